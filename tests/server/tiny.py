"""Tiny random checkpoints of every family, made by transformers' own models."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    AutoModelForSeq2SeqLM,
    PreTrainedModel,
)
from transformers.utils import logging as transformers_logging

COMMON: dict[str, Any] = {"vocab_size": 103, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 3}
LLAMA_SIZES: dict[str, Any] = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "max_position_embeddings": 256,
}
VISION_SIZES: dict[str, Any] = {
    "model_type": "pixtral",
    "hidden_size": 16,
    "intermediate_size": 16,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "image_size": 28,
    "patch_size": 14,
}
MOE_SIZES: dict[str, Any] = {
    "n_routed_experts": 8,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "n_shared_experts": 2,
    "first_k_dense_replace": 1,
}
LATENT_SIZES: dict[str, Any] = (
    LLAMA_SIZES
    | MOE_SIZES
    | {
        "num_key_value_heads": 8,
        "kv_lora_rank": 32,
        "q_lora_rank": 24,
        "qk_nope_head_dim": 12,
        "qk_rope_head_dim": 8,
        "v_head_dim": 16,
    }
)
T5_SIZES: dict[str, Any] = {
    "d_model": 64,
    "d_ff": 96,
    "num_layers": 3,
    "num_heads": 8,
    "d_kv": 16,
    "relative_attention_num_buckets": 8,
    "relative_attention_max_distance": 20,
    "decoder_start_token_id": 3,
}
DELTA_SIZES: dict[str, Any] = LLAMA_SIZES | {
    "head_dim": 16,
    "num_hidden_layers": 4,
    "layer_types": ["linear_attention", "full_attention"] * 2,
    "linear_num_key_heads": 8,
    "linear_num_value_heads": 16,
    "linear_key_head_dim": 12,
    "linear_value_head_dim": 32,
}
GEMMA4_SIZES: dict[str, Any] = LLAMA_SIZES | {
    "head_dim": 16,
    "global_head_dim": 32,
    "num_hidden_layers": 4,
    "layer_types": ["sliding_attention", "full_attention"] * 2,
    "sliding_window": 24,
    "hidden_size_per_layer_input": 0,
    "final_logit_softcapping": 3.0,
}
DELTA_EXPERTS: dict[str, Any] = DELTA_SIZES | {
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "shared_expert_intermediate_size": 48,
}
MAMBA_SIZES: dict[str, Any] = {
    "mamba_n_heads": 8,
    "mamba_d_head": 32,
    "mamba_expand": 4,
    "mamba_d_state": 12,
    "mamba_n_groups": 1,
}
NEMOTRON_SIZES: dict[str, Any] = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 16,
    "max_position_embeddings": 256,
    "mamba_num_heads": 8,
    "mamba_head_dim": 32,
    "ssm_state_size": 12,
    "n_groups": 4,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "moe_shared_expert_intermediate_size": 48,
    "routed_scaling_factor": 2.5,
}
FALCON_MULTIPLIERS: dict[str, Any] = {
    "embedding_multiplier": 3.0,
    "lm_head_multiplier": 0.5,
    "attention_in_multiplier": 1.2,
    "attention_out_multiplier": 0.7,
    "key_multiplier": 0.4,
    "mlp_multipliers": [0.6, 0.3],
    "ssm_in_multiplier": 1.3,
    "ssm_out_multiplier": 0.4,
    "ssm_multipliers": [0.9, 1.1, 0.8, 1.2, 0.7],
}
GRANITE_MULTIPLIERS: dict[str, Any] = {
    "embedding_multiplier": 3.0,
    "residual_multiplier": 0.4,
    "attention_multiplier": 0.1,
    "logits_scaling": 4.0,
}
ROPE_SCALINGS: dict[str, dict[str, Any]] = {
    "linear": {"rope_type": "linear", "factor": 4.0},
    "dynamic": {"rope_type": "dynamic", "factor": 2.0},
    "llama3": {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 64,
    },
    "yarn": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64},
}
YARN_BY_DIM: dict[str, Any] = {"rope_theta": 10000.0, "mscale": 0.707, "mscale_all_dim": 0.707, **ROPE_SCALINGS["yarn"]}
LONG_ROPE = {
    "rope_type": "longrope",
    "short_factor": [1.0, 1.1, 1.2, 1.3],
    "long_factor": [1.0, 2.0, 4.0, 8.0],
    "original_max_position_embeddings": 128,
}

# Name of the test case -> (model_type, what differs from the family's defaults).
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "bloom": ("bloom", {"hidden_size": 64, "n_head": 8, "n_layer": 3}),
    "bloom-normed-residual": (
        "bloom",
        {"hidden_size": 64, "n_head": 8, "n_layer": 3, "apply_residual_connection_post_layernorm": True},
    ),
    "opt": ("opt", {"hidden_size": 64, "ffn_dim": 96, "num_hidden_layers": 3, "num_attention_heads": 8,
                    "max_position_embeddings": 256, "word_embed_proj_dim": 64}),
    "opt-350m": ("opt", {"hidden_size": 64, "ffn_dim": 96, "num_hidden_layers": 3, "num_attention_heads": 8,
                         "max_position_embeddings": 256, "word_embed_proj_dim": 32, "do_layer_norm_before": False}),
    "gpt2": ("gpt2", {"n_embd": 64, "n_head": 8, "n_layer": 3, "n_positions": 256}),
    "gpt_bigcode": ("gpt_bigcode", {"n_embd": 64, "n_head": 8, "n_layer": 3, "n_positions": 256, "multi_query": True}),
    "gpt_bigcode-mha": (
        "gpt_bigcode", {"n_embd": 64, "n_head": 8, "n_layer": 3, "n_positions": 256, "multi_query": False},
    ),
    "gpt_neox": ("gpt_neox", {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 3,
                              "num_attention_heads": 8, "max_position_embeddings": 256, "rotary_pct": 0.5}),
    "gpt_neox-serial": (
        "gpt_neox", {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 3, "num_attention_heads": 8,
                     "max_position_embeddings": 256, "use_parallel_residual": False},
    ),
    "falcon-7b": ("falcon", {"hidden_size": 64, "num_hidden_layers": 3, "num_attention_heads": 8,
                             "new_decoder_architecture": False, "multi_query": True, "parallel_attn": True,
                             "bias": False, "alibi": False}),
    "falcon-40b": ("falcon", {"hidden_size": 64, "num_hidden_layers": 3, "num_attention_heads": 8, "num_kv_heads": 4,
                              "new_decoder_architecture": True, "bias": False, "alibi": False}),
    "falcon-rw": ("falcon", {"hidden_size": 64, "num_hidden_layers": 3, "num_attention_heads": 8,
                             "new_decoder_architecture": False, "multi_query": False, "parallel_attn": False,
                             "bias": True, "alibi": True,
                             "attn_implementation": "sdpa"}),  # transformers' eager Falcon adds ALiBi twice
    "llama": ("llama", LLAMA_SIZES),
    "llama-biased-tied": (
        "llama", LLAMA_SIZES | {"attention_bias": True, "mlp_bias": True, "tie_word_embeddings": True},
    ),
    **{f"llama-{name}": ("llama", LLAMA_SIZES | {"rope_parameters": {"rope_theta": 10000.0, **scaling}})
       for name, scaling in ROPE_SCALINGS.items()},
    "afmoe": (
        "afmoe", LLAMA_SIZES | {"head_dim": 16, "num_hidden_layers": 5, "sliding_window": 24, "mup_enabled": True,
                                "num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 32,
                                "num_shared_experts": 2, "route_scale": 2.5},
    ),
    "arcee": ("arcee", LLAMA_SIZES | {"mlp_bias": True}),
    "mistral": ("mistral", LLAMA_SIZES | {"sliding_window": 24}),
    "mixtral": ("mixtral", LLAMA_SIZES | {"num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": None}),
    "qwen2": ("qwen2", LLAMA_SIZES | {"use_sliding_window": True, "sliding_window": 24, "max_window_layers": 1}),
    "qwen3": ("qwen3", LLAMA_SIZES | {"head_dim": 16}),
    "qwen3_moe": (
        "qwen3_moe", LLAMA_SIZES | {"head_dim": 16, "num_experts": 4, "num_experts_per_tok": 2, "norm_topk_prob": True,
                                    "moe_intermediate_size": 32, "mlp_only_layers": [0]},
    ),
    "qwen3_5": ("qwen3_5_text", DELTA_SIZES),
    "qwen3_5_moe": ("qwen3_5_moe_text", DELTA_EXPERTS),
    "qwen3_next": ("qwen3_next", DELTA_EXPERTS | {"mlp_only_layers": [0]}),
    "lfm2": (
        "lfm2", LLAMA_SIZES | {"num_hidden_layers": 4, "block_auto_adjust_ff_dim": False,
                               "layer_types": ["conv", "full_attention", "conv", "conv"], "conv_bias": True},
    ),
    "lfm2_moe": (
        "lfm2_moe", LLAMA_SIZES | {"layer_types": ["conv", "full_attention", "conv"], "num_dense_layers": 1,
                                   "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32},
    ),
    "granitemoehybrid": (
        "granitemoehybrid", LLAMA_SIZES | MAMBA_SIZES | GRANITE_MULTIPLIERS | {
            "num_hidden_layers": 4, "layer_types": ["linear_attention", "full_attention"] * 2,
            "num_local_experts": 4, "num_experts_per_tok": 2, "shared_intermediate_size": 48},
    ),
    "granitemoehybrid-dense": (
        "granitemoehybrid", LLAMA_SIZES | MAMBA_SIZES | GRANITE_MULTIPLIERS | {
            "layer_types": ["linear_attention", "full_attention", "linear_attention"], "mamba_n_groups": 2,
            "num_local_experts": 0, "shared_intermediate_size": 96, "position_embedding_type": "rope"},
    ),
    "nemotron_h": (
        "nemotron_h", NEMOTRON_SIZES | {
            "layers_block_type": ["linear_attention", "mlp", "full_attention", "linear_attention", "moe"]},
    ),
    "mamba2": (
        "mamba2", {"hidden_size": 64, "num_heads": 8, "head_dim": 32, "expand": 4, "state_size": 12, "n_groups": 2,
                   "num_hidden_layers": 3},
    ),
    "falcon_h1": (
        "falcon_h1", LLAMA_SIZES | MAMBA_SIZES | FALCON_MULTIPLIERS | {
            "mamba_d_ssm": 256, "mamba_n_groups": 2, "mamba_rms_norm": True},
    ),
    "falcon_h1-unnormed": (
        "falcon_h1", LLAMA_SIZES | MAMBA_SIZES | FALCON_MULTIPLIERS | {"mamba_d_ssm": 256},
    ),
    "gemma": ("gemma", LLAMA_SIZES | {"head_dim": 16}),
    "gemma2": (
        "gemma2", LLAMA_SIZES | {"head_dim": 16, "sliding_window": 24, "query_pre_attn_scalar": 24,
                                 "attn_logit_softcapping": 2.0, "final_logit_softcapping": 3.0},
    ),
    "gemma3_text": (
        "gemma3_text", LLAMA_SIZES | {"head_dim": 16, "sliding_window": 24, "num_hidden_layers": 7,
                                      "query_pre_attn_scalar": 24},
    ),
    "gemma4": ("gemma4_text", GEMMA4_SIZES | {"num_global_key_value_heads": 2, "attention_k_eq_v": True}),
    "gemma4-e": (
        "gemma4_text", GEMMA4_SIZES | {"num_hidden_layers": 8, "num_kv_shared_layers": 3, "use_double_wide_mlp": True,
                                       "layer_types": ["sliding_attention", "full_attention"] * 4,
                                       "hidden_size_per_layer_input": 12, "vocab_size_per_layer_input": 103},
    ),
    "gemma4-a": (
        "gemma4_text", GEMMA4_SIZES | {"enable_moe_block": True, "num_experts": 4, "top_k_experts": 2,
                                       "moe_intermediate_size": 32, "num_global_key_value_heads": 2,
                                       "attention_k_eq_v": True},
    ),
    "gemma4_unified": ("gemma4_unified_text", GEMMA4_SIZES),
    "phi3": ("phi3", LLAMA_SIZES | {"sliding_window": 24}),
    "phi3-longrope": (
        "phi3", LLAMA_SIZES | {"rope_parameters": {"rope_theta": 10000.0, **LONG_ROPE},
                               "original_max_position_embeddings": 128},
    ),
    "stablelm": ("stablelm", LLAMA_SIZES | {"use_qkv_bias": True, "partial_rotary_factor": 0.5}),
    "stablelm-parallel": ("stablelm", LLAMA_SIZES | {"use_parallel_residual": True, "partial_rotary_factor": 0.5}),
    "starcoder2": ("starcoder2", LLAMA_SIZES | {"sliding_window": 24, "use_bias": True}),
    "gpt_oss": (
        "gpt_oss", LLAMA_SIZES | {"head_dim": 16, "num_local_experts": 4, "num_experts_per_tok": 2,
                                  "sliding_window": 24, "rope_parameters": {
                                      "rope_theta": 150000.0, "truncate": False, **ROPE_SCALINGS["yarn"]}},
    ),
    "granite": ("granite", LLAMA_SIZES | {"embedding_multiplier": 3.0, "residual_multiplier": 0.22,
                                          "attention_multiplier": 0.1, "logits_scaling": 4.0}),
    "granitemoe": (
        "granitemoe", LLAMA_SIZES | {"embedding_multiplier": 3.0, "residual_multiplier": 0.4, "logits_scaling": 4.0,
                                     "attention_multiplier": 0.1, "num_local_experts": 4, "num_experts_per_tok": 2},
    ),
    "smollm3": ("smollm3", LLAMA_SIZES | {"no_rope_layer_interval": 2}),
    "smollm3-windowed": (
        "smollm3", LLAMA_SIZES | {"no_rope_layers": [1, 0, 1], "use_sliding_window": True, "sliding_window": 24},
    ),
    "olmo2": ("olmo2", LLAMA_SIZES),
    "olmo3": (
        "olmo3", LLAMA_SIZES | {"num_hidden_layers": 4, "sliding_window": 24, "rope_theta": 10000.0,
                                "rope_scaling": {"attention_factor": 1.2, **ROPE_SCALINGS["yarn"]}},
    ),
    "olmoe": ("olmoe", LLAMA_SIZES | {"num_experts": 4, "num_experts_per_tok": 2, "clip_qkv": 0.5}),
    "glm": ("glm", LLAMA_SIZES | {"head_dim": 16, "num_key_value_heads": 2}),
    "glm4": ("glm4", LLAMA_SIZES | {"head_dim": 16, "num_key_value_heads": 2}),
    "exaone4": ("exaone4", LLAMA_SIZES | {"sliding_window": 24, "num_hidden_layers": 5, "head_dim": 16}),
    "exaone4-unwindowed": ("exaone4", LLAMA_SIZES | {"sliding_window": None, "layer_types": ["full_attention"] * 3}),
    "ministral3": (
        "ministral3", LLAMA_SIZES | {"head_dim": 16, "rope_parameters": {
            "rope_theta": 10000.0, "llama_4_scaling_beta": 0.4, "mscale": 1.0, "mscale_all_dim": 1.0,
            **ROPE_SCALINGS["yarn"], "original_max_position_embeddings": 16}},
    ),
    "mistral3": (  # with eyes
        "mistral3", {"tie_word_embeddings": False, "vision_config": VISION_SIZES,
                     "text_config": COMMON | LLAMA_SIZES | {"model_type": "mistral", "sliding_window": 24}},
    ),
    "cohere": ("cohere", LLAMA_SIZES | {"logit_scale": 0.25}),
    "cohere2": ("cohere2", LLAMA_SIZES | {"logit_scale": 0.25, "sliding_window": 24, "num_hidden_layers": 5}),
    "phi4-mini": (
        "phi3", LLAMA_SIZES | {"tie_word_embeddings": True, "original_max_position_embeddings": 128, "head_dim": 8,
                               "rope_parameters": {"rope_theta": 10000.0, "partial_rotary_factor": 0.75,
                                                   **LONG_ROPE, "short_factor": [1.0, 1.1, 1.2],
                                                   "long_factor": [1.0, 2.0, 4.0]}},
    ),
    "seed_oss": ("seed_oss", LLAMA_SIZES | {"head_dim": 16}),
    "hunyuan_v1_dense": (
        "hunyuan_v1_dense", LLAMA_SIZES | {"head_dim": 16, "rope_parameters": {
            "rope_theta": 10000.0, "rope_type": "dynamic", "alpha": 50.0, "factor": 1.0}},
    ),
    "ernie4_5": ("ernie4_5", LLAMA_SIZES | {"head_dim": 16, "use_bias": True}),
    "ernie4_5_moe": (
        "ernie4_5_moe", LLAMA_SIZES | {"head_dim": 16, "moe_num_experts": 4, "moe_k": 2, "moe_intermediate_size": 32,
                                       "moe_num_shared_experts": 2, "moe_layer_start_index": 1},
    ),
    "phimoe": (
        "phimoe", LLAMA_SIZES | {"num_local_experts": 4, "num_experts_per_tok": 2, "attention_bias": True,
                                 "lm_head_bias": True, "router_jitter_noise": 0.1,
                                 "rope_parameters": {"rope_theta": 10000.0, "short_mscale": 1.2, "long_mscale": 1.2,
                                                     **LONG_ROPE}},
    ),
    "glm4_moe": (
        "glm4_moe", LLAMA_SIZES | MOE_SIZES | {"head_dim": 16, "use_qk_norm": True, "attention_bias": True,
                                               "n_group": 4, "topk_group": 2, "routed_scaling_factor": 2.5},
    ),
    "minimax_m2": (
        "minimax_m2", LLAMA_SIZES | {"head_dim": 16, "num_local_experts": 4, "num_experts_per_tok": 2,
                                     "rotary_dim": 8},
    ),
    "qwen2_moe": (
        "qwen2_moe", LLAMA_SIZES | {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32,
                                    "shared_expert_intermediate_size": 48},
    ),
    "dots1": (
        "dots1", LLAMA_SIZES | MOE_SIZES | {"norm_topk_prob": True, "sliding_window": 24, "max_window_layers": 1},
    ),
    "deepseek_v2": (
        "deepseek_v2", LATENT_SIZES | {"topk_method": "group_limited_greedy", "n_group": 4, "topk_group": 2,
                                       "routed_scaling_factor": 4.0, "rope_parameters": YARN_BY_DIM},
    ),
    "deepseek_v2-lite": ("deepseek_v2", LATENT_SIZES | {"q_lora_rank": None, "rope_parameters": YARN_BY_DIM}),
    "deepseek_v3": (
        "deepseek_v3", LATENT_SIZES | {"n_group": 4, "topk_group": 2, "routed_scaling_factor": 2.5,
                                       "rope_parameters": YARN_BY_DIM | {"mscale": 1.0}},
    ),
    "glm4_moe_lite": ("glm4_moe_lite", LATENT_SIZES | {"n_group": 1, "topk_group": 1, "q_lora_rank": None}),
    "mistral4": (
        "mistral4", LATENT_SIZES | {"n_group": 4, "topk_group": 2, "routed_scaling_factor": 2.0, "rope_parameters": {
            "llama_4_scaling_beta": 0.4, **YARN_BY_DIM, "original_max_position_embeddings": 16}},
    ),
    "llama4": (
        "llama4_text", LLAMA_SIZES | {"head_dim": 16, "num_hidden_layers": 5, "no_rope_layer_interval": 3,
                                      "attention_chunk_size": 24, "floor_scale": 16, "intermediate_size": 32,
                                      "intermediate_size_mlp": 96, "num_local_experts": 4, "num_experts_per_tok": 1,
                                      "interleave_moe_layer_step": 2},
    ),
    "mpt": ("mpt", {"d_model": 64, "n_heads": 8, "n_layers": 3, "max_seq_len": 256, "expansion_ratio": 4}),
    "mpt-clipped": ("mpt", {"d_model": 72, "n_heads": 6, "n_layers": 3, "max_seq_len": 256,
                            "attn_config": {"clip_qkv": 0.5}}),
    "t5": ("t5", T5_SIZES),
    "t5-gated": ("t5", T5_SIZES | {"feed_forward_proj": "gated-gelu", "tie_word_embeddings": False, "d_kv": 24}),
    "mt5": ("mt5", T5_SIZES | {"feed_forward_proj": "gated-gelu", "num_decoder_layers": 2}),
}  # fmt: skip


def save_tiny(case: str, folder: Path, **changes: object) -> PreTrainedModel:
    """A random model, its config changed by `changes`, whose weights are large enough that every part matters."""
    transformers_logging.disable_progress_bar()
    model_type, sizes = CASES[case]
    torch.manual_seed(7)
    settings = {"attn_implementation": "eager"} | COMMON | sizes
    attention = settings.pop("attn_implementation")
    config = AutoConfig.for_model(model_type, **(settings | changes))
    auto: Any = AutoModelForSeq2SeqLM if config.is_encoder_decoder else AutoModelForCausalLM
    sees = hasattr(config, "vision_config") or model_type == "mistral4"  # which has a list of such models alone
    auto = AutoModelForImageTextToText if sees else auto
    model: PreTrainedModel = auto.from_config(config, attn_implementation=attention).eval()
    for name, parameter in model.named_parameters():
        is_norm = "norm" in name or ".ln_" in name or "ln_f" in name
        parameter.data.normal_(0.5 if is_norm else 0.0, 0.2)
    for name, buffer in model.named_buffers():
        if name.endswith(("e_score_correction_bias", "expert_bias")):
            buffer.normal_(0.0, 0.2)
        if name.endswith("layer_scalar"):
            buffer.normal_(0.9, 0.2)
    model.save_pretrained(folder)
    return model
