"""Models that transformers runs one sequence at a time, each with the cache that it made for it: slowly, but they run.

One rank: no paging, no batched arithmetic, no custom kernels, no prefix that two requests could share. Scheduling,
limits, sampling and the wire are as for any model; how much a sequence's cache takes is estimated from the config.
"""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedConfig, PreTrainedModel

from server.arch.footprint import LEAST_PREFILL_TOKENS
from server.backends.protocol import TokenAdapters
from server.stepping.batch import Carried, Forward
from server.stepping.cache import Kept, KvOnDevice, KVShape
from server.stepping.sequences import TokenRun


class SerialModel:
    """See `server.stepping.engine.Model`; a step's "hidden states" are its logits. warning: what is told of it."""

    def __init__(self, model: PreTrainedModel, warning: str):
        self._model = model
        self.warning = warning
        self._config = model.config.get_text_config()
        self._keeps_last = "logits_to_keep" in inspect.signature(model.forward).parameters
        self.vocab_size: int = model.get_output_embeddings().weight.shape[0]
        self._has_encoder: bool = model.config.is_encoder_decoder
        self.kv_placement = KvOnDevice()
        self.shares_prefixes = self.takes_drafts = self.has_states = False  # each sequence has a cache of its own
        self.nbytes = sum(parameter.nbytes for parameter in model.parameters())
        self.num_parameters = sum(parameter.numel() for parameter in model.parameters())

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
        return max_positions(self._config)

    def kv_shape(self, dtype: torch.dtype) -> KVShape:
        """About what one token takes."""
        config = self._config
        layers = config.per_layer_config if config.is_heterogeneous else [config] * config.num_hidden_layers
        sizes = tuple(map(_kv_size, layers))
        return KVShape(len(sizes), *sizes[0], dtype, is_paged=False, sizes=sizes)

    def least_step_bytes(self, prefill_tokens: int, dtype: torch.dtype) -> int:
        """About the logits of all its tokens, which transformers may compute."""
        return min(prefill_tokens, LEAST_PREFILL_TOKENS) * self.vocab_size * dtype.itemsize

    def run(self, forward: Forward, kv_caches: Sequence[Kept]) -> Carried:
        """The logits [T, V] of a step's tokens; zeros where they are not asked for."""
        parts = [
            self._one(run, forward.token_ids[start:stop])
            for run, (start, stop) in zip(forward.runs, pairwise(forward.meta.query_starts), strict=True)
        ]
        return Carried(torch.cat(parts))

    def logits(self, hidden: Tensor, adapters: TokenAdapters | None = None) -> Tensor:
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


def max_positions(config: PreTrainedConfig) -> int:
    """Longest sequence of a text model; 0: no limit of its own."""
    return getattr(config, "max_position_embeddings", None) or 0


def _kv_size(layer: PreTrainedConfig) -> tuple[int, int]:
    """About how many kv heads a layer has, and how large they are."""
    heads = getattr(layer, "num_attention_heads", None) or 1
    kv_heads = getattr(layer, "num_key_value_heads", None) or heads
    return kv_heads, getattr(layer, "head_dim", None) or layer.hidden_size // heads
