"""Do thousands of connections, many of them hostile, slow down those who are served beside them? And do they all end?

`python -m tests.system.hostile_connections [--idle 10000] [--hostile 1000] [--streams 32] [--seconds 60]` starts a
server and measures the gaps between the tokens of its streams: alone, with a crowd once all of it is there, and alone
again. The crowd is a process at nice 19: keep-alive connections that send one /health a minute, and hostile ones that
come back whenever the server has ended them. At last it waits until all hostile ones are ended. One line of JSON; exit
code 1 if a connection outlived its clock or a probe failed. Figures are in docs/results/router.md.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import socket
import subprocess
import sys
import time
from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import uvloop

from host.process import lower_priority
from tests.running import ROOT, Server, body

PROBE = b"GET /health HTTP/1.1\r\nhost: localhost\r\n\r\n"
SCRIPT = b"GET /docs/swagger-ui-bundle.js HTTP/1.1\r\nhost: localhost\r\n\r\n"  # 1.5 MB
POST = b"POST /generate HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"
TRICKLE_S = 0.5
ESTABLISHED = 1  # in the first byte of TCP_INFO
LATE_S = 10.0  # for a client at nice 19 to notice
OPENING = 50  # connections that are opened at a time


@dataclass(frozen=True)
class Timeouts:
    """The server's, in seconds."""

    header: float = 10.0
    body: float = 30.0
    keep_alive: float = 75.0
    unread: float = 60.0

    def flags(self) -> list[str]:
        """For the launcher."""
        return [word for name, value in asdict(self).items() for word in (flag(name), str(value))]


def flag(name: str) -> str:
    return f"--{name.replace('_', '-')}-timeout"


@dataclass(frozen=True)
class Hostile:
    """What one sends at once, what it goes on sending, and which clock ends it."""

    begin: bytes
    trickle: bytes
    clock: str


KINDS = {
    "slow headers": Hostile(PROBE[:-2] + b"a: ", b"x", "header"),
    "slow body": Hostile(POST + b"content-length: 100000\r\n\r\n{", b" ", "body"),
    "trailers": Hostile(POST + b"transfer-encoding: chunked\r\n\r\n1\r\n{\r\n0\r\n", b"x-request-id: mine\r\n", "body"),
    "unread answer": Hostile(SCRIPT, b"", "unread"),
    "pipelining": Hostile(SCRIPT * 17 + b"G", b"", "unread"),
    "empty lines": Hostile(PROBE, b"\r\n", "keep_alive"),
}


# ------------------------------------------------------------------------------------------------------ the crowd


class Crowd:
    """Connections of one process, idle and hostile."""

    def __init__(self, port: int, num_idle: int, num_hostile: int, interval: float) -> None:
        self.port = port
        self.lifetimes: defaultdict[str, list[float]] = defaultdict(list)
        self.probes: Counter[str] = Counter()
        self._interval = interval
        self._ending = False
        self._opening = asyncio.Semaphore(OPENING)
        self._missing = num_idle + num_hostile
        self._all_open = asyncio.Event()
        kinds = [list(KINDS)[number % len(KINDS)] for number in range(num_hostile)]
        self._idle = [asyncio.create_task(self._probe()) for _ in range(num_idle)]
        self._hostile = [asyncio.create_task(self._attack(kind)) for kind in kinds]

    async def open(self) -> None:
        """Until all are there at once."""
        await self._all_open.wait()

    async def end(self) -> None:
        """Until the server has ended the hostile ones; the idle ones leave last."""
        self._ending = True
        await asyncio.gather(*self._hostile)
        for task in self._idle:
            task.cancel()
        await asyncio.gather(*self._idle, return_exceptions=True)

    def _opened(self) -> None:
        self._missing -= 1
        if not self._missing:
            self._all_open.set()

    async def _probe(self) -> None:
        pause = random.uniform(0, self._interval)
        async with self._opening:
            reader, writer = await asyncio.open_connection("127.0.0.1", self.port)
            await self._ask(reader, writer)
            self._opened()
        try:
            while True:
                await asyncio.sleep(pause)
                await self._ask(reader, writer)
                pause = self._interval
        except (OSError, asyncio.IncompleteReadError) as error:
            self.probes[type(error).__name__] += 1
        finally:
            writer.close()

    async def _ask(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(PROBE)
        self.probes[(await reader.readuntil(b"\r\n\r\n")).split()[1].decode()] += 1

    async def _attack(self, name: str) -> None:
        kind, opened = KINDS[name], self._opened
        while not self._ending:
            with socket.socket() as connection:
                connection.setblocking(False)
                connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
                async with self._opening:
                    await asyncio.get_running_loop().sock_connect(connection, ("127.0.0.1", self.port))
                started = time.monotonic()
                connection.send(kind.begin)
                opened()
                opened = int
                while is_open(connection, kind.trickle):
                    await asyncio.sleep(TRICKLE_S)
                self.lifetimes[name].append(time.monotonic() - started)


def is_open(connection: socket.socket, trickle: bytes) -> bool:
    """Whether the server has not ended it; sends a little more if so."""
    if connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 1)[0] != ESTABLISHED:
        return False
    try:
        connection.send(trickle)
    except OSError:
        return False
    return True


async def crowd(port: int, num_idle: int, num_hostile: int, interval: float) -> None:
    """The child process: says when all are open, and on a line of input ends and reports."""
    it = Crowd(port, num_idle, num_hostile, interval)
    await it.open()
    print("open", flush=True)
    await asyncio.get_running_loop().run_in_executor(None, sys.stdin.readline)
    await it.end()
    print(json.dumps({"probes": it.probes, "lifetimes": it.lifetimes}), flush=True)


