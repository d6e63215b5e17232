"""Llama 1 to 3 (Touvron et al. 2023, arXiv 2302.13971): RMS norms, rotary positions, gated mlp, shared kv heads."""

from __future__ import annotations

from server.arch.families.hf_config import Config, activation, head_dim, longest_sequence, rope
from server.arch.names import NameMap
from server.arch.spec import ArchSpec, Gated, LayerSpec, Residual, RmsNormSpec

NAMES = NameMap(
    roles={
        "embed": "embed_tokens",
        "attention_norm": "layers.{i}.input_layernorm",
        "q": "layers.{i}.self_attn.q_proj",
        "k": "layers.{i}.self_attn.k_proj",
        "v": "layers.{i}.self_attn.v_proj",
        "attention_out": "layers.{i}.self_attn.o_proj",
        "mlp_norm": "layers.{i}.post_attention_layernorm",
        "mlp_gate": "layers.{i}.mlp.gate_proj",
        "mlp_up": "layers.{i}.mlp.up_proj",
        "mlp_down": "layers.{i}.mlp.down_proj",
        "final_norm": "norm",
        "head": "lm_head",
    },
    prefixes=("model.", ""),
    ignore=(r"rotary_emb\.inv_freq$", r"^lm_head\.weight$"),  # computed from the config; a copy of a tied embedding
)


def spec(config: Config) -> ArchSpec:
    dim = head_dim(config)
    position = rope(config, dim)
    mlp = Gated(config["intermediate_size"], activation(config["hidden_act"]))
    return ArchSpec(
        vocab_size=config["vocab_size"],
        hidden_size=config["hidden_size"],
        num_heads=config["num_attention_heads"],
        num_kv_heads=config.get("num_key_value_heads") or config["num_attention_heads"],
        head_dim=dim,
        norm=RmsNormSpec(config["rms_norm_eps"]),
        residual=Residual.PRE,
        layers=(LayerSpec(mlp, position),) * config["num_hidden_layers"],
        tied_head=config.get("tie_word_embeddings", False),
        qkv_bias=config.get("attention_bias", False),
        attention_out_bias=config.get("attention_bias", False),
        mlp_bias=config.get("mlp_bias", False),
        max_positions=longest_sequence(config, position),
    )
