"""Memory of weights: of the host, in pages of 2 MiB; and under tensors that may be given other memory."""

from __future__ import annotations

import mmap

import torch
from torch import Tensor

PAGE_BYTES = 2**21


def map_pages(num_bytes: int) -> Tensor:
    """Fresh zeroed memory [N] uint8 of whole large pages, at least `num_bytes`, that starts with one."""
    rounded = -(-num_bytes // PAGE_BYTES) * PAGE_BYTES
    memory = mmap.mmap(-1, rounded + PAGE_BYTES, flags=mmap.MAP_PRIVATE)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        memory.madvise(mmap.MADV_HUGEPAGE)
    tensor = torch.frombuffer(memory, dtype=torch.uint8)
    first = -tensor.data_ptr() % PAGE_BYTES
    return alone(tensor[first : first + rounded])


def alone(tensor: Tensor) -> Tensor:
    """The same memory under a tensor that is no view: a view keeps its base alive, wherever it lies later."""
    return tensor if tensor._base is None else tensor.detach()
