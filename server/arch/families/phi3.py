"""Phi-3 (Abdin et al. 2024, arXiv 2404.14219): Llama with fused projections, windows and long rotations.

Phi-3.5-MoE has layer norms, biases, and a mixture whose router is a sparse mixer (arXiv 2409.12136).
"""

from __future__ import annotations

from dataclasses import replace

from server.arch.families import llama, mistral
from server.arch.families.hf_config import Config, mixture, partial_rope, rotation_of
from server.arch.names import NameMap
from server.arch.spec import ArchSpec, LayerNormSpec, LongScaling, Rope, Scoring, with_layers

NAMES = NameMap(
    roles={
        **{role: name for role, name in llama.NAMES.roles.items() if role not in ("q", "k", "v")},
        "qkv": "layers.{i}.self_attn.qkv_proj",
        "mlp_gate_up": "layers.{i}.mlp.gate_up_proj",  # GPTQModel writes both apart
    },
    prefixes=llama.NAMES.prefixes,
    ignore=llama.NAMES.ignore,
)
NAMES_OF_MOE = mistral.NAMES_OF_MIXTRAL


def spec(config: Config) -> ArchSpec:
    base = mistral.spec(config)
    return with_layers(base, position=partial_rope(config))


def spec_of_moe(config: Config) -> ArchSpec:
    config = {"rope_theta": 1e6, **config}
    moe = replace(
        mixture(config, width=config["intermediate_size"]),
        scoring=Scoring.SPARSE_MIXER,
        tolerance=2 * config.get("router_jitter_noise", 0.01),
    )
    base = with_layers(mistral.spec(config), mlp=moe, position=_long_rope(config))
    norm, has_bias = LayerNormSpec(config["rms_norm_eps"]), config.get("lm_head_bias", False)
    return replace(base, norm=norm, head_bias=has_bias)


def _long_rope(config: Config) -> Rope:
    """Its magnitudes are under names of their own."""
    position = partial_rope(config)
    given = rotation_of(config)
    if not isinstance(position.scaling, LongScaling):
        return position
    magnitude = given.get("short_mscale", position.scaling.magnitude)
    if given.get("long_mscale", magnitude) != magnitude:
        raise ValueError("config.json has a short_mscale and another long_mscale: Phi-3.5-MoE is served with one")
    return replace(position, scaling=replace(position.scaling, magnitude=magnitude))
