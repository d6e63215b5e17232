"""How each decoder that transformers has fares without a family: `python -m tests.server.fallback.fares [TYPE …]`.

Each is made as small as its config lets it be, with random weights, and loaded as a server loads it.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedConfig
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from server.arch import families
from server.backends.cpu.device import CpuDevice
from server.backends.reference import ReferenceBackend
from server.checkpoint.formats import Quantisation
from server.fallback.batched import BatchedModel
from server.fallback.load import UNREADABLE, Loader
from server.ranks.collectives import Shard
from tests.server.fallback.cases import shard_config
from tests.server.tiny import COMMON, LLAMA_SIZES

MOST_PARAMETERS = 30_000_000
# What configs call their sizes, beside `LLAMA_SIZES`.
SIZES: dict[str, Any] = {
    "head_dim": 8, "n_embd": 64, "n_head": 8, "n_layer": 3, "n_positions": 256, "rotary_dim": 4, "d_model": 64,
    "num_layers": 3, "encoder_layers": 3, "decoder_layers": 3, "num_heads": 8, "ffn_dim": 96, "attention_heads": 8,
    "n_inner": 96, "rotary_pct": 1.0,
    "num_experts": 4, "num_local_experts": 4, "n_routed_experts": 4, "num_experts_per_tok": 2, "n_group": 1,
    "topk_group": 1, "moe_intermediate_size": 32, "shared_expert_intermediate_size": 32, "first_k_dense_replace": 1,
    "n_shared_experts": 1, "q_lora_rank": 16, "kv_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8,
    "v_head_dim": 8, "moe_num_experts": 4, "moe_k": 2, "sliding_window": 9, "hidden_size_per_layer_input": 16,
    "vocab_size_per_layer_input": 103, "global_head_dim": 8, "attention_types": [[["global", "local"], 2]],
}  # fmt: skip
# The last layers of hybrids attend, as some of every checkpoint's do.
HYBRID = {"layer_types": ["linear_attention", "linear_attention", "full_attention"]}
CHANGED: dict[str, dict[str, Any]] = {
    "gpt_neo": {"num_hidden_layers": 4, "num_layers": 4}, "bamba": {"attn_layer_indices": [2]},
    "jamba": {"attn_layer_period": 3, "attn_layer_offset": 2}, "bailing_hybrid": HYBRID, "kimi_linear": HYBRID,
}  # fmt: skip
LATENT = {"num_key_value_heads": 8}  # where keys and values are expanded from one row, for every head


def config_of(model_type: str) -> PreTrainedConfig:
    """A small one. Raises what transformers does for sizes that do not fit together."""
    known = AutoConfig.for_model(model_type)
    sizes = {name: size for name, size in SIZES.items() if hasattr_quietly(known, name)}
    latent = LATENT if "kv_lora_rank" in sizes else {}
    return AutoConfig.for_model(model_type, **(LLAMA_SIZES | sizes | latent | COMMON | CHANGED.get(model_type, {})))


def hasattr_quietly(config: PreTrainedConfig, name: str) -> bool:
    """Whether a config has such a setting, be it another one in each layer."""
    try:
        return getattr(config, name, None) is not None
    except RuntimeError:
        return True


def fare(model_type: str) -> str:
    """`batched`, why it is not, or why it cannot be tried."""
    try:
        config = config_of(model_type)
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(config)
        if (count := sum(parameter.numel() for parameter in model.parameters())) > MOST_PARAMETERS:
            return f"not tried: {count} parameters"
    except UNREADABLE as error:
        return f"not tried: {type(error).__name__} {str(error).strip()[:120]}".replace("\n", " ")
    with TemporaryDirectory() as folder:
        config.save_pretrained(folder)
        settings = shard_config(Path(folder), random_weights=True)
        loader = Loader(settings, ReferenceBackend(CpuDevice()), Shard(), torch.float32, Quantisation())
        try:
            loaded = loader.load()
        except ValueError as error:
            return f"refused: {str(error).partition('; served')[0]}"
    if isinstance(loaded, BatchedModel):
        return "batched"
    (reason,) = re.findall(r"because (.*): without", loaded.warning)
    return str(reason).partition(", by ")[0]


def fares(model_types: list[str]) -> Iterator[tuple[str, str]]:
    """Of some model types, or of all without a family."""
    for model_type in model_types or sorted(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES):
        if not families.has({"model_type": model_type}):
            yield model_type, fare(model_type)


if __name__ == "__main__":
    for model_type, how in fares(sys.argv[1:]):
        print(f"{model_type}: {how}", flush=True)
