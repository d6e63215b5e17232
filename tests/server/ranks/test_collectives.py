"""Ranks and what ties them: whose fault an error is, and that no rank does what another one does not."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from server.backends.cpu import Kernels
from server.backends.device import CaptureFailed
from server.backends.protocol import Computation
from server.ranks.collectives import PeerLost, Shard
from server.stepping.graphs import AgreedCapture
from tests.running import ROOT, kill_group
from tests.server.conftest import DEMO
from tests.server.driver import CPU
from tests.server.ranks import tensor_parallel

DEVICE_FAILED = "CUDA error: an illegal memory access was encountered"


def two_ranks_whose_all_reduce(monkeypatch: pytest.MonkeyPatch, error: BaseException) -> Callable[[], object]:
    """An all-reduce of two ranks that fails with `error`."""

    def fail(*_: object, **__: object) -> None:
        raise error

    monkeypatch.setattr(dist, "all_reduce", fail)
    return lambda: Shard(0, 2).all_reduce(torch.ones(2))


@pytest.mark.parametrize(
    "error",
    [
        dist.DistNetworkError("The client socket has timed out after 2000ms"),
        dist.DistStoreError("Timed out after 3 seconds waiting for clients. 1/2 clients joined."),
        dist.DistBackendError("NCCL error in: x.cpp:1, remote process exited or there was a network error"),
        dist.DistBackendError("NCCL communicator was aborted on rank 0."),
        RuntimeError("[pair.cc:553] Connection closed by peer [127.0.0.1]:424."),
        RuntimeError("[unbound_buffer.cc:78] Timed out waiting 3000ms for recv operation to complete"),
        RuntimeError("Application timeout caused pair closure"),
        RuntimeError("Wait timeout"),
    ],
    ids=str,
)
def test_what_a_peer_caused_is_a_lost_peer(monkeypatch: pytest.MonkeyPatch, error: RuntimeError) -> None:
    with pytest.raises(PeerLost):
        two_ranks_whose_all_reduce(monkeypatch, error)()


@pytest.mark.parametrize(
    "error",
    [
        torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB"),
        torch.AcceleratorError(DEVICE_FAILED),
        RuntimeError(DEVICE_FAILED),
        RuntimeError("CUDA error: the launch timed out and was terminated"),
        dist.DistBackendError("NCCL error in: x.cpp:1, unhandled cuda error (run with NCCL_DEBUG=INFO for details)"),
        RuntimeError("Tensors must be contiguous"),
    ],
    ids=str,
)
def test_what_failed_here_stays_what_it_is(monkeypatch: pytest.MonkeyPatch, error: RuntimeError) -> None:
    with pytest.raises(type(error)) as raised:
        two_ranks_whose_all_reduce(monkeypatch, error)()
    assert error is raised.value


@pytest.fixture(scope="module")
def uneven(kernels: Kernels, tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """What became of two ranks of which one cannot capture every step."""
    rendezvous = f"file://{tmp_path_factory.mktemp('uneven') / 'rendezvous'}"
    command = [sys.executable, "-m", "tests.server.ranks.uneven_ranks", rendezvous, str(DEMO)]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, cwd=ROOT, text=True, start_new_session=True
    ) as process:
        try:
            stdout, stderr = process.communicate(timeout=300)  # a bound of liveness
        finally:
            kill_group(process)
    assert process.returncode == 0, stderr
    found: list[dict[str, Any]] = json.loads(stdout.splitlines()[-1])
    return found


def test_where_one_rank_cannot_capture_none_replays(uneven: list[dict[str, Any]]) -> None:
    expected = tensor_parallel.tokens(DEMO, Shard())
    assert [expected, expected] == [rank["tokens"] for rank in uneven]


def test_every_rank_says_which_one_could_not_and_why(uneven: list[dict[str, Any]]) -> None:
    said = {rank["captured"] for rank in uneven}
    assert 1 == len(said)
    assert "rank 1: OutOfMemoryError: no memory for this graph" in said.pop()


class Failing:
    """A capture that fails."""

    sizes = (1,)
    prompt_tokens = ()
    computes = False

    def __call__(self, function: Computation) -> Computation:
        raise CaptureFailed("no memory")


def test_a_single_rank_computes_without_a_graph_too() -> None:
    capture = AgreedCapture(Failing(), Shard(), CPU)

    def function() -> tuple[torch.Tensor, ...]:
        return ()

    assert function is capture(function)
    assert ["no memory"] == capture.failures


def test_on_a_single_rank_nothing_is_sent(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("all_reduce", "all_gather", "barrier"):
        monkeypatch.delattr(dist, name)
    assert Shard().first_problem(None, CPU) is None
    assert "full" == Shard().first_problem("full", CPU)


SLOW_TO_LOAD = """
import os, sys, time
from datetime import timedelta
import torch
from server.ranks import collectives
rank, rendezvous = int(sys.argv[1]), sys.argv[2]
shard = collectives.connect(rank, 2, rendezvous, torch.device("cpu"))
short = timedelta(seconds=1)
collectives._set_pg_timeout(short) if sys.argv[3] == "short" else None
time.sleep(3 * rank)
try:
    shard.barrier()
    print("loaded", flush=True)
    shard.wait_at_most(short)
    time.sleep(4 * rank)
    shard.barrier()
except collectives.PeerLost:
    print("lost", flush=True)
os._exit(0)
"""


@pytest.mark.parametrize(("patience", "said"), [("long", "loaded\nlost\n"), ("short", "lost\n")])
def test_a_rank_that_loads_slowly_is_waited_for_and_one_that_is_warm_is_not(
    tmp_path: Path, patience: str, said: str
) -> None:
    command = [sys.executable, "-c", SLOW_TO_LOAD]
    tensor_parallel = [
        subprocess.Popen(
            [*command, str(rank), f"file://{tmp_path}/meeting", patience], cwd=ROOT, stdout=subprocess.PIPE, text=True
        )
        for rank in range(2)
    ]
    said_by = [rank.communicate(timeout=300)[0] for rank in tensor_parallel]
    assert said == said_by[0]
