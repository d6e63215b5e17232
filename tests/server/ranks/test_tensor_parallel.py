"""Shard-equality: 2, 4 and 8 gloo ranks generate the tokens of one rank, and every rank agrees.

Every family runs so once: on 4 or 8 ranks those that between them have every way in which parts are divided there, on 2
ranks the others.
"""

from __future__ import annotations

import fcntl
import json
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
import torch

from server.arch import families
from server.arch.spec import validate
from server.ranks.collectives import Shard
from tests.running import ROOT, kill_group
from tests.server.checkpoints import CASES, Checkpoints
from tests.server.conftest import DEMO
from tests.server.ranks import tensor_parallel

Tokens = dict[str, list[list[int]]]
CASES_OF = {
    4: [
        "gpt_bigcode",  # one kv head in a fused projection, for all ranks
        "falcon-40b",  # kv heads inside a fused projection, one for each rank
        "mixtral",  # experts
        "chatglm3",  # 2 kv heads, each for two ranks
        "mt5",  # an encoder, gates
    ],
    8: [
        "embedded",  # ALiBi, a vocabulary that 8 divides
        "gpt_neox",  # interleaved queries, keys and values, heads that are rotated in part
        "falcon-7b",  # one kv head for all ranks
        "llama-biased-tied",  # 4 kv heads, each for two ranks; biased sums, a tied vocabulary that 8 does not divide
        "t5",  # an encoder, biases by distance
    ],
}
CASES_OF[2] = [case for case in CASES if case not in CASES_OF[4] + CASES_OF[8]]


def splits(folder: Path, world_size: int) -> bool:
    """Whether the model in `folder` can be split so."""
    _, spec = families.find(json.loads((folder / "config.json").read_text()))
    try:
        validate(spec, world_size)
    except ValueError:
        return False
    return True


def run_ranks(models: Sequence[str | Path], world_size: int, rendezvous: Path) -> list[Tokens]:
    """The tokens that each rank generated with each model, as `ranks` takes them; no rank outlives this call."""
    command = [
        sys.executable,
        "-m",
        "tests.server.ranks.tensor_parallel",
        str(world_size),
        f"file://{rendezvous}",
        *map(str, models),
    ]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, cwd=ROOT, text=True, start_new_session=True
    ) as process:
        try:
            stdout, stderr = process.communicate(timeout=300)
        finally:
            kill_group(process)
    assert process.returncode == 0, stderr
    found: list[Tokens] = json.loads(stdout.splitlines()[-1])
    return found


@pytest.fixture(scope="module")
def folders(checkpoints: Checkpoints) -> dict[str, Path]:
    return {"embedded": DEMO, **{case: checkpoints(case)[0] for case in CASES}}


@pytest.fixture(scope="session")
def shared_folder(tmp_path_factory: pytest.TempPathFactory, worker_id: str) -> Path:
    """A folder that all workers of this run of the tests have in common."""
    own = tmp_path_factory.getbasetemp()
    return own if worker_id == "master" else own.parent


@pytest.fixture(scope="module")
def of_ranks(
    folders: dict[str, Path], shared_folder: Path, tmp_path_factory: pytest.TempPathFactory
) -> Callable[[int], list[Tokens]]:
    """The tokens of all ranks at a world size, for every model that is run so; each world size runs once.

    Whoever else wants them, here or in another worker, waits. Checkpoints of one case are the same in all workers.
    """

    def get(world_size: int) -> list[Tokens]:
        kept = shared_folder / f"tokens-of-{world_size}-ranks.json"
        with kept.with_suffix(".lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if not kept.exists():
                cases = {str(folders[case]): case for case in CASES_OF[world_size]}
                rendezvous = tmp_path_factory.mktemp("ranks") / "rendezvous"
                made = run_ranks([Path(folder) for folder in cases], world_size, rendezvous)
                kept.write_text(json.dumps([{cases[f]: tokens[f] for f in cases} for tokens in made]))
        found: list[Tokens] = json.loads(kept.read_text())
        return found

    return get


@pytest.mark.parametrize(
    ("case", "world_size"), [(case, world_size) for world_size, cases in CASES_OF.items() for case in cases]
)
def test_ranks_generate_the_tokens_of_one(
    folders: dict[str, Path], of_ranks: Callable[[int], list[Tokens]], case: str, world_size: int
) -> None:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    expected = tensor_parallel.tokens(folders[case], Shard())
    torch.set_num_threads(threads)
    assert [expected] * world_size == [tokens[case] for tokens in of_ranks(world_size)]


def test_what_ranks_do_not_divide_is_refused(folders: dict[str, Path]) -> None:
    assert {("mpt-clipped", 4), ("mpt-clipped", 8)} == {  # 6 heads
        (case, world_size) for case in folders for world_size in (2, 4, 8) if not splits(folders[case], world_size)
    }
