"""Gemma 3, text (Gemma Team 2025, arXiv 2503.19786): five windowed layers to each full one, rotated differently."""

from __future__ import annotations

from dataclasses import replace

from server.arch.families import gemma2
from server.arch.families.reading import Config, head_dim, layer_windows, rope
from server.arch.spec import ArchSpec

NAMES = replace(
    gemma2.NAMES,
    roles={
        **gemma2.NAMES.roles,
        "q_norm": "layers.{i}.self_attn.q_norm",
        "k_norm": "layers.{i}.self_attn.k_norm",
    },
)


def spec(config: Config) -> ArchSpec:
    base, dim = gemma2.spec(config), head_dim(config)
    pattern = config.get("sliding_window_pattern") or 6
    windows = layer_windows(config, lambda i: (i + 1) % pattern != 0)
    full = rope(config, dim, kind="full_attention", theta=1e6)
    local_theta = {"rope_theta": config.get("rope_local_base_freq")}
    local = rope({"rope_parameters": config.get("rope_parameters") or local_theta}, dim, kind="sliding_attention")
    layers = tuple(
        replace(layer, window=w, position=local if w else full) for layer, w in zip(base.layers, windows, strict=True)
    )
    return replace(base, layers=layers, qk_norm=True)
