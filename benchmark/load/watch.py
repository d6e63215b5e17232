"""Watches the server while a row is measured: how many requests it has in its batch and in its queue, by `/metrics`.

Servers name these differently; those of Lockstep and TGI, vLLM and SGLang are known. Where a server has no such page,
or says it only with a key, there is nothing to see and nothing is said. Asked twice a second, so that asking costs the
server little of what it does.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Mapping
from contextlib import suppress
from types import TracebackType
from typing import Any

from benchmark.http_client import HttpClient

INTERVAL_S = 0.5
# What is counted, by the names that servers have for it.
NAMES: Mapping[str, tuple[str, ...]] = {
    "running": ("tgi_batch_current_size", "vllm:num_requests_running", "sglang:num_running_reqs"),
    "waiting": ("tgi_queue_size", "vllm:num_requests_waiting", "sglang:num_queue_reqs"),
}
KNOWN = {name: key for key, names in NAMES.items() for name in names}


def counts_of(page: str) -> dict[str, float] | None:
    """The two numbers on a page in Prometheus' text format, each a sum over its labels; None where one is none."""
    found: dict[str, float] = {}
    for line in page.splitlines():
        name = line.partition("{")[0].partition(" ")[0]
        if (key := KNOWN.get(name)) is not None:
            rest = line.rpartition("}")[2] if "{" in line else line.partition(" ")[2]
            with suppress(ValueError, IndexError):
                found[key] = found.get(key, 0.0) + float(rest.split()[0])
    is_whole = found.keys() == NAMES.keys() and all(map(math.isfinite, found.values()))
    return found if is_whole else None


class ServerWatch:
    """Notes the numbers while its block runs. timeline: two points a second, from the block's beginning on."""

    def __init__(self, client: HttpClient, interval_s: float = INTERVAL_S) -> None:
        self.timeline: list[dict[str, Any]] = []
        self._client = client
        self._interval_s = interval_s

    async def __aenter__(self) -> ServerWatch:
        self._began = time.perf_counter()
        self._task = asyncio.create_task(self._watch())
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._task.cancel()
        with suppress(asyncio.CancelledError):
            await self._task

    async def _watch(self) -> None:
        while True:
            try:
                counts = counts_of(await self._client.text("/metrics"))
            except (OSError, TimeoutError):  # an overloaded server may answer the next one
                await asyncio.sleep(self._interval_s)
                continue
            except UnicodeDecodeError:
                return
            if counts is None:
                return
            self.timeline.append({"at_s": round(time.perf_counter() - self._began, 3), **counts})
            await asyncio.sleep(self._interval_s)
