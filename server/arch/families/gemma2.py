"""Gemma 2 (Gemma Team 2024, arXiv 2408.00118): norms on both sides, capped scores and logits, alternating windows."""

from __future__ import annotations

from dataclasses import replace

from server.arch.families import gemma
from server.arch.families.reading import Config, layer_windows
from server.arch.spec import ArchSpec, Residual

NAMES = replace(
    gemma.NAMES,
    roles={
        **gemma.NAMES.roles,
        "attention_post_norm": "layers.{i}.post_attention_layernorm",
        "mlp_norm": "layers.{i}.pre_feedforward_layernorm",
        "mlp_post_norm": "layers.{i}.post_feedforward_layernorm",
    },
)


def spec(config: Config) -> ArchSpec:
    base = gemma.spec(config)
    windows = layer_windows(config, lambda i: i % 2 == 0)
    return replace(
        base,
        residual=Residual.SANDWICH,
        layers=tuple(replace(layer, window=w) for layer, w in zip(base.layers, windows, strict=True)),
        scale=config["query_pre_attn_scalar"] ** -0.5,
        score_cap=config.get("attn_logit_softcapping") or 0.0,
        logit_cap=config.get("final_logit_softcapping") or 0.0,
    )
