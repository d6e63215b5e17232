"""How many CPU threads compute in a shard."""

from __future__ import annotations

import math
import os

from host.cgroups import cpu_quota

SMALL_MODEL_BYTES = 64 * 2**20


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
