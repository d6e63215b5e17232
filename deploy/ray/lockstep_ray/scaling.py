"""How many replicas a model should have: from what waits on them and how full their KV caches are.

Serve collects the numbers (`record_autoscaling_stats` of each replica), asks here, and keeps to the delays and bounds
that its own configuration has.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

QUEUE, KV = "lockstep_waiting", "lockstep_kv_share"


def wanted(loads: Mapping[str, Mapping[Any, float]], num_replicas: int, queued: float, queue: float, kv: float) -> int:
    """The number of replicas for what these have to do.

    loads: by metric and replica; queued: requests that no replica has; queue and kv: at which one replica is full.
    """
    waiting, shares = loads.get(QUEUE, {}), loads.get(KV, {})
    replicas = {*waiting, *shares}
    if not replicas:  # none has reported yet
        return max(num_replicas, math.ceil(queued / queue))
    fullest = [max(waiting.get(one, 0.0) / queue, shares.get(one, 0.0) / kv) for one in replicas]
    return math.ceil(sum(fullest) + queued / queue)


class QueueAndCache:
    """Serve's interface of policies. queue, kv: at which a replica counts as full."""

    def __init__(self, queue: float = 4, kv: float = 0.8) -> None:
        self._queue = queue
        self._kv = kv

    def __call__(self, context: Any) -> tuple[int, dict[str, Any]]:
        """Serve's `AutoscalingContext` -> how many replicas, and the state for the next time: none."""
        loads = context.aggregated_metrics or {}
        queued = context.total_queued_requests or 0.0
        return wanted(loads, context.current_num_replicas, queued, self._queue, self._kv), {}
