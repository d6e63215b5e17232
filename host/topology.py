"""What the machine's CPUs share: threads of one core its arithmetic, cores of one node the memory that is near.

A machine with several sockets has a NUMA node for each, or several. Memory is taken from the node of the thread that
first writes to it, so a process that stays on the CPUs of one node has its weights there. Left out: what a processor's
cores differ in; work is taken when a core is ready for more (`server/backends/cpu/threads.h`).
"""

from __future__ import annotations

import os
from collections.abc import Collection
from pathlib import Path

SYSTEM = Path("/sys/devices/system")


def allowed_cpus() -> set[int]:
    """The CPUs that this process may run on."""
    return os.sched_getaffinity(0)


def physical_cores(cpus: Collection[int], system: Path = SYSTEM) -> int:
    """How many cores these CPUs are threads of; each is one where the system does not tell."""
    return len({_read_list(system / f"cpu/cpu{cpu}/topology/thread_siblings_list") or (cpu,) for cpu in cpus})


def nodes(cpus: Collection[int], system: Path = SYSTEM) -> list[set[int]]:
    """Those of these CPUs that each NUMA node has, without nodes that have none; all where the system does not tell."""
    found = [
        set(_read_list(path / "cpulist")) & set(cpus) for path in sorted(system.glob("node/node[0-9]*"), key=_number)
    ]
    return [node for node in found if node] or [set(cpus)]


def share(rank: int, ranks: int, cpus: Collection[int], system: Path = SYSTEM) -> tuple[set[int], int]:
    """Of `ranks` processes on this machine, the CPUs of the one that is number `rank`, and how many have the same.

    Each has the CPUs of one node where every node gets equally many processes; otherwise all have all.
    """
    found = nodes(cpus, system)
    if ranks % len(found):
        return set(cpus), ranks
    sharing = ranks // len(found)
    return found[rank // sharing], sharing


def settle(rank: int, ranks: int) -> int:
    """Keep this process, one of `ranks` on this machine, on its share of the CPUs; returns how many have the same."""
    allowed = allowed_cpus()
    cpus, sharing = share(rank, ranks, allowed)
    if cpus != allowed:
        os.sched_setaffinity(0, cpus)
    return sharing


def _number(path: Path) -> int:
    return int(path.name.removeprefix("node"))


def _read_list(path: Path) -> tuple[int, ...]:
    """The numbers of a list like 0-3,8; none where there is no such file, or no such list in it."""
    try:
        ranges = [part.split("-") for part in path.read_text().strip().split(",") if part]
        return tuple(number for ends in ranges for number in range(int(ends[0]), int(ends[-1]) + 1))
    except (OSError, ValueError):
        return ()
