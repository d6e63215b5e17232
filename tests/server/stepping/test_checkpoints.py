"""States that are kept in KV blocks: another sequence goes on from them with the very same tokens."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from server.blocks import BLOCK_SIZE
from server.pb import generate_pb2 as pb
from server.stepping.checkpoints import Checkpoints
from server.stepping.engine import Engine
from server.stepping.sequences import StepError
from tests.server import tiny
from tests.server.checkpoints import Checkpoints as TinyCheckpoints
from tests.server.driver import GREEDY, load_engine
from tests.server.model.test_pipeline import Pipeline, pipeline

PROMPT = [int(i) for i in torch.randint(4, 103, (70,), generator=torch.Generator().manual_seed(3))]
BORDER = 2 * BLOCK_SIZE
OWN, OTHERS = list(range(8)), list(range(100, 108))
Launching = Engine | Pipeline


def step(engine: Launching, **fields: object) -> list[int]:
    launched = engine.launch(pb.StepRequest(**fields))
    return [] if launched is None else launched.finish().token_ids


def new(id: int, blocks: list[int], computed: int = 0) -> pb.NewSequence:
    return pb.NewSequence(id=id, token_ids=PROMPT, blocks=blocks, computed=computed, sampling=GREEDY)


def decoded(engine: Launching, tokens: list[int]) -> list[int]:
    return [*tokens, *(token for _ in range(6) for token in step(engine, decode=True))]


def gone_on(engine: Launching, kept: list[int]) -> list[int]:
    """The first token of a sequence that goes on from the states in these blocks."""
    shared = [*OWN[: BORDER // BLOCK_SIZE], *range(30, 36)]
    rest = {"chunk_ids": [3], "chunk_tokens": [len(PROMPT) - BORDER]}
    return step(engine, add=[new(3, shared, BORDER)], loaded_ids=[3], loaded_blocks=kept, **rest)


@pytest.mark.parametrize("kv_cache", ["auto", "int8"])
@pytest.mark.parametrize("way", ["reference", "kernels"])
def test_a_sequence_goes_on_from_states_that_another_left(
    checkpoints: TinyCheckpoints, request: pytest.FixtureRequest, way: str, kv_cache: str
) -> None:
    kernels = request.getfixturevalue("kernels") if way == "kernels" else None
    engine = load_engine(checkpoints("qwen3_5")[0], kernels=kernels, kv_cache=kv_cache, warms_up=False, tokens=8192)
    kept = list(range(200, 200 + engine.checkpoint_blocks))
    step(engine, add=[new(1, OWN)], chunk_ids=[1], chunk_tokens=[BORDER], kept_ids=[1], kept_blocks=kept)
    expected = decoded(engine, step(engine, chunk_ids=[1], chunk_tokens=[len(PROMPT) - BORDER]))
    step(engine, retire=[1], add=[new(2, OTHERS)], chunk_ids=[2], chunk_tokens=[7])  # which takes its row
    step(engine, retire=[2])
    assert expected == decoded(engine, gone_on(engine, kept))


def test_blocks_that_there_are_not_are_refused(checkpoints: TinyCheckpoints) -> None:
    engine = load_engine(checkpoints("qwen3_5")[0], warms_up=False)
    many = [engine.num_blocks] * engine.checkpoint_blocks
    with pytest.raises(StepError, match="as many blocks each"):
        step(engine, add=[new(1, OWN)], chunk_ids=[1], chunk_tokens=[5], loaded_ids=[1], loaded_blocks=many)
    without = load_engine(checkpoints("llama")[0], warms_up=False)
    assert 0 == without.checkpoint_blocks
    with pytest.raises(StepError, match="this shard has none"):
        step(without, add=[new(1, OWN)], chunk_ids=[1], chunk_tokens=[5], kept_ids=[1], kept_blocks=[9])


def test_a_stage_without_states_leaves_them_to_others(tmp_path: Path) -> None:
    tiny.save_tiny(
        "qwen3_5", tmp_path, layer_types=[f"{kind}_attention" for kind in ("full", "linear", "full", "full")]
    )
    whole = load_engine(tmp_path, warms_up=False, tokens=2048, total_tokens=128)
    found = []
    with pipeline(tmp_path, 2, tokens=2048, total_tokens=128) as stages:
        counts = [engine.checkpoint_blocks for engine in stages.engines]
        assert counts[0] and not counts[1]
        kept = list(range(40, 40 + max(*counts, whole.checkpoint_blocks)))
        for engine in (whole, stages):
            step(engine, add=[new(1, OWN)], chunk_ids=[1], chunk_tokens=[BORDER], kept_ids=[1], kept_blocks=kept)
            found.append(decoded(engine, gone_on(engine, kept)))
    assert found[0] == found[1]


def test_blocks_of_nothing_hold_no_states() -> None:
    assert 0 == Checkpoints([torch.zeros(2, 5)], []).num_blocks
    assert 3 == Checkpoints([torch.zeros(2, 5)], [torch.zeros(4, 1), torch.zeros(4, 2, dtype=torch.int16)]).num_blocks
