"""ChatGLM3, ChatGLM2 (Zeng et al. 2022, arXiv 2210.02414): two groups of heads, half of each rotated in pairs."""

from __future__ import annotations

from server.arch.families.hf_config import Config
from server.arch.names import NameMap
from server.arch.spec import Activation, ArchSpec, Gated, LayerSpec, Residual, RmsNormSpec, Rope

NAMES = NameMap(
    roles={
        "embed": "embedding.word_embeddings",
        "attention_norm": "encoder.layers.{i}.input_layernorm",
        "qkv": "encoder.layers.{i}.self_attention.query_key_value",
        "attention_out": "encoder.layers.{i}.self_attention.dense",
        "mlp_norm": "encoder.layers.{i}.post_attention_layernorm",
        "mlp_gate_up": "encoder.layers.{i}.mlp.dense_h_to_4h",
        "mlp_down": "encoder.layers.{i}.mlp.dense_4h_to_h",
        "final_norm": "encoder.final_layernorm",
        "head": "output_layer",
    },
    prefixes=("transformer.", ""),
    ignore=(r"rotary_pos_emb\.inv_freq$",),  # computed from the config
)


def spec(config: Config) -> ArchSpec:
    heads, dim, bias = config["num_attention_heads"], config["kv_channels"], config["add_bias_linear"]
    position = Rope(theta=10000.0 * config.get("rope_ratio", 1.0), dim=dim // 2, interleaved=True)
    mlp = Gated(config["ffn_hidden_size"], Activation.SILU)
    return ArchSpec(
        vocab_size=config["padded_vocab_size"],
        hidden_size=config["hidden_size"],
        num_heads=heads,
        num_kv_heads=config["multi_query_group_num"] if config["multi_query_attention"] else heads,
        head_dim=dim,
        norm=RmsNormSpec(config["layernorm_epsilon"]),
        residual=Residual.PRE_NORMED if config["apply_residual_connection_post_layernorm"] else Residual.PRE,
        layers=(LayerSpec(mlp, position),) * config["num_layers"],
        tied_head=config.get("tie_word_embeddings", False),
        qkv_bias=bias or config["add_qkv_bias"],
        attention_out_bias=bias,
        mlp_bias=bias,
        max_positions=config["seq_length"],
    )
