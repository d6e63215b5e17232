"""Qwen2 (Yang et al. 2024, arXiv 2407.10671): Llama with biases on q, k and v, and windows in its upper layers.

Qwen3, dense and mixture (Yang et al. 2025, arXiv 2505.09388), has normalised queries and keys in place of the biases.
Qwen3-Next and Qwen3.5 (3.6 too, by the same names) have gated delta rules in three of four layers, gates on attention,
norms stored as distances from 1, and in mixtures an mlp that every token takes. Of the vision models, Qwen3.5 among
them, the text half is served; in text, the three positions of a token (mRoPE) are one.
"""

from __future__ import annotations

from dataclasses import replace

from server.arch.families import llama
from server.arch.families.hf_config import Config, activation, head_dim, layer_types, rope, windowed
from server.arch.names import FUSED_EXPERTS
from server.arch.spec import ArchSpec, GatedDelta, Moe, RmsNormSpec

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
NAMES_OF_3_5 = replace(
    NAMES_OF_3,
    roles={
        **NAMES_OF_3.roles,
        "shared_gate": "layers.{i}.mlp.shared_expert.gate_proj",
        "shared_up": "layers.{i}.mlp.shared_expert.up_proj",
        "shared_down": "layers.{i}.mlp.shared_expert.down_proj",
        "shared_weight": "layers.{i}.mlp.shared_expert_gate",
        "delta": "layers.{i}.linear_attn",
        "delta_qkv": "layers.{i}.linear_attn.in_proj_qkv",
        "delta_z": "layers.{i}.linear_attn.in_proj_z",
        "delta_b": "layers.{i}.linear_attn.in_proj_b",
        "delta_a": "layers.{i}.linear_attn.in_proj_a",
        "delta_conv": "layers.{i}.linear_attn.conv1d",
        "delta_norm": "layers.{i}.linear_attn.norm",
        "delta_out": "layers.{i}.linear_attn.out_proj",
    },
    prefixes=("model.language_model.", *NAMES.prefixes),
    # Images and videos; a layer that drafts the token after the next.
    ignore=(*NAMES.ignore, r"(^|\.)visual\.", r"(^|\.)mtp\."),
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


def spec_of_3_moe(config: Config) -> ArchSpec:
    return _with_experts(spec_of_3(config), config)


def _with_experts(base: ArchSpec, config: Config) -> ArchSpec:
    """A spec whose layers are mixtures, but for those that config.json names."""
    moe = Moe(
        num_experts=config.get("num_experts") or config["num_local_experts"],
        top_k=config["num_experts_per_tok"],
        width=config["moe_intermediate_size"],
        activation=activation(config["hidden_act"]),
        renormalise=config["norm_topk_prob"],
        shared_width=config.get("shared_expert_intermediate_size", 0),
        shared_gate="shared_expert_intermediate_size" in config,
    )
    step, dense = config.get("decoder_sparse_step", 1), config.get("mlp_only_layers") or []
    is_moe = [i not in dense and (i + 1) % step == 0 for i in range(base.num_layers)]
    layers = tuple(replace(y, mlp=moe) if wanted else y for y, wanted in zip(base.layers, is_moe, strict=True))
    return replace(base, layers=layers)


def spec_of_next(config: Config) -> ArchSpec:
    """Qwen3-Next and Qwen3.5, dense and mixture; of a vision model, by its `text_config`."""
    defaults = {"norm_topk_prob": True, "tie_word_embeddings": config.get("tie_word_embeddings", False)}
    config = defaults | dict(config.get("text_config") or config)
    base = llama.spec({"intermediate_size": config.get("moe_intermediate_size"), **config})
    share = (config.get("rope_parameters") or config).get("partial_rotary_factor", 0.25)
    position, interval = rope(config, int(head_dim(config) * share)), config.get("full_attention_interval", 4)
    kinds = {"linear_attention": _recurrence(config), "full_attention": None}
    usual = ["linear_attention" if (i + 1) % interval else "full_attention" for i in range(base.num_layers)]
    types = layer_types(config, usual)
    if unknown := set(types) - set(kinds):
        raise ValueError(f"config.json asks for layers of the type {min(unknown)!r}; served are: {', '.join(kinds)}")
    layers = tuple(
        replace(layer, position=position, recurrence=kinds[kind])
        for layer, kind in zip(base.layers, types, strict=True)
    )
    norm = RmsNormSpec(config["rms_norm_eps"], unit_offset=True)
    base = replace(base, layers=layers, norm=norm, qk_norm=True, attention_gate=True)
    return _with_experts(base, config) if config.get("num_experts") else base


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
