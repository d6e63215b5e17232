"""Every thread of a shard computes on its rank's GPU: CUDA, a stub here, keeps a current device for each thread."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator
from types import SimpleNamespace

import pytest
import torch

from server import backends
from server.distributed import Shard
from server.pb import generate_pb2 as pb
from server.service import ShardService
from server.stepping.launched import StepResult

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
