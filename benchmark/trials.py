"""The trials of `promises`: a server is started, something is done to it, and what was seen comes back as numbers.

Every trial starts what it needs, leaves no process behind, and returns one number for each promise that it is about.
What a number should be at most is not known here. Servers run on the CPU, because that is where the promises are made;
what is promised of a GPU is measured by `gpu`.

What can be told as a ratio of two things in one run is told so: both then suffer alike from whatever else the machine
is doing.
"""

from __future__ import annotations

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

from benchmark import interrupts, launch, shapes
from benchmark.http_client import HttpClient, Reply, TgiApi
from benchmark.report import BenchError, percentile

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

SMALL_MODEL: dict[str, Any] = {"hidden_size": 64, "n_layer": 1, "vocab_size": 256}
# 192 million weights of two bytes: a second copy of them would be twice the bound.
LARGE_MODEL: dict[str, Any] = {
    "hidden_size": 1024,
    "n_layer": 14,
    "vocab_size": 16000,
}
BYTES_OF_A_MEGABYTE = 1e6


@dataclass(frozen=True)
class Means:
    """What a trial has. folder: lasts for all repetitions. cpu_kernels: of all its servers, as their flag."""

    folder: Path
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


# ------------------------------------------------------------------------------------------------------------ starting


def start(means: Means) -> dict[str, float]:
    """Start the embedded model. `ready`: seconds from the launch; `first-request`: the first request's time divided by
    the median of the next ten."""
    with means.server({}) as server:
        first, *later = interrupts.run(_request_seconds(server.url, 1 + REQUESTS_AFTER_THE_FIRST))
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


def taken_port(means: Means) -> dict[str, float]:
    """Launch on a port that another program has. `taken-port`: seconds until the launcher has refused."""
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        started = time.perf_counter()
        try:
            with means.server({"--port": other.getsockname()[1]}):
                pass
        except BenchError as refusal:
            if "is taken" not in str(refusal):
                raise
            return {"taken-port": time.perf_counter() - started}
    raise BenchError("a server started on a port that another program listens on")


# ----------------------------------------------------------------------------------------------------------- streaming


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
        return interrupts.run(_crowd(HttpClient(server.url)))


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


# -------------------------------------------------------------------------------------------------------------- client


def client(means: Means) -> dict[str, float]:
    """Count tokens that cost their server next to nothing. `client`: microseconds of `serving` for each, by the slowest
    of the APIs."""
    command = [sys.executable, "-m", "benchmark.frames"]
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


# ------------------------------------------------------------------------------------------------------------- loading


def loading(means: Means) -> dict[str, float]:
    """Load a checkpoint of 384 MB. `loading-memory`: megabytes that the shard's largest size exceeds its weights by.

    What Python, torch and a warm-up need anyway is measured on a checkpoint of next to nothing and taken off.
    """
    small, large = (
        _checkpoint(means.folder / name, size) for name, size in (("small", SMALL_MODEL), ("large", LARGE_MODEL))
    )
    growth = _peak_of_a_shard(means, large) - _peak_of_a_shard(means, small)
    weights = _weight_bytes(large) - _weight_bytes(small)
    return {"loading-memory": (growth - weights) / BYTES_OF_A_MEGABYTE}


def _checkpoint(folder: Path, size: dict[str, Any]) -> Path:
    """A BLOOM of this size with random weights in bfloat16, written once."""
    if folder.exists():
        return folder
    import torch
    from transformers import BloomConfig, BloomForCausalLM

    config = BloomConfig(n_head=8, **size)
    shapes.make_model_folder(config.to_dict(), folder)
    model: Any = BloomForCausalLM(config)
    model.to(torch.bfloat16).save_pretrained(folder)
    return folder


def _weight_bytes(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.glob("*.safetensors"))


def _peak_of_a_shard(means: Means, folder: Path) -> int:
    """The most bytes that the one shard of a server had in memory, with a KV cache and a warm-up as small as can be."""
    settings = {
        "--model-id": folder,
        "--dtype": "bfloat16",
        "--max-concurrent-requests": 1,
        "--max-input-length": 16,
        "--max-total-tokens": 32,
        "--max-batch-prefill-tokens": 16,
        "--max-batch-total-tokens": 32,
    }
    with means.server(settings) as server:
        return max(launch.peak_memory(pid) for pid in server.shard_pids())
