"""Command R (Cohere 2024) and Command A, R7B (arXiv 2504.00698): attention beside the mlp, rotation in pairs.

The second generation has windows, and no positions where there is none.
"""

from __future__ import annotations

from dataclasses import replace

from server.arch.families import llama
from server.arch.families.hf_config import Config, head_dim, period, rope, windowed
from server.arch.spec import ArchSpec, LayerNormSpec, Residual, with_layers

NAMES = llama.NAMES


def spec(config: Config) -> ArchSpec:
    if config.get("use_qk_norm"):
        raise ValueError("config.json asks for use_qk_norm, one norm for each head: Cohere is served without it")
    eps = config["layer_norm_eps"]
    base = llama.spec({"tie_word_embeddings": True, **config, "rms_norm_eps": eps})
    return replace(
        with_layers(base, position=replace(rope(config, head_dim(config), theta=500000.0), interleaved=True)),
        norm=LayerNormSpec(eps, bias=False),
        residual=Residual.PARALLEL_ONE_NORM,
        head_scale=config.get("logit_scale", 0.0625),
    )


def spec_of_2(config: Config) -> ArchSpec:
    each = period(config, 4)
    config = {"rope_theta": 10000.0, **config, "sliding_window": config["sliding_window"]}
    base = windowed(spec(config), config, lambda i: (i + 1) % each != 0)
    return replace(base, layers=tuple(y if y.window else replace(y, position=None) for y in base.layers))
