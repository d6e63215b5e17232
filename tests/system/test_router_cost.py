"""A step costs the router the same at 8 shards as at 1: CPU time of its process, which other work leaves alone."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from statistics import median

import pytest

from router.scheduling.request import ValidRequest
from router.shards.client import ShardedClient
from router.shards.wire import new_sequence, step_request
from server.config import ShardConfig
from tests.running import ROOT

DEMO = str(ROOT / "server" / "demo")
SEQUENCES = 32
SERIES, STEPS = 10, 60
MOST = 1.3  # times the cost at one shard


@contextmanager
def null_shards(folder: Path, num_ranks: int) -> Iterator[list[str]]:
    """The sockets of a null model's ranks, each in a process of its own."""
    folder.mkdir()
    paths = [str(folder / f"rank-{rank}") for rank in range(num_ranks)]
    steps = tuple(str(folder / f"steps-{rank}") for rank in range(1, num_ranks))
    processes = []
    try:
        for rank, path in enumerate(paths):
            config = ShardConfig(
                DEMO, DEMO, rank, num_ranks, path, "", step_sockets=steps, is_null=True, log_level="error"
            )
            config.save(folder / f"{rank}.json")
            command = [sys.executable, "-P", "-m", "server", "--config", str(folder / f"{rank}.json")]
            processes.append(subprocess.Popen(command, cwd=ROOT, env={"PYTHONPATH": str(ROOT)}))
        yield paths
    finally:
        for process in processes:
            process.kill()
            process.wait()


async def begin(shards: ShardedClient) -> None:
    """Sequences that decode from the second step on."""
    await shards.wait_ready(timeout=120)
    add = [new_sequence(id, ValidRequest([5], 9), [id], block_size=16) for id in range(SEQUENCES)]
    shards.send(step_request(1, add=add, chunks=[(id, 1) for id in range(SEQUENCES)]))
    await shards.receive()


async def cost(shards: ShardedClient, step: int) -> float:
    """CPU seconds of this process for one step in which all sequences decode."""
    started = time.process_time()
    shards.send(step_request(step, decode=True))
    reply = await shards.receive()
    assert SEQUENCES == len(reply.ids)
    return time.process_time() - started


async def compare(one: ShardedClient, eight: ShardedClient) -> float:
    """Cost at 8 shards over that at 1, the least of all series.

    The two take turns at every step, because a step costs more when it is waited for longer and caches have gone cold:
    eight ranks on two cores take longer, whoever passes the steps on.
    """
    ratios = []
    await asyncio.gather(begin(one), begin(eight))
    for first in range(2, 2 + SERIES * STEPS, STEPS):
        costs = [(await cost(one, step), await cost(eight, step)) for step in range(first, first + STEPS)]
        at_one, at_eight = (median(series) for series in zip(*costs, strict=True))
        print(f"{1e3 * at_one:.3f} ms a step at 1 shard, {1e3 * at_eight:.3f} at 8: {at_eight / at_one:.2f} x")
        ratios.append(at_eight / at_one)
    return min(ratios)


@pytest.mark.alone
def test_a_step_costs_the_same_whatever_the_number_of_shards(tmp_path: Path) -> None:
    async def run(one_path: list[str], eight_paths: list[str]) -> float:
        one, eight = ShardedClient(one_path), ShardedClient(eight_paths)
        try:
            return await compare(one, eight)
        finally:
            await asyncio.gather(one.close(), eight.close())

    with null_shards(tmp_path / "1", 1) as one_path, null_shards(tmp_path / "8", 8) as eight_paths:
        assert asyncio.run(run(one_path, eight_paths)) <= MOST
