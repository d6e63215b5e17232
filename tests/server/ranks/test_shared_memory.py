"""Ranks that are processes of this machine and speak through shared memory: what they compute, and whom they miss."""

from __future__ import annotations

import io
import os
import signal
import time
from collections.abc import Callable
from dataclasses import replace
from datetime import timedelta
from functools import partial
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from server.backends import cpu
from server.backends.cpu import Kernels
from server.ranks import collectives, shared_memory
from server.ranks.collectives import GroupCollectives, PeerLost, Shard
from server.ranks.shared_memory import BUFFER_BYTES, SharedMemory, has_core_for_each, join

CPU = torch.device("cpu")
# Elements of float32: less than a vector, about what each rank sums for itself, a buffer and more than several.
COUNTS = [1, 7, 16, 4095, 4097, 10_000, BUFFER_BYTES // 4, BUFFER_BYTES // 4 + 5, BUFFER_BYTES + 12_345]
Work = Callable[[Shard], Any]


def numbers(count: int, rank: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(count, generator=torch.Generator().manual_seed(100 * count + rank)).to(dtype)


def run_rank(rank: int, world_size: int, rendezvous: str, work: Work, has_kernels: bool, sending: Any) -> None:
    torch.set_num_threads(1)
    shard = collectives.connect(rank, world_size, f"file://{rendezvous}", CPU)
    shard = join(shard, cpu.load() if has_kernels else None, CPU)
    answer = io.BytesIO()
    torch.save(work(shard), answer)
    sending.send_bytes(answer.getvalue())
    collectives.disconnect()


def on_ranks(
    world_size: int, folder: Path, work: Work, *, answering: int | None = None, without: int | None = None
) -> list[Any]:
    """What `work` returns on each of so many ranks, or on the first `answering`. without: the rank without kernels."""
    context, receivers, ranks = get_context("spawn"), [], []
    for rank in range(world_size):
        receiving, sending = context.Pipe(duplex=False)
        arguments = (rank, world_size, str(folder / "met"), work, rank != without, sending)
        ranks.append(context.Process(target=run_rank, args=arguments))
        ranks[-1].start()
        sending.close()
        receivers.append(receiving)
    try:
        return [torch.load(io.BytesIO(receiving.recv_bytes())) for receiving in receivers[:answering]]
    finally:
        for process in ranks:
            process.kill()
            process.join()


def sums(shard: Shard) -> list[Tensor]:
    return [
        shard.all_reduce(numbers(count, shard.rank, dtype))
        for dtype in (torch.float32, torch.bfloat16)
        for count in COUNTS
    ]


@pytest.mark.parametrize("world_size", [2, 3, 8])
def test_sums_are_added_in_the_order_of_the_ranks_and_rounded_once(
    kernels: Kernels, tmp_path: Path, world_size: int
) -> None:
    found = on_ranks(world_size, tmp_path, sums)
    for place, (dtype, count) in enumerate((d, n) for d in (torch.float32, torch.bfloat16) for n in COUNTS):
        expected = torch.zeros(count)
        for rank in range(world_size):
            expected += numbers(count, rank, dtype).float()
        assert all(torch.equal(expected.to(dtype), of_rank[place]) for of_rank in found), (dtype, count)


def everything_else(shard: Shard) -> dict[str, Any]:
    rank, spread = shard.rank, torch.arange(12.0).view(3, 4).t() + shard.rank
    shard.barrier()
    return {
        "largest": shard.all_reduce_max(numbers(5000, rank)),
        "smallest": shard.minimum(7 - rank, CPU),
        "halves": shard.all_reduce(torch.full((3,), 0.5 + rank, dtype=torch.float16)),
        "integers": shard.all_reduce(torch.tensor([rank, 1])),
        "spread sum": shard.all_reduce(spread.clone(memory_format=torch.preserve_format)),
        "spread parts": shard.all_gather(spread),
        "parts": shard.all_gather(numbers(BUFFER_BYTES, rank)),
        "nothing": [shard.all_reduce(torch.empty(0)), *shard.all_gather(torch.empty(0))],
        "told": shard.broadcast(numbers(BUFFER_BYTES, rank)),
        "told spread": shard.broadcast(spread.clone(memory_format=torch.preserve_format)),
        "problem": shard.first_problem("it rains" if rank else None, CPU),
        "none": shard.first_problem(None, CPU),
    }


def test_all_else_is_what_it_is_without(kernels: Kernels, tmp_path: Path) -> None:
    both = on_ranks(2, tmp_path, everything_else)
    spread = torch.arange(12.0).view(3, 4).t()
    for found in both:
        assert torch.equal(torch.maximum(numbers(5000, 0), numbers(5000, 1)), found["largest"])
        assert [6, [2, 2, 2], [1, 2]] == [found["smallest"], found["halves"].tolist(), found["integers"].tolist()]
        assert torch.equal(2 * spread + 1, found["spread sum"]) and torch.equal(spread, found["told spread"])
        assert all(torch.equal(spread + rank, part) for rank, part in enumerate(found["spread parts"]))
        assert all(torch.equal(numbers(BUFFER_BYTES, rank), part) for rank, part in enumerate(found["parts"]))
        assert torch.equal(numbers(BUFFER_BYTES, 0), found["told"])
        assert [0, 0, 0] == [len(part) for part in found["nothing"]]
        assert ["rank 1: it rains", None] == [found["problem"], found["none"]]


def turns_of_unequal_ranks(shard: Shard) -> bool:
    """Ranks that are late by turns, so that each sleeps until another wakes it, and is itself awaited."""
    for turn in range(3000):
        if turn % 500 == 100 * shard.rank:
            time.sleep(0.03)
        count = 1 + turn * 37 % 6000
        total = shard.all_reduce(torch.full((count,), float(turn + shard.rank)))
        if not bool((total == 3 * turn + 3).all()):
            return False
    return True


def test_nobody_reads_what_another_step_has_written(kernels: Kernels, tmp_path: Path) -> None:
    assert [True] * 3 == on_ranks(3, tmp_path, turns_of_unequal_ranks)


def lose(shard: Shard, fault: int, patience: float) -> tuple[list[str], int]:
    """What rank 0 is told by three collectives, and how many steps these have begun. Rank 1 sends itself a signal."""
    shard.all_reduce(torch.ones(3))
    shard.wait_at_most(timedelta(seconds=patience))
    if shard.rank == 1:
        os.kill(os.getpid(), fault)
        time.sleep(300)
    assert isinstance(shard.collectives, SharedMemory)
    before, told = shard.collectives._meeting.step, []
    for collective in (shard.all_reduce, shard.broadcast, shard.all_gather):
        try:
            collective(torch.ones(3))
        except PeerLost as error:
            told.append(str(error))
    return told, shard.collectives._meeting.step - before


@pytest.mark.parametrize(
    ("fault", "patience", "told"),
    [(signal.SIGKILL, 600, "rank 1 has ended"), (signal.SIGSTOP, 0.5, "timed out after 0.5 s")],
    ids=["dies", "stands still"],
)
def test_a_rank_that_is_missing_is_told_and_not_waited_for_again(
    kernels: Kernels, tmp_path: Path, fault: int, patience: float, told: str
) -> None:
    ((said, num_steps),) = on_ranks(2, tmp_path, partial(lose, fault=fault, patience=patience), answering=1)
    assert ([f"lost contact with another rank: {told}"] * 3, 1) == (said, num_steps)


@pytest.mark.parametrize(
    ("cpus", "quota", "expected"), [(4, None, True), (3, None, False), (8, 4.0, True), (8, 3.5, False), (2, 8.0, False)]
)
def test_ranks_look_out_where_they_take_nobodys_time(cpus: int, quota: float | None, expected: bool) -> None:
    assert expected == has_core_for_each(4, cpus, quota)


def test_memory_of_another_process_is_known_by_its_token(tmp_path: Path) -> None:
    """As a process of the same number on another machine may have."""
    with (tmp_path / "other").open("w+b") as file:
        file.write(bytes(64))
        file.flush()
        at = (os.getpid(), file.fileno())
        assert (None, "rank 0 is on another machine") == shared_memory._open(*at, 64, b"x" * 16)
        assert (None, "rank 0 is on another machine") == shared_memory._open(*at, 65, bytes(16))
        memory, problem = shared_memory._open(*at, 64, bytes(16))
        assert problem is None and memory is not None
        memory.close()
    memory, problem = shared_memory._open(2**22 + 1, 3, 64, bytes(16))
    assert memory is None and "rank 0's memory cannot be opened: [Errno 2]" in str(problem)


def without_pidfds(shard: Shard) -> str:
    """Join again, as on a Python that was built for an older system."""
    if shard.rank:
        del os.pidfd_open
    again = join(replace(shard, collectives=GroupCollectives()), cpu.load(), CPU)
    return type(again.collectives).__name__


def test_a_python_without_what_is_wanted_stays_with_gloo(kernels: Kernels, tmp_path: Path) -> None:
    assert ["GroupCollectives"] * 2 == on_ranks(2, tmp_path, without_pidfds)


def over_what(shard: Shard) -> tuple[str, float]:
    return type(shard.collectives).__name__, float(shard.all_reduce(torch.ones(1)))


@pytest.mark.parametrize("without", [None, 0, 1])
def test_where_one_rank_cannot_none_does(kernels: Kernels, tmp_path: Path, without: int | None) -> None:
    name = SharedMemory.__name__ if without is None else GroupCollectives.__name__
    assert [(name, 2.0)] * 2 == on_ranks(2, tmp_path, over_what, without=without)
