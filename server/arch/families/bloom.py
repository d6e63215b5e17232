"""BLOOM (BigScience Workshop 2022, arXiv 2211.05100): ALiBi, a norm after the embedding, q, k and v fused per head."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from server.arch.families.hf_config import share_of
from server.arch.names import NameMap, QkvLayout
from server.arch.spec import Activation, Alibi, ArchSpec, Dense, LayerNormSpec, LayerSpec, Residual

NAMES = NameMap(
    roles={
        "embed": "word_embeddings",
        "embed_norm": "word_embeddings_layernorm",
        "attention_norm": "h.{i}.input_layernorm",
        "qkv": "h.{i}.self_attention.query_key_value",
        "attention_out": "h.{i}.self_attention.dense",
        "mlp_norm": "h.{i}.post_attention_layernorm",
        "mlp_up": "h.{i}.mlp.dense_h_to_4h",
        "mlp_down": "h.{i}.mlp.dense_4h_to_h",
        "activation": "h.{i}.mlp.gelu_impl",
        "final_norm": "ln_f",
        "head": "lm_head",
    },
    qkv_layout=QkvLayout.GROUPED,
    prefixes=("transformer.", ""),
    ignore=(r"^lm_head\.weight$",),  # a copy of the tied embedding
)


def spec(config: Mapping[str, Any]) -> ArchSpec:
    hidden = config.get("hidden_size") or config["n_embed"]
    heads = config.get("n_head") or config["num_attention_heads"]
    normed = config.get("apply_residual_connection_post_layernorm", False)
    layer = LayerSpec(mlp=Dense(width=4 * hidden, activation=Activation.GELU_TANH), position=Alibi())
    return ArchSpec(
        vocab_size=config["vocab_size"],
        hidden_size=hidden,
        num_heads=heads,
        num_kv_heads=heads,
        head_dim=share_of(hidden, heads),
        norm=LayerNormSpec(eps=config.get("layer_norm_epsilon", 1e-5)),
        residual=Residual.PRE_NORMED if normed else Residual.PRE,
        layers=(layer,) * (config.get("n_layer") or config["num_hidden_layers"]),
        tied_head=config.get("tie_word_embeddings", True),
        qkv_bias=True,
        attention_out_bias=True,
        mlp_bias=True,
        embed_norm=True,
    )
