"""Two ranks of which one cannot capture: `python -m tests.server.ranks.uneven_ranks RENDEZVOUS FOLDER`.

Prints a JSON list of each rank's tokens and how its steps are captured.
"""

from __future__ import annotations

import json
import multiprocessing
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from server.arch.spec import ArchSpec
from server.backends.cpu import CpuBackend, Kernels
from server.backends.device import CaptureFailed
from server.backends.protocol import Computation, GraphCapture
from server.ranks.collectives import connect, disconnect
from server.stepping.warmup import _captured
from tests.cpu_kernels import load
from tests.server.driver import CPU, Repeating, generate, load_engine
from tests.server.ranks.tensor_parallel import prompts


class Uneven(Repeating):
    """Captures, but not on rank 1, which is short of memory for one size."""

    def __init__(self, rank: int):
        super().__init__()
        self.rank = rank

    def __call__(self, function: Computation) -> Computation:
        super().__call__(function)
        if self.rank == 1 and self.captured % 2:
            raise CaptureFailed("OutOfMemoryError: no memory for this graph")
        return function


class UnevenBackend(CpuBackend):
    """Ranks on CPUs that are captured all the same."""

    def __init__(self, kernels: Kernels, rank: int):
        super().__init__(kernels, torch.float32)
        self.rank = rank

    def why_not_captured(self, spec: ArchSpec, quantised: str | None, world_size: int) -> str | None:
        return None

    def graph_capture(self, sizes: Sequence[int] | None) -> GraphCapture:
        return Uneven(self.rank)


def run_rank(rank: int, rendezvous: str, folder: str) -> dict[str, Any]:
    """What became of one rank."""
    shard = connect(rank, 2, rendezvous, CPU)
    try:
        assert KERNELS is not None
        engine = load_engine(Path(folder), shard=shard, tokens=1024, backend=UnevenBackend(KERNELS, rank))
        tokens = [prompt.tokens for prompt in generate(engine, prompts())]
        return {"tokens": tokens, "captured": _captured(engine, 0.0)}
    finally:
        disconnect()


KERNELS: Kernels | None = None
if __name__ == "__main__":
    torch.set_num_threads(1)
    KERNELS = load()
    with multiprocessing.get_context("fork").Pool(2) as pool:
        print(json.dumps(pool.starmap(run_rank, [(rank, *sys.argv[1:]) for rank in range(2)], chunksize=1)))
