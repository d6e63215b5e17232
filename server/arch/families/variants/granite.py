"""Granite 3, dense and mixture (IBM 2024): Llama with four multipliers."""

from __future__ import annotations

from dataclasses import replace

from server.arch.families import llama
from server.arch.families.hf_config import Config, activation
from server.arch.names import FusedRows
from server.arch.spec import ArchSpec, Moe, with_layers, with_residual_scale

NAMES = llama.NAMES
EXPERTS = "layers.{i}.block_sparse_moe"
NAMES_OF_MOE = replace(
    NAMES,
    roles={
        **NAMES.roles,
        "router": (f"{EXPERTS}.router.layer", f"{EXPERTS}.router"),
        "expert_gate": f"{EXPERTS}.experts.{{e}}.gate_proj",
        "expert_up": f"{EXPERTS}.experts.{{e}}.up_proj",
        "expert_down": f"{EXPERTS}.experts.{{e}}.down_proj",
    },
    fused_experts={
        "expert_gate": FusedRows(f"{EXPERTS}.input_linear.weight", 0, 2),
        "expert_up": FusedRows(f"{EXPERTS}.input_linear.weight", 1, 2),
        "expert_down": FusedRows(f"{EXPERTS}.output_linear.weight"),
    },
)


def spec(config: Config) -> ArchSpec:
    base = replace(
        llama.spec(config),
        embed_scale=config.get("embedding_multiplier", 1.0),
        scale=config.get("attention_multiplier", 1.0),
        head_scale=1.0 / config.get("logits_scaling", 1.0),
    )
    return with_residual_scale(base, config.get("residual_multiplier", 1.0))


def spec_of_moe(config: Config) -> ArchSpec:
    moe = Moe(
        num_experts=config["num_local_experts"],
        top_k=config["num_experts_per_tok"],
        width=config["intermediate_size"],
        activation=activation(config["hidden_act"]),
        renormalise=True,
    )
    return with_layers(spec(config), mlp=moe)
