"""Shard-equality: 2, 4 and 8 gloo ranks generate the tokens of one rank, and every rank agrees."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests.server import ranks
from tests.server.conftest import DEMO

ROOT = Path(__file__).parents[2]


def run_ranks(folder: Path, world_size: int, rendezvous: Path) -> list[list[list[int]]]:
    """The tokens that each rank generated."""
    command = [sys.executable, "-m", "tests.server.ranks", str(folder)]
    processes = [
        subprocess.Popen(
            [*command, str(rank), str(world_size), f"file://{rendezvous}"],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            cwd=ROOT,
            text=True,
        )
        for rank in range(world_size)
    ]
    results = [process.communicate(timeout=240) for process in processes]
    for process, (_, stderr) in zip(processes, results, strict=True):
        assert process.returncode == 0, stderr
    return [json.loads(stdout.splitlines()[-1]) for stdout, _ in results]


@pytest.fixture(scope="module")
def one_rank(tiny_bloom: Path) -> dict[Path, list[list[int]]]:
    threads = torch.get_num_threads()
    expected = {folder: ranks.tokens(folder, 0, 1, "") for folder in (tiny_bloom, DEMO)}
    torch.set_num_threads(threads)
    return expected


@pytest.mark.parametrize("world_size", [2, 4, 8])
def test_ranks_of_a_random_model_equal_one(
    tiny_bloom: Path, one_rank: dict[Path, list[list[int]]], world_size: int, tmp_path: Path
) -> None:
    results = run_ranks(tiny_bloom, world_size, tmp_path / "rendezvous")
    assert [one_rank[tiny_bloom]] * world_size == results


def test_two_ranks_of_the_embedded_model_equal_one(one_rank: dict[Path, list[list[int]]], tmp_path: Path) -> None:
    assert [one_rank[DEMO]] * 2 == run_ranks(DEMO, 2, tmp_path / "rendezvous")


def test_alone_equals_together(tiny_bloom: Path, one_rank: dict[Path, list[list[int]]]) -> None:
    for tokens in one_rank.values():
        assert tokens[:2] == tokens[-2:]
