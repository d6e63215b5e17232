"""EXAONE 4 (arXiv 2507.11407): OLMo 2's wiring, norms of each head, and no positions where there is no window."""

from __future__ import annotations

from dataclasses import replace

from server.arch.families import llama
from server.arch.families.hf_config import Config, windowed
from server.arch.families.variants import olmo
from server.arch.spec import ArchSpec, Residual

NAMES = olmo.NAMES


def spec(config: Config) -> ArchSpec:
    pattern = config.get("sliding_window_pattern") or 4
    letters = pattern if isinstance(pattern, str) else ""  # of layers, local and global; "LLLG" is 4
    base = windowed(
        llama.spec(config),
        config,
        lambda i: letters[i % len(letters)] == "L" if letters else (i + 1) % pattern != 0,
    )
    if config.get("sliding_window"):
        layers = tuple(y if y.window else replace(y, position=None) for y in base.layers)
        base = replace(base, layers=layers)
    return replace(base, residual=Residual.OUTPUT_NORMED, qk_norm=True)
