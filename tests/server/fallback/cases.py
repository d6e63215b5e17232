"""Tiny random models that have no family, made by transformers, and engines of them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForSeq2SeqLM, PreTrainedModel
from transformers.utils import logging as transformers_logging

from server.config import ShardConfig
from server.loading import load
from server.stepping.engine import Engine
from server.stepping.warmup import warm_up
from tests.server.tiny import COMMON, LLAMA_SIZES

GPTJ_SIZES = {"n_embd": 64, "n_head": 8, "n_layer": 3, "n_positions": 256, "rotary_dim": 4}
# Of what is batched, what its model adds to `LLAMA_SIZES`.
BATCHED: dict[str, dict[str, Any]] = {
    "hyperclovax": {"logits_scaling": 4.0},
    "flex_olmo": {"num_experts": 4, "num_experts_per_tok": 2},
    "nemotron": {},
    "internlm3": {},
    "helium": {"head_dim": 8},
    "persimmon": {},
    "apertus": {},
    "biogpt": {},
    "bitnet": {},
    "jetmoe": {},
    "olmo": {"clip_qkv": 4.0},
    "vaultgemma": {"head_dim": 8, "query_pre_attn_scalar": 8, "sliding_window": 9},
    "solar_open": {"n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "n_group": 1,
              "topk_group": 1, "first_k_dense_replace": 1, "n_shared_experts": 1},
    "gemma3n_text": {"hidden_size_per_layer_input": 16, "vocab_size_per_layer_input": 103, "head_dim": 8,
                     "num_hidden_layers": 4, "num_kv_shared_layers": 2, "sliding_window": 9, "laurel_rank": 4,
                     "layer_types": ["sliding_attention", "full_attention"] * 2},
}  # fmt: skip
SERIAL: dict[str, dict[str, Any]] = {
    "gptj": GPTJ_SIZES,
    "bart": {"d_model": 64, "encoder_layers": 2, "decoder_layers": 2, "encoder_attention_heads": 8,
             "decoder_attention_heads": 8, "encoder_ffn_dim": 96, "decoder_ffn_dim": 96,
             "max_position_embeddings": 256, "decoder_start_token_id": 2, "forced_eos_token_id": None},
}  # fmt: skip


def make(model_type: str, **changes: Any) -> PreTrainedModel:
    """A model whose weights are large enough for tokens to differ."""
    transformers_logging.disable_progress_bar()
    torch.manual_seed(3)
    sizes = SERIAL[model_type] if model_type in SERIAL else LLAMA_SIZES | BATCHED.get(model_type, {})
    config = AutoConfig.for_model(model_type, **(COMMON | sizes | changes))
    auto = AutoModelForSeq2SeqLM if config.is_encoder_decoder else AutoModelForCausalLM
    model: PreTrainedModel = auto.from_config(config).eval()
    for name, parameter in model.named_parameters():
        if "norm" not in name and "ln_" not in name:
            parameter.data.normal_(0, 0.2)
    return model


def save(model_type: str, folder: Path, **changes: Any) -> PreTrainedModel:
    """The same, and a checkpoint of it."""
    model = make(model_type, **changes)
    model.save_pretrained(folder)
    return model


def shard_config(folder: Path, **changes: Any) -> ShardConfig:
    """Of a single shard in float32 on a CPU."""
    places = {"model_path": str(folder), "weights_path": str(folder), "socket_path": "", "rendezvous": ""}
    given = {**places, "rank": 0, "world_size": 1, "dtype": "float32", "device": "cpu", **changes}
    return ShardConfig(**given)


def engine_of(folder: Path, **changes: Any) -> Engine:
    """An engine that is warm. changes: of its settings."""
    engine, _ = load(shard_config(folder, **changes))
    sizes = {"prefill_tokens": 64, "total_tokens": 64, "wanted_tokens": 2048, "useful_tokens": 2048, "sequences": 0}
    warm_up(engine, top_n_tokens=5, fraction=1.0, **sizes)
    return engine


@torch.inference_mode()
def expected(model: PreTrainedModel, prompt: list[int], count: int) -> list[int]:
    """Greedy generation without the end token's say, as the engine does."""
    ids = torch.tensor([prompt])
    out = model.generate(  # type: ignore[operator]
        ids, attention_mask=torch.ones_like(ids), max_new_tokens=count, min_new_tokens=count, do_sample=False,
        eos_token_id=-1,
    )  # fmt: skip
    return [int(id) for id in out[0, -count:]]
