"""Shard-equality: for every family, 2, 4 and 8 gloo ranks generate the tokens of one rank, and every rank agrees."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from server.arch import families
from server.arch.spec import validate
from server.distributed import Shard
from tests.server import ranks
from tests.server.checkpoints import CASES, Checkpoints
from tests.server.conftest import DEMO

ROOT = Path(__file__).parents[2]
Tokens = dict[str, list[list[int]]]


def splits(folder: Path, world_size: int) -> bool:
    """Whether the model in `folder` can be split so."""
    _, spec = families.find(json.loads((folder / "config.json").read_text()))
    try:
        validate(spec, world_size)
    except ValueError:
        return False
    return True


def run_ranks(folders: list[Path], world_size: int, rendezvous: Path) -> list[Tokens]:
    """The tokens that each rank generated with the model in each folder."""
    names = [str(folder) for folder in folders]
    command = [sys.executable, "-m", "tests.server.ranks"]
    processes = [
        subprocess.Popen(
            [*command, str(rank), str(world_size), f"file://{rendezvous}", *names],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            cwd=ROOT,
            text=True,
        )
        for rank in range(world_size)
    ]
    results = [process.communicate(timeout=300) for process in processes]
    for process, (_, stderr) in zip(processes, results, strict=True):
        assert process.returncode == 0, stderr
    return [json.loads(stdout.splitlines()[-1]) for stdout, _ in results]


@pytest.fixture(scope="module")
def folders(checkpoints: Checkpoints) -> dict[str, Path]:
    return {"embedded": DEMO, **{case: checkpoints(case)[0] for case in CASES}}


@pytest.fixture(scope="module")
def of_ranks(folders: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> Callable[[int], list[Tokens]]:
    """The tokens of all ranks at a world size, for every model that can be split so; each world size runs once."""
    made: dict[int, list[Tokens]] = {}

    def get(world_size: int) -> list[Tokens]:
        if world_size not in made:
            able = [folder for folder in folders.values() if splits(folder, world_size)]
            made[world_size] = run_ranks(able, world_size, tmp_path_factory.mktemp("ranks") / "rendezvous")
        return made[world_size]

    return get


@pytest.mark.parametrize("world_size", [2, 4, 8])
@pytest.mark.parametrize("case", ["embedded", *CASES])
def test_ranks_generate_the_tokens_of_one(
    folders: dict[str, Path], of_ranks: Callable[[int], list[Tokens]], case: str, world_size: int
) -> None:
    if not splits(folders[case], world_size):
        assert (case, world_size) in {("mpt-clipped", 4), ("mpt-clipped", 8)}  # 6 heads
        return
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    expected = ranks.tokens(folders[case], Shard())
    torch.set_num_threads(threads)
    assert [expected] * world_size == [tokens[str(folders[case])] for tokens in of_ranks(world_size)]
