"""The rows of `serving`: draws the work of each, sends it to the server, watches that, and says what came of it.

How many requests the server has in its batch and in its queue is read from `/metrics`, by the names of Lockstep and
TGI, vLLM and SGLang; where a server has no such page, or says it only with a key, there is nothing to see and nothing
is said. Asked twice a second, so that asking costs the server little of what it does.
"""

from __future__ import annotations

import argparse
import asyncio
import math
import sys
import time
from collections import Counter
from collections.abc import Callable, Coroutine, Mapping
from contextlib import suppress
from dataclasses import dataclass
from itertools import product
from random import Random
from types import TracebackType
from typing import Any

from benchmark import launch
from benchmark.result import BenchError, Result
from benchmark.serving import workload
from benchmark.serving.datasets import Lengths, TracedRequest
from benchmark.serving.http_client import DISCONNECTED, Api, HttpClient
from benchmark.serving.loops import (
    HOPELESS,
    LagMeter,
    Send,
    capped,
    closed_loop,
    open_loop,
    sender,
    unreachable,
)
from benchmark.serving.outcomes import Load, Objectives, Outcome, Records, loads, progress, row_of
from benchmark.serving.workload import PlannedRequest
from benchmark.terminal import Progress, Stage

TOKEN_S = 0.02  # of a stream, about, to foresee how long a row takes
SAMPLE = 32  # requests of a data set that say how long its requests are on average, where no row has been drawn


@dataclass(frozen=True)
class MeasuredServer:
    """The server to measure, and what it says of itself."""

    url: str
    model: str
    info: Mapping[str, Any]  # of GET /info; empty for servers without
    server: launch.Server | None = None  # None: not ours
    has_meaning: bool = True  # False: random weights, whose tokenizer knows no words

    def cause(self, error: BenchError) -> BenchError:
        """Why a server of ours was lost: its launcher knows better than the connection."""
        if self.server is None:
            return error
        self.server.wait_ended(5.0)
        return BenchError(self.server.failure() or str(error))


@dataclass(frozen=True)
class _Sent:
    """What came of a row's requests, and of who sent and answered them."""

    outcomes: list[Outcome]
    began_unix_s: float
    client: LagMeter
    server: ServerWatch


