"""Gemma 4 (Gemma Team 2026): Gemma 3's wiring and windows, where layers that see everything have heads of another size.

Those turn a part of each head alone, and in some models their values are their keys. Values are normalised, and each
layer multiplies what leaves it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from server.arch.families import gemma
from server.arch.families.hf_config import Config, checked, head_dim, layer_types, rope, windowed
from server.arch.spec import ArchSpec, KvHeads, LayerSpec, Residual, RmsNormSpec, Rope

NAMES = replace(gemma.NAMES_OF_3, roles={**gemma.NAMES_OF_3.roles, "layer_scale": "layers.{i}.layer_scalar"})
ROTATIONS = {
    "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0},
    "full_attention": {"rope_type": "proportional", "rope_theta": 1000000.0, "partial_rotary_factor": 0.25},
}


def spec(config: Config) -> ArchSpec:
    if (seeing := config.get("use_bidirectional_attention")) not in (None, False, "vision"):
        raise ValueError(
            f"config.json says use_bidirectional_attention {seeing!r}: tokens that see later ones generate no text"
        )
    base = gemma.spec(config)
    types = _types(config, base.num_layers)
    base = windowed(base, {**config, "layer_types": types}, lambda i: False)
    layers = tuple(_layer(config, i, layer) for i, layer in enumerate(base.layers))
    return replace(
        base,
        norm=RmsNormSpec(config["rms_norm_eps"]),
        residual=Residual.SANDWICH,
        layers=layers,
        qk_norm=True,
        v_norm=True,
        scale=1.0,
        logit_cap=config.get("final_logit_softcapping") or 0.0,
        layer_scale=True,
    )


def spec_of_unified(config: Config) -> ArchSpec:
    """The text of models that see and hear without a tower for it."""
    return spec({**config, "hidden_size_per_layer_input": 0})


def _types(config: Config, count: int) -> list[str]:
    """Five layers with a window to each without one, if config.json does not say; the last one never has one."""
    usual = ["full_attention" if (i + 1) % 6 == 0 else "sliding_attention" for i in range(count)]
    return [*layer_types(config, usual)[:-1], "full_attention"]


def _layer(config: Config, index: int, layer: LayerSpec) -> LayerSpec:
    heads = _heads(config, index, is_full=not layer.window)
    return replace(
        layer,
        kv_heads=heads,
        keys_are_values=not layer.window and config.get("attention_k_eq_v", False),
        position=_rope(config, "sliding_attention" if layer.window else "full_attention", heads.dim),
    )


def _heads(config: Config, index: int, *, is_full: bool) -> KvHeads:
    """By what is said of layers that see everything, or as transformers 5.23 writes it, of each layer by its number."""
    own = KvHeads(config["num_key_value_heads"], head_dim(config))
    if (given := config.get("per_layer_config")) is not None:
        of_layer = given.get(str(index)) or {}
        if not isinstance(of_layer, Mapping):
            raise ValueError(f"config.json says per_layer_config.{index} {of_layer!r}, which must be an object")
        of_layer = checked(of_layer)
        return KvHeads(of_layer.get("num_key_value_heads", own.count), of_layer.get("head_dim", own.dim))
    if not is_full:
        return own
    count = config.get("num_global_key_value_heads") if config.get("attention_k_eq_v") else None
    return KvHeads(count or own.count, config.get("global_head_dim", 512))


def _rope(config: Config, kind: str, dim: int) -> Rope:
    given = config.get("rope_parameters") or ROTATIONS
    return rope({"rope_parameters": given, "head_dim": dim}, dim, kind=kind)
