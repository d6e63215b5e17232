"""What a step costs the router at 1, 2, 4 and 8 shards: CPU time of its process, over a fixed load on the null model.

`python -m tests.system.router_cost [--runs 3] [FOLDER ...]` measures the source in each FOLDER, which take turns; by
default this one. `--paths /generate_stream /v1/chat/completions --tokens 1500` compares streams of several APIs; these
should be long, since the prompts of chats are made one after another, and steps with few streams cost more for each
token. The router has a core of its own, and its shards share the others with this program: what eight ranks on two
cores do to the caches is not the router's cost. One line of JSON a run, then medians. Figures are in
docs/results/router.md.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import os
import tempfile
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from statistics import median

import httpx2

from tests.running import ROOT, Server, body

SHARDS = (1, 2, 4, 8)
STREAMS = 32
TOKENS = 300
NATIVE, CHAT = "/generate_stream", "/v1/chat/completions"
TEMPLATE = "{{ messages[-1]['content'] }}"


def main(argv: Sequence[str] | None = None) -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folders", nargs="*", default=[str(ROOT)], help="roots of the sources to compare")
    parser.add_argument("--shards", type=int, nargs="+", default=SHARDS, help="numbers of shards, the first of them 1")
    parser.add_argument("--runs", type=int, default=3, help="of each folder and number of shards")
    parser.add_argument("--tokens", type=int, default=TOKENS, help="of each stream")
    parser.add_argument("--paths", nargs="+", choices=(NATIVE, CHAT), default=[NATIVE], help="of the streams")
    args = parser.parse_args(argv)
    found: defaultdict[tuple[str, int, str], list[float]] = defaultdict(list)
    for _ in range(args.runs):
        for num_shards, folder, path in itertools.product(args.shards, args.folders, args.paths):
            cost = measure(Path(folder), num_shards, path, args.tokens)
            found[folder, num_shards, path].append(cost)
            run = {"folder": folder, "shards": num_shards, "path": path, "ms_per_step": round(cost, 3)}
            print(json.dumps(run), flush=True)
    for (folder, num_shards, path), costs in found.items():
        ratio = median(costs) / median(found[folder, 1, args.paths[0]])
        spread = f"{median(costs):.3f} ms ({min(costs):.3f}-{max(costs):.3f})"
        print(f"{folder} {num_shards} shards {path}: {spread}, {ratio:.2f} x")


def measure(folder: Path, num_shards: int, path: str = NATIVE, tokens: int = TOKENS) -> float:
    """Milliseconds of the router's CPU time for a token of every stream, after a smaller load."""
    with tempfile.NamedTemporaryFile("w", suffix=".jinja") as template:
        template.write(TEMPLATE)
        template.flush()
        flags = ("--chat-template", template.name) if path == CHAT else ()
        with Server("--model-id", "null", "--num-shard", str(num_shards), *flags, folder=folder) as server:
            router = server.router()
            separate(router, server.children())
            asyncio.run(load(server, path, tokens=30))
            before = cpu_seconds(router)
            asyncio.run(load(server, path, tokens))
            return 1000 * (cpu_seconds(router) - before) / tokens


def separate(router: int, children: Sequence[int]) -> None:
    """Give the router the first core, and everything else the others."""
    first, *others = sorted(os.sched_getaffinity(os.getppid()))
    for pid in (os.getpid(), *children):
        for thread in Path(f"/proc/{pid}/task").iterdir():
            os.sched_setaffinity(int(thread.name), {first} if pid == router else others or {first})


async def load(server: Server, path: str, tokens: int) -> None:
    """All streams at once, each read to its end."""
    limits = httpx2.Limits(max_connections=None)

    async def read(client: httpx2.AsyncClient, number: int) -> None:
        asked = body(f"Request {number}", max_new_tokens=tokens)
        if path == CHAT:
            messages = [{"role": "user", "content": asked["inputs"]}]
            asked = {"messages": messages, "max_tokens": tokens, "temperature": 0, "stream": True}
        async with client.stream("POST", f"{server.url}{path}", json=asked) as stream:
            assert 200 == stream.status_code
            async for _ in stream.aiter_raw():
                pass

    async with httpx2.AsyncClient(timeout=300, limits=limits) as client:
        await asyncio.gather(*(read(client, number) for number in range(STREAMS)))


def cpu_seconds(pid: int) -> float:
    """User and system time of a process, all of its threads."""
    fields = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


if __name__ == "__main__":
    main()
