"""Windowed layers that keep rings of blocks: the tokens are those of a cache that holds everything."""

from __future__ import annotations

from functools import partial

import pytest
import torch

from server.arch.windows import Ring, ring_for
from server.blocks import BLOCK_SIZE, num_blocks
from server.pb import generate_pb2 as pb
from server.stepping.checkpoints import RingCopies
from server.stepping.engine import Engine
from server.stepping.sequences import StepError
from tests.server.checkpoints import Checkpoints
from tests.server.driver import GREEDY, load_engine

PROMPT = [int(i) for i in torch.randint(4, 103, (150,), generator=torch.Generator().manual_seed(3))]
CHUNKS = (64, 60, 26)
DEPTH = 7  # blocks of PROMPT that others begin with
NUM_DECODES = 40
LONGEST = num_blocks(len(PROMPT) + NUM_DECODES)
loaded = partial(load_engine, tokens=4096, rings=True)


def step(engine: Engine, **fields: object) -> list[int]:
    launched = engine.launch(pb.StepRequest(**fields))
    return [] if launched is None else launched.finish().token_ids


def new(id: int, blocks: list[int], computed: int = 0) -> pb.NewSequence:
    return pb.NewSequence(id=id, token_ids=PROMPT, blocks=blocks, computed=computed, sampling=GREEDY)


def decoded(engine: Engine) -> list[int]:
    return [token for _ in range(NUM_DECODES) for token in step(engine, decode=True)]


def alone(engine: Engine) -> list[int]:
    """The tokens of a sequence that is computed from its start, and stays as sequence 1."""
    step(engine, add=[new(1, [*range(LONGEST)])])
    first = [token for count in CHUNKS for token in step(engine, chunk_ids=[1], chunk_tokens=[count])]
    return first + decoded(engine)


def ring_of(engine: Engine) -> Ring:
    assert engine.kv_shape.ring is not None
    return engine.kv_shape.ring


@pytest.mark.parametrize("kv_cache", ["auto", "int8", "fp8_e4m3"])
@pytest.mark.parametrize("way", ["reference", "kernels"])
@pytest.mark.parametrize("family", ["gemma2", "gemma3_text", "gpt_oss", "mistral"])
def test_a_ring_gives_the_tokens_of_a_whole_cache_and_others_go_on_from_copies(
    checkpoints: Checkpoints, request: pytest.FixtureRequest, family: str, way: str, kv_cache: str
) -> None:
    kernels = request.getfixturevalue("kernels") if way == "kernels" else None
    folder = checkpoints(family)[0]
    engine = loaded(folder, kernels=kernels, kv_cache=kv_cache)
    whole = loaded(folder, kernels=kernels, kv_cache=kv_cache, warms_up=False)
    assert whole.kv_shape.ring is None and engine.kv_shape.bytes_per_token < whole.kv_shape.bytes_per_token
    expected = alone(whole)
    assert expected == alone(engine)
    # The end of a sequence that leaves, whose row the next one takes; it overwrites the ring beforehand.
    ring, end = ring_of(engine), (len(PROMPT) + NUM_DECODES - 1) // BLOCK_SIZE
    step(engine, add=[new(2, [*range(20, 20 + LONGEST)])])
    for count in CHUNKS[:2]:
        step(engine, chunk_ids=[2], chunk_tokens=[count])
    places = [range(depth - ring.window_blocks, depth) for depth in (end, DEPTH)]
    each = engine.checkpoint_blocks
    kept = [[*range(first, first + each * ring.window_blocks)] for first in (100, 180)]
    copied_ids = [id for id, part in zip((1, 2), places, strict=True) for _ in part]
    step(engine, copied_ids=copied_ids, copied_places=[*places[0], *places[1]], copied_blocks=kept[0] + kept[1])
    step(engine, retire=[1, 2], add=[new(3, [*range(40, 40 + LONGEST)])], chunk_ids=[3], chunk_tokens=[61])
    blocks = [*range(20, 20 + DEPTH), *range(60, 60 + LONGEST - DEPTH)]
    first = step(
        engine,
        retire=[3],
        add=[new(4, blocks, DEPTH * BLOCK_SIZE)],
        loaded_ids=[4] * ring.window_blocks,
        loaded_places=[*places[1]],
        loaded_blocks=kept[1],
        chunk_ids=[4],
        chunk_tokens=[len(PROMPT) - DEPTH * BLOCK_SIZE],
    )
    assert expected == first + decoded(engine)


def test_captured_steps_read_rings(checkpoints: Checkpoints, kernels: object) -> None:
    folder = checkpoints("gemma3_text")[0]
    engine, eager = (loaded(folder, kernels=kernels, captured=captured) for captured in (True, False))
    assert engine.why_not_captured is None and eager.why_not_captured is not None
    assert alone(eager) == alone(engine)


def test_what_does_not_fit_a_ring_and_copies_without_one_are_refused(checkpoints: Checkpoints) -> None:
    engine = loaded(checkpoints("gemma2")[0])
    assert 64 == ring_of(engine).most_at_once
    with pytest.raises(StepError, match="takes 65 tokens in a step, but its ring 64"):
        step(engine, add=[new(1, [*range(12)])], chunk_ids=[1], chunk_tokens=[65])
    with pytest.raises(StepError, match="as many blocks for each place"):
        step(engine, copied_ids=[1], copied_places=[0, 1], copied_blocks=[3, 4])
    with pytest.raises(StepError, match="this shard has none"):
        step(loaded(checkpoints("llama")[0]), copied_ids=[1], copied_places=[0], copied_blocks=[3])


def test_a_ring_is_there_where_it_saves_half_at_least() -> None:
    assert Ring(8, 512) == ring_for(128, prefill_tokens=4096, total_tokens=32768)
    assert 8 + 32 + 1 == Ring(8, 512).num_blocks
    assert Ring(64, 256) == ring_for(1024, prefill_tokens=256, total_tokens=32768)
    assert 289 == Ring(256, 512).num_blocks
    assert ring_for(4096, prefill_tokens=4096, total_tokens=4096) is None
    assert ring_for(4096, prefill_tokens=4096, total_tokens=2 * 289 * BLOCK_SIZE - BLOCK_SIZE) is None
    assert Ring(256, 512) == ring_for(4096, prefill_tokens=4096, total_tokens=2 * 289 * BLOCK_SIZE)
    assert ring_for(0, prefill_tokens=4096, total_tokens=32768) is None
    assert Ring(1, 512) == ring_for(1, prefill_tokens=4096, total_tokens=32768)  # 0 blocks say that there are no rings


def test_copies_of_a_stage_without_rings_do_nothing() -> None:
    copies = RingCopies([], [torch.zeros(4, 2)])
    copies.keep(torch.tensor([3]), torch.tensor([[1, 2]]))
    copies.load(torch.tensor([3]), torch.tensor([[1, 2]]))
    assert 0 == copies.num_blocks
