"""LFM2 (Liquid AI 2025): gated short convolutions in most layers, attention with norms of each head in the others.

The mixture chooses experts by sigmoids and a bias, behind a few dense layers.
"""

from __future__ import annotations

from dataclasses import replace

from server.arch.families import llama
from server.arch.families.hf_config import Config, layer_types, mixed, mixture
from server.arch.names import NameMap, rows_of_gated
from server.arch.recurrences import ShortConv
from server.arch.spec import ArchSpec, Scoring

NAMES = NameMap(
    roles={
        **llama.NAMES.roles,
        "attention_norm": "layers.{i}.operator_norm",
        "attention_out": "layers.{i}.self_attn.out_proj",
        "q_norm": "layers.{i}.self_attn.q_layernorm",
        "k_norm": "layers.{i}.self_attn.k_layernorm",
        "conv_in": "layers.{i}.conv.in_proj",
        "short_conv": "layers.{i}.conv.conv",
        "conv_out": "layers.{i}.conv.out_proj",
        "mlp_norm": "layers.{i}.ffn_norm",
        "mlp_gate": "layers.{i}.feed_forward.w1",
        "mlp_up": "layers.{i}.feed_forward.w3",
        "mlp_down": "layers.{i}.feed_forward.w2",
        "final_norm": "embedding_norm",
    },
    prefixes=llama.NAMES.prefixes,
    ignore=llama.NAMES.ignore,
)

EXPERTS = "layers.{i}.feed_forward.experts"
NAMES_OF_MOE = replace(
    NAMES,
    roles={
        **NAMES.roles,
        "router": "layers.{i}.feed_forward.gate",
        "choice_bias": "layers.{i}.feed_forward.expert_bias",
        "expert_gate": f"{EXPERTS}.{{e}}.w1",
        "expert_up": f"{EXPERTS}.{{e}}.w3",
        "expert_down": f"{EXPERTS}.{{e}}.w2",
    },
    fused_experts=rows_of_gated(f"{EXPERTS}.gate_up_proj", f"{EXPERTS}.down_proj"),
)


def spec(config: Config) -> ArchSpec:
    rope = {"rope_theta": 1000000.0, **config}
    tied = config.get("tie_embedding", config.get("tie_word_embeddings", True))
    own = {
        "hidden_act": "silu",
        "tie_word_embeddings": tied,
        "rms_norm_eps": config["norm_eps"],
        "intermediate_size": _width(config),
    }
    base = replace(llama.spec({**rope, **own}), qk_norm=True)
    kind = ShortConv(config["hidden_size"], config.get("conv_L_cache", 3), config.get("conv_bias", False))
    attending = config.get("full_attn_idxs")
    usual = ["full_attention" if attending is None or i in attending else "conv" for i in range(base.num_layers)]
    kinds = {"conv": kind, "full_attention": None}
    types = layer_types(config, usual, tuple(kinds))
    layers = tuple(
        replace(layer, recurrence=kinds[name], attends=kinds[name] is None)
        for layer, name in zip(base.layers, types, strict=True)
    )
    return replace(base, layers=layers)


def spec_of_moe(config: Config) -> ArchSpec:
    usual = {"hidden_act": "silu", "norm_topk_prob": True, **config}
    moe = replace(
        mixture(usual, width=config["moe_intermediate_size"]),
        scoring=Scoring.SIGMOID,
        choice_bias=config.get("use_expert_bias", True),
        scale=config.get("routed_scaling_factor", 1.0),
    )
    base = spec({**config, "block_auto_adjust_ff_dim": False})
    return mixed(base, moe, lambda i: i >= config.get("num_dense_layers", 2))


def _width(config: Config) -> int:
    """Of the mlp: two thirds of what config.json says; times a factor, in whole multiples, unless that is null."""
    width = config.get("block_ff_dim") or config["intermediate_size"]
    if not config.get("block_auto_adjust_ff_dim", True):
        return width
    width, factor = int(2 * width / 3), config.get("block_ffn_dim_multiplier", 1.0)
    if factor is None:
        return width
    multiple = config.get("block_multiple_of", 256)
    return -(-int(factor * width) // multiple) * multiple
