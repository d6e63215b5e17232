"""Watches the client itself: how late its event loop is, and how much of its core it needs.

A client that is late measures itself: tokens wait in its sockets, and requests leave late. A timer that is due every
10 ms tells how long anything waits that is due.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from types import TracebackType
from typing import Any

from benchmark.outcomes import LATE_MS, percentiles

PERIOD_S = 0.01
BUSY_SHARE = 0.9  # of one core: the rest is noise of the measurement


class LagMeter:
    """Notes delays of the loop while its block runs. delays_ms: one for each tick."""

    def __init__(self) -> None:
        self.delays_ms: list[float] = []

    async def __aenter__(self) -> LagMeter:
        self._began, self._cpu_began = time.perf_counter(), time.process_time()
        self._task = asyncio.create_task(self._tick())
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._task.cancel()
        self._seconds = time.perf_counter() - self._began
        self._cpu_s = time.process_time() - self._cpu_began

    async def _tick(self) -> None:
        while True:
            due = time.perf_counter() + PERIOD_S
            await asyncio.sleep(PERIOD_S)
            self.delays_ms.append(1000 * max(0.0, time.perf_counter() - due))

    def report(self, sent_late_ms: float) -> dict[str, Any]:
        """What a row says of its client. sent_late_ms: how late 1 % of its requests were, or later."""
        return client_report(self.delays_ms, self._cpu_s / max(self._seconds, 1e-9), sent_late_ms)


def client_report(delays_ms: Sequence[float], cpu_share: float, sent_late_ms: float) -> dict[str, Any]:
    """The delays' percentiles, the share of a core, and why the client limits the run; empty where it does not."""
    delay = percentiles(delays_ms)
    p99 = delay["p99"] if delay else 0.0
    reasons = [
        (cpu_share > BUSY_SHARE, f"it computed {100 * cpu_share:.0f} % of the time"),
        (p99 > LATE_MS, f"1 % of what it had to do waited {p99:.0f} ms or more"),
        (sent_late_ms > LATE_MS, f"it sent 1 % of its requests {sent_late_ms:.0f} ms late or later"),
    ]
    limits = [sentence for is_so, sentence in reasons if is_so]
    return {"loop_delay_ms": delay, "cpu_share": cpu_share, "limits": limits, "is_limit": bool(limits)}
