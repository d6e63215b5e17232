"""A transformers model that computes all tokens of a step in one row over the paged cache, as a `Transformer` does.

Its body and its head run apart, because logits are wanted of few rows: `Given` stands for the body while the head
computes, whatever its model does around that.

Shapes: T tokens in the step, D model width, R rows whose logits are wanted, V vocabulary, Vl this rank's part of it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import PreTrainedModel

from server.arch.footprint import LEAST_PREFILL_TOKENS, LOGIT_BYTES, LOGIT_ROWS, STEP_COPIES, STREAM_COPIES
from server.backends.protocol import LinearFormat, TokenAdapters
from server.fallback.asked import LayerAttention
from server.fallback.attention import Pass
from server.fallback.linear import FormatLinear
from server.layers.embedding import vocab_share
from server.quantisation.kv import KvFormat
from server.ranks.collectives import Shard
from server.stepping.batch import Carried, Forward
from server.stepping.cache import Kept, KvOnDevice, KVShape


class Given(nn.Module):
    """A body that has computed already. output: the class of what it gives."""

    def __init__(self, output: Callable[..., Any]):
        super().__init__()
        self._output = output

    def forward(self, *_: Any, inputs_embeds: Tensor, **__: Any) -> Any:
        """inputs_embeds [1, R, D]: the hidden states."""
        return self._output(last_hidden_state=inputs_embeds)


class DividedHead(nn.Module):
    """This rank's rows [Vl, D] of the output embeddings."""

    def __init__(self, format: LinearFormat, bias: Tensor | None):
        super().__init__()
        self.format, self.bias = format, bias

    def forward(self, x: Tensor) -> Tensor:
        """x [1, R, D] → [1, R, Vl], as exact as the format knows them."""
        return self.format.finest(x[0].contiguous(), self.bias).unsqueeze(0)


@dataclass(frozen=True)
class BatchedModel:
    """See `server.stepping.engine.Model`."""

    body: nn.Module
    causal: PreTrainedModel  # with `Given` for its body and `DividedHead` for its head
    layers: Sequence[LayerAttention]
    step: Pass
    shard: Shard
    vocab_size: int
    max_positions: int
    cache: KvFormat
    kv_placement: KvOnDevice
    warning: str
    decoder_start: None = None
    shares_prefixes: bool = True
    takes_drafts: bool = True
    has_states: bool = False

    @property
    def vocab_range(self) -> tuple[int, int]:
        """See `Transformer`."""
        (start, stop), padding = vocab_share(self.shard, self.vocab_size)
        return start, stop - start + padding

    @property
    def nbytes(self) -> int:
        """Memory of this rank's weights."""
        modules = [*self.body.modules(), *self.causal.modules()]
        formats = sum(m.format.nbytes for m in modules if isinstance(m, FormatLinear | DividedHead))
        parameters = {id(p): p.nbytes for m in modules for p in m.parameters(recurse=False)}
        return formats + sum(parameters.values())

    def kv_shape(self, dtype: torch.dtype) -> KVShape:
        """What one token takes in this rank's cache."""
        sizes = tuple((layer.num_kv_heads, layer.head_dim) for layer in self.layers)
        return KVShape(len(sizes), *sizes[0], dtype, format=self.cache, sizes=sizes if len(set(sizes)) > 1 else ())

    def least_step_bytes(self, prefill_tokens: int, dtype: torch.dtype) -> int:
        """About what the smallest step takes that `prefill_tokens` may become."""
        widths = [m.width for m in self.body.modules() if isinstance(m, FormatLinear)]
        tokens = min(prefill_tokens, LEAST_PREFILL_TOKENS)
        streams = (STREAM_COPIES + STEP_COPIES) * max(widths, default=0) * dtype.itemsize
        return tokens * streams + LOGIT_BYTES * LOGIT_ROWS * self.vocab_size

    def run(self, forward: Forward, kv_caches: Sequence[Kept]) -> Carried:
        """See `Transformer`."""
        self.step.meta, self.step.kv_caches = forward.meta, kv_caches
        return Carried(hidden_states(self.body, forward.token_ids, forward.meta.positions))

    def logits(self, hidden: Tensor, adapters: TokenAdapters | None = None) -> Tensor:
        """hidden [R, D] → [R, Vl], minus infinity behind the vocabulary's end."""
        logits: Tensor = self.causal(inputs_embeds=hidden.unsqueeze(0), use_cache=False).logits[0]
        (start, stop), padding = vocab_share(self.shard, self.vocab_size)
        return F.pad(logits[:, : stop - start], (0, padding), value=float("-inf")) if padding else logits


def hidden_states(body: nn.Module, token_ids: Tensor, positions: Tensor) -> Tensor:
    """What a body makes of tokens [T] at positions [T] behind its last layer: [T, D]."""
    hidden: Tensor = output_of(body, token_ids, positions).last_hidden_state[0]
    return hidden


def output_of(body: nn.Module, token_ids: Tensor, positions: Tensor) -> Any:
    """All that it gives, in a class of transformers."""
    return body(input_ids=token_ids.unsqueeze(0), position_ids=positions.unsqueeze(0), use_cache=False)
