"""StableLM (Bellagente et al. 2024, arXiv 2402.17834): Llama with layer norms and heads rotated in part."""

from __future__ import annotations

from dataclasses import replace

from server.arch.families import llama
from server.arch.families.hf_config import Config, partial_rope
from server.arch.spec import ArchSpec, LayerNormSpec, Residual, with_layers

NAMES = llama.NAMES


def spec(config: Config) -> ArchSpec:
    if config.get("qk_layernorm"):
        raise ValueError("config.json asks for qk_layernorm, one norm for each head: StableLM is served without it")
    base = llama.spec({**config, "rms_norm_eps": config["layer_norm_eps"]})
    return replace(
        with_layers(base, position=partial_rope(config, default=0.25)),
        norm=LayerNormSpec(config["layer_norm_eps"]),
        residual=Residual.PARALLEL_ONE_NORM if config.get("use_parallel_residual") else Residual.PRE,
        qkv_bias=config.get("use_qkv_bias", False),
    )
