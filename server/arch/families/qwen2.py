"""Qwen2 (Yang et al. 2024, arXiv 2407.10671): Llama with biases on q, k and v, and windows in its upper layers."""

from __future__ import annotations

from dataclasses import replace

from server.arch.families import llama
from server.arch.families.reading import Config, layer_windows
from server.arch.spec import ArchSpec

NAMES = llama.NAMES


def spec(config: Config) -> ArchSpec:
    base = llama.spec(config)
    first = config.get("max_window_layers", 0) if config.get("use_sliding_window") else config["num_hidden_layers"]
    windows = layer_windows(config, lambda i: i >= first)
    layers = tuple(replace(layer, window=w) for layer, w in zip(base.layers, windows, strict=True))
    return replace(base, layers=layers, qkv_bias=True)
