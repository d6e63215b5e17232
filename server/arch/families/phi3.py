"""Phi-3 (Abdin et al. 2024, arXiv 2404.14219): Llama with fused projections, windows and long rotations."""

from __future__ import annotations

from server.arch.families import llama, mistral
from server.arch.families.hf_config import Config, partial_rope
from server.arch.names import NameMap
from server.arch.spec import ArchSpec, with_layers

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
    return with_layers(base, position=partial_rope(config))
