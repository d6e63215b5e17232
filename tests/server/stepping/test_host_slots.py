"""Blocks that were saved and restored stand for the very tokens that they stood for, in every format of the cache."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from server.backends import choose
from server.backends.cpu.device import CpuDevice
from server.backends.reference import ReferenceBackend
from server.pb import generate_pb2 as pb
from server.prefix.mover import Session
from server.stepping.engine import Engine, StepResult
from server.stepping.sequences import StepError
from tests.server.driver import GREEDY, load_engine

PROMPT = [5 + 7 * n % 90 for n in range(40)]  # two full blocks, and a part of the third


def run(engine: Engine, request: pb.StepRequest) -> StepResult | None:
    launched = engine.launch(request)
    return None if launched is None else launched.finish()


def generated(engine: Engine, request: pb.StepRequest, id: int, computed: int) -> tuple[list[int], list[float]]:
    request.add.add(id=id, token_ids=PROMPT, blocks=range(4), computed=computed, sampling=GREEDY)
    request.chunk_ids.append(id)
    request.chunk_tokens.append(len(PROMPT) - computed)
    results = [run(engine, request), *(run(engine, pb.StepRequest(decode=True)) for _ in range(4))]
    engine.launch(pb.StepRequest(retire=[id]))
    tokens = [token for result in results if result is not None for token in result.token_ids]
    return tokens, [logprob for result in results if result is not None for logprob in result.logprobs]


@pytest.mark.parametrize("kv_cache", ["auto", "int8", "fp8_e4m3", "fp8_e5m2"])
@pytest.mark.parametrize("is_fast", [False, True])
def test_what_comes_back_is_what_was_saved(tiny_bloom: Path, kv_cache: str, is_fast: bool) -> None:
    device = CpuDevice()
    backend = choose(device, torch.float32) if is_fast else ReferenceBackend(device)
    engine = load_engine(tiny_bloom, backend=backend, kv_cache=kv_cache, tokens=256)
    session = Session()
    session.begin(9)
    engine.open_slots(6, session)
    generated(engine, pb.StepRequest(), 1, computed=0)
    expected = generated(engine, pb.StepRequest(), 2, computed=32)
    run(engine, pb.StepRequest(step=4, tier_session=9, saved_blocks=[0, 1], saved_slots=[5, 2]))
    assert [(True, False)] * 2 == [(session.is_given_up(slot, 3), session.is_given_up(slot, 4)) for slot in (5, 2)]
    with torch.inference_mode():
        for cache in engine._kv_caches:
            cache.zero_()
    run(engine, pb.StepRequest(tier_session=8, saved_blocks=[0, 1], saved_slots=[5, 2]))  # of a router that is gone
    restoring = pb.StepRequest(tier_session=9, restored_slots=[5, 2], restored_blocks=[0, 1])
    assert expected == generated(engine, restoring, 3, computed=32)


def test_slots_and_blocks_that_there_are_not_are_refused(tiny_bloom: Path) -> None:
    engine = load_engine(tiny_bloom, tokens=256, warms_up=False)
    with pytest.raises(StepError, match="no tier"):
        engine.launch(pb.StepRequest(saved_blocks=[0], saved_slots=[0]))
    engine.open_slots(6, Session())
    for blocks, slots in (([0], [6]), ([16], [0]), ([0, 1], [0])):
        with pytest.raises(StepError, match="slots of the host"):
            engine.launch(pb.StepRequest(saved_blocks=blocks, saved_slots=slots))
