"""What control groups leave a process of the machine's cores and memory.

A container and a unit of systemd are control groups, of version 1 or 2. A process finds its group's path in
`/proc/self/cgroup`; a limit may also be set on any group around it. Inside a container that path mostly does not exist,
and what is mounted at `/sys/fs/cgroup` is the container's own group.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

MOUNTED = Path("/sys/fs/cgroup")
MEMBERSHIP = Path("/proc/self/cgroup")


def available_bytes() -> int:
    """What the kernel says is available, or less if a cgroup (a container) allows less."""
    meminfo = dict(line.split(":", 1) for line in Path("/proc/meminfo").read_text().splitlines())
    available = int(meminfo["MemAvailable"].split()[0]) * 1024
    allowed = memory_left()
    return available if allowed is None else min(available, allowed)


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
