"""Qwen2 (Yang et al. 2024, arXiv 2407.10671): Llama with biases on q, k and v, and windows in its upper layers.

Its mixture has an expert that all tokens share. Qwen3, dense and mixture (Yang et al. 2025, arXiv 2505.09388), has
normalised queries and keys in place of the biases.
"""

from __future__ import annotations

from dataclasses import replace

from server.arch.families import llama
from server.arch.families.hf_config import Config, mixed, mixture, windowed
from server.arch.names import FUSED_EXPERTS
from server.arch.spec import ArchSpec, Moe

NAMES = llama.NAMES
EXPERTS = {
    "router": "layers.{i}.mlp.gate",
    "expert_gate": "layers.{i}.mlp.experts.{e}.gate_proj",
    "expert_up": "layers.{i}.mlp.experts.{e}.up_proj",
    "expert_down": "layers.{i}.mlp.experts.{e}.down_proj",
}
NAMES_OF_2_MOE = replace(
    NAMES,
    roles={
        **NAMES.roles,
        **EXPERTS,
        "shared_gate": "layers.{i}.mlp.shared_expert.gate_proj",
        "shared_up": "layers.{i}.mlp.shared_expert.up_proj",
        "shared_down": "layers.{i}.mlp.shared_expert.down_proj",
        "shared_router": "layers.{i}.mlp.shared_expert_gate",
    },
    fused_experts=FUSED_EXPERTS,
)
NAMES_OF_3 = replace(
    NAMES,
    roles={
        **NAMES.roles,
        **EXPERTS,
        "q_norm": "layers.{i}.self_attn.q_norm",
        "k_norm": "layers.{i}.self_attn.k_norm",
    },
    fused_experts=FUSED_EXPERTS,
)
# Those of DeepSeek V3 and of those that follow it.
NAMES_OF_SHARED = replace(
    NAMES_OF_3,
    roles={
        **NAMES_OF_3.roles,
        "choice_bias": "layers.{i}.mlp.gate.e_score_correction_bias",
        "shared_gate": "layers.{i}.mlp.shared_experts.gate_proj",
        "shared_up": "layers.{i}.mlp.shared_experts.up_proj",
        "shared_down": "layers.{i}.mlp.shared_experts.down_proj",
    },
)


def _windowed(config: Config) -> ArchSpec:
    first = config.get("max_window_layers", 0) if config.get("use_sliding_window") else config["num_hidden_layers"]
    return windowed(llama.spec(config), config, lambda i: i >= first)


def spec(config: Config) -> ArchSpec:
    return replace(_windowed(config), qkv_bias=True)


def spec_of_3(config: Config) -> ArchSpec:
    return replace(_windowed(config), qk_norm=True)


def _mixed(base: ArchSpec, config: Config, moe: Moe) -> ArchSpec:
    step, dense = config.get("decoder_sparse_step", 1), config.get("mlp_only_layers") or []
    return mixed(base, moe, lambda i: i not in dense and (i + 1) % step == 0)


def spec_of_2_moe(config: Config) -> ArchSpec:
    moe = mixture(config, width=config["moe_intermediate_size"])
    moe = replace(moe, shared_width=config["shared_expert_intermediate_size"], shared_gate=True)
    return _mixed(replace(_windowed(config), qkv_bias=config.get("qkv_bias", True)), config, moe)


def spec_of_3_moe(config: Config) -> ArchSpec:
    return _mixed(spec_of_3(config), config, mixture(config, width=config["moe_intermediate_size"]))
