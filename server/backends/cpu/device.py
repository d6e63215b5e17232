"""A CPU as a device: its memory is the host's, and work is done when a call returns; and how many threads compute."""

from __future__ import annotations

import math
import mmap
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.profiler import ProfilerActivity

from host.cgroups import available_bytes, cpu_quota
from host.cpu_kinds import good_dtypes
from host.topology import allowed_cpus, physical_cores
from server.backends.device import HostCopies, Values, bytes_of_slots, map_pages

# Memory kept back, because the estimate of what is free cannot see the other programs' next moves.
HEADROOM = 0.2
SMALL_MODEL_BYTES = 64 * 2**20


class CpuDevice:
    """See `device.Device`."""

    torch_device = torch.device("cpu")
    name = "cpu"
    kind = "this CPU"
    measures_memory = False

    def activate(self) -> None:
        """All threads have it."""

    def good_dtypes(self, cpu_kernels: str) -> set[torch.dtype]:
        return {getattr(torch, name) for name in good_dtypes(cpu_kernels)}

    def upload(self, values: Values, dtype: torch.dtype = torch.int64) -> Tensor:
        return torch.tensor(values, dtype=dtype)

    def upload_tensor(self, tensor: Tensor) -> Tensor:
        return tensor

    def stage(self, tensor: Tensor) -> Tensor:
        return tensor

    def bring(self, staged: Tensor) -> Tensor:
        return staged

    def download(self, tensor: Tensor) -> Tensor:
        return tensor.clone()  # the next step may write its results to the same place

    def event(self) -> None:
        return None

    def empty_kv(self, size: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """Zeros that take memory only where they are written. To write 17 GB of them at once took up to 18 seconds."""
        memory = mmap.mmap(-1, math.prod(size) * dtype.itemsize, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        return torch.frombuffer(memory, dtype=dtype).view(size)

    def slot(self, num_bytes: int) -> Tensor:
        return map_pages(num_bytes)

    def link(self) -> None:
        return None

    def host_queue(self) -> None:
        return None

    def host_copies(self, parts: Sequence[Tensor], slots: int) -> HostCopies:
        """Memory is taken where a slot is written, as with the cache."""
        memory = self.empty_kv((bytes_of_slots(parts, slots),), torch.uint8)
        return MemoryCopies(parts, memory, slots)

    def free_bytes(self, *, fraction: float, world_size: int) -> int:
        return int(available_bytes() * (1 - HEADROOM)) // world_size

    def left_bytes(self, *, fraction: float, world_size: int, kv_bytes: int) -> int:
        return max(0, available_bytes() // world_size - kv_bytes)  # the cache's pages are still to be touched

    def peak_bytes(self, step: Callable[[], object]) -> int:
        step()
        return 0

    def clocks(self, action: Callable[[], object]) -> str:
        action()
        return ""

    def taken_bytes(self, action: Callable[[], object]) -> int:
        action()
        return 0

    def profiled(self) -> tuple[list[Any], str]:
        return [ProfilerActivity.CPU], "self_cpu_time_total"


class MemoryCopies(HostCopies):
    """Copies from memory to memory, complete when a call returns."""

    def save(self, blocks: Sequence[int], slots: Sequence[int]) -> None:
        for block, slot in zip(blocks, slots, strict=True):
            for part, columns in self.parts:
                self.slots[slot, columns].copy_(part[block])

    def restore(self, slots: Sequence[int], blocks: Sequence[int]) -> None:
        for slot, block in zip(slots, blocks, strict=True):
            for part, columns in self.parts:
                part[block].copy_(self.slots[slot, columns])

    def close(self) -> None:
        """The device knows nothing of it."""


def plan_threads(wanted: int | None, *, is_host: bool, ranks: int, sharing: int, weight_bytes: int) -> tuple[int, str]:
    """Threads for operators on the host, and why so many: this rank's share of the cores, mostly.

    is_host: whether the host computes the model; ranks: those on this machine; sharing: of these, the ones
    that have the CPUs that this one may run on.

    Two threads of one core share its arithmetic, which one keeps busy. The router has no core of its own: it works
    while a step's last tokens are on their way, and threads that find no work sleep after a moment (threads.h). Threads
    wait for each other after every operator, and for a small model an operator is shorter than that wait: on two busy
    cores a second thread made a step of the embedded model 5 to 30 times as long, on idle ones a tenth shorter.
    """
    if wanted is not None:
        return wanted, "asked for"
    if not is_host:
        return 1, "the GPU computes"
    if weight_bytes < SMALL_MODEL_BYTES:
        return 1, f"the model is too small for more of {physical_cores(allowed_cpus())} cores"
    cores, quota = physical_cores(allowed_cpus()), cpu_quota()
    if quota is not None and quota / ranks < cores / sharing:
        # Threads beyond the quota use it up early, and then all of them stand still for the rest of each period.
        return max(1, math.floor(quota) // ranks), f"a cgroup quota of {quota:g} cores for all shards"
    if sharing == 1:
        return cores, f"{cores} cores; they sleep when idle"
    return max(1, cores // sharing), f"{cores} cores for {sharing} shards; they sleep when idle"
