"""A CPU as a device: its memory is the host's, and work is done when a call returns.

Control groups limit its cores and memory; a container and a unit of systemd are such groups, of version 1 or 2. A
process finds its group's path in `/proc/self/cgroup`; a limit may also be set on any group around it. Inside a
container that path mostly does not exist, and what is mounted at `/sys/fs/cgroup` is the container's own group.
"""

from __future__ import annotations

import math
import mmap
import os
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.profiler import ProfilerActivity

from server.backends.device import HostCopies, bytes_of_slots, map_pages

# Memory kept back, because the estimate of what is free cannot see the other programs' next moves.
HEADROOM = 0.2


class CpuDevice:
    """See `device.Device`."""

    torch_device = torch.device("cpu")
    name = "cpu"
    kind = "this CPU"
    measures_memory = False

    def activate(self) -> None:
        """All threads have it."""

    def good_dtypes(self) -> set[torch.dtype]:
        flags = Path("/proc/cpuinfo").read_text() if Path("/proc/cpuinfo").is_file() else ""
        good = {torch.float32}
        if "avx512_bf16" in flags or "amx_bf16" in flags or " bf16" in flags:
            good.add(torch.bfloat16)
        if "avx512_fp16" in flags or "amx_fp16" in flags:
            good.add(torch.float16)
        return good

    def upload(self, values: Sequence[Any], dtype: torch.dtype = torch.int64) -> Tensor:
        return torch.tensor(values, dtype=dtype)

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
        return int(_available_bytes() * (1 - HEADROOM)) // world_size

    def left_bytes(self, *, fraction: float, world_size: int, kv_bytes: int) -> int:
        return max(0, _available_bytes() // world_size - kv_bytes)  # the cache's pages are still to be touched

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


def _available_bytes() -> int:
    """What the kernel says is available, or less if a cgroup (a container) allows less."""
    meminfo = dict(line.split(":", 1) for line in Path("/proc/meminfo").read_text().splitlines())
    available = int(meminfo["MemAvailable"].split()[0]) * 1024
    allowed = memory_left()
    return available if allowed is None else min(available, allowed)


SMALL_MODEL_BYTES = 64 * 2**20
MOUNTED = Path("/sys/fs/cgroup")
MEMBERSHIP = Path("/proc/self/cgroup")


def plan_threads(wanted: int | None, *, is_host: bool, world_size: int, weight_bytes: int) -> tuple[int, str]:
    """Threads for operators on the host, and why so many: this rank's share of the cores, mostly.

    is_host: whether the host computes the model.

    The router has no core of its own: it works while a step's last tokens are on their way, and threads that find no
    work sleep after a moment (threads.h). Threads wait for each other after every operator, and for a small model an
    operator is shorter than that wait: on two busy cores a second thread made a step of the embedded model 5 to 30
    times as long, on idle ones a tenth shorter.
    """
    if wanted is not None:
        return wanted, "asked for"
    if not is_host:
        return 1, "the GPU computes"
    if weight_bytes < SMALL_MODEL_BYTES:
        return 1, "the model is too small to share"
    cores, quota = len(os.sched_getaffinity(0)), cpu_quota()
    if quota is not None and quota < cores:
        # Threads beyond the quota use it up early, and then all of them stand still for the rest of each period.
        return max(1, math.floor(quota) // world_size), f"a cgroup quota of {quota:g} cores for all shards"
    return max(1, cores // world_size), f"{cores} cores for all shards; they sleep when idle"


def cpu_quota(mounted: Path = MOUNTED, membership: Path = MEMBERSHIP) -> float | None:
    """The cores' worth of time that may be used; None: no limit."""
    quotas = []
    for group in _groups(mounted, membership, ""):
        quota, _, period = _read(group / "cpu.max").partition(" ")
        if quota.isdecimal() and period.isdecimal():
            quotas.append(int(quota) / int(period))
    for group in _groups(mounted, membership, "cpu"):
        quota, period = _read(group / "cpu.cfs_quota_us"), _read(group / "cpu.cfs_period_us")
        if quota.isdecimal() and period.isdecimal():  # -1: no limit
            quotas.append(int(quota) / int(period))
    return min(quotas, default=None)


def memory_left(mounted: Path = MOUNTED, membership: Path = MEMBERSHIP) -> int | None:
    """Bytes that may still be used; None: no limit. Cached parts of files that were not read of late make room."""
    left = []
    names = {
        "": ("memory.max", "memory.current", "inactive_file"),
        "memory": ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
    }
    for controller, (limit_name, usage_name, cached_name) in names.items():
        for group in _groups(mounted, membership, controller):
            limit, usage = _read(group / limit_name), _read(group / usage_name)
            if limit.isdecimal() and usage.isdecimal():
                cached = dict(line.split(" ", 1) for line in _read(group / "memory.stat").splitlines())
                left.append(max(0, int(limit) - int(usage) + int(cached.get(cached_name, 0))))
    return min(left, default=None)


def _groups(mounted: Path, membership: Path, controller: str) -> Iterator[Path]:
    """This process's group and those around it, of one controller of version 1 or (empty) of version 2."""
    root = mounted / controller
    lines = (line.split(":", 2) for line in _read(membership).splitlines())
    own = next((path for _, names, path in lines if controller in names.split(",")), "/")
    group = root / own.lstrip("/")
    while group != root and root in group.parents:
        yield group
        group = group.parent
    yield root


def _read(path: Path) -> str:
    """A file's text, empty where there is none that can be read."""
    try:
        return path.read_text().strip()
    except OSError:
        return ""
