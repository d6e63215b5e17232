"""What is promised of time, by the clock of a machine that does nothing else: `python -m tests.system.promises`.

The suite does not ask how long something took, because a busy machine would fail it for no reason that is the code's.
This does, before a release and when code changes that a promise is about: each trial starts a server on the CPU some
times, and the medians are held against their bounds. What can be told as a ratio of two things in one run is told so,
because both suffer alike from whatever else the machine is doing. Exit code 1: one is broken.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import socket
import sys
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from itertools import pairwise
from statistics import median
from typing import NamedTuple
from urllib.parse import urlsplit

from benchmark.launch import Server, flags_of, running_server
from benchmark.result import percentile, table
from benchmark.serving.http_client import HttpClient, TgiApi

PROMPT = "Once upon a time"
NUM_READERS, TOKENS_OF_A_READER = 8, 1600  # whose gaps are measured: long enough for slow ones to be cut beside them
NUM_COMPANIONS, TOKENS_OF_A_COMPANION = 50, 16000  # more tokens than a stream gets meanwhile
CROWD, REFUSALS = 128, 10  # the launcher's own default of requests at once; how often one more is sent
CANDIDATES = 5  # reported with each token: events of a kilobyte fill the kernel's buffers soon
WAIT_SECONDS = 30.0  # for streams to begin or to end; nothing is measured meanwhile
EMBEDDED = {"--device": "cpu"}
NULL = EMBEDDED | {
    "--model-id": "null",
    "--max-concurrent-requests": CROWD,
    "--max-input-length": 64,
    "--max-total-tokens": 64 + TOKENS_OF_A_COMPANION,
}
# What is promised, the most that it may be, and why.
PROMISES = {
    "launch to ready, the embedded model (s)": (15.0, "a newcomer still waits for it; most is the import of torch"),
    "first request / median of the next ten": (3.0, "what a first request triggers happens before the server is ready"),
    "p99 gap beside 50 clients that hardly read / beside 50 that do": (
        2.0, "0.7 to 1.7 was measured, and 3.4 of a router that lost half a millisecond at each write to such a client",
    ),
    "slowest of ten answers by 429 of a full server (s)": (1.0, "in time for the client to try another server"),
}  # fmt: skip


class ReadingHabit(NamedTuple):
    """How a client takes what is streamed to it."""

    read_bytes: int  # most that it takes at a time
    pause_s: float  # between two reads
    receive_buffer: int | None  # bytes that the kernel takes in for it; None: as many as the kernel likes


# Both cost the client next to nothing, so that the two sides of the ratio differ in what the server does alone.
PROMPT_READER = ReadingHabit(read_bytes=65536, pause_s=0.02, receive_buffer=None)
SLOW_READER = ReadingHabit(read_bytes=1, pause_s=0.2, receive_buffer=4096)


async def start(server: Server) -> list[float]:
    """The first two promises."""
    client = HttpClient(server.url)
    first, *later = [(await answered(client, 200)) for _ in range(11)]
    return [server.startup.ready_s, first / median(later)]


async def crowd(server: Server) -> list[float]:
    """The others."""
    client, gaps = HttpClient(server.url), []
    await answered(client, 200)
    for habit in (SLOW_READER, PROMPT_READER):
        async with companions(client, NUM_COMPANIONS, habit):
            gaps.append(await p99_gap(client))
    async with companions(client, CROWD, PROMPT_READER):
        refused = [await answered(client, 429) for _ in range(REFUSALS)]
    return [gaps[0] / gaps[1], max(refused)]


async def answered(client: HttpClient, expected: int) -> float:
    """Seconds of one request that is not streamed, and has this status."""
    started = time.perf_counter()
    status, _ = await client.json("POST", "/generate", {"inputs": PROMPT, "parameters": {"max_new_tokens": 20}})
    assert status == expected, f"a request was answered by {status} where {expected} was due"
    return time.perf_counter() - started


async def p99_gap(client: HttpClient) -> float:
    """The p99 of the seconds between two tokens of a stream, over all streams."""
    streams = (client.stream(TgiApi(), PROMPT, TOKENS_OF_A_READER) for _ in range(NUM_READERS))
    replies = await asyncio.gather(*streams)
    assert not any(reply.error for reply in replies), [reply.error for reply in replies]
    return percentile(sorted(b - a for reply in replies for a, b in pairwise(reply.token_times)), 99)


@asynccontextmanager
async def companions(client: HttpClient, count: int, habit: ReadingHabit) -> AsyncIterator[None]:
    """`count` clients with this habit, streaming for the whole length of the block."""
    streams = [asyncio.create_task(read_streams(client.url, habit)) for _ in range(count)]
    try:
        await wait_until_running(client, count)
        yield
        assert not any(stream.done() for stream in streams), "a stream ended before what was measured beside it did"
    finally:
        for stream in streams:
            stream.cancel()
        await asyncio.gather(*streams, return_exceptions=True)
    await wait_until_running(client, 0)


async def read_streams(url: str, habit: ReadingHabit) -> None:
    """Read one stream; a client that is cut because it hardly reads asks again at once."""
    while True:
        try:
            return await read_stream(url, habit)
        except ConnectionError:
            continue


async def read_stream(url: str, habit: ReadingHabit) -> None:
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
            if connection.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR):  # what came before the cut can still be read
                raise ConnectionResetError("the server cut the stream")


async def wait_until_running(client: HttpClient, count: int) -> None:
    """Wait until the server generates for exactly `count` requests."""
    deadline = time.perf_counter() + WAIT_SECONDS
    while True:
        lines = (await client.text("/metrics")).splitlines()
        running = next((float(line.split()[1]) for line in lines if line.startswith("tgi_batch_current_size ")), 0.0)
        if running == count:
            return
        assert time.perf_counter() < deadline, f"the server generates for {running:g} requests, not {count}"
        await asyncio.sleep(0.02)


def main() -> int:
    """Print each promise with its bound, its median and its range."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repeat", type=int, default=5, help="the fewest of which two may be disturbed (5)")
    samples: list[list[float]] = []
    for _ in range(parser.parse_args().repeat):
        found = []
        for settings, trial in ((EMBEDDED, start), (NULL, crowd)):
            with running_server(flags_of(settings)) as server:
                found += asyncio.run(trial(server))
        samples.append(found)
        print(*(f"{value:.3g}" for value in found), file=sys.stderr)
    rows = []
    for (name, (bound, why)), values in zip(PROMISES.items(), zip(*samples, strict=True), strict=True):
        verdict = "kept" if median(values) <= bound else "broken"
        rows.append(
            (name, f"{bound:g}", f"{median(values):.3g}", f"{min(values):.3g} to {max(values):.3g}", verdict, why)
        )
    print(table(("Promise", "At most", "Median", "Range", "Verdict", "Why"), rows))
    return int(any("broken" in row for row in rows))


if __name__ == "__main__":
    sys.exit(main())
