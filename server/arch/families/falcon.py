"""Falcon (Almazrouei et al. 2023, arXiv 2311.16867): three generations that differ in norms, positions and kv heads."""

from __future__ import annotations

from server.arch.families.hf_config import Config, activation, rope, share_of
from server.arch.names import NameMap, QkvLayout
from server.arch.spec import Alibi, ArchSpec, Dense, LayerNormSpec, LayerSpec, Residual

NAMES = NameMap(
    roles={
        "embed": "word_embeddings",
        "attention_norm": ("h.{i}.ln_attn", "h.{i}.input_layernorm"),
        "qkv": "h.{i}.self_attention.query_key_value",
        "attention_out": "h.{i}.self_attention.dense",
        "mlp_norm": ("h.{i}.ln_mlp", "h.{i}.post_attention_layernorm"),
        "mlp_up": "h.{i}.mlp.dense_h_to_4h",
        "mlp_down": "h.{i}.mlp.dense_4h_to_h",
        "activation": "h.{i}.mlp.act",
        "final_norm": "ln_f",
        "head": "lm_head",
    },
    qkv_layout=QkvLayout.GROUPED,
    prefixes=("transformer.", ""),
    ignore=(r"^lm_head\.weight$", r"rotary_emb\.inv_freq$"),  # the tied embedding, computed from the config
)


def spec(config: Config) -> ArchSpec:
    hidden, heads, is_new = config["hidden_size"], config["num_attention_heads"], config["new_decoder_architecture"]
    dim, bias = share_of(hidden, heads), config["bias"]
    kv_heads = config["num_kv_heads"] if is_new else 1 if config["multi_query"] else heads
    norms = config.get("num_ln_in_parallel_attn") or (2 if is_new else 1)
    parallel = Residual.PARALLEL_TWO_NORMS if is_new and norms == 2 else Residual.PARALLEL_ONE_NORM
    # Falcon scales its ALiBi together with the scores.
    position = Alibi(scale=dim**-0.5) if config["alibi"] else rope(config, dim)
    mlp = Dense(config.get("ffn_hidden_size") or 4 * hidden, activation(config.get("activation", "gelu")))
    return ArchSpec(
        vocab_size=config["vocab_size"],
        hidden_size=hidden,
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=dim,
        norm=LayerNormSpec(config["layer_norm_epsilon"]),
        residual=parallel if is_new or config["parallel_attn"] else Residual.PRE,
        layers=(LayerSpec(mlp, position),) * config["num_hidden_layers"],
        tied_head=config.get("tie_word_embeddings", True),
        qkv_bias=bias,
        attention_out_bias=bias,
        mlp_bias=bias,
        max_positions=0 if config["alibi"] else config.get("max_position_embeddings", 2048),
    )
