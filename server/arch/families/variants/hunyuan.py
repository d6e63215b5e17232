"""Hunyuan, dense (Tencent 2025): Llama whose queries and keys are normalised behind their rotation."""

from __future__ import annotations

from dataclasses import replace

from server.arch.families import llama
from server.arch.families.hf_config import Config, rotation_of
from server.arch.spec import ArchSpec, DynamicScaling, Rope, with_layers

NAMES = replace(
    llama.NAMES,
    roles={
        **llama.NAMES.roles,
        "q_norm": "layers.{i}.self_attn.query_layernorm",
        "k_norm": "layers.{i}.self_attn.key_layernorm",
    },
)


def spec(config: Config) -> ArchSpec:
    base = replace(llama.spec(config), late_qk_norm=True)
    alpha = rotation_of(config).get("alpha")
    position = base.layers[0].position
    if alpha is None or not (isinstance(position, Rope) and isinstance(position.scaling, DynamicScaling)):
        return base
    # With `alpha`, what is called dynamic is a base that is larger from the first token on.
    theta = position.theta * alpha ** (position.dim / (position.dim - 2))
    return replace(
        with_layers(base, position=Rope(theta, position.dim)), max_positions=config["max_position_embeddings"]
    )