class Sweep:
    """The loads of one run, sent to one server row after row."""

    def __init__(
        self, args: argparse.Namespace, target: MeasuredServer, client: HttpClient, api: Api, view: Progress
    ) -> None:
        self._args = args
        self._view = view
        self._target = target
        self._client = client
        self._adapters: list[str] = []  # names that requests have
        self._send = sender(client, api)
        self._ends = workload.local_token_ends(args.tokenizer) if args.tokenizer else server_token_ends(self._client)
        self._given = workload.read_lengths(args.lengths_file) if args.lengths_file else None
        self._objectives = Objectives(args.ttft_objective, args.tpot_objective)
        self._records = Records(args.output)

    async def run(self, result: Result, keep: Callable[[], None]) -> None:
        """Add the rows to the result, one at a time. Raises BenchError; the finished rows are there."""
        try:
            self._adapters = await adapter_names(self._client, self._args.adapters) if self._args.adapters else []
            for cell, load in product(self._cells(), loads_of(self._args)):
                row = await self._measure(cell, load)
                result.rows.append(row)
                keep()
                print(progress(row, load), file=sys.stderr)
                if DISCONNECTED in row["errors_by_kind"]:
                    await check_alive(self._client)
            if all(row["errors"] == row["requests"] for row in result.rows):
                raise BenchError("no request succeeded: the report counts the errors by kind")
        except BenchError as error:
            raise self._target.cause(error) from None

    def _cells(self) -> list[Lengths | None]:
        """What the rows are named by; None where the lengths are those of a file's texts or of a trace."""
        if self._args.trace_requests is not None or self._args.conversations is not None:
            return [None]
        if self._given is not None:
            return [workload.mean_lengths(self._given)]
        return [Lengths(*pair) for pair in product(self._args.input_length, self._args.output_length)]

    async def _measure(self, cell: Lengths | None, load: Load) -> dict[str, Any]:
        self._view.begin()
        random = Random(f"{self._args.seed} {cell} {load}")
        source = self._source(cell, Random(f"prompts of {self._args.seed} {cell} {load}"))
        warmups = await source.draw(self._args.warmups, random) if self._args.warmups else []
        requests = await self._plan(source, load, random)
        if self._adapters:
            choice, its = (
                "zipf" if self._args.zipf else "uniform",
                Random(f"adapters of {self._args.seed} {cell} {load}"),
            )
            warmups, requests = (
                workload.with_adapters(some, self._adapters, choice, its) for some in (warmups, requests)
            )
        refuse_too_long(workload.longest([*warmups, *requests]), self._target.info, self._args)
        await closed_loop(self._send, warmups, load.concurrency or len(warmups))
        sent = await self._watched(self._sent(requests, load, self._advancing(len(requests))))
        cell = cell or workload.mean_lengths([one.lengths for one in requests])
        first_turns = sum(outcome.turn == 0 for outcome in sent.outcomes)
        about = {"duration": self._args.duration, "drawn_requests": len(requests)}
        if self._adapters:
            about["adapters"] = dict(Counter(outcome.adapter for outcome in sent.outcomes).most_common())
        return self._row(cell, load, sent) | about | {"sent_again": max(0, first_turns - len(requests))}

    async def _watched(self, sending: Coroutine[Any, Any, list[Outcome]]) -> _Sent:
        """What was sent, while client and server were watched."""
        began_unix_s = time.time()
        async with LagMeter() as meter, ServerWatch(self._client) as watch:
            outcomes = await sending
        return _Sent(outcomes, began_unix_s, meter, watch)

    def _row(self, cell: Lengths, load: Load, sent: _Sent) -> dict[str, Any]:
        """The row of what was sent, whose records are written."""
        self._records.add(sent.outcomes, min(outcome.intended_at for outcome in sent.outcomes))
        row = row_of(cell, load, sent.outcomes, self._objectives, self._distribution())
        about = {"began_unix_s": sent.began_unix_s, "server_timeline": sent.server.timeline}
        return row | about | {"client": sent.client.report(late_ms(row))}

    def _advancing(self, count: int) -> Send:
        """Sends, and says that of a stage of so many requests one more is done."""

        async def send(request: PlannedRequest, intended_at: float | None) -> Outcome:
            outcome = await self._send(request, intended_at)
            self._view.advance(1 / count)
            return outcome

        return send

    async def _sent(self, requests: list[PlannedRequest], load: Load, send: Send) -> list[Outcome]:
        if load.concurrency is not None:
            return await closed_loop(send, requests, load.concurrency, self._args.duration)
        send = capped(send, load.max_concurrency) if load.max_concurrency else send
        return await open_loop(send, requests)

    def _source(self, cell: Lengths | None, random: Random) -> workload.Source:
        args = self._args
        words = workload.WORDS if self._target.has_meaning else workload.MEANINGLESS_WORDS
        texts = workload.Texts(self._ends, words, random)
        dialogue = workload.Dialogue(args.turns or 1, args.think_time or 0.0)
        if args.trace_requests is not None:
            return workload.TraceSource(texts, args.trace_requests, args.most_tokens)
        if args.conversations is not None:
            return workload.DatasetSource(texts, args.conversations, args.dataset_output, args.most_tokens, dialogue)
        choice = args.prefix_choice or workload.CHOICES[0]
        prefixes = workload.Prefixes(args.prefixes, args.prefix_length, choice) if args.prefixes else None
        assert cell is not None, "random prompts have lengths"
        return workload.RandomSource(texts, lambda n, random: self._lengths(cell, n, random), prefixes, dialogue)

    def _lengths(self, cell: Lengths, count: int, random: Random) -> list[Lengths]:
        if self._given is not None:
            return random.choices(self._given, k=count)
        return workload.draw_lengths(self._args.length_distribution, cell, count, random)

    async def _plan(self, source: workload.Source, load: Load, random: Random) -> list[PlannedRequest]:
        """The requests of a row with their times. Raises BenchError where there are none."""
        args = self._args
        if args.trace_requests is not None:
            drawn = await source.draw(args.num_requests or len(args.trace_requests), random)
            return [one for one in drawn if one.send_after_s < (args.duration or float("inf"))]
        if load.request_rate is None:
            return await source.draw(num_requests(args, load), random)
        count = args.num_requests if args.duration else num_requests(args, load)
        # The lengths are drawn first, then the times, as `simulate` does, unless a duration decides how many there are.
        times = workload.arrival_times(load, count, args.duration, random) if args.duration else None
        if times == []:
            raise BenchError(f"no request comes in {args.duration:g} s at {load}: give a longer --duration")
        requests = await source.draw(len(times or [()] * (count or 0)), random)
        return workload.at_times(requests, times or workload.arrival_times(load, count, None, random))

    def _distribution(self) -> str:
        named = self._args.trace or self._args.dataset
        return str(named) if named else str(self._args.length_distribution)


