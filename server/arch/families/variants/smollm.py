"""SmolLM3 (Hugging Face 2025): Llama whose every fourth layer has no positions."""

from __future__ import annotations

from dataclasses import replace

from server.arch.families import llama
from server.arch.families.hf_config import Config, of_layers, windowed
from server.arch.spec import ArchSpec

NAMES = llama.NAMES


def spec(config: Config) -> ArchSpec:
    base = llama.spec({"tie_word_embeddings": True, "rope_theta": 2e6, **config})
    interval = config.get("no_rope_layer_interval", 4)
    given = config.get("no_rope_layers") or [(i + 1) % interval for i in range(base.num_layers)]
    rotated = of_layers(given, base.num_layers, "no_rope_layers")
    layers = tuple(y if turns else replace(y, position=None) for y, turns in zip(base.layers, rotated, strict=True))
    sliding = bool(config.get("use_sliding_window"))
    return windowed(replace(base, layers=layers), config, lambda i: sliding and not rotated[i])
