"""StarCoder2 (Lozhkov et al. 2024, arXiv 2402.19173): layer norms, biases, rotary positions, a sliding window."""

from __future__ import annotations

from dataclasses import replace

from server.arch.families import llama
from server.arch.families.hf_config import Config, activation, head_dim, longest_sequence, rope, windowed
from server.arch.spec import ArchSpec, Dense, LayerNormSpec, LayerSpec, Residual

NAMES = replace(
    llama.NAMES,
    roles={
        **{role: name for role, name in llama.NAMES.roles.items() if role != "mlp_gate"},
        "mlp_up": "layers.{i}.mlp.c_fc",
        "mlp_down": "layers.{i}.mlp.c_proj",
        "activation": "layers.{i}.mlp.act",
    },
)


def spec(config: Config) -> ArchSpec:
    dim, bias = head_dim(config), config.get("use_bias", True)
    position = rope(config, dim)
    mlp = Dense(config["intermediate_size"], activation(config["hidden_act"]))
    base = ArchSpec(
        vocab_size=config["vocab_size"],
        hidden_size=config["hidden_size"],
        num_heads=config["num_attention_heads"],
        num_kv_heads=config["num_key_value_heads"],
        head_dim=dim,
        norm=LayerNormSpec(config["norm_epsilon"]),
        residual=Residual.PRE,
        layers=(LayerSpec(mlp, position),) * config["num_hidden_layers"],
        tied_head=config.get("tie_word_embeddings", True),
        qkv_bias=bias,
        attention_out_bias=bias,
        mlp_bias=bias,
        max_positions=longest_sequence(config, position),
    )
    return windowed(base, config, lambda i: True)
