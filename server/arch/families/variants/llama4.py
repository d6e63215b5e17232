"""Llama 4 (Meta 2025), its text: mixtures, chunks in three layers of four, and no positions in the fourth.

Rotated queries and keys are normalised without weights; those without positions are scaled as sequences grow. A
router's sigmoid multiplies what its experts are given, beside an mlp that all tokens go to.
"""

from __future__ import annotations

from dataclasses import replace

from server.arch.families import llama
from server.arch.families.hf_config import Config, activation, head_dim, layer_types, mixed, of_layers, rope
from server.arch.names import Stack
from server.arch.spec import ArchSpec, LayerSpec, Moe, QueryScale, Scoring

LAYER_TYPES = ("full_attention", "chunked_attention")
FEED_FORWARD = "layers.{i}.feed_forward"
NAMES = replace(
    llama.NAMES,
    roles={
        **llama.NAMES.roles,
        "mlp_gate": f"{FEED_FORWARD}.gate_proj",
        "mlp_up": f"{FEED_FORWARD}.up_proj",
        "mlp_down": f"{FEED_FORWARD}.down_proj",
        "router": f"{FEED_FORWARD}.router",
        "shared_gate": f"{FEED_FORWARD}.shared_expert.gate_proj",
        "shared_up": f"{FEED_FORWARD}.shared_expert.up_proj",
        "shared_down": f"{FEED_FORWARD}.shared_expert.down_proj",
    },
    stacks={
        "expert_gate_up": Stack(f"{FEED_FORWARD}.experts.gate_up_proj", transposed=True, turned=True),
        "expert_down": Stack(f"{FEED_FORWARD}.experts.down_proj", transposed=True, turned=True),
    },
)


def spec(config: Config) -> ArchSpec:
    base = llama.spec({**config, "intermediate_size": config.get("intermediate_size_mlp", 16384)})
    count, interval = base.num_layers, config.get("no_rope_layer_interval", 4)
    given = config.get("no_rope_layers") or [(i + 1) % interval for i in range(count)]
    rotated = of_layers(given, count, "no_rope_layers")
    types = layer_types(config, [LAYER_TYPES[bool(turns)] for turns in rotated], LAYER_TYPES)
    layers = [_layer(config, layer, *kind) for layer, *kind in zip(base.layers, rotated, types, strict=True)]
    has_norm = config.get("use_qk_norm", True)
    base = replace(base, layers=tuple(layers), late_qk_norm=has_norm, plain_qk_norm=has_norm)
    step = config.get("interleave_moe_layer_step", 1)
    of_experts = config.get("moe_layers")
    return mixed(base, _mixture(config), lambda i: (i + 1) % step == 0 if of_experts is None else i in of_experts)


def _layer(config: Config, layer: LayerSpec, turns: int, kind: str) -> LayerSpec:
    chunk = config.get("attention_chunk_size", 8192) if kind == "chunked_attention" else 0
    if turns:
        return replace(
            layer, chunk=chunk, position=replace(rope(config, head_dim(config), theta=5e5), interleaved=True)
        )
    grows = config.get("attn_temperature_tuning", True)
    scale = QueryScale(config.get("attn_scale", 0.1), config.get("floor_scale", 8192), offset=1)
    return replace(layer, chunk=chunk, position=None, query_scale=scale if grows else None)


def _mixture(config: Config) -> Moe:
    return Moe(
        num_experts=config["num_local_experts"],
        top_k=config["num_experts_per_tok"],
        width=config["intermediate_size"],
        activation=activation(config["hidden_act"]),
        renormalise=False,
        scoring=Scoring.SIGMOID,
        weighs_inputs=True,
        shared_width=config["intermediate_size"],
    )
