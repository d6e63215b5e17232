"""Mixtral-8x7B's config, as published, and one of its shape that is small."""

from __future__ import annotations

from typing import Any

MIXTRAL: dict[str, Any] = {
    "model_type": "mixtral", "vocab_size": 32_000, "hidden_size": 4096, "intermediate_size": 14_336,
    "num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 8, "num_local_experts": 8,
    "num_experts_per_tok": 2, "rms_norm_eps": 1e-5, "hidden_act": "silu", "tie_word_embeddings": False,
    "rope_theta": 1e6, "max_position_embeddings": 32_768, "sliding_window": None, "torch_dtype": "bfloat16",
}  # fmt: skip
SMALL_MIXTRAL = MIXTRAL | {
    "vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "num_local_experts": 4,
}  # fmt: skip
