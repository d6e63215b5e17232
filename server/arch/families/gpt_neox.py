"""GPT-NeoX, Pythia (Black et al. 2022, arXiv 2204.06745): attention and mlp in parallel, heads rotated in part."""

from __future__ import annotations

from server.arch.families.hf_config import Config, activation, longest_sequence, rope, share_of
from server.arch.names import NameMap, QkvLayout
from server.arch.spec import ArchSpec, Dense, LayerNormSpec, LayerSpec, Residual

NAMES = NameMap(
    roles={
        "embed": "embed_in",
        "attention_norm": "layers.{i}.input_layernorm",
        "qkv": "layers.{i}.attention.query_key_value",
        "attention_out": "layers.{i}.attention.dense",
        "mlp_norm": "layers.{i}.post_attention_layernorm",
        "mlp_up": "layers.{i}.mlp.dense_h_to_4h",
        "mlp_down": "layers.{i}.mlp.dense_4h_to_h",
        "activation": "layers.{i}.mlp.act",
        "final_norm": "final_layer_norm",
        "head": ("embed_out", "lm_head"),
    },
    qkv_layout=QkvLayout.GROUPED,
    prefixes=("gpt_neox.", ""),
    ignore=(r"\.attention\.(masked_)?bias$", r"rotary_emb\.inv_freq$"),  # causal masks, computed from the config
)


def spec(config: Config) -> ArchSpec:
    hidden, heads = config["hidden_size"], config["num_attention_heads"]
    bias = config.get("attention_bias", True)
    share = (config.get("rope_parameters") or {}).get("partial_rotary_factor") or config.get("rotary_pct", 0.25)
    base = config.get("rotary_emb_base", 10000)
    mlp = Dense(config["intermediate_size"], activation(config["hidden_act"]))
    dim = share_of(hidden, heads)
    position = rope(config, int(dim * share), theta=base)
    return ArchSpec(
        vocab_size=config["vocab_size"],
        hidden_size=hidden,
        num_heads=heads,
        num_kv_heads=heads,
        head_dim=dim,
        norm=LayerNormSpec(config["layer_norm_eps"]),
        residual=Residual.PARALLEL_TWO_NORMS if config.get("use_parallel_residual", True) else Residual.PRE,
        layers=(LayerSpec(mlp, position),) * config["num_hidden_layers"],
        tied_head=config.get("tie_word_embeddings", False),
        qkv_bias=bias,
        attention_out_bias=bias,
        mlp_bias=True,
        max_positions=longest_sequence(config, position),
    )
