"""Gemma (Gemma Team 2024, arXiv 2403.08295): Llama with a scaled embedding and norms stored as distances from 1."""

from __future__ import annotations

from dataclasses import replace

from server.arch.families import llama
from server.arch.families.reading import Config, activation
from server.arch.spec import ArchSpec, Gated, RmsNormSpec

NAMES = llama.NAMES


def spec(config: Config) -> ArchSpec:
    # Early configs say "gelu" in hidden_act and mean its tanh form, which hidden_activation then says.
    name = config.get("hidden_activation") or "gelu_pytorch_tanh"
    base = llama.spec({**config, "hidden_act": name})
    mlp = Gated(config["intermediate_size"], activation(name))
    return replace(
        base,
        norm=RmsNormSpec(config["rms_norm_eps"], unit_offset=True),
        layers=tuple(replace(layer, mlp=mlp) for layer in base.layers),
        embed_scale=config["hidden_size"] ** 0.5,
        tied_head=config.get("tie_word_embeddings", True),
    )
