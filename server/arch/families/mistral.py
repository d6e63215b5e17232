"""Mistral (Jiang et al. 2023, arXiv 2310.06825): Llama with a sliding window.

Mixtral (Jiang et al. 2024, arXiv 2401.04088) is Mistral with a mixture of experts in every layer.
Ministral 3 (Mistral AI 2025) multiplies queries by what grows with their position; so does Mistral Small 4, which is
DeepSeek V3 with a router of its own.
"""

from __future__ import annotations

from dataclasses import replace

from server.arch.families import deepseek, llama
from server.arch.families.hf_config import Config, activation, deepseek_mixture, rotation_of, windowed
from server.arch.names import FUSED_EXPERTS
from server.arch.spec import ArchSpec, Moe, QueryScale, Scoring, with_layers

NAMES = llama.NAMES
NAMES_OF_4 = deepseek.NAMES


def _names(published: str, of_packers: str) -> tuple[str, ...]:
    """What an expert's matrix is called: by Mistral AI, and by tools that pack a model as transformers 5 names it."""
    blocks = ("block_sparse_moe", "mlp")
    return tuple(f"layers.{{i}}.{block}.experts.{{e}}.{name}" for block in blocks for name in (published, of_packers))


NAMES_OF_MIXTRAL = replace(
    NAMES,
    roles={
        **NAMES.roles,
        "router": ("layers.{i}.block_sparse_moe.gate", "layers.{i}.mlp.gate"),
        "expert_gate": _names("w1", "gate_proj"),
        "expert_up": _names("w3", "up_proj"),
        "expert_down": _names("w2", "down_proj"),
    },
    fused_experts=FUSED_EXPERTS,
)


def spec(config: Config) -> ArchSpec:
    return windowed(llama.spec(config), config, lambda i: True)


def spec_of_ministral(config: Config) -> ArchSpec:
    return _growing(spec(config), config)


def spec_of_4(config: Config) -> ArchSpec:
    moe = replace(deepseek_mixture({"n_shared_experts": 1, **config}), scoring=Scoring.SOFTMAX, choice_bias=False)
    return _growing(deepseek.with_experts(deepseek.compressed(config), config, moe), config)


def _growing(base: ArchSpec, config: Config) -> ArchSpec:
    """The same with queries that grow with their position, where config.json says so."""
    given = rotation_of(config) or config["rope_parameters"]
    growth, period = given.get("llama_4_scaling_beta"), given.get("original_max_position_embeddings")
    return with_layers(base, query_scale=QueryScale(growth, period)) if growth and period else base


def spec_of_mixtral(config: Config) -> ArchSpec:
    base = spec({"rope_theta": 1e6, **config})
    moe = Moe(
        num_experts=config["num_local_experts"],
        top_k=config["num_experts_per_tok"],
        width=config["intermediate_size"],
        activation=activation(config["hidden_act"]),
        renormalise=True,
    )
    return replace(base, layers=tuple(replace(layer, mlp=moe) for layer in base.layers))
