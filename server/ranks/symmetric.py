"""Sums over the ranks of one host in one kernel, through memory that every rank's GPU can read.

A decode step sums some tens of kilobytes twice in each layer, and there NCCL spends its time on setting out, not on
bytes. In a one-shot all-reduce each rank writes its summand where the others read it, waits for theirs, and adds them
all up for itself, always in the order of the ranks: one kernel, captured as any other is, and the same bits on every
rank. The kernel is torch's (`symm_mem::one_shot_all_reduce_copy_out`); what is here is when it is used, and the memory
that it goes through. Why it is not a kernel of our own: docs/decisions/0012-the-one-shot-sum-is-torchs.md.

Left out: large tensors, whose bytes cost more this way than NCCL's, and several hosts. Not yet run on a GPU.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import torch
from torch import Tensor

# The largest tensor that is summed so: each rank reads it from every other one. 256 KiB are 32 rows of 4,096 in
# bfloat16; beyond that, ways that send less win.
MOST_BYTES = 256 * 2**10
# What the kernel adds up, and in how wide pieces it reads and writes.
DTYPES = (torch.bfloat16, torch.float32)
PIECE_BYTES = 16


class SymmetricMemory(Protocol):
    """Memory that every rank's GPU can read, and sums that go through it; all ranks do both in the same order."""

    def empty(self, elements: int, dtype: torch.dtype) -> Tensor:
        """A buffer on every rank. Raises RuntimeError where there is no such memory."""

    def sum(self, buffer: Tensor, tensor: Tensor) -> None:
        """Add up the ranks' tensors, in place, through a buffer of their shape."""


class SymmetricSum:
    """All-reduces through one buffer for each dtype, which a sum gives back when it ends.

    Buffers are made beforehand: to make one is a matter of all ranks and of the host, and impossible in a capture.
    """

    def __init__(self, memory: SymmetricMemory):
        """Raises RuntimeError where this rank has no such memory."""
        self._memory = memory
        self._buffers = {dtype: memory.empty(MOST_BYTES // dtype.itemsize, dtype) for dtype in DTYPES}

    def takes(self, tensor: Tensor) -> bool:
        """Whether a tensor is summed so: the same answer on every rank, for it rests on size and dtype alone."""
        return tensor.dtype in DTYPES and 0 < tensor.nbytes <= MOST_BYTES and tensor.nbytes % PIECE_BYTES == 0

    def __call__(self, tensor: Tensor) -> None:
        """The sum over the ranks, in place."""
        buffer = self._buffers[tensor.dtype][: tensor.numel()].view(tensor.shape)
        if tensor.is_contiguous() and tensor.storage_offset() * tensor.itemsize % PIECE_BYTES == 0:
            self._memory.sum(buffer, tensor)
            return
        whole = tensor.clone(memory_format=torch.contiguous_format)
        self._memory.sum(buffer, whole)
        tensor.copy_(whole)

    def problem(self, rank: int, world_size: int, device: torch.device) -> str | None:
        """Sum known numbers on all ranks: what is wrong with the results; None if nothing is."""
        wrong = []
        for dtype, buffer in self._buffers.items():  # all of them on every rank, whatever is wrong with the first
            tensor = torch.full((len(buffer),), 1.0 + rank, dtype=dtype, device=device)
            self(tensor)
            if not bool((tensor == world_size * (world_size + 1) / 2).all()):
                wrong.append(str(dtype))
        return f"sums of {' and '.join(wrong)} through it are wrong" if wrong else None


def join(
    memory: SymmetricMemory,
    problem: str | None,
    agree: Callable[[str | None], str | None],
    *,
    rank: int,
    world_size: int,
    device: torch.device,
) -> SymmetricSum | str:
    """Make and try the sums together with the other ranks, or say why none of them uses such memory.

    problem: what is known beforehand to keep this rank from it. agree: a problem of any rank, told to all of them; they
    agree before each stage, because a rank that is alone in one would wait in it for ever.
    """
    sums = None
    if (reason := agree(problem)) is None:
        try:
            sums = SymmetricSum(memory)
        except RuntimeError as error:
            problem = (str(error).strip().splitlines() or [type(error).__name__])[0]
        reason = agree(problem)
    if reason is None and sums is not None:
        reason = agree(sums.problem(rank, world_size, device))
    return sums if reason is None and sums is not None else str(reason)
