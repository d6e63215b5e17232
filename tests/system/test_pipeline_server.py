"""Whole servers whose model is cut into pipeline stages answer as one process does, and survive what others survive."""

from __future__ import annotations

import asyncio
import random
import subprocess
import sys
from collections.abc import Sequence

import pytest

from tests.running import PATIENCE_S, ROOT, Server
from tests.system.survival import SIGNALS, Answer, answers_of, mixed_requests, signals, survive

FLOAT32 = ("--dtype", "float32")
REQUESTS = mixed_requests(24, random.Random(5), most_tokens=60)


@pytest.fixture(scope="module")
def expected() -> list[Answer]:
    """What one process answers."""
    with Server(*FLOAT32) as server:
        return asyncio.run(answers_of(server, REQUESTS))


@pytest.mark.parametrize(
    "flags",
    [
        pytest.param(("--pipeline-parallel", "2"), marks=pytest.mark.rest),
        ("--pipeline-parallel", "2", "--num-shard", "2", "--micro-batches", "5", "--prefill-chunk", "16"),
        pytest.param(("--pipeline-parallel", "4", "--max-batch-size", "5"), marks=pytest.mark.rest),
    ],
)
def test_stages_answer_as_one_process_and_survive_kills(flags: Sequence[str], expected: list[Answer]) -> None:
    with Server(*FLOAT32, *flags) as server:
        disturb = signals(SIGNALS["kill"], 2, random.Random(3), most_s=1.0)
        tally = asyncio.run(survive(server, disturb, streams=12, requests=REQUESTS, expected=expected))
    assert not tally.failures
    assert tally.answers >= 12


def test_more_stages_than_layers_are_refused() -> None:
    command = [sys.executable, "launcher.py", "--pipeline-parallel", "9", "--port", "0", "--device", "cpu"]
    ended = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=PATIENCE_S)
    assert ended.returncode == 1
    assert "--pipeline-parallel is 9, but the model has 4 layers, and each stage needs one: use" in ended.stderr
