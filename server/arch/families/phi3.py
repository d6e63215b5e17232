"""Phi-3 (Abdin et al. 2024, arXiv 2404.14219): Llama with fused projections, windows and long rotations."""

from __future__ import annotations

from dataclasses import replace

from server.arch.families import llama, mistral
from server.arch.families.hf_config import Config, head_dim, rope
from server.arch.names import NameMap
from server.arch.spec import ArchSpec

NAMES = NameMap(
    roles={
        **{role: name for role, name in llama.NAMES.roles.items() if role not in ("q", "k", "v")},
        "qkv": "layers.{i}.self_attn.qkv_proj",
        "mlp_gate_up": "layers.{i}.mlp.gate_up_proj",  # GPTQModel writes both apart
    },
    prefixes=llama.NAMES.prefixes,
    ignore=llama.NAMES.ignore,
)


def spec(config: Config) -> ArchSpec:
    base = mistral.spec(config)
    share = (config.get("rope_parameters") or config).get("partial_rotary_factor") or 1.0
    position = rope(config, int(head_dim(config) * share))
    return replace(base, layers=tuple(replace(layer, position=position) for layer in base.layers))
