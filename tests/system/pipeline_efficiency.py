"""How much of its stages' speed a pipeline reaches: `python -m tests.system.pipeline_efficiency --model FOLDER`.

It measures decode steps of each of two stages by itself, both at once in processes of one thread, so that both cores
are busy and nobody waits for anybody; then a whole server with as many stages, and as many micro-batches as asked for,
under streams that fill them. A pipeline that never idles makes one micro-batch's tokens in the time of the slower
stage; the share of that which the server reaches is printed as JSON with the times.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import httpx2
import torch
from torch import Tensor

from server.blocks import num_blocks
from server.pb import generate_pb2 as pb
from tests.cpu_kernels import load
from tests.running import ROOT, Server, body
from tests.server.driver import GREEDY, load_engine

STAGES = 2
PROMPT, STEPS, WARM_UPS = 64, 60, 5  # tokens, and decode steps that are measured and that come before
TOKENS = 160  # of each stream
SETTLE_S = 2.0


class Nothing:
    """The ends of a ring at which what is received is there at once, and what is sent goes nowhere."""

    def send(self, tensors: Sequence[Tensor], ready: object = None) -> None:
        """Forget it."""

    def receive(self, parts: Sequence[tuple[tuple[int, ...], torch.dtype]]) -> list[Tensor]:
        """Zeros."""
        return [torch.zeros(shape, dtype=dtype) for shape, dtype in parts]

    def close(self) -> None:
        """There is nothing."""


def stage_seconds(folder: Path, stage: int, batch: int) -> float:
    """The median time of a decode step of one stage, with a thread of its own."""
    torch.set_num_threads(1)
    tokens = PROMPT + WARM_UPS + STEPS + 2
    engine = load_engine(
        folder, dtype=torch.bfloat16, kernels=load(), stage=(stage, STAGES), ring=Nothing(),  # type: ignore[arg-type]
        tokens=batch * (tokens + 16), total_tokens=tokens,
    )  # fmt: skip
    blocks = itertools.count()
    first = pb.StepRequest(step=1)
    for id in range(batch):
        table = list(itertools.islice(blocks, num_blocks(tokens)))
        first.add.add(id=id, token_ids=range(100, 100 + PROMPT), blocks=table, sampling=GREEDY)
        first.chunk_ids.append(id)
        first.chunk_tokens.append(PROMPT)
    engine.launch(first)
    print("ready", flush=True)
    sys.stdin.readline()
    times = []
    for step in range(2, 2 + WARM_UPS + STEPS):
        began = time.perf_counter()
        launched = engine.launch(pb.StepRequest(step=step, decode=True))
        if launched is not None:
            launched.finish()
        times.append(time.perf_counter() - began)
    return statistics.median(times[WARM_UPS:])


def both_stages(folder: Path, batch: int) -> list[float]:
    """The times of all stages, measured at once."""
    argv = [sys.executable, "-m", "tests.system.pipeline_efficiency", "--model", str(folder), "--batch", str(batch)]
    pipe = subprocess.PIPE
    jobs = [
        subprocess.Popen([*argv, "--stage", str(stage)], cwd=ROOT, stdin=pipe, stdout=pipe, text=True)
        for stage in range(STAGES)
    ]
    for job in jobs:
        assert job.stdout is not None and job.stdout.readline() == "ready\n"
    for job in jobs:
        assert job.stdin is not None
        job.stdin.write("go\n")
        job.stdin.flush()
    return [float(job.communicate(timeout=300)[0]) for job in jobs]


async def tokens_per_second(server: Server, streams: int) -> float:
    """Of so many streams, from a while after all have begun until the first ends."""
    arrivals: list[list[float]] = [[] for _ in range(streams)]

    async def one(client: httpx2.AsyncClient, number: int) -> None:
        prompt = " ".join(f"{number}" for _ in range(PROMPT // 2))
        request = body(prompt, max_new_tokens=TOKENS, ignore_eos=True)
        async with client.stream("POST", f"{server.url}/generate_stream", json=request) as stream:
            async for line in stream.aiter_lines():
                if line.startswith("data:"):
                    arrivals[number].append(time.monotonic())

    async with httpx2.AsyncClient(timeout=600, limits=httpx2.Limits(max_connections=None)) as client:
        await asyncio.gather(*(one(client, number) for number in range(streams)))
    begin = max(times[0] for times in arrivals) + SETTLE_S
    end = min(times[-1] for times in arrivals)
    assert end > begin + SETTLE_S, "the streams are too short for this machine: raise TOKENS"
    return sum(begin < at <= end for times in arrivals for at in times) / (end - begin)


def main() -> int:
    """Run the command; the exit code."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--batch", type=int, default=8, help="sequences of one micro-batch")
    parser.add_argument("--micro-batches", type=int, default=8)
    parser.add_argument("--stage", type=int, default=None, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.stage is not None:
        print(stage_seconds(args.model, args.stage, args.batch))
        return 0
    before = both_stages(args.model, args.batch)
    flags = ("--pipeline-parallel", str(STAGES), "--micro-batches", str(args.micro_batches), "--dtype", "bfloat16")
    with Server("--model-id", str(args.model), *flags, "--disable-prefix-caching") as server:
        served = asyncio.run(tokens_per_second(server, args.batch * args.micro_batches))
    after = both_stages(args.model, args.batch)
    slower = max(statistics.mean(pair) for pair in zip(before, after, strict=True))
    result = {
        "stage_ms": [[round(1000 * seconds, 2) for seconds in times] for times in (before, after)],
        "tokens_per_s": round(served, 1),
        "most_tokens_per_s": round(args.batch / slower, 1),
        "share": round(served * slower / args.batch, 3),
    }
    print(json.dumps(result))
    return 0


if __name__ == "__main__":
    sys.exit(main())
