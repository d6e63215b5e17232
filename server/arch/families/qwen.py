"""Qwen2 (Yang et al. 2024, arXiv 2407.10671): Llama with biases on q, k and v, and windows in its upper layers.

Qwen3, dense and mixture (Yang et al. 2025, arXiv 2505.09388), has normalised queries and keys in place of the biases.
"""

from __future__ import annotations

from dataclasses import replace

from server.arch.families import llama
from server.arch.families.hf_config import Config, mixture, windowed
from server.arch.names import FUSED_EXPERTS
from server.arch.spec import ArchSpec

NAMES = llama.NAMES
NAMES_OF_3 = replace(
    NAMES,
    roles={
        **NAMES.roles,
        "q_norm": "layers.{i}.self_attn.q_norm",
        "k_norm": "layers.{i}.self_attn.k_norm",
        "router": "layers.{i}.mlp.gate",
        "expert_gate": "layers.{i}.mlp.experts.{e}.gate_proj",
        "expert_up": "layers.{i}.mlp.experts.{e}.up_proj",
        "expert_down": "layers.{i}.mlp.experts.{e}.down_proj",
    },
    fused_experts=FUSED_EXPERTS,
)


def _windowed(config: Config) -> ArchSpec:
    first = config.get("max_window_layers", 0) if config.get("use_sliding_window") else config["num_hidden_layers"]
    return windowed(llama.spec(config), config, lambda i: i >= first)


def spec(config: Config) -> ArchSpec:
    return replace(_windowed(config), qkv_bias=True)


def spec_of_3(config: Config) -> ArchSpec:
    return replace(_windowed(config), qk_norm=True)


def spec_of_3_moe(config: Config) -> ArchSpec:
    base = spec_of_3(config)
    moe = mixture(config, width=config["moe_intermediate_size"])
    step, dense = config.get("decoder_sparse_step", 1), config.get("mlp_only_layers") or []
    is_moe = [i not in dense and (i + 1) % step == 0 for i in range(base.num_layers)]
    layers = tuple(replace(y, mlp=moe) if wanted else y for y, wanted in zip(base.layers, is_moe, strict=True))
    return replace(base, layers=layers)
