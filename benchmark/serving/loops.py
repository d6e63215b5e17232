"""Who sends its next request when: closed and open loops, and how late the client itself is.

In a closed loop a stream sends when its last request is answered. In an open loop every request has its own moment, and
its times count from there, so that a server which makes its clients wait cannot hide it (coordinated omission). A
client that is late measures itself: a timer that is due every 10 ms tells how long anything waits that is due.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import replace
from itertools import cycle, takewhile
from types import TracebackType
from typing import Any

from benchmark.result import BenchError
from benchmark.serving.http_client import UNREACHABLE, Api, HttpClient
from benchmark.serving.outcomes import LATE_MS, Outcome, percentiles
from benchmark.serving.workload import PlannedRequest

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
        keeps = bool(request.later)
        reply = await client.stream(api, asked, length, adapter=request.adapter, keep_text=keeps)
        if reply.error == UNREACHABLE:
            raise unreachable(client.url, reply.detail)
        if reply.error in HOPELESS:
            remedy = f"{HOPELESS[reply.error]} ({reply.detail})" if request.adapter else HOPELESS[reply.error]
            raise BenchError(f"POST {client.url}{api.path} was answered by {reply.error}: {remedy}")
        at = reply.sent_at if intended_at is None else intended_at
        return Outcome(request.lengths, at, reply, turn=request.turn, adapter=request.adapter)

    return send


def unreachable(url: str, detail: object) -> BenchError:
    """The error of a server that does not answer, for the reason in `detail`."""
    return BenchError(f"cannot reach {url} ({detail}): check the URL and that the server runs")


# ------------------------------------------------------------------------------------------------------------------ lag


LAG_PERIOD_S = 0.01
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
            due = time.perf_counter() + LAG_PERIOD_S
            await asyncio.sleep(LAG_PERIOD_S)
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
