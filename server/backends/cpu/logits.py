"""What sampling asks of the logits, by compiled kernels: one pass over them instead of five.

Shapes: R rows, V vocabulary, n best tokens of each row.
"""

from __future__ import annotations

import torch
from torch import Tensor

from server.backends.cpu.kernels import Kernels
from server.backends.protocol import LogitSummary
from server.backends.reference.logits import StockLogits


class KernelLogits(StockLogits):
    """`StockLogits`, compiled, but for the warpers' thresholds. Of equal logits the smaller id is the more likely."""

    def __init__(self, kernels: Kernels):
        self._kernels = kernels

    def summarise(self, logits: Tensor, n: int) -> LogitSummary:
        """The n best tokens (at least 1) of logits [R, V], which are not changed."""
        logits = logits.float()
        rows, vocab_size = logits.shape
        ids = torch.empty(rows, n, dtype=torch.int64)
        best = torch.empty(rows, n)
        totals = torch.empty(rows, 1)
        self._kernels.summarise(
            logits.data_ptr(),
            logits.stride(0),
            rows,
            vocab_size,
            n,
            best.data_ptr(),
            ids.data_ptr(),
            totals.data_ptr(),
            torch.get_num_threads(),
        )
        return LogitSummary(ids, best, totals)

    def race(self, logits: Tensor, seed_low: Tensor, seed_high: Tensor, positions: Tensor, first_id: int = 0) -> Tensor:
        """Draw one token [R] of each row of logits [R, V]. Noise of removed tokens (-inf) is not computed."""
        logits = logits.float()
        rows, vocab_size = logits.shape
        ids = torch.empty(rows, dtype=torch.int64)
        self._kernels.race(
            logits.data_ptr(),
            logits.stride(0),
            rows,
            vocab_size,
            first_id,
            seed_low.data_ptr(),
            seed_high.data_ptr(),
            positions.data_ptr(),
            ids.data_ptr(),
            torch.get_num_threads(),
        )
        return ids
