"""WORLD_SIZE ranks over NCCL; prints rank 0's tokens.

`python -m tests.gpu.nccl_rank FOLDER WORLD_SIZE INIT ALL_REDUCE`, the last as `--all-reduce`.
"""

from __future__ import annotations

import faulthandler
import json
import sys
from pathlib import Path

import torch
import torch.multiprocessing as mp

from server import backends
from server.__main__ import TEARDOWN_SECONDS
from server.distributed import connect, disconnect
from tests.server.driver import generate, load_engine
from tests.server.ranks import prompts


def run(rank: int, folder: Path, world_size: int, rendezvous: str, all_reduce: str) -> None:
    device = backends.open_device("cuda", rank, world_size)
    shard = connect(rank, world_size, rendezvous, device.torch_device, all_reduce)
    engine = load_engine(folder, shard=shard, backend=backends.choose(device, torch.float32))
    tokens = [p.tokens for p in generate(engine, prompts())]
    if rank == 0:
        print(json.dumps(tokens), flush=True)
    # As a shard ends: graphs hold captured collectives, for whose end NCCL waits; a timer ends what waits all the same.
    faulthandler.dump_traceback_later(TEARDOWN_SECONDS, exit=True)
    engine.release()
    torch.cuda.synchronize(device.torch_device)
    disconnect()


if __name__ == "__main__":
    folder, world_size, rendezvous, all_reduce = sys.argv[1:]
    mp.spawn(run, args=(Path(folder), int(world_size), rendezvous, all_reduce), nprocs=int(world_size))
