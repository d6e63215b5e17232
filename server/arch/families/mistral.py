"""Mistral (Jiang et al. 2023, arXiv 2310.06825): Llama with a sliding window."""

from __future__ import annotations

from dataclasses import replace

from server.arch.families import llama
from server.arch.families.reading import Config, layer_windows
from server.arch.spec import ArchSpec

NAMES = llama.NAMES


def spec(config: Config) -> ArchSpec:
    base = llama.spec(config)
    windows = layer_windows(config, lambda i: True)
    return replace(base, layers=tuple(replace(y, window=w) for y, w in zip(base.layers, windows, strict=True)))
