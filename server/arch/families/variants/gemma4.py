"""Gemma 4 (Gemma Team 2026): Gemma 3's wiring and windows, where layers that see everything have heads of another size.

Those turn a part of each head alone, and in some models their values are their keys. Values are normalised, and each
layer multiplies what leaves it. In E2B and E4B the upper layers use the keys and values of the last ones of their kind
below them, and every layer is given inputs of its own. 26B-A4B has experts beside the mlp of each layer.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from server.arch.families import gemma
from server.arch.families.hf_config import Config, checked, head_dim, layer_types, rope, windowed
from server.arch.names import rows_of_gated
from server.arch.spec import ArchSpec, Gated, KvHeads, LayerSpec, Moe, PerLayerInputs, Residual, RmsNormSpec, Rope

NAMES = replace(
    gemma.NAMES_OF_3,
    roles={
        **gemma.NAMES_OF_3.roles,
        "layer_scale": "layers.{i}.layer_scalar",
        "per_layer_embed": "embed_tokens_per_layer",
        "per_layer_in": "per_layer_model_projection",
        "per_layer_in_norm": "per_layer_projection_norm",
        "per_layer_gate": "layers.{i}.per_layer_input_gate",
        "per_layer_out": "layers.{i}.per_layer_projection",
        "per_layer_post_norm": "layers.{i}.post_per_layer_input_norm",
        "router": "layers.{i}.router.proj",
        "router_norm": "layers.{i}.router.scale",
        "expert_scale": "layers.{i}.router.per_expert_scale",
        "expert_norm": "layers.{i}.pre_feedforward_layernorm_2",
        "expert_post_norm": "layers.{i}.post_feedforward_layernorm_2",
        "shared_post_norm": "layers.{i}.post_feedforward_layernorm_1",
        "shared_gate": "layers.{i}.mlp.gate_proj",
        "shared_up": "layers.{i}.mlp.up_proj",
        "shared_down": "layers.{i}.mlp.down_proj",
        "expert_gate": "layers.{i}.experts.{e}.gate_proj",
        "expert_up": "layers.{i}.experts.{e}.up_proj",
        "expert_down": "layers.{i}.experts.{e}.down_proj",
    },
    fused_experts=rows_of_gated("layers.{i}.experts.gate_up_proj", "layers.{i}.experts.down_proj"),
)
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
    layers = shared(config, types, [_layer(config, i, layer) for i, layer in enumerate(base.layers)])
    width = config.get("hidden_size_per_layer_input", 256)
    mlp = _gated(layers[0])
    inputs = PerLayerInputs(width, config.get("vocab_size_per_layer_input", 262144), mlp.activation)
    if config.get("enable_moe_block"):
        moe = _mixture(config, mlp)
        layers = tuple(replace(layer, mlp=moe) for layer in layers)
    return replace(
        base,
        norm=RmsNormSpec(config["rms_norm_eps"]),
        residual=Residual.SANDWICH_MIXED if config.get("enable_moe_block") else Residual.SANDWICH,
        layers=layers,
        qk_norm=True,
        v_norm=True,
        scale=1.0,
        logit_cap=config.get("final_logit_softcapping") or 0.0,
        per_layer_inputs=inputs if width else None,
        layer_scale=True,
    )


def _gated(layer: LayerSpec) -> Gated:
    assert isinstance(layer.mlp, Gated), "as Gemma's layers are"
    return layer.mlp


def _mixture(config: Config, beside: Gated) -> Moe:
    if config.get("num_kv_shared_layers"):
        raise ValueError("config.json says enable_moe_block and num_kv_shared_layers, which are not served together")
    return Moe(
        num_experts=config["num_experts"],
        top_k=config["top_k_experts"],
        width=config["moe_intermediate_size"],
        activation=beside.activation,
        renormalise=True,
        expert_scale=True,
        router_norm=True,
        shared_width=beside.width,
    )


def spec_of_unified(config: Config) -> ArchSpec:
    """The text of models that see and hear without a tower for it."""
    return spec({**config, "hidden_size_per_layer_input": 0})


def _types(config: Config, count: int) -> list[str]:
    """Five layers with a window to each without one, if config.json does not say; the last one never has one."""
    usual = ["full_attention" if (i + 1) % 6 == 0 else "sliding_attention" for i in range(count)]
    return [*layer_types(config, usual)[:-1], "full_attention"]


def shared(config: Config, types: Sequence[str], layers: Sequence[LayerSpec]) -> tuple[LayerSpec, ...]:
    """The same where the upper layers use keys and values of the last of their type below, perhaps with wider mlps."""
    first = len(layers) - config.get("num_kv_shared_layers", 0)
    last = {kind: i for i, kind in enumerate(types[: max(first, 0)])}
    if missing := set(types[max(first, 0) :]) - set(last):
        raise ValueError(
            f"config.json has no layer of the type {min(missing)!r} whose keys and values others could use"
        )
    wider = 2 if config.get("use_double_wide_mlp") else 1
    return tuple(
        replace(layer, kv_from=i - last[kind], mlp=replace(_gated(layer), width=wider * _gated(layer).width))
        if i >= first
        else layer
        for i, (kind, layer) in enumerate(zip(types, layers, strict=True))
    )


def _layer(config: Config, index: int, layer: LayerSpec) -> LayerSpec:
    heads = _heads(config, index, is_full=not layer.window)
    return replace(
        layer,
        kv_heads=heads,
        keys_are_values=not layer.window and config.get("attention_k_eq_v", False),
        position=_rope(config, "sliding_attention" if layer.window else "full_attention", heads.dim),
    )


def _heads(config: Config, index: int, *, is_full: bool) -> KvHeads:
    """By what is said of layers that see everything, or as transformers 5.23 writes it, of each layer by its number.

    Of ten layers or more it writes 04, not 4.
    """
    own = KvHeads(config["num_key_value_heads"], head_dim(config))
    if (given := config.get("per_layer_config")) is not None:
        of_layer = {number.lstrip("0") or number[-1:]: values for number, values in given.items()}.get(str(index)) or {}
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
