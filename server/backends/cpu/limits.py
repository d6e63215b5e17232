"""How many CPU threads compute in a shard, and what control groups leave it of the machine's cores and memory.

A container and a unit of systemd are control groups, of version 1 or 2. A process finds its group's path in
`/proc/self/cgroup`; a limit may also be set on any group around it. Inside a container that path mostly does not exist,
and what is mounted at `/sys/fs/cgroup` is the container's own group.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterator
from pathlib import Path

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
