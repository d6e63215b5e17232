"""Every thread of a shard computes on its rank's GPU: CUDA, a stub here, keeps a current device for each thread."""

from __future__ import annotations

import asyncio
import ctypes
import functools
import threading
from collections.abc import AsyncIterator, Callable
from types import SimpleNamespace

import pytest
import torch

from server import backends
from server.pb import generate_pb2 as pb
from server.ranks.collectives import Shard
from server.service import ShardService
from server.stepping.engine import StepResult

RANK = 2


class Cuda(threading.local):
    """The current device of each thread: the first, until the thread chooses."""

    device = torch.device("cuda", 0)

    def set_device(self, device: torch.device | int) -> None:
        self.device = torch.device("cuda", device) if isinstance(device, int) else device


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> Cuda:
    """In place of the parts of torch.cuda that a shard calls before it computes."""
    stub = Cuda()
    monkeypatch.setattr(torch.cuda, "set_device", stub.set_device)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "a stub")
    return stub


class NotingEngine:
    """Notes on which device its steps are launched and finished."""

    def __init__(self, cuda: Cuda, device: backends.Device):
        self.device = device
        self.shard = Shard()
        self.seen: list[tuple[str, torch.device]] = []
        self.is_done = False
        self._cuda = cuda

    def launch(self, request: pb.StepRequest) -> NotingEngine:
        self._note()
        return self

    def finish(self) -> StepResult:
        self._note()
        return StepResult([], [], [], [], [], {}, SimpleNamespace())  # type: ignore[arg-type]

    def _note(self) -> None:
        self.seen.append((threading.current_thread().name.split("_")[0], self._cuda.device))


def test_both_threads_of_the_service_have_the_ranks_gpu(cuda: Cuda, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = NotingEngine(cuda, backends.open_device("cuda", RANK, world_size=4))
    monkeypatch.setattr("server.service.to_reply", lambda step, result: pb.StepReply(step=step))

    async def requests() -> AsyncIterator[pb.StepRequest]:
        yield pb.StepRequest(step=1)

    async def replies() -> list[pb.StepReply]:
        service = ShardService(engine, pb.InfoReply(), 1.0)  # type: ignore[arg-type]
        return [reply async for reply in service.Run(requests(), None)]  # type: ignore[arg-type]

    assert [pb.StepReply(step=1)] == asyncio.run(replies())
    assert [("compute", torch.device("cuda", RANK)), ("finish", torch.device("cuda", RANK))] == engine.seen
    assert torch.device("cuda", RANK) == cuda.device  # of the main thread, which loads


@pytest.mark.parametrize(("world_size", "index", "num_sharing"), [(3, 2, 1), (4, 2, 1), (5, 2, 2), (8, 2, 2)])
def test_ranks_may_share_gpus_and_their_memory(
    cuda: Cuda, monkeypatch: pytest.MonkeyPatch, world_size: int, index: int, num_sharing: int
) -> None:
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (60 * 2**30, 80 * 2**30))
    for rank in (index, index + 4)[: 1 + (world_size > 6)]:
        device = backends.open_device("cuda", rank, world_size, shares=True)
        assert torch.device("cuda", index) == device.torch_device == cuda.device
        assert (60 - 8) * 2**30 // num_sharing == device.left_bytes(fraction=0.9, world_size=world_size, kv_bytes=0)


def test_what_ranks_of_a_gpu_take_together_is_divided(cuda: Cuda, monkeypatch: pytest.MonkeyPatch) -> None:
    free = iter([60 * 2**30, 52 * 2**30])
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: None)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (next(free), 80 * 2**30))
    assert 4 * 2**30 == backends.open_device("cuda", 0, 8, shares=True).taken_bytes(lambda: None)


def test_more_ranks_than_gpus_are_refused_with_both_remedies(cuda: Cuda) -> None:
    with pytest.raises(ValueError, match="there are 4 GPUs: use --num-shard 4, or --all-reduce host"):
        backends.open_device("cuda", 0, 8)


class Driver:
    """CUDA's driver, which runs a function of the host at once and gives an error of its own."""

    def __init__(self, error: int = 0) -> None:
        self.error = error
        self.numbers: list[int | None] = []

    def launch(self, stream: int, function: Callable[[int | None], None], number: int | None) -> int:
        self.numbers.append(number)
        function(number)
        return self.error


def test_functions_of_the_host_are_launched_by_their_numbers(cuda: Cuda, monkeypatch: pytest.MonkeyPatch) -> None:
    driver = Driver()
    monkeypatch.setattr(ctypes, "CDLL", lambda name: SimpleNamespace(cuLaunchHostFunc=functools.partial(driver.launch)))
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: SimpleNamespace(cuda_stream=7))
    queue = backends.open_device("cuda", 0, 1).host_queue()
    assert queue is not None
    said: list[str] = []
    functions = [functools.partial(said.append, "one"), functools.partial(said.append, "two")]
    for function in (*functions, *functions):
        queue.call(function)
    assert ["one", "two", "one", "two"] == said and [0, 1, 0, 1] == driver.numbers
    driver.error = 700
    with pytest.raises(RuntimeError, match="CUDA error: cuLaunchHostFunc gave 700"):
        queue.call(functions[0])
