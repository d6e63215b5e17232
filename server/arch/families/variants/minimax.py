"""MiniMax-M2 (MiniMax 2025): a mixture in every layer, chosen by sigmoids and a bias; whole rows are normalised."""

from __future__ import annotations

from dataclasses import replace

from server.arch.families import llama, mistral
from server.arch.families.hf_config import Config, head_dim, mixture, rope, rotation_of
from server.arch.spec import ArchSpec, Scoring, with_layers

NAMES = replace(
    mistral.NAMES_OF_MIXTRAL,
    roles={
        **mistral.NAMES_OF_MIXTRAL.roles,
        "q_norm": "layers.{i}.self_attn.q_norm",
        "k_norm": "layers.{i}.self_attn.k_norm",
        "choice_bias": (
            "layers.{i}.block_sparse_moe.e_score_correction_bias",
            "layers.{i}.mlp.e_score_correction_bias",
        ),
    },
)


def spec(config: Config) -> ArchSpec:
    dim = head_dim(config)
    share = rotation_of(config).get("partial_rotary_factor")
    position = rope(config, int(share * dim) if share else config.get("rotary_dim", dim), theta=5e6)
    moe = mixture({**config, "norm_topk_prob": True}, width=config["intermediate_size"])
    moe = replace(moe, scoring=Scoring.SIGMOID, choice_bias=True)
    return replace(with_layers(llama.spec(config), mlp=moe, position=position), qk_row_norm=True)
