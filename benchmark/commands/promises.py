"""`lockstep-bench promises`: what Lockstep promises of time and memory, measured several times and given a verdict.

`make test` does not ask how long something took, because a busy machine would fail it for no reason that is the code's.
This command does: it is run before a release, and when code changes that a promise is about. A trial starts a server on
the CPU, does something to it, leaves no process behind, and returns one number for each promise that it is about; what
can be told as a ratio of two things in one run is told so, because both suffer alike from whatever else the machine is
doing. A promise is a line of `PROMISES`, kept when the median over the repetitions is within its bound. Exit codes: 0
all are kept, 1 one is broken or could not be measured.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import socket
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple
from urllib.parse import urlsplit

from benchmark import launch, options
from benchmark.report.publishing import published
from benchmark.result import BenchError, Result, RunContext, arguments_of, footer, percentile, prepare_output, table
from benchmark.serving.http_client import HttpClient, Reply, TgiApi
from benchmark.terminal import Stage, shown

REPETITIONS = 5  # the fewest of which two may be disturbed without moving the median
KEPT, BROKEN = "kept", "broken"


# --------------------------------------------------------------------------------------------------------------- trials


PROMPT = "Once upon a time"
REQUESTS_AFTER_THE_FIRST = 10
TOKENS_OF_A_REQUEST = 20

NUM_READERS = 8  # streams whose gaps are measured
TOKENS_OF_A_READER = 1600  # each: some seconds, in which clients that hardly read fill their buffers and are cut
NUM_COMPANIONS = 50  # streams beside them
CROWD = 128  # requests that fill a server: the launcher's own default
TOKENS_OF_A_COMPANION = 16000  # more than a stream gets while anything is measured beside it
CANDIDATES = 5  # reported with each of its tokens: events of a kilobyte fill the kernel's buffers soon
REFUSALS = 10
CLIENT_STREAMS = 256
TOKENS_OF_A_CLIENT_STREAM = 300
WAIT_SECONDS = 30.0  # for streams to begin or to end; nothing is measured meanwhile


@dataclass(frozen=True)
class Means:
    """What a trial has. cpu_kernels: of all its servers, as their flag."""

    cpu_kernels: str | None = None

    @contextmanager
    def server(self, settings: Mapping[str, object]) -> Iterator[launch.Server]:
        """A server on the CPU with these launcher flags. Raises BenchError when it cannot start or be reached."""
        shared = {"--device": "cpu", "--cpu-kernels": self.cpu_kernels}
        try:
            with launch.running_server(launch.flags_of({**shared, **settings})) as server:
                yield server
        except (OSError, TimeoutError) as error:
            raise BenchError(f"the server did not answer: {error or 'it took too long'}") from None


Trial = Callable[[Means], Mapping[str, float]]


# ------------------------------------------------------------------------------------------------------------- starting


def start(means: Means) -> dict[str, float]:
    """Start the embedded model. `ready`: seconds from the launch; `first-request`: the first request's time divided by
    the median of the next ten."""
    with means.server({}) as server:
        first, *later = launch.run_interruptible(_request_seconds(server.url, 1 + REQUESTS_AFTER_THE_FIRST))
        return {"ready": server.startup.ready_s, "first-request": first / median(later)}


async def _request_seconds(url: str, count: int) -> list[float]:
    """How long each of `count` equal requests takes, one after the other."""
    client = HttpClient(url)
    seconds = []
    for _ in range(count):
        took, status = await _generate(client)
        if status != 200:
            raise BenchError(f"a request was answered by {status} where 200 was due")
        seconds.append(took)
    return seconds


async def _generate(client: HttpClient) -> tuple[float, int]:
    """Seconds and HTTP status of one request that is not streamed."""
    body = {"inputs": PROMPT, "parameters": {"max_new_tokens": TOKENS_OF_A_REQUEST}}
    started = time.perf_counter()
    status, _ = await client.json("POST", "/generate", body)
    return time.perf_counter() - started, status


# ------------------------------------------------------------------------------------------------------------ streaming


class ReadingHabit(NamedTuple):
    """How a client takes what is streamed to it."""

    read_bytes: int  # most that it takes at a time
    pause_s: float  # between two reads
    receive_buffer: int | None  # bytes that the kernel takes in for it; None: as many as the kernel likes


# Both cost the client next to nothing, so that the two sides of the ratio differ in what the server does alone.
PROMPT_READER = ReadingHabit(read_bytes=65536, pause_s=0.02, receive_buffer=None)
SLOW_READER = ReadingHabit(read_bytes=1, pause_s=0.2, receive_buffer=4096)


def crowd(means: Means) -> dict[str, float]:
    """Stream to many clients at once, without a model.

    `slow-readers`: p99 of the gaps between the tokens of clients beside others who hardly read, divided by the same
    beside as many who read at once. `refusal`: seconds that the slowest of ten requests waits for its 429 on a server
    that is full.
    """
    settings = {
        "--model-id": "null",
        "--max-concurrent-requests": CROWD,
        "--max-input-length": 64,
        "--max-total-tokens": 64 + TOKENS_OF_A_COMPANION,
    }
    with means.server(settings) as server:
        return launch.run_interruptible(_crowd(HttpClient(server.url)))


async def _crowd(client: HttpClient) -> dict[str, float]:
    await _generate(client)  # what only a first request does is not measured
    gaps = {}
    for habit in (PROMPT_READER, SLOW_READER):
        async with _companions(client, NUM_COMPANIONS, habit):
            gaps[habit] = await _p99_gap(client)
    async with _companions(client, CROWD, PROMPT_READER):
        refused = [await _generate(client) for _ in range(REFUSALS)]
    if {status for _, status in refused} != {429}:
        raise BenchError(f"a server with {CROWD} requests of at most {CROWD} did not refuse one more by 429")
    return {
        "slow-readers": gaps[SLOW_READER] / gaps[PROMPT_READER],
        "refusal": max(seconds for seconds, _ in refused),
    }


async def _p99_gap(client: HttpClient) -> float:
    streams = (client.stream(TgiApi(), PROMPT, TOKENS_OF_A_READER) for _ in range(NUM_READERS))
    return p99_gap(await asyncio.gather(*streams))


def p99_gap(replies: Sequence[Reply]) -> float:
    """The p99 of the seconds between two tokens of a stream, over all streams. Raises BenchError if one failed."""
    if error := next((reply.error for reply in replies if reply.error), None):
        raise BenchError(f"a stream failed while its gaps were measured: {error}")
    gaps = [after - before for reply in replies for before, after in pairwise(reply.token_times)]
    return percentile(sorted(gaps), 99)


@asynccontextmanager
async def _companions(client: HttpClient, count: int, habit: ReadingHabit) -> AsyncIterator[None]:
    """`count` clients with this habit, streaming for the whole length of the block. Raises BenchError if one ended."""
    streams = [asyncio.create_task(_read_streams(client.url, habit)) for _ in range(count)]
    try:
        await _wait_until_running(client, count)
        yield
        if any(stream.done() for stream in streams):
            raise BenchError("a stream ended before what was measured beside it did")
    finally:
        for stream in streams:
            stream.cancel()
        await asyncio.gather(*streams, return_exceptions=True)
    await _wait_until_running(client, 0)


async def _read_streams(url: str, habit: ReadingHabit) -> None:
    """Read one stream; a client that is cut because it hardly reads asks again at once."""
    while True:
        try:
            return await _read_stream(url, habit)
        except ConnectionError:
            continue


async def _read_stream(url: str, habit: ReadingHabit) -> None:
    """Ask for a long stream and read it to its end. Raises ConnectionError when the server cuts it."""
    loop, address = asyncio.get_running_loop(), urlsplit(url)
    parameters = {"max_new_tokens": TOKENS_OF_A_COMPANION, "top_n_tokens": CANDIDATES}
    body = json.dumps({"inputs": PROMPT, "parameters": parameters})
    head = (
        f"POST /generate_stream HTTP/1.1\r\nHost: {address.netloc}\r\nContent-Type: application/json\r\n"
        f"Content-Length: {len(body)}\r\n\r\n"
    )
    with socket.socket() as connection:
        connection.setblocking(False)
        if habit.receive_buffer is not None:  # before connecting, when the sizes are agreed on
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, habit.receive_buffer)
        await loop.sock_connect(connection, (address.hostname, address.port))
        await loop.sock_sendall(connection, (head + body).encode())
        while await loop.sock_recv(connection, habit.read_bytes):
            await asyncio.sleep(habit.pause_s)
            if connection.getsockopt(
                socket.SOL_SOCKET, socket.SO_ERROR
            ):  # what came before the cut could still be read
                raise ConnectionResetError("the server cut the stream")


async def _wait_until_running(client: HttpClient, count: int) -> None:
    """Wait until the server generates for exactly `count` requests. Raises BenchError when it does not come to that."""
    deadline = time.perf_counter() + WAIT_SECONDS
    while (running := await _num_running(client)) != count:
        if time.perf_counter() > deadline:
            raise BenchError(f"the server generates for {running} requests where {count} were expected")
        await asyncio.sleep(0.02)


async def _num_running(client: HttpClient) -> int:
    """For how many requests the server generates now, as its metrics tell."""
    lines = (await client.text("/metrics")).splitlines()
    return next((round(float(line.split()[1])) for line in lines if line.startswith("tgi_batch_current_size ")), 0)


# --------------------------------------------------------------------------------------------------------------- client


def client(means: Means) -> dict[str, float]:
    """Count tokens that cost their server next to nothing. `client`: microseconds of `serving` for each, by the slowest
    of the APIs."""
    command = [sys.executable, "-m", "benchmark.serving.frames"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as frames:
        try:
            assert frames.stdout is not None
            url = f"http://127.0.0.1:{int(frames.stdout.readline())}"
            return {"client": max(_client_us(url, api) for api in ("tgi", "openai", "chat"))}
        finally:
            frames.kill()


def _client_us(url: str, api: str) -> float:
    """Microseconds for a token. Raises BenchError where not all are counted."""
    flags = ("--url", url, "--api", api, "--input-length", "4", "--output-length", str(TOKENS_OF_A_CLIENT_STREAM))
    load = ("--concurrency", str(CLIENT_STREAMS), "--num-requests", str(CLIENT_STREAMS))
    command = [sys.executable, "-m", "benchmark", "serving", *flags, *load]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise BenchError(f"`serving` cannot count ready-made frames: {done.stderr.strip()}")
    [row] = json.loads(done.stdout.splitlines()[-1])["rows"]
    if row["output_tokens"] != CLIENT_STREAMS * TOKENS_OF_A_CLIENT_STREAM:
        raise BenchError(f"`serving` counts {row['output_tokens']} ready-made tokens of {api}: that is wrong")
    return 1e6 / float(row["output_tokens_per_second"])


@dataclass(frozen=True)
class Promise:
    """One figure that is promised to be at most `bound`."""

    name: str  # under which its trial returns the figure
    sentence: str
    bound: float
    unit: str  # empty for a ratio
    reason: str  # why the bound is what it is
    trial: Trial


PROMISES: Sequence[Promise] = (
    Promise(
        "ready",
        "the embedded model is ready after its launch",
        15.0,
        "s",
        "A newcomer still waits for it. Importing torch in the shard is most of it, on two cores 4 to 8 seconds.",
        start,
    ),
    Promise(
        "first-request",
        "first request after ready / median of the next ten",
        3.0,
        "",
        "Whatever a first request triggers happens before the server is ready; caches of the processor stay cold.",
        start,
    ),
    Promise(
        "slow-readers",
        "p99 gap of a stream beside 50 clients that hardly read / beside 50 that read at once",
        2.0,
        "",
        "A client that does not read costs the others no more than one that does; the rest is left to a p99's scatter: "
        "0.7 to 1.7 was measured, and 3.4 of a router that lost half a millisecond at each write to such a client.",
        crowd,
    ),
    Promise(
        "refusal",
        "slowest of ten answers by 429 of a server that is full",
        1.0,
        "s",
        "A refusal must be quick enough for the client to try another server.",
        crowd,
    ),
    Promise(
        "client",
        "time that `serving` takes for a token of 256 streams of ready-made frames, by the slowest API",
        20.0,
        "µs",
        "A client that counts 50,000 tokens a second limits no server that is measured here; its frames have a core of "
        "their own.",
        client,
    ),
)


# --------------------------------------------------------------------------------------------------------- command line


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options of this command."""
    names = [promise.name for promise in PROMISES]
    parser.add_argument(
        "--only", nargs="+", choices=names, default=names, metavar="NAME", help=f"some of {', '.join(names)} (all)"
    )
    parser.add_argument(
        "--repeat", type=options.positive, default=REPETITIONS, metavar="N", help=f"repetitions ({REPETITIONS})"
    )
    launch.add_kernels_argument(parser)
    parser.add_argument("--output", type=Path, metavar="DIR", help="folder for result.md and result.json")


