"""WORLD_SIZE ranks over NCCL; prints rank 0's tokens.

`python -m tests.gpu.nccl_rank FOLDER WORLD_SIZE INIT ALL_REDUCE`, the last as `--all-reduce`. Steps are launched and
finished by the two threads of a service, as in a server: CUDA keeps a current device for each thread. A rank that takes
too long says where it stands, and ends.
"""

from __future__ import annotations

import asyncio
import faulthandler
import json
import sys
from pathlib import Path

import torch
import torch.multiprocessing as mp

from server import backends
from server.__main__ import TEARDOWN_SECONDS
from server.pb import generate_pb2 as pb
from server.ranks.collectives import connect, disconnect
from server.service import ShardService
from server.stepping.engine import Engine, Launched, StepResult
from tests.server.driver import generate, load_engine
from tests.server.ranks.tensor_parallel import prompts

TIMEOUT = 240  # seconds: the ranks of a tiny model need some twenty


class ThreadedStep:
    """A step that a service's other thread finishes."""

    def __init__(self, service: ShardService, launched: Launched):
        self._service = service
        self._launched = launched

    def finish(self) -> StepResult:
        return self._service._finish.submit(self._launched.finish).result()


class ThreadedEngine:
    """An engine whose steps are launched on the thread of a service."""

    def __init__(self, service: ShardService, engine: Engine):
        self.model = engine.model
        self._service = service
        self._engine = engine

    def launch(self, request: pb.StepRequest) -> ThreadedStep | None:
        launched = self._service._compute.submit(self._engine.launch, request).result()
        return None if launched is None else ThreadedStep(self._service, launched)


async def tokens(engine: Engine) -> list[list[int]]:
    """The tokens of every prompt."""
    service = ShardService(engine, pb.InfoReply(), 1.0)
    return [p.tokens for p in generate(ThreadedEngine(service, engine), prompts())]  # type: ignore[arg-type]


def run(rank: int, folder: Path, world_size: int, rendezvous: str, all_reduce: str) -> None:
    faulthandler.dump_traceback_later(TIMEOUT, exit=True)
    device = backends.open_device("cuda", rank, world_size)
    shard = connect(rank, world_size, rendezvous, device.torch_device, all_reduce)
    engine = load_engine(folder, shard=shard, backend=backends.choose(device, torch.float32), warms_up=False)
    found = asyncio.run(tokens(engine))
    if rank == 0:
        print(json.dumps(found), flush=True)
    # As a shard ends: graphs hold captured collectives, for whose end NCCL waits; a timer ends what waits all the same.
    faulthandler.dump_traceback_later(TEARDOWN_SECONDS, exit=True)
    engine.release()
    torch.cuda.synchronize(device.torch_device)
    disconnect()


if __name__ == "__main__":
    folder, world_size, rendezvous, all_reduce = sys.argv[1:]
    mp.spawn(run, args=(Path(folder), int(world_size), rendezvous, all_reduce), nprocs=int(world_size))
