"""Decoding over slow links, held against what `plan` foresees: `python -m tests.nodes.slow_links --model FOLDER`. Root.

Two nodes with a core each and a pipeline stage each, with mutual TLS, and between them a cable with a delay
(`delays.py`). First `latency` measures the whole model on one core, which is what `plan --cost` divides among the
stages; then for each delay and number of streams a server's times between tokens, and to the first token of a stream
alone, are medians that are printed beside the plan's as JSON. A delay of 0 tells what the cable costs by itself.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx2

from tests.nodes.cluster import Cluster, Machine, certificates
from tests.nodes.machines import Namespace, machines
from tests.running import ROOT, Server, body

STAGES, PROMPT, TOKENS = 2, 64, 60
ECHO = """
import socket
listener = socket.create_server(("0.0.0.0", 7777))
print("ready", flush=True)
end, _ = listener.accept()
while data := end.recv(1 << 16):
    end.sendall(data)
"""
NUM_ECHOES = 20

Plan = dict[tuple[str, int], float]  # ms by step and batch size


@dataclass(frozen=True)
class OneCore:
    """A node with a core of its own."""

    machine: Machine
    core: int

    @property
    def address(self) -> str:
        """As other nodes see it."""
        return self.machine.address

    def command(self, argv: Sequence[str]) -> list[str]:
        """Run it there."""
        return self.machine.command(["taskset", "--cpu-list", str(self.core), *argv])


def benchmark(*argv: str, core: int = 0) -> dict[str, Any]:
    """The JSON of a command of the benchmark that has one core."""
    command = ["taskset", "--cpu-list", str(core), sys.executable, "-m", "benchmark", *argv]
    done = subprocess.run(command, cwd=ROOT, check=True, stdout=subprocess.PIPE, text=True, timeout=600)
    return dict(json.loads(done.stdout.splitlines()[-1]))


def round_trip_ms(node: Machine) -> float:
    """The median time of a byte to a node and back."""
    assert isinstance(node, Namespace)
    command = node.command([sys.executable, "-c", ECHO])
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as echo:
        assert echo.stdout is not None and echo.stdout.readline() == "ready\n"
        with socket.create_connection((node.address, 7777), timeout=30) as end:
            times = []
            for _ in range(NUM_ECHOES):
                began = time.perf_counter()
                end.sendall(b".")
                end.recv(1)
                times.append(1000 * (time.perf_counter() - began))
    return statistics.median(times)


async def token_times(server: Server, streams: int, tokens: int) -> list[list[float]]:
    """When each stream of a load of so many had its tokens, after it was sent; in ms."""

    async def one(client: httpx2.AsyncClient, number: int) -> list[float]:
        prompt = " ".join(f"t{number + n}" for n in range(PROMPT))
        request = body(prompt, max_new_tokens=tokens, ignore_eos=True)
        began, times = time.monotonic(), []
        async with client.stream("POST", f"{server.url}/generate_stream", json=request) as stream:
            async for line in stream.aiter_lines():
                if line.startswith("data:"):
                    times.append(1000 * (time.monotonic() - began))
        return times

    async with httpx2.AsyncClient(timeout=600) as client:
        return list(await asyncio.gather(*(one(client, number) for number in range(streams))))


def medians(server: Server, streams: int, tokens: int = TOKENS) -> tuple[float, float]:
    """Between two tokens while all streams decode, and to the first token; in ms."""
    asyncio.run(token_times(server, streams, tokens))  # connections, and whatever else is met for the first time
    found = asyncio.run(token_times(server, streams, tokens))
    begin, end = max(times[0] for times in found), min(times[-1] for times in found)
    spans = [[at for at in times if begin <= at <= end] for times in found]
    gaps = [(span[-1] - span[0]) / (len(span) - 1) for span in spans]
    return statistics.median(gaps), statistics.median(times[0] for times in found)


def planned(args: argparse.Namespace, delay_ms: float, cost: Path) -> Plan:
    """What is expected, by step and batch size."""
    result = benchmark(
        "plan", "--model-id", str(args.model), "--dtype", args.dtype, "--num-shard", "1", "--cost", str(cost),
        "--pipeline-parallel", str(STAGES), "--link-ms", str(delay_ms), "-s", str(PROMPT), "-d", str(TOKENS),
        "-b", *map(str, args.streams),
    )  # fmt: skip
    return {(row["step"], row["batch_size"]): row["expected_ms"] for row in result["rows"]}


def compared(args: argparse.Namespace, delay_ms: float, plan: Plan, tls_dir: str) -> Iterator[dict[str, float]]:
    """For each number of streams, what a server shows over links of this delay, beside the plan."""
    flags = ("--model-id", str(args.model), "--dtype", args.dtype, "--pipeline-parallel", str(STAGES))
    with machines(2, delay_ms) as nodes:
        rtt = round_trip_ms(nodes[1])
        own_cores = [OneCore(node, core) for core, node in enumerate(nodes)]
        with Cluster(own_cores, *flags, "--disable-prefix-caching", "--tls-dir", tls_dir) as server:
            for streams in args.streams:
                token_ms, first_ms = medians(server, streams)
                line = {"delay_ms": delay_ms, "round_trip_ms": rtt, "streams": streams}
                line |= beside("token", token_ms, plan["Decode (token)", streams])
                yield line | (beside("first", first_ms, plan["Prefill", 1]) if streams == 1 else {})


def beside(name: str, ms: float, planned_ms: float) -> dict[str, float]:
    """A measured time, a planned one, and their ratio."""
    return {f"{name}_ms": ms, f"planned_{name}_ms": planned_ms, f"{name}_ratio": ms / planned_ms}


def main() -> int:
    """Run the command; the exit code."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", type=Path, required=True, help="a folder whose tokenizer knows the words t0, t1, …")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--delays", type=float, nargs="+", default=[0, 1, 5, 20], metavar="MS")
    parser.add_argument("--streams", type=int, nargs="+", default=[1, 8], metavar="N")
    args = parser.parse_args()
    batches = sorted({1, *(max(2, streams // STAGES) for streams in args.streams)})
    with tempfile.TemporaryDirectory() as name, certificates(Path(name, "tls")) as tls_dir:
        cost = Path(name, "latency")
        benchmark(
            "latency", "--model-id", str(args.model), "--dtype", args.dtype, "--num-shard", "1", "-r", "3",
            "-s", str(PROMPT), "-d", str(TOKENS), "-b", *map(str, batches), "--output", str(cost), core=1,
        )  # fmt: skip
        for delay_ms in args.delays:
            for line in compared(args, delay_ms, planned(args, delay_ms, cost / "result.json"), tls_dir):
                print(json.dumps({key: round(value, 3) for key, value in line.items()}), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
