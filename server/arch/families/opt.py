"""OPT (Zhang et al. 2022, arXiv 2205.01068): learned positions behind two unused rows; the 350m is post-norm."""

from __future__ import annotations

from server.arch.families.hf_config import Config, activation, share_of
from server.arch.names import NameMap
from server.arch.spec import ArchSpec, Dense, LayerNormSpec, LayerSpec, Learned, Residual

NAMES = NameMap(
    roles={
        "embed": "embed_tokens",
        "positions": "embed_positions",
        "project_in": "project_in",
        "attention_norm": "layers.{i}.self_attn_layer_norm",
        "q": "layers.{i}.self_attn.q_proj",
        "k": "layers.{i}.self_attn.k_proj",
        "v": "layers.{i}.self_attn.v_proj",
        "attention_out": "layers.{i}.self_attn.out_proj",
        "mlp_norm": "layers.{i}.final_layer_norm",
        "mlp_up": "layers.{i}.fc1",
        "mlp_down": "layers.{i}.fc2",
        "final_norm": "final_layer_norm",
        "project_out": "project_out",
        "head": "lm_head",
    },
    prefixes=("model.decoder.", "decoder.", ""),
    ignore=(r"^lm_head\.weight$",),  # a copy of the tied embedding
)


def spec(config: Config) -> ArchSpec:
    hidden, heads, bias = config["hidden_size"], config["num_attention_heads"], config.get("enable_bias", True)
    embed_dim, is_pre = config.get("word_embed_proj_dim") or hidden, config.get("do_layer_norm_before", True)
    mlp = Dense(config["ffn_dim"], activation(config["activation_function"]))
    return ArchSpec(
        vocab_size=config["vocab_size"],
        hidden_size=hidden,
        num_heads=heads,
        num_kv_heads=heads,
        head_dim=share_of(hidden, heads),
        norm=LayerNormSpec(eps=1e-5),
        residual=Residual.PRE if is_pre else Residual.POST,
        layers=(LayerSpec(mlp, Learned(config["max_position_embeddings"], offset=2)),) * config["num_hidden_layers"],
        tied_head=config.get("tie_word_embeddings", True),
        qkv_bias=bias,
        attention_out_bias=bias,
        mlp_bias=bias,
        embed_dim=embed_dim if embed_dim != hidden else 0,
        final_norm=is_pre and not config.get("_remove_final_layer_norm", False),
        max_positions=config["max_position_embeddings"],
    )
