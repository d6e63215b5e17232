"""Pipeline stages: every family cut in pieces generates the tokens of the whole, and neighbours that fail say so."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch

from server.arch.stages import Stage
from server.backends.cpu.device import CpuDevice
from server.pb import generate_pb2 as pb
from server.ranks.collectives import COLLECTIVE_TIMEOUT, LOAD_TIMEOUT, Shard
from server.stepping.engine import Launched
from server.stepping.pipeline import StageConnections, StageNeighbours
from tests.server.backends.stand_in import WHY_NOT, StandInBackend, StandInDevice
from tests.server.checkpoints import CASES, Checkpoints
from tests.server.conftest import DEMO
from tests.server.driver import generate, load_engine
from tests.server.ranks.tensor_parallel import prompts

SIZES = {"warms_up": False, "tokens": 1024, "total_tokens": 64}


class Pipeline:
    """All stages of a model in one process, driven as one engine: each launches its part behind the one before."""

    def __init__(self, folder: Path, count: int, **settings: object) -> None:
        ends = [socket.socketpair() for _ in range(count)]  # from stage n to the next
        self.rings = [StageConnections(ends[n - 1][1], ends[n][0], patience=20) for n in range(count)]
        try:
            self.engines = [
                load_engine(folder, stage=(n, count), ring=ring, **{**SIZES, **settings})  # type: ignore[arg-type]
                for n, ring in enumerate(self.rings)
            ]
        except ValueError:
            self.close()
            raise
        self.model = self.engines[-1].model

    def launch(self, request: pb.StepRequest) -> Launched | None:
        """The last stage's part, which has the tokens."""
        return [engine.launch(request) for engine in self.engines][-1]

    def close(self) -> None:
        for ring in self.rings:
            ring.close()


@contextmanager
def pipeline(folder: Path, count: int, **settings: object) -> Iterator[Pipeline]:
    made = Pipeline(folder, count, **settings)
    try:
        yield made
    finally:
        made.close()


def tokens_of(engine: object) -> list[tuple[list[int], list[float]]]:
    return [(prompt.tokens, prompt.logprobs) for prompt in generate(engine, prompts())]  # type: ignore[arg-type]


@pytest.mark.parametrize("case", ["embedded", *CASES])
def test_stages_generate_the_tokens_of_the_whole(case: str, checkpoints: Checkpoints) -> None:
    folder = DEMO if case == "embedded" else checkpoints(case)[0]
    whole = load_engine(folder, warms_up=False, tokens=1024, total_tokens=64)
    count = min(3, whole.model.stage.layers.stop)  # type: ignore[attr-defined]
    assert count >= 2, "a model of one layer shows nothing"
    with pipeline(folder, count) as stages:
        assert tokens_of(stages) == tokens_of(whole)


@pytest.mark.skipif(WHY_NOT is not None, reason=str(WHY_NOT))
def test_stages_capture_their_part_of_a_step_and_do_not_wait_for_the_device() -> None:
    """Only the last one has logits."""
    whole = load_engine(DEMO, warms_up=False, tokens=1024, total_tokens=64)
    with pipeline(DEMO, 3, backend=StandInBackend()) as stages:
        for engine in stages.engines:
            assert engine.graphs is not None
            for capture in engine.graphs.decodes.captures():  # as the warm-up does
                capture()
        with StandInDevice().forbidding():
            assert [tokens for tokens, _ in tokens_of(stages)] == [tokens for tokens, _ in tokens_of(whole)]


def test_stages_agree_on_the_smallest_whatever_tokens_are_due() -> None:
    """As one stage may stream its weights, or have room for fewer tokens, and they warm up together."""
    with pipeline(DEMO, 3) as stages, ThreadPoolExecutor(3) as threads:
        for wanted in ((5, 3, 9), (2, 7, 7), (8, 8, 4)):
            tokens_of(stages)  # the first stage has not asked for the last ones of them
            found = threads.map(lambda engine, value: engine.neighbours.minimum(value), stages.engines, wanted)
            assert [min(wanted)] * 3 == list(found)
        assert tokens_of(stages) == tokens_of(load_engine(DEMO, warms_up=False, tokens=1024, total_tokens=64))


def test_stages_wait_long_for_each_other_until_all_are_warm() -> None:
    """One may capture more than another, or load from a slower disk."""
    before, behind = socket.socketpair()
    with before, behind:
        connections = StageConnections(before, behind)
        assert LOAD_TIMEOUT.total_seconds() == connections.patience
        stage = Stage(0, 2, range(1))
        StageNeighbours(stage, Shard(), connections, CpuDevice(), torch.float32, 8).wait_at_most(COLLECTIVE_TIMEOUT)
        assert COLLECTIVE_TIMEOUT.total_seconds() == connections.patience
        connections.close()
