"""Granite 3, dense and mixture (IBM 2024): Llama with four multipliers.

Granite 4-H (2025) has Mamba-2 in most layers, and attention, often without positions, in the others. All tokens go to
one mlp, beside a mixture or alone.
"""

from __future__ import annotations

from dataclasses import replace

from server.arch.families import llama
from server.arch.families.hf_config import Config, activation, layer_types, mixture, need_silu, share_of, step_limits
from server.arch.names import rows_of_gated
from server.arch.recurrences import Mamba2
from server.arch.spec import ArchSpec, Gated, Moe, with_layers, with_residual_scale

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
    fused_experts=rows_of_gated(f"{EXPERTS}.input_linear.weight", f"{EXPERTS}.output_linear.weight"),
)
SHARED_MLP = "layers.{i}.shared_mlp"
NAMES_OF_HYBRID = replace(
    NAMES_OF_MOE,
    roles={
        **{role: name for role, name in NAMES_OF_MOE.roles.items() if role not in ("mlp_gate", "mlp_up")},
        "mlp_gate_up": f"{SHARED_MLP}.input_linear",
        "mlp_down": f"{SHARED_MLP}.output_linear",
        "shared_gate_up": f"{SHARED_MLP}.input_linear",
        "shared_down": f"{SHARED_MLP}.output_linear",
        "mamba_in": "layers.{i}.mamba.in_proj",
        "mamba": "layers.{i}.mamba",
        "mamba_conv": "layers.{i}.mamba.conv1d",
        "mamba_norm": "layers.{i}.mamba.norm",
        "mamba_out": "layers.{i}.mamba.out_proj",
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
    return with_layers(spec(config), mlp=_mixture(config))


def _mixture(config: Config) -> Moe:
    return mixture({**config, "norm_topk_prob": True}, width=config["intermediate_size"])


def spec_of_hybrid(config: Config) -> ArchSpec:
    shared = config["shared_intermediate_size"]
    is_mixed = bool(config.get("num_local_experts"))
    mlp = (
        replace(_mixture(config), shared_width=shared) if is_mixed else Gated(shared, activation(config["hidden_act"]))
    )
    base = with_layers(spec(config), mlp=mlp)
    if config.get("position_embedding_type") != "rope":
        base = with_layers(base, position=None)
    mamba = mamba_of(config)
    kinds = {"mamba": mamba, "linear_attention": mamba, "attention": None, "full_attention": None}
    types = layer_types(config, ["mamba"] * base.num_layers, tuple(kinds))
    layers = tuple(
        replace(layer, recurrence=kinds[kind], attends=kinds[kind] is None)
        for layer, kind in zip(base.layers, types, strict=True)
    )
    return replace(base, layers=layers)


def mamba_of(config: Config) -> Mamba2:
    """Mamba-2 by the names that Bamba gave its fields, of which Falcon-H1 adds some."""
    need_silu(config)
    heads = config["mamba_n_heads"]
    inner = config.get("mamba_d_ssm") or config.get("mamba_expand", 2) * config["hidden_size"]
    size = config.get("mamba_d_head", "auto")
    least, most = step_limits(config)
    return Mamba2(
        num_heads=heads,
        num_groups=config.get("mamba_n_groups", 1),
        head_dim=share_of(inner, heads) if size == "auto" else int(size),
        key_dim=config.get("mamba_d_state", 256),
        conv=config.get("mamba_d_conv", 4),
        eps=config["rms_norm_eps"],
        conv_bias=config.get("mamba_conv_bias", True),
        bias=config.get("mamba_proj_bias", False),
        least_step=least,
        most_step=most,
    )
