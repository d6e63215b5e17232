"""What windowed models at 32k tokens, and those that attend nowhere, take in plans and on shards, in numbers."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch

from benchmark.cost.devices import kept_bytes
from benchmark.cost.roofline import ServedModel
from benchmark.cost.shapes import from_config
from server.arch import families
from server.arch.stages import stages_of
from server.arch.windows import largest_window, ring_for
from server.model.transformer import kv_shape
from server.quantisation.kv import AS_COMPUTED
from server.ranks.collectives import Shard

TOKENS = 32768
GPT_OSS_20B: dict[str, Any] = {
    "model_type": "gpt_oss",
    "hidden_act": "silu",
    "rms_norm_eps": 1e-5,
    "rope_theta": 150000,
    "rope_scaling": {"rope_type": "yarn", "factor": 32.0, "original_max_position_embeddings": 4096, "truncate": False},
    "tie_word_embeddings": False,
    "vocab_size": 201088,
    "hidden_size": 2880,
    "intermediate_size": 2880,
    "num_hidden_layers": 24,
    "num_attention_heads": 64,
    "num_key_value_heads": 8,
    "head_dim": 64,
    "num_local_experts": 32,
    "num_experts_per_tok": 4,
    "sliding_window": 128,
    "max_position_embeddings": 131072,
    "torch_dtype": "bfloat16",
}
GEMMA_3_27B: dict[str, Any] = {
    "model_type": "gemma3_text",
    "hidden_activation": "gelu_pytorch_tanh",
    "rms_norm_eps": 1e-6,
    "rope_theta": 1000000,
    "rope_local_base_freq": 10000,
    "vocab_size": 262208,
    "hidden_size": 5376,
    "intermediate_size": 21504,
    "num_hidden_layers": 62,
    "num_attention_heads": 32,
    "num_key_value_heads": 16,
    "head_dim": 128,
    "sliding_window": 1024,
    "max_position_embeddings": 131072,
    "query_pre_attn_scalar": 168,
    "torch_dtype": "bfloat16",
}
MISTRAL_7B: dict[str, Any] = {
    "model_type": "mistral",
    "hidden_act": "silu",
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000,
    "tie_word_embeddings": False,
    "vocab_size": 32000,
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "sliding_window": 4096,
    "max_position_embeddings": 32768,
    "torch_dtype": "bfloat16",
}
MAMBA_CODESTRAL_7B: dict[str, Any] = {
    "model_type": "mamba2",
    "vocab_size": 32768,
    "hidden_size": 4096,
    "num_hidden_layers": 64,
    "num_heads": 128,
    "head_dim": 64,
    "n_groups": 8,
    "state_size": 128,
    "conv_kernel": 4,
    "torch_dtype": "bfloat16",
}
# A token in all layers; then with rings: a token in those without, and a sequence in those with one.
SIZES = [
    # 24 layers of 2 x 8 x 64 numbers in 2 bytes, half of them windowed: 8 + 32 + 1 blocks of 16 tokens.
    (GPT_OSS_20B, 49_152, 24_576, 12 * 41 * 16 * 2_048),
    # 62 layers of 2 x 16 x 128, of which 10 see all; the others keep 64 + 32 + 1 blocks.
    (GEMMA_3_27B, 507_904, 81_920, 52 * 97 * 16 * 8_192),
    # 32 layers of 2 x 8 x 128, all windowed; blocks of one layer's size hold copies of 256 + 32 + 1 blocks.
    (MISTRAL_7B, 131_072, 4_096, 32 * 289 * 16 * 4_096),
]


@pytest.mark.parametrize(("config", "whole", "token", "sequence"), SIZES, ids=["gpt-oss 20b", "Gemma 3 27B", "Mistral"])
@pytest.mark.parametrize("ranks", [1, 2])
def test_windowed_models_take_what_their_windows_need(
    config: dict[str, Any], whole: int, token: int, sequence: int, ranks: int
) -> None:
    served = dataclasses.replace(ServedModel(from_config(config), "bfloat16"), ranks=ranks)
    assert (token // ranks, sequence // ranks) == kept_bytes(served, 4096, TOKENS)
    assert (whole // ranks, 0) == kept_bytes(served, 4096, 1024)  # where a ring saves little
    _, spec = families.find(config)
    (stage,) = stages_of(spec, 1)
    shape = kv_shape(spec, stage, Shard(0, ranks), torch.bfloat16, AS_COMPUTED)
    assert (whole // ranks, 0) == (shape.bytes_per_token, shape.bytes_per_sequence)
    ringed = dataclasses.replace(shape, ring=ring_for(largest_window(spec), 4096, TOKENS))
    assert (token // ranks, sequence // ranks) == (ringed.bytes_per_token, ringed.bytes_per_sequence)
    assert 5 * (TOKENS * token + sequence) < 3 * TOKENS * whole


@pytest.mark.parametrize(("ranks", "numbers"), [(1, 64 * (8192 * 128 + 3 * 10240)), (2, 64 * (4096 * 128 + 3 * 5120))])
def test_blocks_for_kept_states_alone_are_planned_as_shards_have_them(ranks: int, numbers: int) -> None:
    """A token has its share of the 64 blocks of 16 tokens that one state takes, in float32."""
    served = dataclasses.replace(ServedModel(from_config(MAMBA_CODESTRAL_7B), "bfloat16"), ranks=ranks)
    expected = (4 * -(-numbers // 1024), 4 * numbers)
    assert expected == kept_bytes(served, 4096, TOKENS)
    _, spec = families.find(MAMBA_CODESTRAL_7B)
    (stage,) = stages_of(spec, 1)
    shape = kv_shape(spec, stage, Shard(0, ranks), torch.bfloat16, AS_COMPUTED)
    assert expected == (shape.bytes_per_token, shape.bytes_per_sequence)
