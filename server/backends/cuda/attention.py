"""Attention by Triton kernels that read the cache's blocks in place.

Importing this module imports Triton, which a CPU server neither has nor needs. The kernels, their papers and what has
not been run yet are described in `kernels/`.

Shapes: T tokens, S sequences, N local heads, K local kv heads, H head dim, B blocks, P tokens per block.
"""

from __future__ import annotations

import torch
from torch import Tensor

from server.backends.cuda.kernels.common import ScoreTerms, score_terms
from server.backends.cuda.kernels.decode import decode
from server.backends.cuda.kernels.prefill import prefill
from server.backends.cuda.kernels.rotate import rotate_and_store
from server.backends.cuda.kernels.splits import Processors, processors_of
from server.backends.cuda.kernels.store import store
from server.backends.protocol import Rotation, Scores, StepMeta, split_heads


class PagedAttention:
    """Softmax attention over the paged cache, with biases, windows, capped scores and shared kv heads.

    processors: multiprocessors to fill with decodes; None for as many as the tensors' GPU has.
    """

    def __init__(self, scores: Scores, processors: int | None = None):
        self._scores = scores
        self._wanted_processors = processors
        self._made: tuple[torch.device, ScoreTerms, Processors] | None = None  # when the first tensors tell the device

    def write(self, kv: Tensor, k: Tensor, v: Tensor, meta: StepMeta) -> None:
        store(kv, k, v, meta.slots)

    def attend(self, q: Tensor, kv: Tensor, meta: StepMeta, window: int) -> Tensor:
        out = q.new_empty(q.shape)
        terms, processors = self._on(q.device)
        if meta.num_decodes:
            decode(q, kv, out, meta, terms, processors, window=window)
        if meta.longest:
            prefill(q, kv, out, meta, terms, window=window)
        return out

    def self_attend(self, heads: Tensor, kv: Tensor, rotation: Rotation | None, meta: StepMeta, window: int) -> Tensor:
        q, k, v = split_heads(heads, kv.shape[2])
        out = q.new_empty(q.shape)
        terms, processors = self._on(q.device)
        if meta.num_decodes:
            decode(heads, kv, out, meta, terms, processors, window=window, rotation=rotation)
        if meta.longest:
            if rotation is None:
                store(kv, k, v, meta.slots, first=meta.num_decodes)
            else:
                q = rotate_and_store(q, k, v, rotation, kv, meta.slots, first=meta.num_decodes)
            prefill(q, kv, out, meta, terms, window=window)
        return out

    def _on(self, device: torch.device) -> tuple[ScoreTerms, Processors]:
        """What kernels on `device` need beside a step: made before anything is captured, kept for every replay."""
        if self._made is None or self._made[0] != device:
            self._made = device, score_terms(self._scores, device), processors_of(device, self._wanted_processors)
        return self._made[1:]
