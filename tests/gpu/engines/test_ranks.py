"""Tensor-parallel ranks on GPUs: of one GPU through the host's memory, of two over NCCL. Run by `make test-gpu`."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch

from server.ranks.collectives import Shard
from tests.gpu.nccl_rank import TIMEOUT
from tests.gpu.selection import NEEDS_GPU
from tests.server.conftest import save_tiny_bloom
from tests.server.ranks.sharing_ranks import tokens_of_ranks
from tests.server.ranks.tensor_parallel import tokens

pytestmark = NEEDS_GPU


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tiny-bloom")
    save_tiny_bloom(folder)
    return folder


@pytest.mark.parametrize("world_size", [2, 4])
def test_ranks_that_share_a_gpu_equal_one(tiny: Path, tmp_path: Path, world_size: int) -> None:
    expected = tokens(tiny, Shard())
    found = tokens_of_ranks("cuda", world_size, tiny, tmp_path / "rendezvous")
    assert [{"captured": expected, "plain": expected}] * world_size == found


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
@pytest.mark.parametrize("all_reduce", ["nccl", "auto"])
def test_two_ranks_over_nccl_equal_one(tiny: Path, tmp_path: Path, all_reduce: str) -> None:
    command = [sys.executable, "-m", "tests.gpu.nccl_rank", str(tiny)]
    ranks = [
        subprocess.run(
            [*command, str(world_size), f"file://{tmp_path}/{world_size}", all_reduce],
            capture_output=True,
            check=True,
            timeout=TIMEOUT + 60,  # the ranks end earlier, and say where they stand
        )
        for world_size in (1, 2)
    ]
    assert ranks[0].stdout == ranks[1].stdout
