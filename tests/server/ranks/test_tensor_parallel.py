"""Shard-equality: 2, 4 and 8 gloo ranks generate the tokens of one rank, and every rank agrees.

Every family runs so once: on 4 or 8 ranks those that between them have every way in which parts are divided there, on 2
ranks the others.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Sequence
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
        "gpt_oss",  # sinks, rows of gates and the other halves by turns, biases of experts
        "glm4_moe",  # experts that all tokens share, groups of experts
        "granitemoehybrid-dense",  # groups of Mamba heads, each for two ranks
        "qwen3_5_moe",  # recurrent heads in tensors of their own, gated attention, an mlp beside experts
        "deepseek_v3",  # keys and values compressed on every rank, heads that each rank makes of them
        "gemma4",  # 4 kv heads in some layers and 2 in others, values that are keys
        "nemotron_h",  # layers of one branch, experts without gates
        "falcon_h1",  # attention beside Mamba heads, whose groups have two ranks each
        "gpt_neox",  # interleaved queries, keys and values, heads that are rotated in part
    ],
    8: [
        "embedded",  # ALiBi, a vocabulary that 8 divides
        "falcon-7b",  # one kv head for all ranks
        "llama-biased-tied",  # 4 kv heads, each for two ranks; biased sums, a tied vocabulary that 8 does not divide
        "qwen3_next",  # recurrent heads in fused tensors, one head of keys for each rank
        "deepseek_v2-lite",  # one head for each rank, queries that are not compressed
        "lfm2",  # channels of short convolutions, with biases
        "gemma4-e",  # keys and values of earlier layers, a second table of words
        "granitemoehybrid",  # one group of Mamba heads for all ranks, whose norm they add up
        "t5",  # an encoder, biases by distance
        "olmo2",  # norms over heads of all ranks, 4 kv heads, each for two ranks
    ],
}
CASES_OF[2] = [case for case in CASES if case not in CASES_OF[4] + CASES_OF[8]]
AT_ONCE = 17  # to start ranks takes longer than any model, and a test has ten minutes on any machine
RUNS = [
    pytest.param(
        *(size, cases[start : start + AT_ONCE]),
        marks=[] if size == 2 else [pytest.mark.rest],
        id=f"{size}-{cases[start]}-and-others",
    )
    for size, cases in CASES_OF.items()
    for start in range(0, len(cases), AT_ONCE)
]


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
            stdout, stderr = process.communicate(timeout=550)  # a bound of liveness
        finally:
            kill_group(process)
    assert process.returncode == 0, stderr
    found: list[Tokens] = json.loads(stdout.splitlines()[-1])
    return found


def folder_of(case: str, checkpoints: Checkpoints) -> Path:
    return DEMO if case == "embedded" else checkpoints(case)[0]


@pytest.mark.parametrize(("world_size", "names"), RUNS)
def test_ranks_generate_the_tokens_of_one(
    checkpoints: Checkpoints, tmp_path: Path, world_size: int, names: Sequence[str]
) -> None:
    cases = {str(folder_of(case, checkpoints)): case for case in names}
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    expected = {case: tensor_parallel.tokens(folder, Shard()) for folder, case in cases.items()}
    torch.set_num_threads(threads)
    found = run_ranks(list(cases), world_size, tmp_path / "rendezvous")
    assert world_size == len(found)
    for rank in found:
        assert expected == {case: rank[folder] for folder, case in cases.items()}


def test_what_ranks_do_not_divide_is_refused(checkpoints: Checkpoints) -> None:
    folders = {case: folder_of(case, checkpoints) for case in CASES}
    assert {("mpt-clipped", 4), ("mpt-clipped", 8)} == {  # 6 heads
        (case, world_size) for case in folders for world_size in (2, 4, 8) if not splits(folders[case], world_size)
    }
