"""Architectures that Lockstep does not implement, run by transformers' own model: slowly, but they run.

One rank, one sequence at a time, each with the cache that transformers made for it: no paging, no batched arithmetic,
no custom kernels, no prefix that two requests could share. Scheduling, limits, sampling and the wire are as for any
model; how much a sequence's cache takes is estimated from the config. Code from a model's repository is never run.
"""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from huggingface_hub.errors import StrictDataclassError
from torch import Tensor
from transformers import (
    MODEL_FOR_MASKED_LM_MAPPING,
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForSeq2SeqLM,
    PreTrainedConfig,
    PreTrainedModel,
)

from server.arch import families
from server.arch.footprint import LEAST_PREFILL_TOKENS
from server.config import AUTO, ShardConfig
from server.offload.share import Share
from server.quantisation.kv import AS_COMPUTED
from server.stepping.batch import Carried, Forward
from server.stepping.cache import KvOnDevice, KVShape
from server.stepping.sequences import TokenRun

SERVED = ", ".join(sorted(families.FAMILIES))
# What transformers raises for a config.json that it cannot make a model of.
UNREADABLE = (
    *(ValueError, KeyError, TypeError, AttributeError, ArithmeticError, AssertionError, ImportError, RuntimeError),
    StrictDataclassError,
)


class FallbackModel:
    """A transformers model behind the interface of ours; a step's "hidden states" are its logits."""

    def __init__(self, model: PreTrainedModel, reads_images: bool = False):
        self._model = model
        self._reads_images = reads_images
        self._config = model.config.get_text_config()
        self._keeps_last = "logits_to_keep" in inspect.signature(model.forward).parameters
        self.vocab_size: int = model.get_output_embeddings().weight.shape[0]
        self._has_encoder: bool = model.config.is_encoder_decoder
        self.kv_placement = KvOnDevice()
        self.shares_prefixes = False  # each sequence has a cache of its own
        self.nbytes = sum(parameter.nbytes for parameter in model.parameters())
        self.num_parameters = sum(parameter.numel() for parameter in model.parameters())

    @property
    def warning(self) -> str:
        """What whoever starts it is told."""
        others = "It serves text alone: images are refused. " if self._reads_images else ""
        return (
            f"{type(self._model).__name__} is not one of Lockstep's architectures: transformers' own model serves it, "
            f"one sequence at a time, without paged cache, batching or sharding. {others}Expect a fraction of the "
            "usual speed"
        )

    @property
    def decoder_start(self) -> int | None:
        """The token that an encoder-decoder's generations start from; None for a decoder."""
        if not self._has_encoder:
            return None
        start = self._model.config.decoder_start_token_id
        return int(self._config.pad_token_id or 0) if start is None else int(start)

    @property
    def vocab_range(self) -> tuple[int, int]:
        """All tokens: there is one rank."""
        return 0, self.vocab_size

    @property
    def max_positions(self) -> int:
        """Longest sequence; 0: no limit of its own."""
        return getattr(self._config, "max_position_embeddings", None) or 0

    def kv_shape(self, dtype: torch.dtype) -> KVShape:
        """About what one token takes."""
        config = self._config
        heads = getattr(config, "num_attention_heads", None) or 1
        kv_heads = getattr(config, "num_key_value_heads", None) or heads
        head_dim = getattr(config, "head_dim", None) or config.hidden_size // heads
        return KVShape(config.num_hidden_layers, kv_heads, head_dim, dtype, is_paged=False)

    def least_step_bytes(self, prefill_tokens: int, dtype: torch.dtype) -> int:
        """About the logits of all its tokens, which transformers may compute."""
        return min(prefill_tokens, LEAST_PREFILL_TOKENS) * self.vocab_size * dtype.itemsize

    def run(self, forward: Forward, kv_caches: Sequence[Tensor]) -> Carried:
        """The logits [T, V] of a step's tokens; zeros where they are not asked for."""
        parts = [
            self._one(run, forward.token_ids[start:stop])
            for run, (start, stop) in zip(forward.runs, pairwise(forward.meta.query_starts), strict=True)
        ]
        return Carried(torch.cat(parts))

    def logits(self, hidden: Tensor) -> Tensor:
        """What `run` returned, in float32."""
        return hidden.float()

    def _one(self, run: TokenRun, token_ids: Tensor) -> Tensor:
        """One sequence's next tokens [n] → [n, V]."""
        wanted: dict[str, Any] = {"use_cache": True}
        if self._keeps_last and not run.reported:
            wanted["logits_to_keep"] = 1
        encoded, cache = run.sequence.own_cache or (self._encode(run.sequence.encoder_tokens), None)
        ids = {"decoder_input_ids" if self._has_encoder else "input_ids": token_ids.unsqueeze(0)}
        output = self._model(**ids, **encoded, past_key_values=cache, **wanted)
        run.sequence.own_cache = encoded, output.past_key_values
        logits: Tensor = output.logits[0]
        missing = len(token_ids) - len(logits)
        return torch.cat([logits.new_zeros(missing, logits.shape[1]), logits]) if missing else logits

    def _encode(self, prompt: list[int]) -> dict[str, Any]:
        """What the decoder is told of an encoder's prompt; nothing where there is no encoder."""
        if not self._has_encoder:
            return {}
        ids = torch.tensor([prompt], device=self._model.device)
        return {"encoder_outputs": self._model.get_encoder()(ids), "attention_mask": torch.ones_like(ids)}