async def adapter_names(client: HttpClient, wanted: int) -> list[str]:
    """The first names of adapters that a server lists. Raises BenchError where there are fewer than wanted."""
    status = 0
    try:
        status, models = await client.json("GET", "/v1/models")
        names = [str(one["id"]) for one in models["data"] if one.get("parent")]
    except (OSError, TimeoutError, KeyError, TypeError, AttributeError):
        names = []
    if status in (401, 403):
        raise BenchError(f"{client.url}/v1/models answers status {status}: {HOPELESS[str(status)]}")
    if len(names) < wanted:
        raise BenchError(
            f"{client.url}/v1/models lists {len(names)} adapters, and --adapters is {wanted}: start the server with as "
            "many, or give a smaller number"
        )
    return names[:wanted]


def gaps_of(args: argparse.Namespace) -> float:
    """The standard deviation of the gaps between arrivals / their mean."""
    return 1.0 if args.burstiness is None else float(args.burstiness)


def loads_of(args: argparse.Namespace) -> list[Load]:
    """Closed loops, then open loops, then the ramp, or the trace."""
    if args.trace_requests is not None:
        return [_trace_load(args, args.trace_requests)]
    gaps = gaps_of(args)
    ramps = [Load(request_rate=sum(args.ramp) / 2, ramp=tuple(args.ramp))] if args.ramp else []
    found = loads(args.concurrency, args.request_rate) + ramps
    return [
        one
        if one.concurrency
        else Load(None, one.request_rate, one.ramp, burstiness=gaps, max_concurrency=args.max_concurrency)
        for one in found
    ]


def _trace_load(args: argparse.Namespace, trace: list[TracedRequest]) -> Load:
    taken = trace[: args.num_requests]
    rate = len(taken) / max(taken[-1].arrives_s, 1e-3)
    return Load(request_rate=rate, max_concurrency=args.max_concurrency, trace=args.trace.name)


def num_requests(args: argparse.Namespace, load: Load) -> int:
    """How many requests a row has: enough that the streams' unequal ends matter little, or a minute of arrivals."""
    return args.num_requests or max(32, 4 * (load.concurrency or 0), round(60 * (load.request_rate or 0)))


def stages_of(args: argparse.Namespace) -> list[Stage]:
    """The rows that a sweep will have, and how much there is to do in each."""
    lengths = [Lengths(*pair) for pair in product(args.input_length or (), args.output_length or ())]
    cells: list[Lengths | None] = [*lengths] or [None]
    if args.trace_requests is not None or args.conversations is not None or args.lengths_file is not None:
        cells = [None]
    return [_stage(args, cell, load) for cell, load in product(cells, loads_of(args))]