class CrowdProcess:
    """The crowd at nice 19, as its parent sees it. All are there when the `with` block begins."""

    def __init__(self, server: Server, num_idle: int, num_hostile: int, interval: float = 60.0) -> None:
        port = urlsplit(server.url).port
        command = [sys.executable, "-m", "tests.system.hostile_connections", "--crowd", str(port)]
        command += ["--idle", str(num_idle), "--hostile", str(num_hostile), "--interval", str(interval)]
        self._process = subprocess.Popen(
            command,
            cwd=ROOT,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            preexec_fn=lambda: lower_priority(19),
        )

    def __enter__(self) -> CrowdProcess:
        assert self._process.stdout is not None
        assert "open\n" == self._process.stdout.readline()
        return self

    def __exit__(self, *_: object) -> None:
        self._process.kill()
        self._process.communicate()

    def end(self, timeout: float) -> dict[str, Any]:
        """Wait until the server has ended all that is hostile. Returns what became of each."""
        output, _ = self._process.communicate("end\n", timeout=timeout)
        found: dict[str, Any] = json.loads(output)
        return found


# ------------------------------------------------------------------------------------------------- who is served


async def gaps(server: Server, num_streams: int, seconds: float, num_tokens: int) -> list[float]:
    """Milliseconds between the tokens of streams that follow upon each other."""
    until = time.monotonic() + seconds
    found: list[float] = []

    async def read(number: int) -> None:
        address = urlsplit(server.url)
        asked = json.dumps(body(f"Request {number}", max_new_tokens=num_tokens)).encode()
        request = POST.replace(b"generate", b"generate_stream") + b"content-length: %d\r\n\r\n%b" % (len(asked), asked)
        while time.monotonic() < until:
            reader, writer = await asyncio.open_connection(address.hostname, address.port)
            writer.write(request)
            assert b" 200 " in await reader.readuntil(b"\r\n\r\n")
            before = 0.0
            while (line := await reader.readline()) != b"0\r\n":
                assert line, "the stream was cut"
                if line.startswith(b"data:"):
                    now = time.perf_counter()
                    found.append(1000 * (now - before))
                    if not before:
                        found.pop()
                    before = now
            writer.close()

    await asyncio.gather(*(read(number) for number in range(num_streams)))
    return found


def p99(values: Sequence[float]) -> float:
    """Nearest rank."""
    return sorted(values)[-(-99 * len(values) // 100) - 1]


def held(router: Path) -> dict[str, float]:
    """Megabytes and descriptors of the router."""
    pages = int((router / "statm").read_text().split()[1])
    return {
        "mb": round(pages * os.sysconf("SC_PAGE_SIZE") / 1e6, 1),
        "descriptors": len(list((router / "fd").iterdir())),
    }


def outlived(lifetimes: dict[str, list[float]], timeouts: Timeouts) -> dict[str, float]:
    """The longest life of each kind that lived longer than its clock allows."""
    most = asdict(timeouts) | {"unread": 1.25 * timeouts.unread}  # it is looked at four times in each
    longest = {name: max(times) for name, times in lifetimes.items()}
    return {name: seconds for name, seconds in longest.items() if seconds > most[KINDS[name].clock] + LATE_S}


def measure(args: argparse.Namespace) -> dict[str, Any]:
    """All figures."""
    with Server("--model-id", args.model_id) if args.model_id else Server() as server:
        router = Path(f"/proc/{server.router()}")

        def figures() -> dict[str, float]:
            found = uvloop.run(gaps(server, args.streams, args.seconds, args.tokens))
            return {"p50_ms": round(p50(found), 2), "p99_ms": round(p99(found), 2), "gaps": len(found), **held(router)}

        uvloop.run(gaps(server, args.streams, 5, args.tokens))
        before = figures()
        with CrowdProcess(server, args.idle, args.hostile) as them:
            beside = figures()
            found = them.end(timeout=600)
        after = figures()
    return {
        "alone": before,
        "beside": beside,
        "alone_again": after,
        "ratio": round(beside["p99_ms"] / max(before["p99_ms"], after["p99_ms"]), 2),
        "probes": found["probes"],
        "ended": {name: [len(times), round(max(times), 1)] for name, times in found["lifetimes"].items()},
        "outlived": outlived(found["lifetimes"], Timeouts()),
    }


def p50(values: Sequence[float]) -> float:
    """Nearest rank."""
    return sorted(values)[-(-len(values) // 2) - 1]


def main(argv: Sequence[str] | None = None) -> int:
    """Measure and print, or be the crowd."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--idle", type=int, default=10_000)
    parser.add_argument("--hostile", type=int, default=1_000)
    parser.add_argument("--streams", type=int, default=32)
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--tokens", type=int, default=200)
    parser.add_argument("--model-id", default="")
    parser.add_argument("--interval", type=float, default=60.0, help=argparse.SUPPRESS)
    parser.add_argument("--crowd", type=int, default=0, help=argparse.SUPPRESS)
    args = parser.parse_args(argv)
    if args.crowd:
        uvloop.run(crowd(args.crowd, args.idle, args.hostile, args.interval))
        return 0
    result = measure(args)
    print(json.dumps(result))
    return int(bool(result["outlived"]) or set(result["probes"]) != {"200"})


if __name__ == "__main__":
    sys.exit(main())
