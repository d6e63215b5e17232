"""ERNIE 4.5, dense (Baidu 2025): Llama rotated in pairs, with biases everywhere or nowhere."""

from __future__ import annotations

from dataclasses import replace

from server.arch.families import llama
from server.arch.families.hf_config import Config, head_dim, rope
from server.arch.spec import ArchSpec, with_layers

NAMES = llama.NAMES


def spec(config: Config) -> ArchSpec:
    bias = config.get("use_bias", False)
    base = llama.spec({"tie_word_embeddings": True, **config, "attention_bias": bias, "mlp_bias": bias})
    position = replace(rope(config, head_dim(config), theta=500000.0), interleaved=True)
    return with_layers(base, position=position)
