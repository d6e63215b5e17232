"""Baichuan 2 and ChatGLM3 in plain torch, written from their published architecture: the oracles of the parity tests.

Neither is part of transformers. Both are functions from a checkpoint's tensors to logits, without cache or batch, and
share nothing with the code that they judge.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

Tensors = dict[str, Tensor]
BAICHUAN: dict[str, Any] = {
    "model_type": "baichuan", "vocab_size": 125696, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2,
    "num_attention_heads": 8, "rms_norm_eps": 1e-6, "hidden_act": "silu", "tie_word_embeddings": False,
}  # fmt: skip
CHATGLM: dict[str, Any] = {
    "model_type": "chatglm", "padded_vocab_size": 104, "hidden_size": 64, "ffn_hidden_size": 96, "num_layers": 3,
    "num_attention_heads": 8, "kv_channels": 16, "multi_query_attention": True, "multi_query_group_num": 2,
    "layernorm_epsilon": 1e-5, "add_bias_linear": False, "add_qkv_bias": True, "seq_length": 256, "rmsnorm": True,
    "apply_residual_connection_post_layernorm": False, "tie_word_embeddings": False,
}  # fmt: skip


def rms(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return weight * x / torch.sqrt(x.pow(2).mean(-1, keepdim=True) + eps)


def causal(scores: Tensor) -> Tensor:
    length = scores.shape[-1]
    return scores.masked_fill(torch.ones(length, length).triu(1).bool(), float("-inf")).softmax(-1)


def baichuan_logits(config: dict[str, Any], tensors: Tensors, ids: Tensor) -> Tensor:
    """Baichuan 1 and 2: rotations where the config has max_position_embeddings (7B), else ALiBi (13B)."""
    heads, length = config["num_attention_heads"], len(ids)
    dim = config["hidden_size"] // heads
    x = tensors["model.embed_tokens.weight"][ids]
    for i in range(config["num_hidden_layers"]):
        layer = {name.removeprefix(f"model.layers.{i}."): t for name, t in tensors.items() if f"layers.{i}." in name}
        normed = rms(x, layer["input_layernorm.weight"], config["rms_norm_eps"])
        q, k, v = (normed @ layer["self_attn.W_pack.weight"].T).view(length, 3, heads, dim).permute(1, 2, 0, 3)
        if "max_position_embeddings" in config:
            angles = torch.arange(length)[:, None] * 10000.0 ** (-torch.arange(0, dim, 2) / dim)
            cos, sin = angles.repeat(1, 2).cos(), angles.repeat(1, 2).sin()
            q, k = (y * cos + torch.cat([-y[..., dim // 2 :], y[..., : dim // 2]], -1) * sin for y in (q, k))
        scores = q @ k.transpose(1, 2) / math.sqrt(dim)
        if "max_position_embeddings" not in config:
            slopes = torch.tensor([2.0 ** (-8 * (h + 1) / heads) for h in range(heads)])  # heads is a power of two here
            scores = scores + slopes[:, None, None] * torch.arange(length)
        mixed = (causal(scores) @ v).transpose(0, 1).reshape(length, -1)
        x = x + mixed @ layer["self_attn.o_proj.weight"].T
        normed = rms(x, layer["post_attention_layernorm.weight"], config["rms_norm_eps"])
        gate, up = (normed @ layer[f"mlp.{name}_proj.weight"].T for name in ("gate", "up"))
        x = x + (torch.nn.functional.silu(gate) * up) @ layer["mlp.down_proj.weight"].T
    x = rms(x, tensors["model.norm.weight"], config["rms_norm_eps"])
    head = tensors["lm_head.weight"]
    if config["vocab_size"] == 125696:  # the second generation's
        head = head / head.norm(dim=1, keepdim=True)
    return x @ head.T


def chatglm_logits(config: dict[str, Any], tensors: Tensors, ids: Tensor) -> Tensor:
    """ChatGLM3: heads share two kv groups; of each head the first half is rotated, in neighbouring pairs."""
    heads, groups, dim = config["num_attention_heads"], config["multi_query_group_num"], config["kv_channels"]
    length, eps, rotated = len(ids), config["layernorm_epsilon"], config["kv_channels"] // 2
    x = tensors["transformer.embedding.word_embeddings.weight"][ids]
    angles = torch.arange(length)[:, None] * 10000.0 ** (-torch.arange(0, rotated, 2) / rotated)
    turn = torch.polar(torch.ones_like(angles), angles)

    def rotate(y: Tensor) -> Tensor:
        pairs = torch.view_as_complex(y[..., :rotated].reshape(*y.shape[:-1], -1, 2).contiguous())
        return torch.cat([torch.view_as_real(pairs * turn).flatten(-2), y[..., rotated:]], -1)

    for i in range(config["num_layers"]):
        prefix = f"transformer.encoder.layers.{i}."
        layer = {name.removeprefix(prefix): t for name, t in tensors.items() if name.startswith(prefix)}
        normed = rms(x, layer["input_layernorm.weight"], eps)
        qkv = normed @ layer["self_attention.query_key_value.weight"].T + layer["self_attention.query_key_value.bias"]
        q, k, v = qkv.split([heads * dim, groups * dim, groups * dim], -1)
        q = rotate(q.view(length, heads, dim).transpose(0, 1))
        k = rotate(k.view(length, groups, dim).transpose(0, 1)).repeat_interleave(heads // groups, 0)
        v = v.view(length, groups, dim).transpose(0, 1).repeat_interleave(heads // groups, 0)
        mixed = (causal(q @ k.transpose(1, 2) / math.sqrt(dim)) @ v).transpose(0, 1).reshape(length, -1)
        x = x + mixed @ layer["self_attention.dense.weight"].T
        normed = rms(x, layer["post_attention_layernorm.weight"], eps)
        gate, up = (normed @ layer["mlp.dense_h_to_4h.weight"].T).chunk(2, -1)
        x = x + (torch.nn.functional.silu(gate) * up) @ layer["mlp.dense_4h_to_h.weight"].T
    return (
        rms(x, tensors["transformer.encoder.final_layernorm.weight"], eps)
        @ tensors["transformer.output_layer.weight"].T
    )


def baichuan_shapes(config: dict[str, Any]) -> dict[str, tuple[int, ...]]:
    hidden, width, vocab = config["hidden_size"], config["intermediate_size"], config["vocab_size"]
    shapes: dict[str, tuple[int, ...]] = {
        "model.embed_tokens.weight": (vocab, hidden),
        "model.norm.weight": (hidden,),
        "lm_head.weight": (vocab, hidden),
    }
    for i in range(config["num_hidden_layers"]):
        shapes |= {
            f"model.layers.{i}.input_layernorm.weight": (hidden,),
            f"model.layers.{i}.self_attn.W_pack.weight": (3 * hidden, hidden),
            f"model.layers.{i}.self_attn.o_proj.weight": (hidden, hidden),
            f"model.layers.{i}.post_attention_layernorm.weight": (hidden,),
            f"model.layers.{i}.mlp.gate_proj.weight": (width, hidden),
            f"model.layers.{i}.mlp.up_proj.weight": (width, hidden),
            f"model.layers.{i}.mlp.down_proj.weight": (hidden, width),
        }
    return shapes


def chatglm_shapes(config: dict[str, Any]) -> dict[str, tuple[int, ...]]:
    hidden, width, vocab = config["hidden_size"], config["ffn_hidden_size"], config["padded_vocab_size"]
    inner = config["num_attention_heads"] * config["kv_channels"]
    rows = inner + 2 * config["multi_query_group_num"] * config["kv_channels"]
    shapes: dict[str, tuple[int, ...]] = {
        "transformer.embedding.word_embeddings.weight": (vocab, hidden),
        "transformer.rotary_pos_emb.inv_freq": (config["kv_channels"] // 4,),
        "transformer.encoder.final_layernorm.weight": (hidden,),
        "transformer.output_layer.weight": (vocab, hidden),
    }
    for i in range(config["num_layers"]):
        layer = f"transformer.encoder.layers.{i}"
        shapes |= {
            f"{layer}.input_layernorm.weight": (hidden,),
            f"{layer}.self_attention.query_key_value.weight": (rows, hidden),
            f"{layer}.self_attention.query_key_value.bias": (rows,),
            f"{layer}.self_attention.dense.weight": (hidden, inner),
            f"{layer}.post_attention_layernorm.weight": (hidden,),
            f"{layer}.mlp.dense_h_to_4h.weight": (2 * width, hidden),
            f"{layer}.mlp.dense_4h_to_h.weight": (hidden, width),
        }
    return shapes


Oracle = Callable[[Tensor], Tensor]
# Name of the test case -> (config, shapes of its tensors, its forward pass).
CASES: dict[str, tuple[dict[str, Any], Callable[..., dict[str, tuple[int, ...]]], Callable[..., Tensor]]] = {
    "baichuan2-7b": (BAICHUAN | {"max_position_embeddings": 256}, baichuan_shapes, baichuan_logits),
    "baichuan-13b": (BAICHUAN | {"vocab_size": 103, "model_max_length": 256}, baichuan_shapes, baichuan_logits),
    "chatglm3": (CHATGLM, chatglm_shapes, chatglm_logits),
}


def save_published(case: str, folder: Path) -> Oracle:
    """Random weights with their config in `folder`; returns the oracle, ids [T] → logits [T, V]."""
    config, shapes, logits = CASES[case]
    generator = torch.Generator().manual_seed(7)
    tensors = {
        name: torch.randn(shape, generator=generator) * 0.2 + (0.5 if "norm" in name else 0.0)
        for name, shape in shapes(config).items()
    }
    save_file(tensors, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(config))
    return lambda ids: logits(config, tensors, ids)
