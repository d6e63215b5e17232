"""A GPU as a device: it works behind the host's back, in the order in which it was told to.

NVIDIA's; AMD's too, which torch built for ROCm knows by the same names. What computes on each is another question,
which `choose` of this package answers.

A copy from ordinary memory makes the host wait until all earlier work of a GPU is done, and so undoes what it gained by
launching a step while another one is running; from pinned memory it takes its place among that work.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.profiler import ProfilerActivity

# What torch's allocator cannot use of its memory, between pieces that are taken, on top of a step's peak.
FRAGMENTATION = 0.1
# Memory that stays free beside weights, KV cache, graphs and the largest step: kernels that are loaded at their first
# use, workspaces of libraries and NCCL's buffers take it from the driver, where torch's allocator cannot make room.
HEADROOM_BYTES = 2**30


class CudaDevice:
    """See `protocol.Device`. Not yet run on a GPU."""

    kind = "this GPU"
    measures_memory = True

    def __init__(self, index: int):
        self.torch_device = torch.device("cuda", index)
        self.name = torch.cuda.get_device_name(self.torch_device)

    def activate(self) -> None:
        torch.cuda.set_device(self.torch_device)  # which CUDA keeps for each thread; others launch on the first GPU

    def good_dtypes(self) -> set[torch.dtype]:
        good = {torch.float32, torch.float16}
        if torch.cuda.is_bf16_supported(including_emulation=False):
            good.add(torch.bfloat16)
        return good

    def upload(self, values: Sequence[Any], dtype: torch.dtype = torch.int64) -> Tensor:
        return torch.tensor(values, dtype=dtype, pin_memory=True).to(self.torch_device, non_blocking=True)

    def download(self, tensor: Tensor) -> Tensor:
        host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
        return host.copy_(tensor, non_blocking=True)

    def event(self) -> torch.cuda.Event:
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def empty_kv(self, size: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        return torch.zeros(size, dtype=dtype, device=self.torch_device)

    def free_bytes(self, *, fraction: float, world_size: int) -> int:
        return self._unused_bytes(fraction) - HEADROOM_BYTES

    def left_bytes(self, *, fraction: float, world_size: int, kv_bytes: int) -> int:
        return max(0, self._unused_bytes(fraction))

    def _unused_bytes(self, fraction: float) -> int:
        torch.cuda.empty_cache()
        free, total = torch.cuda.mem_get_info(self.torch_device)
        return int(free - (1 - fraction) * total)

    def peak_bytes(self, step: Callable[[], object]) -> int:
        torch.cuda.reset_peak_memory_stats(self.torch_device)
        before = torch.cuda.memory_allocated(self.torch_device)
        step()
        torch.cuda.synchronize(self.torch_device)
        return int((torch.cuda.max_memory_allocated(self.torch_device) - before) * (1 + FRAGMENTATION))

    def taken_bytes(self, action: Callable[[], object]) -> int:
        torch.cuda.empty_cache()
        before, _ = torch.cuda.mem_get_info(self.torch_device)
        action()
        torch.cuda.synchronize(self.torch_device)
        torch.cuda.empty_cache()
        return max(0, before - torch.cuda.mem_get_info(self.torch_device)[0])

    def profiled(self) -> tuple[list[Any], str]:
        return [ProfilerActivity.CPU, ProfilerActivity.CUDA], "self_device_time_total"
