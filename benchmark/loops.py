"""The loops of `serving`: who sends its next request when.

In a closed loop a stream sends when its last request is answered. In an open loop every request has its own moment, and
its times count from there, so that a server which makes its clients wait cannot hide it (coordinated omission).
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Coroutine, Sequence
from typing import Any

from benchmark.http_client import UNREACHABLE, Api, HttpClient
from benchmark.outcomes import Outcome
from benchmark.report import BenchError
from benchmark.workload import PlannedRequest

# Answers that every other request would get as well, and what to do about them.
HOPELESS = {
    "401": "give the server's key by --api-key-file",
    "403": "give the server's key by --api-key-file",
    "404": "is --api right, and is the URL without the route's path?",
    "405": "is --api right, and is the URL without the route's path?",
}
Send = Callable[[PlannedRequest, float | None], Coroutine[Any, Any, Outcome]]  # None: intended for when it is sent


async def closed_loop(send: Send, requests: Sequence[PlannedRequest], concurrency: int) -> list[Outcome]:
    """Each of `concurrency` streams sends the next request when its last one has ended. Raises BenchError."""
    waiting = iter(requests)
    outcomes: list[Outcome] = []

    async def stream() -> None:
        for request in waiting:
            outcomes.append(await send(request, None))

    await _together([stream() for _ in range(concurrency)])
    return outcomes


async def open_loop(send: Send, requests: Sequence[PlannedRequest]) -> list[Outcome]:
    """Each request is sent at its own time, whatever became of the others. Raises BenchError."""
    started_at = time.perf_counter()
    outcomes: list[Outcome] = []

    async def at_its_time(request: PlannedRequest) -> None:
        intended_at = started_at + request.send_after_s
        await asyncio.sleep(intended_at - time.perf_counter())
        outcomes.append(await send(request, intended_at))

    await _together([at_its_time(request) for request in requests])
    return outcomes


async def _together(work: Sequence[Coroutine[Any, Any, None]]) -> None:
    """Run everything at once; the first BenchError cancels the others and is raised."""
    failure: BenchError | None = None
    try:
        async with asyncio.TaskGroup() as tasks:
            for one in work:
                tasks.create_task(one)
    except* BenchError as failures:
        failure = next(error for error in failures.exceptions if isinstance(error, BenchError))
    if failure is not None:
        raise failure


def sender(client: HttpClient, api: Api) -> Send:
    """A function that sends one request. It raises BenchError for what would answer every other request as well."""

    async def send(request: PlannedRequest, intended_at: float | None) -> Outcome:
        reply = await client.stream(api, request.prompt, request.lengths.output_length)
        if reply.error == UNREACHABLE:
            raise unreachable(client.url, reply.detail)
        if reply.error in HOPELESS:
            raise BenchError(f"POST {client.url}{api.path} was answered by {reply.error}: {HOPELESS[reply.error]}")
        return Outcome(request.lengths, reply.sent_at if intended_at is None else intended_at, reply)

    return send


def unreachable(url: str, detail: object) -> BenchError:
    """The error of a server that does not answer, for the reason in `detail`."""
    return BenchError(f"cannot reach {url} ({detail}): check the URL and that the server runs")
