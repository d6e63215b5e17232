"""Mixtral (Jiang et al. 2024, arXiv 2401.04088): Mistral with a mixture of experts in every layer."""

from __future__ import annotations

from dataclasses import replace

from server.arch.families import llama, mistral
from server.arch.families.reading import Config, activation
from server.arch.names import NameMap
from server.arch.spec import ArchSpec, Moe

NAMES = NameMap(
    roles={
        **llama.NAMES.roles,
        "router": "layers.{i}.block_sparse_moe.gate",
        "expert_gate": "layers.{i}.block_sparse_moe.experts.{e}.w1",
        "expert_up": "layers.{i}.block_sparse_moe.experts.{e}.w3",
        "expert_down": "layers.{i}.block_sparse_moe.experts.{e}.w2",
    },
    prefixes=llama.NAMES.prefixes,
    ignore=llama.NAMES.ignore,
)


def spec(config: Config) -> ArchSpec:
    base = mistral.spec(config)
    moe = Moe(
        num_experts=config["num_local_experts"],
        top_k=config["num_experts_per_tok"],
        width=config["intermediate_size"],
        activation=activation(config["hidden_act"]),
        renormalise=True,
    )
    return replace(base, layers=tuple(replace(layer, mlp=moe) for layer in base.layers))
