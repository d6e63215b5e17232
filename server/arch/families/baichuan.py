"""Baichuan 1 and 2 (Yang et al. 2023, arXiv 2309.10305): Llama with fused q, k, v; the 13B has ALiBi."""

from __future__ import annotations

from dataclasses import replace

from server.arch.families import llama
from server.arch.families.hf_config import Config
from server.arch.names import NameMap
from server.arch.spec import Alibi, ArchSpec

NAMES = NameMap(
    roles={
        **{role: name for role, name in llama.NAMES.roles.items() if role not in ("q", "k", "v")},
        "qkv": "layers.{i}.self_attn.W_pack",
    },
    prefixes=llama.NAMES.prefixes,
    ignore=llama.NAMES.ignore,
)


def spec(config: Config) -> ArchSpec:
    has_alibi = "max_position_embeddings" not in config
    is_second = config["vocab_size"] == 125696  # whose head is normalised; the first has 64,000
    base = llama.spec({"max_position_embeddings": config.get("model_max_length", 4096), **config})
    layers = tuple(replace(layer, position=Alibi()) if has_alibi else layer for layer in base.layers)
    positions = 0 if has_alibi else base.max_positions
    return replace(base, layers=layers, max_positions=positions, unit_head=is_second)
