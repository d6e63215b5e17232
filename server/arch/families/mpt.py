"""MPT (MosaicML 2023): ALiBi, norms without bias, queries, keys and values that may be clipped."""

from __future__ import annotations

from server.arch.families.hf_config import Config, share_of
from server.arch.names import NameMap
from server.arch.spec import Activation, Alibi, ArchSpec, Dense, LayerNormSpec, LayerSpec, Residual

NAMES = NameMap(
    roles={
        "embed": "wte",
        "attention_norm": "blocks.{i}.norm_1",
        "qkv": "blocks.{i}.attn.Wqkv",
        "attention_out": "blocks.{i}.attn.out_proj",
        "mlp_norm": "blocks.{i}.norm_2",
        "mlp_up": "blocks.{i}.ffn.up_proj",
        "mlp_down": "blocks.{i}.ffn.down_proj",
        "activation": "blocks.{i}.ffn.act",
        "final_norm": "norm_f",
        "head": "lm_head",
    },
    prefixes=("transformer.", ""),
    ignore=(r"^lm_head\.weight$",),  # a copy of the tied embedding
)


def spec(config: Config) -> ArchSpec:
    hidden, heads, attention = config["d_model"], config["n_heads"], config["attn_config"]
    mlp = Dense(int(config["expansion_ratio"] * hidden), Activation.GELU)
    return ArchSpec(
        vocab_size=config["vocab_size"],
        hidden_size=hidden,
        num_heads=heads,
        num_kv_heads=heads,
        head_dim=share_of(hidden, heads),
        norm=LayerNormSpec(config.get("layer_norm_epsilon", 1e-5), bias=False),
        residual=Residual.PRE,
        layers=(LayerSpec(mlp, Alibi(max_bias=attention.get("alibi_bias_max", 8))),) * config["n_layers"],
        tied_head=config.get("tie_word_embeddings", True),
        qkv_clip=attention.get("clip_qkv") or 0.0,
        scale=attention.get("softmax_scale") or 0.0,
        max_positions=config.get("max_seq_len", 0),
    )