def run(args: argparse.Namespace) -> int:
    """Measure the promises that the arguments name; 0 when all of them are kept. Raises BenchError."""
    prepare_output(args.output)
    promises = [promise for promise in PROMISES if promise.name in args.only]
    result = Result(_context(args), notes=[f"{promise.name}: {promise.reason}" for promise in promises])
    samples: dict[str, list[float]] = {promise.name: [] for promise in promises}
    names = {promise.trial: promise.name for promise in promises}
    stages = [Stage(f"{name}, time {n + 1} of {args.repeat}") for n in range(args.repeat) for name in names.values()]
    with (
        published(result, markdown, args.output) as keep,
        shown("measuring what is promised", stages) as view,
    ):
        for trial in view.each(list(names) * args.repeat):
            found = trial(Means(args.cpu_kernels))
            for name in samples.keys() & found.keys():
                samples[name].append(found[name])
            result.rows = [row_of(promise, samples[promise.name]) for promise in promises if samples[promise.name]]
            keep()
    return 1 if any(row["verdict"] == BROKEN for row in result.rows) else 0


# --------------------------------------------------------------------------------------------------------------- report


def row_of(promise: Promise, samples: Sequence[float]) -> dict[str, Any]:
    """One row of the JSON: the promise, and what its repetitions, at least one, say of it."""
    middle = median(samples)
    return {
        "promise": promise.name,
        "sentence": promise.sentence,
        "unit": promise.unit,
        "bound": promise.bound,
        "median": middle,
        "min": min(samples),
        "max": max(samples),
        "samples": list(samples),
        "verdict": KEPT if middle <= promise.bound else BROKEN,
    }


def markdown(result: Result) -> str:
    """The table of promises, and what to know about them."""
    return f"{promise_table(result.rows)}\n\n{footer(result)}"


def promise_table(rows: Sequence[Mapping[str, Any]]) -> str:
    """One line for each promise, in its own unit."""
    cells = [
        [
            row["promise"],
            row["sentence"],
            _quantity(row["bound"], row["unit"]),
            _quantity(row["median"], row["unit"]),
            f"{_quantity(row['min'], row['unit'])} to {_quantity(row['max'], row['unit'])}",
            row["verdict"],
        ]
        for row in rows
    ]
    return table(("Name", "Promise", "At most", "Median", "Range", "Verdict"), cells)


def _quantity(value: float, unit: str) -> str:
    return f"{value:.3g} {unit}".rstrip()


def _context(args: argparse.Namespace) -> RunContext:
    return RunContext.gather(
        "promises",
        model="the embedded model and the null model",
        device="cpu",
        dtype="each model's own",
        num_shard=1,
        threads=0,
        quantize=None,
        arguments=arguments_of(args),
        work={"only": list(args.only), "repeat": args.repeat},
    )
