"""GPT-2 (Radford et al. 2019): learned positions, fused q, k and v, linear weights stored inputs first.

GPT-BigCode, StarCoder (Li et al. 2023, arXiv 2305.06161), is GPT-2 with one key-value head for all heads.
"""

from __future__ import annotations

from dataclasses import replace

from server.arch.families.hf_config import Config, activation, share_of
from server.arch.names import NameMap, QkvLayout
from server.arch.spec import ArchSpec, Dense, LayerNormSpec, LayerSpec, Learned, Residual

NAMES = NameMap(
    roles={
        "embed": "wte",
        "positions": "wpe",
        "attention_norm": "h.{i}.ln_1",
        "qkv": "h.{i}.attn.c_attn",
        "attention_out": "h.{i}.attn.c_proj",
        "mlp_norm": "h.{i}.ln_2",
        "mlp_up": "h.{i}.mlp.c_fc",
        "mlp_down": "h.{i}.mlp.c_proj",
        "final_norm": "ln_f",
        "head": "lm_head",
    },
    transposed=True,
    prefixes=("transformer.", ""),
    ignore=(r"^lm_head\.weight$", r"\.attn\.(masked_)?bias$"),  # the tied embedding; causal masks of old checkpoints
)
# With one kv head, or one for each head, the grouped layout is what both kinds of checkpoint have.
NAMES_OF_BIGCODE = replace(
    NAMES,
    roles={**NAMES.roles, "activation": "h.{i}.mlp.act"},
    transposed=False,
    qkv_layout=QkvLayout.GROUPED,
)


def spec(config: Config) -> ArchSpec:
    if config.get("scale_attn_by_inverse_layer_idx"):
        raise ValueError(
            "config.json asks for scale_attn_by_inverse_layer_idx, scores divided by the layer's number, which is not "
            "served: serve another model"
        )
    hidden, heads = config["n_embd"], config["n_head"]
    mlp = Dense(config.get("n_inner") or 4 * hidden, activation(config["activation_function"]))
    return ArchSpec(
        vocab_size=config["vocab_size"],
        hidden_size=hidden,
        num_heads=heads,
        num_kv_heads=heads,
        head_dim=share_of(hidden, heads),
        norm=LayerNormSpec(config["layer_norm_epsilon"]),
        residual=Residual.PRE,
        layers=(LayerSpec(mlp, Learned(config["n_positions"])),) * config["n_layer"],
        tied_head=config.get("tie_word_embeddings", True),
        qkv_bias=True,
        attention_out_bias=True,
        mlp_bias=True,
        max_positions=config["n_positions"],
        scale=0.0 if config.get("scale_attn_weights", True) else 1.0,
    )


def spec_of_bigcode(config: Config) -> ArchSpec:
    base = spec(config)
    return replace(base, num_kv_heads=1 if config["multi_query"] else base.num_heads)
