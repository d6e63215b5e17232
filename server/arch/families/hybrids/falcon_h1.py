"""Falcon-H1 (TII 2025, arXiv 2507.22448): attention and Mamba-2 beside each other in every layer, with multipliers."""

from __future__ import annotations

from dataclasses import replace

from server.arch.families import llama
from server.arch.families.hf_config import Config, activation, as_many
from server.arch.families.variants import granite
from server.arch.names import NameMap
from server.arch.recurrences import GateNorm, Mamba2
from server.arch.spec import ArchSpec, Gated, with_layers

MAMBA = ("mamba_in", "mamba", "mamba_conv", "mamba_norm", "mamba_out")
NAMES = NameMap(
    roles={
        **llama.NAMES.roles,
        **{role: granite.NAMES_OF_HYBRID.roles[role] for role in MAMBA},
        "mlp_norm": "layers.{i}.pre_ff_layernorm",
        "mlp_gate": "layers.{i}.feed_forward.gate_proj",
        "mlp_up": "layers.{i}.feed_forward.up_proj",
        "mlp_down": "layers.{i}.feed_forward.down_proj",
        "final_norm": "final_layernorm",
    },
    prefixes=llama.NAMES.prefixes,
    ignore=llama.NAMES.ignore,
)


def spec(config: Config) -> ArchSpec:
    for field in ("attention_bias", "mlp_bias", "mamba_proj_bias", "projectors_bias"):
        if config.get(field):
            raise ValueError(f"config.json asks for {field}: Falcon-H1 is served without biases of its matrices")
    base = llama.spec(config)
    into = config.get("attention_in_multiplier", 1.0)
    gate, down = as_many(config.get("mlp_multipliers"), (1.0, 1.0), "mlp_multipliers")
    if not gate:
        raise ValueError("config.json says mlp_multipliers of 0, which leave nothing of the mlps: download it again")
    # What the gate alone is multiplied by goes to gate and other half, and is taken back behind them.
    mlp = Gated(config["intermediate_size"], activation(config["hidden_act"]), in_scale=gate, out_scale=down / gate)
    return replace(
        with_layers(base, mlp=mlp, recurrence=_mamba(config)),
        embed_scale=config.get("embedding_multiplier", 1.0),
        head_scale=config.get("lm_head_multiplier", 1.0),
        scale=base.head_dim**-0.5 * into**2 * config.get("key_multiplier", 1.0),
        attended_scale=into * config.get("attention_out_multiplier", 1.0),
    )


def _mamba(config: Config) -> Mamba2:
    norm = GateNorm.BEFORE if config.get("mamba_norm_before_gate", True) else GateNorm.BEHIND
    scales = as_many(config.get("ssm_multipliers"), (1.0,) * 5, "ssm_multipliers")
    z, x, b, c, step = (config.get("ssm_in_multiplier", 1.0) * scale for scale in scales)
    return replace(
        granite.mamba_of(config),
        norm=norm if config.get("mamba_rms_norm", False) else GateNorm.NONE,
        scales=(z, x, b, c, step),
        out_scale=config.get("ssm_out_multiplier", 1.0),
    )
