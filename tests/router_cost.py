"""What a step costs the router at 1, 2, 4 and 8 shards: CPU time of its process, over a fixed load on the null model.

`python -m tests.router_cost [--runs 3] [FOLDER ...]` measures the source in each FOLDER, which take turns; by default
this one. The router has a core of its own, and its shards share the others with this program: what eight ranks on two
cores do to the caches is not the router's cost. One line of JSON a run, then medians. Figures are in
docs/results/2026-11-22-steps-through-rank-0.md.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from statistics import median

import httpx2

from tests.running import ROOT, Server, body

SHARDS = (1, 2, 4, 8)
STREAMS = 32
TOKENS = 300


def main(argv: Sequence[str] | None = None) -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folders", nargs="*", default=[str(ROOT)], help="roots of the sources to compare")
    parser.add_argument("--shards", type=int, nargs="+", default=SHARDS, help="numbers of shards, the first of them 1")
    parser.add_argument("--runs", type=int, default=3, help="of each folder and number of shards")
    args = parser.parse_args(argv)
    found: defaultdict[tuple[str, int], list[float]] = defaultdict(list)
    for _ in range(args.runs):
        for num_shards in args.shards:
            for folder in args.folders:
                cost = measure(Path(folder), num_shards)
                found[folder, num_shards].append(cost)
                print(json.dumps({"folder": folder, "shards": num_shards, "ms_per_step": round(cost, 3)}), flush=True)
    for (folder, num_shards), costs in sorted(found.items()):
        ratio = median(costs) / median(found[folder, 1])
        print(
            f"{folder} {num_shards} shards: {median(costs):.3f} ms ({min(costs):.3f}-{max(costs):.3f}), {ratio:.2f} x"
        )


def measure(folder: Path, num_shards: int) -> float:
    """Milliseconds of the router's CPU time for each step of one load, after a smaller one."""
    with Server("--model-id", "null", "--num-shard", str(num_shards), folder=folder) as server:
        router = server.router()
        separate(router, server.children())
        asyncio.run(load(server, tokens=30))
        before = cpu_seconds(router), steps_of(server)
        asyncio.run(load(server, tokens=TOKENS))
        after = cpu_seconds(router), steps_of(server)
    return 1000 * (after[0] - before[0]) / (after[1] - before[1])


def separate(router: int, children: Sequence[int]) -> None:
    """Give the router the first core, and everything else the others."""
    first, *others = sorted(os.sched_getaffinity(os.getppid()))
    for pid in (os.getpid(), *children):
        for thread in Path(f"/proc/{pid}/task").iterdir():
            os.sched_setaffinity(int(thread.name), {first} if pid == router else others or {first})


async def load(server: Server, tokens: int) -> None:
    """All streams at once, each read to its end."""
    limits = httpx2.Limits(max_connections=None)

    async def read(client: httpx2.AsyncClient, number: int) -> None:
        asked = body(f"Request {number}", max_new_tokens=tokens)
        async with client.stream("POST", f"{server.url}/generate_stream", json=asked) as stream:
            assert 200 == stream.status_code
            async for _ in stream.aiter_raw():
                pass

    async with httpx2.AsyncClient(timeout=300, limits=limits) as client:
        await asyncio.gather(*(read(client, number) for number in range(STREAMS)))


def steps_of(server: Server) -> float:
    """How many steps the server has taken."""
    counts = [value for name, value in server.metrics().items() if name.startswith("tgi_batch_forward_duration_count")]
    assert counts
    return sum(counts)


def cpu_seconds(pid: int) -> float:
    """User and system time of a process, all of its threads."""
    fields = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


if __name__ == "__main__":
    main()
