"""Qwen2 (Yang et al. 2024, arXiv 2407.10671): Llama with biases on q, k and v, and windows in its upper layers.

Its mixture has an expert that all tokens share. Qwen3, dense and mixture (Yang et al. 2025, arXiv 2505.09388), has
normalised queries and keys in place of the biases. Qwen3-Next and Qwen3.5 (3.6 too, by the same names) have gated delta
rules in three of four layers, gates on attention, norms stored as distances from 1, and in mixtures an expert that all
tokens share. In text, the three positions of a token of Qwen3.5 (mRoPE) are one.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from server.arch.families import llama
from server.arch.families.hf_config import Config, layer_types, mixed, mixture, need_silu, partial_rope, windowed
from server.arch.names import FUSED_EXPERTS, Predictor
from server.arch.recurrences import GatedDelta
from server.arch.spec import ArchSpec, Moe, RmsNormSpec

NAMES = llama.NAMES
EXPERTS = {
    "router": "layers.{i}.mlp.gate",
    "expert_gate": "layers.{i}.mlp.experts.{e}.gate_proj",
    "expert_up": "layers.{i}.mlp.experts.{e}.up_proj",
    "expert_down": "layers.{i}.mlp.experts.{e}.down_proj",
}
SHARED = {
    "shared_gate": "layers.{i}.mlp.shared_expert.gate_proj",
    "shared_up": "layers.{i}.mlp.shared_expert.up_proj",
    "shared_down": "layers.{i}.mlp.shared_expert.down_proj",
    "shared_router": "layers.{i}.mlp.shared_expert_gate",
}
NAMES_OF_2_MOE = replace(NAMES, roles={**NAMES.roles, **EXPERTS, **SHARED}, fused_experts=FUSED_EXPERTS)
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
    predictor=Predictor(
        {
            "embed": "layers.{i}.embed_tokens",
            "predictor_embed_norm": "layers.{i}.enorm",
            "predictor_hidden_norm": "layers.{i}.hnorm",
            "predictor_in": "layers.{i}.eh_proj",
            "final_norm": "layers.{i}.shared_head.norm",
            "head": "layers.{i}.shared_head.head",
        }
    ),
)
NAMES_OF_3_5 = replace(
    NAMES_OF_3,
    roles={
        **NAMES_OF_3.roles,
        **SHARED,
        "delta": "layers.{i}.linear_attn",
        "delta_qkv": "layers.{i}.linear_attn.in_proj_qkv",
        "delta_z": "layers.{i}.linear_attn.in_proj_z",
        "delta_b": "layers.{i}.linear_attn.in_proj_b",
        "delta_a": "layers.{i}.linear_attn.in_proj_a",
        "delta_conv": "layers.{i}.linear_attn.conv1d",
        "delta_norm": "layers.{i}.linear_attn.norm",
        "delta_out": "layers.{i}.linear_attn.out_proj",
    },
    predictor=Predictor(
        {
            "predictor_embed_norm": "pre_fc_norm_embedding",
            "predictor_hidden_norm": "pre_fc_norm_hidden",
            "predictor_in": "fc",
        },
        prefix="mtp.",
    ),
)
NAMES_OF_NEXT = replace(
    NAMES_OF_3_5,
    roles={
        **NAMES_OF_3_5.roles,
        "delta_qkvz": "layers.{i}.linear_attn.in_proj_qkvz",
        "delta_ba": "layers.{i}.linear_attn.in_proj_ba",
    },
)


def _windowed(config: Config) -> ArchSpec:
    first = config.get("max_window_layers", 0) if config.get("use_sliding_window") else config["num_hidden_layers"]
    return windowed(llama.spec(config), config, lambda i: i >= first)


def spec(config: Config) -> ArchSpec:
    return replace(_windowed(config), qkv_bias=True)


def spec_of_3(config: Config) -> ArchSpec:
    return replace(_windowed(config), qk_norm=True)


def _windowed_mixture(config: Config, is_windowed: Callable[[int], bool]) -> ArchSpec:
    """Which layers have windows, mixtures tell otherwise than dense models."""
    return windowed(llama.spec(config), config, lambda i: bool(config.get("use_sliding_window")) and is_windowed(i))


def _mixed(base: ArchSpec, config: Config, moe: Moe) -> ArchSpec:
    step, dense = config.get("decoder_sparse_step", 1), config.get("mlp_only_layers") or []
    return mixed(base, moe, lambda i: i not in dense and (i + 1) % step == 0)


def spec_of_2_moe(config: Config) -> ArchSpec:
    base = _windowed_mixture(config, lambda i: i % 2 == 0 and i < config.get("max_window_layers", 28))
    return _mixed(replace(base, qkv_bias=config.get("qkv_bias", True)), config, _sharing(config))


def _sharing(config: Config) -> Moe:
    moe = mixture(config, width=config["moe_intermediate_size"])
    return replace(moe, shared_width=config["shared_expert_intermediate_size"], shared_gate=True)


def spec_of_3_moe(config: Config) -> ArchSpec:
    base = replace(_windowed_mixture(config, lambda i: True), qk_norm=True)
    return _mixed(base, config, mixture(config, width=config["moe_intermediate_size"]))


def spec_of_next(config: Config) -> ArchSpec:
    """Qwen3-Next and Qwen3.5, dense and mixture."""
    config = {"norm_topk_prob": True, **config}
    need_silu(config)
    base = llama.spec({"intermediate_size": config.get("moe_intermediate_size"), **config})
    position, interval = partial_rope(config, 0.25), config.get("full_attention_interval", 4)
    kinds = {"linear_attention": _recurrence(config), "full_attention": None}
    usual = ["linear_attention" if (i + 1) % interval else "full_attention" for i in range(base.num_layers)]
    types = layer_types(config, usual, tuple(kinds))
    layers = tuple(
        replace(layer, position=position, recurrence=kinds[kind], attends=kinds[kind] is None)
        for layer, kind in zip(base.layers, types, strict=True)
    )
    norm = RmsNormSpec(config["rms_norm_eps"], unit_offset=True)
    predictors = config.get("mtp_num_hidden_layers", 1)
    base = replace(base, layers=layers, norm=norm, qk_norm=True, attention_gate=True, num_predictors=predictors)
    return _mixed(base, config, _sharing(config)) if config.get("num_experts") else base


def _recurrence(config: Config) -> GatedDelta:
    heads, key_heads = config["linear_num_value_heads"], config["linear_num_key_heads"]
    if heads % key_heads:
        raise ValueError(f"config.json says {heads} heads of values for {key_heads} heads of keys: download it again")
    return GatedDelta(
        num_heads=heads,
        num_key_heads=key_heads,
        key_dim=config["linear_key_head_dim"],
        value_dim=config["linear_value_head_dim"],
        conv=config["linear_conv_kernel_dim"],
    )