def refuse_settings(config: ShardConfig, model_type: object) -> None:
    """Raise ValueError for settings that only models of our families can have."""
    wishes = {
        "--pipeline-parallel": config.num_stages > 1,
        "--kv-cache-dtype": config.kv_cache_dtype != AS_COMPUTED.name,
        "--num-shard": config.stage_size > 1,
        "--quantize": bool(config.quantize),
        "--weights-on-device": config.weights_on_device != AUTO and not Share.parse(config.weights_on_device).is_all,
        "--kv-on-device": not Share.parse(config.kv_on_device).is_all,
        "--rope-scaling and --rope-factor": bool(config.rope_scaling or config.rope_factor),
    }
    if flags := [flag for flag, is_given in wishes.items() if is_given]:
        raise ValueError(
            f"config.json says model_type {model_type!r}, which runs on one shard and as it is only: leave out "
            f"{', '.join(flags)}; served without such limits are: {SERVED}"
        )


def load(model_path: Path, weights_path: Path | None, dtype: torch.dtype, device: torch.device) -> FallbackModel:
    """Load with transformers. Raises ValueError for what it cannot load, with the list of what Lockstep can.

    model_path: folder of config.json; weights_path: folder of the weights, None for random ones. On the device `meta`
    with random weights, nothing is computed: that tells from config.json alone what is refused.
    """
    try:
        config = AutoConfig.from_pretrained(model_path, local_files_only=True, trust_remote_code=False)
        auto = AutoModelForSeq2SeqLM if config.is_encoder_decoder else AutoModelForCausalLM
        model = _build(auto, config, weights_path, dtype, device)
    except UNREADABLE as error:
        raise ValueError(
            "this architecture is not one of Lockstep's, and transformers cannot load it either "
            f"({_first_line(error)}); served are: {SERVED}"
        ) from error
    if "past_key_values" not in inspect.signature(model.forward).parameters:
        raise ValueError(
            f"{type(model).__name__} keeps its state in another way than keys and values, which Lockstep cannot serve; "
            f"served are: {SERVED}"
        )
    if type(config) in MODEL_FOR_MASKED_LM_MAPPING and not (
        config.is_encoder_decoder or getattr(config, "is_decoder", True)
    ):
        raise ValueError(
            f"config.json says model_type {config.model_type!r} without is_decoder, which fills gaps in a text and "
            f"continues none; served are: {SERVED}"
        )
    return FallbackModel(torch.nn.Module.to(model, device).eval(), hasattr(config, "vision_config"))


def _build(
    auto: Any, config: PreTrainedConfig, weights_path: Path | None, dtype: torch.dtype, device: torch.device
) -> PreTrainedModel:
    model: PreTrainedModel
    if weights_path is None:
        with device:
            model = auto.from_config(config, dtype=dtype, trust_remote_code=False)
    else:
        model = auto.from_pretrained(
            weights_path, config=config, dtype=dtype, local_files_only=True, trust_remote_code=False
        )
    return model


def _first_line(error: Exception) -> str:
    return str(error).strip().partition("\n")[0]
