"""The loops of `serving`: who sends its next request when.

In a closed loop a stream sends when its last request is answered. In an open loop every request has its own moment, and
its times count from there, so that a server which makes its clients wait cannot hide it (coordinated omission).
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import replace
from itertools import cycle, takewhile
from typing import Any

from benchmark.http_client import UNREACHABLE, Api, HttpClient
from benchmark.outcomes import Outcome
from benchmark.report import BenchError
from benchmark.workload import PlannedRequest

# Answers that every other request would get as well, and what to do about them.
HOPELESS = {
    "401": "give the server's key by --api-key-file FILE",
    "403": "give the server's key by --api-key-file FILE",
    "404": "is --api right, and is the URL without the route's path?",
    "405": "is --api right, and is the URL without the route's path?",
}
Send = Callable[[PlannedRequest, float | None], Coroutine[Any, Any, Outcome]]  # None: intended for when it is sent


async def closed_loop(
    send: Send, requests: Sequence[PlannedRequest], concurrency: int, seconds: float | None = None
) -> list[Outcome]:
    """Each of `concurrency` streams sends the next request when its last one has ended. Raises BenchError.

    seconds: requests begin within this time, from the first on again where there are too few.
    """
    ends_at = None if seconds is None else time.perf_counter() + seconds
    waiting = iter(requests) if ends_at is None else takewhile(lambda _: time.perf_counter() < ends_at, cycle(requests))
    outcomes: list[Outcome] = []

    async def stream() -> None:
        for request in waiting:
            await _converse(send, request, None, outcomes)

    await _together([stream() for _ in range(concurrency)])
    return outcomes


async def open_loop(send: Send, requests: Sequence[PlannedRequest]) -> list[Outcome]:
    """Each request is sent at its own time, whatever became of the others. Raises BenchError."""
    started_at = time.perf_counter()
    outcomes: list[Outcome] = []

    async def at_its_time(request: PlannedRequest) -> None:
        intended_at = started_at + request.send_after_s
        await _until(intended_at)
        await _converse(send, request, intended_at, outcomes)

    await _together([at_its_time(request) for request in requests])
    return outcomes


async def _until(moment: float) -> None:
    """Sleep until a time of time.perf_counter, and never less: uvloop's timers end up to a millisecond early."""
    while (left := moment - time.perf_counter()) > 0:
        await asyncio.sleep(left)


async def _converse(send: Send, request: PlannedRequest, intended_at: float | None, outcomes: list[Outcome]) -> None:
    """Send a request, and each later turn after the answer before it. A turn that fails is the last one."""
    outcomes.append(outcome := await send(request, intended_at))
    while request.later and outcome.reply.error is None:
        due, think_s = outcome.reply.ended_at + request.later[0].think_s, request.later[0].think_s
        request = request.after(outcome.reply.text, outcome.reply.num_tokens)
        if think_s:
            await _until(due)
        outcomes.append(outcome := await send(request, due if think_s else None))


def capped(send: Send, concurrency: int) -> Send:
    """A sender that has at most so many requests under way; others wait, and their times count meanwhile."""
    free = asyncio.Semaphore(concurrency)

    async def when_free(request: PlannedRequest, intended_at: float | None) -> Outcome:
        came_at = time.perf_counter()
        async with free:
            held_s = time.perf_counter() - came_at
            outcome = await send(request, came_at if intended_at is None else intended_at)
        return replace(outcome, held_s=held_s)

    return when_free


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
        asked, length = request.prompt, request.lengths.output_length
        reply = await client.stream(api, asked, length, keep_text=bool(request.later))
        if reply.error == UNREACHABLE:
            raise unreachable(client.url, reply.detail)
        if reply.error in HOPELESS:
            raise BenchError(f"POST {client.url}{api.path} was answered by {reply.error}: {HOPELESS[reply.error]}")
        at = reply.sent_at if intended_at is None else intended_at
        return Outcome(request.lengths, at, reply, turn=request.turn)

    return send


def unreachable(url: str, detail: object) -> BenchError:
    """The error of a server that does not answer, for the reason in `detail`."""
    return BenchError(f"cannot reach {url} ({detail}): check the URL and that the server runs")
