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
from server.backends.cuda.kernels.store import store
from server.backends.protocol import Rotation, Scores, StepMeta, split_heads


class PagedAttention:
    """Softmax attention over the paged cache, with biases, windows, capped scores and shared kv heads.

    processors: multiprocessors to fill with decodes; None for as many as the tensors' GPU has.
    """

    def __init__(self, scores: Scores, processors: int | None = None):
        self._scores = scores
        self._processors = processors
        self._terms: tuple[torch.device, ScoreTerms] | None = None  # made when the first tensors tell the device

    def write(self, kv: Tensor, k: Tensor, v: Tensor, meta: StepMeta) -> None:
        store(kv, k, v, meta.slots)

    def rotate_and_write(self, heads: Tensor, kv: Tensor, rotation: Rotation | None, meta: StepMeta) -> Tensor:
        q, k, v = split_heads(heads, kv.shape[2])
        if rotation is not None:
            return rotate_and_store(q, k, v, rotation, kv, meta.slots)
        store(kv, k, v, meta.slots)
        return q

    def attend(self, q: Tensor, kv: Tensor, meta: StepMeta, window: int) -> Tensor:
        out = q.new_empty(q.shape)
        terms = self._terms_on(q.device)
        if meta.num_decodes:
            processors = self._processors or torch.cuda.get_device_properties(q.device).multi_processor_count
            decode(q, kv, out, meta, terms, window=window, processors=processors)
        if meta.longest:
            prefill(q, kv, out, meta, terms, window=window)
        return out

    def _terms_on(self, device: torch.device) -> ScoreTerms:
        if self._terms is None or self._terms[0] != device:
            self._terms = device, score_terms(self._scores, device)
        return self._terms[1]
