"""Ranks that share a GPU, or a CPU that interprets its kernels, with their sums through the host's memory.

`python -m tests.server.ranks.sharing_ranks DEVICE WORLD_SIZE RENDEZVOUS FOLDER` generates the same prompts on every
rank with captured steps and without, and prints {"captured": tokens, "plain": tokens} of each rank as a JSON list.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import patch

import torch
from torch import Tensor

from server import backends
from server.backends import Backend
from server.backends.cpu.device import CpuDevice
from server.backends.protocol import GraphCapture
from server.ranks.collectives import Shard, connect, disconnect
from server.ranks.host_sums import HostCollectives
from tests.running import ROOT
from tests.server.driver import CPU, Prompt, Repeating, generate, load_engine
from tests.server.ranks.tensor_parallel import prompts

TIMEOUT = 300  # seconds: of ranks of a tiny model, each of which compiles some kernels
SMALL = 1024  # bytes of the host's memory, so that tensors go in pieces


class AtOnce:
    """A device's queue whose work is done when a call returns."""

    def memory(self, num_bytes: int) -> Tensor:
        return torch.zeros(num_bytes, dtype=torch.uint8)

    def call(self, function: Callable[[], None]) -> None:
        function()

    def synchronize(self) -> None:
        """Nothing is left to do."""


def interpreted(rank: int, world_size: int, rendezvous: str) -> tuple[Shard, Backend]:
    """A rank and the backend of GPUs, on a CPU."""
    from server.backends.cuda.backend import CudaBackend

    class Interpreted(CudaBackend):
        """Captured without a GPU, in few forms: each takes seconds to interpret."""

        def graph_capture(self, sizes: Sequence[int] | None) -> GraphCapture:
            capture = Repeating()
            capture.sizes, capture.prompt_tokens = (2,), ()
            return capture

    torch.set_num_threads(1)
    shard = connect(rank, world_size, rendezvous, CPU, "host")
    through_host = HostCollectives(shard.collectives, AtOnce(), world_size, staged_bytes=SMALL)
    return replace(shard, collectives=through_host), Interpreted(CpuDevice(), torch.float32)


def on_gpu(rank: int, world_size: int, rendezvous: str) -> tuple[Shard, Backend]:
    """A rank and its backend, on a GPU that others have too where there are fewer than ranks."""
    device = backends.open_device("cuda", rank, world_size, shares=True)
    place = device.torch_device
    shard = connect(rank, world_size, rendezvous, place, "host", queue=device.host_queue())
    return shard, backends.choose(device, torch.float32)


def run_rank(rank: int, device: str, world_size: int, rendezvous: str, folder: str) -> dict[str, list[list[int]]]:
    """The tokens of one rank. It leaves the group even when it fails, so that the others do not wait for it."""
    shard, backend = (on_gpu if device == "cuda" else interpreted)(rank, world_size, rendezvous)
    try:
        with nullcontext() if device == "cuda" else stand_in():
            return {
                name: tokens(Path(folder), shard, backend, captured=name == "captured")
                for name in ("captured", "plain")
            }
    finally:
        disconnect()


def tokens(folder: Path, shard: Shard, backend: Backend, *, captured: bool) -> list[list[int]]:
    """Of every prompt."""
    engine = load_engine(
        folder, shard=shard, backend=backend, tokens=1024, total_tokens=64, captured=captured, warms_up=False
    )
    assert captured == (engine.graphs is not None)
    some = prompts_on(backend.device.torch_device.type)
    return [prompt.tokens for prompt in generate(engine, some)]


def prompts_on(device: str) -> list[Prompt]:
    """All that other ranks generate, or few short ones, one of them sampled."""
    if device == "cuda":
        return prompts()
    return [replace(prompt, token_ids=prompt.token_ids[:9], max_new_tokens=2, chunk=5) for prompt in prompts()[:2]]


@contextmanager
def stand_in() -> Iterator[None]:
    """A GPU with few processors, so that attention is split, and an interpreter that is as quick as it can be."""
    from tests.server.backends.cuda.interpreted_cases import quick_interpreter

    properties = SimpleNamespace(multi_processor_count=4)
    with quick_interpreter(), patch.object(torch.cuda, "get_device_properties", lambda device: properties):
        yield


def tokens_of_ranks(device: str, world_size: int, folder: Path, rendezvous: Path) -> list[dict[str, list[list[int]]]]:
    """What each rank of a group of processes has generated."""
    command = [
        sys.executable,
        "-m",
        "tests.server.ranks.sharing_ranks",
        device,
        str(world_size),
        f"file://{rendezvous}",
        str(folder),
    ]
    environment = os.environ | ({} if device == "cuda" else {"TRITON_INTERPRET": "1"})
    run = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=TIMEOUT)
    assert 0 == run.returncode, run.stderr
    found: list[dict[str, list[list[int]]]] = json.loads(run.stdout.splitlines()[-1])
    return found


if __name__ == "__main__":
    device, size, *rest = sys.argv[1:]
    given = [(rank, device, int(size), *rest) for rank in range(int(size))]
    with multiprocessing.get_context("spawn" if device == "cuda" else "fork").Pool(int(size)) as pool:
        print(json.dumps(pool.starmap(run_rank, given, chunksize=1)))
