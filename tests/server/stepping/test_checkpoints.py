"""States that are kept in KV blocks: another sequence goes on from them with the very same tokens."""

from __future__ import annotations

import pytest
import torch

from server.blocks import BLOCK_SIZE
from server.pb import generate_pb2 as pb
from server.stepping.checkpoints import Checkpoints
from server.stepping.engine import Engine
from server.stepping.sequences import StepError
from tests.server.checkpoints import Checkpoints as TinyCheckpoints
from tests.server.driver import GREEDY, load_engine

PROMPT = [int(i) for i in torch.randint(4, 103, (70,), generator=torch.Generator().manual_seed(3))]
BORDER = 2 * BLOCK_SIZE
OWN, OTHERS = list(range(8)), list(range(100, 108))


def step(engine: Engine, **fields: object) -> list[int]:
    launched = engine.launch(pb.StepRequest(**fields))
    return [] if launched is None else launched.finish().token_ids


def new(id: int, blocks: list[int], computed: int = 0) -> pb.NewSequence:
    return pb.NewSequence(id=id, token_ids=PROMPT, blocks=blocks, computed=computed, sampling=GREEDY)


def decoded(engine: Engine, tokens: list[int]) -> list[int]:
    return [*tokens, *(token for _ in range(6) for token in step(engine, decode=True))]


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
    shared = [*OWN[: BORDER // BLOCK_SIZE], *range(110, 116)]
    first = step(
        engine,
        retire=[2],
        add=[new(3, shared, BORDER)],
        chunk_ids=[3],
        chunk_tokens=[len(PROMPT) - BORDER],
        loaded_ids=[3],
        loaded_blocks=kept,
    )
    assert expected == decoded(engine, first)


def test_blocks_that_there_are_not_are_refused(checkpoints: TinyCheckpoints) -> None:
    engine = load_engine(checkpoints("qwen3_5")[0], warms_up=False)
    many = [engine.num_blocks] * engine.checkpoint_blocks
    with pytest.raises(StepError, match="as many blocks each"):
        step(engine, add=[new(1, OWN)], chunk_ids=[1], chunk_tokens=[5], loaded_ids=[1], loaded_blocks=many)
    without = load_engine(checkpoints("llama")[0], warms_up=False)
    assert 0 == without.checkpoint_blocks
    with pytest.raises(StepError, match="this shard has none"):
        step(without, add=[new(1, OWN)], chunk_ids=[1], chunk_tokens=[5], kept_ids=[1], kept_blocks=[9])


def test_blocks_of_nothing_hold_no_states() -> None:
    assert 0 == Checkpoints([torch.zeros(2, 5)], []).num_blocks
    assert 3 == Checkpoints([torch.zeros(2, 5)], [torch.zeros(4, 1), torch.zeros(4, 2, dtype=torch.int16)]).num_blocks