def _stage(args: argparse.Namespace, cell: Lengths | None, load: Load) -> Stage:
    """A row, and about how many seconds it takes."""
    name = str(load) if cell is None else f"{cell.input_length} in, {cell.output_length} out, {load}"
    count = num_requests(args, load)
    if load.concurrency is None:
        of_trace = args.trace_requests and args.trace_requests[-1].arrives_s
        return Stage(name, args.duration or of_trace or count / (load.request_rate or 1.0))
    tokens = count / load.concurrency * (1 if cell is None else cell.output_length)
    return Stage(name, args.duration or tokens * TOKEN_S)


def late_ms(row: Mapping[str, Any]) -> float:
    """How late 1 % of a row's requests were sent, or later, in milliseconds."""
    return float(row["sent_late_ms"]["p99"])


def server_token_ends(client: HttpClient) -> workload.TokenEnds:
    """A function that finds where tokens end by the server's own `/tokenize`."""

    async def ends(text: str) -> list[int]:
        try:
            status, tokens = await client.json("POST", "/tokenize", {"inputs": text})
            if status == 422 and " " in text:
                raise workload.TextTooLong(str(tokens))
            return [token["stop"] for token in tokens]
        except (OSError, TimeoutError) as error:
            raise unreachable(client.url, error) from None
        except (KeyError, TypeError):
            if status in (401, 403):
                raise BenchError(f"{client.url} answers status {status}: {HOPELESS[str(status)]}") from None
            raise BenchError(
                f"{client.url}/tokenize (status {status}) does not tell where tokens end: give --tokenizer the folder "
                "of the model's tokenizer.json"
            ) from None

    return ends


async def check_alive(client: HttpClient) -> None:
    """Ask the server whether it lives. Raises BenchError when nothing listens any more."""
    try:
        await client.json("GET", "/health")
    except (OSError, TimeoutError) as error:
        raise unreachable(client.url, error) from None


def refuse_too_long(longest: Mapping[str, int], info: Mapping[str, Any], args: argparse.Namespace) -> None:
    """Raises BenchError for lengths that the server says it does not take. info: of GET /info."""
    of_files = args.conversations is not None or args.trace_requests is not None
    remedy = "leave those out by --most-tokens" if of_files else "give shorter --input-length and --output-length"
    for name, count in longest.items():
        if isinstance(most := info.get(name), int) and count > most:
            raise BenchError(
                f"requests of up to {count} tokens are asked for, and {name} of the server is {most}: {remedy}, or "
                f"start it with --{name.replace('_', '-')} {count}"
            )


# ----------------------------------------------------------------------------------------------------------- the server


WATCH_INTERVAL_S = 0.5
# What is counted, by the names that servers have for it.
WATCHED: Mapping[str, tuple[str, ...]] = {
    "running": ("tgi_batch_current_size", "vllm:num_requests_running", "sglang:num_running_reqs"),
    "waiting": ("tgi_queue_size", "vllm:num_requests_waiting", "sglang:num_queue_reqs"),
}
WATCHED_NAMES = {name: key for key, names in WATCHED.items() for name in names}


def counts_of(page: str) -> dict[str, float] | None:
    """The two numbers on a page in Prometheus' text format, each a sum over its labels; None where one is none."""
    found: dict[str, float] = {}
    for line in page.splitlines():
        name = line.partition("{")[0].partition(" ")[0]
        if (key := WATCHED_NAMES.get(name)) is not None:
            rest = line.rpartition("}")[2] if "{" in line else line.partition(" ")[2]
            with suppress(ValueError, IndexError):
                found[key] = found.get(key, 0.0) + float(rest.split()[0])
    is_whole = found.keys() == WATCHED.keys() and all(map(math.isfinite, found.values()))
    return found if is_whole else None


class ServerWatch:
    """Notes the numbers while its block runs. timeline: two points a second, from the block's beginning on."""

    def __init__(self, client: HttpClient, interval_s: float = WATCH_INTERVAL_S) -> None:
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
