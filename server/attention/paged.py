"""Attention by Triton kernels that read the cache's blocks in place: the backend for NVIDIA GPUs.

Importing this module imports Triton, which a CPU server neither has nor needs: `choose` imports it for a GPU only.
The kernels, their papers and what has not been run yet are described in `kernels/`.

Shapes: T tokens, S sequences, N local heads, K local kv heads, H head dim, B blocks, P tokens per block.
"""

from __future__ import annotations

import torch
from torch import Tensor

from server.attention.interface import Scores, StepMeta, split_heads
from server.attention.kernels.common import ScoreTerms, score_terms
from server.attention.kernels.decode import decode
from server.attention.kernels.prefill import prefill
from server.attention.kernels.rotate import rotate_and_store
from server.attention.kernels.store import store
from server.layers.position import Rotation

# Compute capabilities with matrix units for bfloat16 and the shared memory that the largest tiles take, 163 KiB: A100,
# Orin, H100 and H200, B200, B300. Consumer GPUs have 99 KiB.
CAPABILITIES = {(8, 0), (8, 7), (9, 0), (10, 0), (10, 3)}


def can_run_on(device: torch.device) -> bool:
    """Whether the kernels' tiles fit this GPU."""
    return torch.cuda.get_device_capability(device) in CAPABILITIES


class PagedAttention:
    """Softmax attention over the paged cache, with biases, windows, capped scores and shared kv heads.

    processors: multiprocessors to fill with decodes; None for as many as the tensors' GPU has.
    """

    name = "paged"

    def __init__(self, scores: Scores, processors: int | None = None):
        self._scores = scores
        self._processors = processors
        self._terms: tuple[torch.device, ScoreTerms] | None = None  # made when the first tensors tell the device

    def write(self, kv: Tensor, k: Tensor, v: Tensor, meta: StepMeta) -> None:
        store(kv, k, v, meta.slots)

    def place(self, heads: Tensor, kv: Tensor, rotation: Rotation | None, meta: StepMeta) -> Tensor:
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
