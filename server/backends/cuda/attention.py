"""Attention by Triton kernels that read the cache's blocks in place.

Importing this module imports Triton, which a CPU server neither has nor needs. The kernels, their papers and what has
not been run yet are described in `kernels/`.

Shapes: T tokens, S sequences, N local heads, K local kv heads, H head dim, B blocks, P tokens per block, W
elements that a row takes.
"""

from __future__ import annotations

import torch
from torch import Tensor

from server.backends.cuda.kernels.cache import store
from server.backends.cuda.kernels.common import ScoreTerms, score_terms
from server.backends.cuda.kernels.decode import decode
from server.backends.cuda.kernels.latent import attend_rows, store_rows
from server.backends.cuda.kernels.prefill import prefill
from server.backends.cuda.kernels.rotate import rotate_and_store, rotated
from server.backends.cuda.kernels.splits import Processors, processors_of
from server.backends.protocol import Rotation, Scores, StepMeta, split_heads
from server.quantisation.kv import AS_COMPUTED, KvFormat


class PagedAttention:
    """Softmax attention over the paged cache, with biases, windows, capped scores and shared kv heads.

    processors: multiprocessors to fill with decodes; program_kib: shared memory that a program can have; None for what
    the tensors' GPU has.
    """

    def __init__(
        self,
        scores: Scores,
        processors: int | None = None,
        program_kib: int | None = None,
        *,
        cache: KvFormat = AS_COMPUTED,
    ):
        self._scores = scores
        self._cache = cache
        self._wanted = processors, program_kib
        self._made: tuple[torch.device, ScoreTerms, Processors] | None = None  # when the first tensors tell the device

    def write(self, kv: Tensor, k: Tensor, v: Tensor, meta: StepMeta) -> None:
        store(kv, k, v, meta.slots, format=self._cache)

    def attend(self, q: Tensor, kv: Tensor, meta: StepMeta, window: int) -> Tensor:
        return self.attend_rotated(q, kv, None, meta, window)

    def attend_rotated(self, q: Tensor, kv: Tensor, rotation: Rotation | None, meta: StepMeta, window: int) -> Tensor:
        terms, processors = self._on(q.device)
        if self._scores.rank:
            assert rotation is None, "keys that are values are rotated where they are written"
            return attend_rows(q, kv, meta, self._scores, processors, self._cache)
        out = q.new_empty(q.shape)
        if meta.num_decodes:
            decode(q, kv, out, meta, terms, processors, window=window, rotation=rotation, format=self._cache)
        if meta.longest:
            q = q if rotation is None else rotated(q, rotation, first=meta.num_decodes)
            prefill(q, kv, out, meta, terms, processors, window=window, format=self._cache)
        return out

    def self_attend(self, heads: Tensor, kv: Tensor, rotation: Rotation | None, meta: StepMeta, window: int) -> Tensor:
        if self._scores.rank:
            store_rows(heads, kv, rotation, meta.slots, self._scores.rank, self._cache)
            return self.attend(heads[:, :-1], kv, meta, window)
        q, k, v = split_heads(heads, kv.shape[2])
        out = q.new_empty(q.shape)
        terms, processors = self._on(q.device)
        if meta.num_decodes:
            decode(heads, kv, out, meta, terms, processors, window=window, rotation=rotation, format=self._cache)
        if meta.longest:
            first = meta.num_decodes
            if rotation is not None and self._cache == AS_COMPUTED:
                q = rotate_and_store(q, k, v, rotation, kv, meta.slots, first=first)
            else:
                if rotation is not None:
                    turned = rotated(heads[:, : -kv.shape[2]], rotation, first=first)
                    q, k = turned[:, : -kv.shape[2]], turned[:, -kv.shape[2] :]
                store(kv, k, v, meta.slots, first=first, format=self._cache)
            prefill(q, kv, out, meta, terms, processors, window=window, format=self._cache)
        return out

    def _on(self, device: torch.device) -> tuple[ScoreTerms, Processors]:
        """What kernels on `device` need beside a step: made before anything is captured, kept for every replay."""
        if self._made is None or self._made[0] != device:
            self._made = device, score_terms(self._scores, device), processors_of(device, *self._wanted)
        return self._made[1:]
