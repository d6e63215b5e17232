"""Drafts change nothing: tokens, log-probabilities and candidates are those of plain decoding, to the last bit."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from server.backends.cpu import Kernels
from server.blocks import BLOCK_SIZE
from server.loading import load
from server.pb import generate_pb2 as pb
from server.ranks.collectives import Shard
from server.stepping import engine as engines
from server.stepping import graphs
from server.stepping.batch import Layout, Tables
from server.stepping.engine import Engine
from server.stepping.graphs import Size
from server.stepping.pipeline import StageNeighbours
from server.stepping.sequences import SequenceState, StepError, TokenRun
from tests.server.checkpoints import CASES, Checkpoints
from tests.server.conftest import DEMO
from tests.server.driver import GREEDY, Drafter, Prompt, Repeating, generate, greedy, load_engine, sampled
from tests.server.fallback.cases import save, shard_config
from tests.server.model.test_pipeline import pipeline
from tests.server.offload.streaming import offloaded
from tests.server.ranks import tensor_parallel
from tests.server.ranks.test_tensor_parallel import run_ranks

SIZES: dict[str, Any] = {"tokens": 2048, "total_tokens": 128, "warms_up": False}
PAIRS: dict[str, Any] = {
    "banned_word_ids": [id for first in range(103) for step in range(0, 20, 4) for id in (first, (first + step) % 103)],
    "banned_word_lengths": [2] * 103 * 5,
}
VARIED = ("embedded", "llama", "t5", "deepseek_v3", "gpt_oss", "gemma3_text", "qwen3_next", "lfm2", "falcon_h1")
SAMPLINGS = [
    GREEDY,
    sampled(1),
    sampled(2, temperature=0.7, top_k=9, top_p=0.9, typical_p=0.8, min_p=0.01),
    sampled(3, repetition_penalty=1.3, frequency_penalty=0.6, presence_penalty=0.5, raw_logprobs=True),
    sampled(4, watermark=True, bias_ids=[5, 77], biases=[4.0, float("-inf")], **PAIRS),
    greedy(repetition_penalty=1.5, min_tokens=9, end_ids=list(range(0, 103, 2)), **PAIRS),
    sampled(6, temperature=1.2, repetition_penalty=1.2, is_constrained=True),
    greedy(raw_logprobs=True, frequency_penalty=2.0),
]


def odd(tokens: Sequence[int]) -> tuple[list[int], list[int]]:
    """Odd tokens alone, after an odd number of tokens those below 60, and two that are forced behind some."""
    return [9, 11] if tokens and tokens[-1] % 7 == 3 and len(tokens) < 20 else [], list(
        range(1, 60 if len(tokens) % 2 else 103, 2)
    )


def prompts() -> list[Prompt]:
    """Of many lengths, which join while others decode."""
    rng = random.Random(5)
    return [
        Prompt(
            token_ids=[rng.randrange(4, 103) for _ in range(rng.randint(1, 40))],
            max_new_tokens=24,
            sampling=sampling,
            top_n_tokens=3 * (i % 2),
            joins_at=3 * (i // 3),
            chunk=rng.choice([7, 16, 1000]),
            grows=i % 3 == 0,
            rule=odd if sampling.is_constrained else None,
        )
        for i, sampling in enumerate(SAMPLINGS)
    ]


def results(prompts: Sequence[Prompt]) -> list[tuple[object, ...]]:
    return [(p.tokens, p.logprobs, p.top_ids, p.top_logprobs) for p in prompts]


def check(engine: Engine, *, most: int = 6, seed: int = 0, make: Callable[[], list[Prompt]] = prompts) -> None:
    """Drafts of up to `most` guesses give what plain decoding gives on the same engine."""
    expected = generate(engine, make())
    drafter = Drafter([p.tokens for p in expected], most=most, seed=seed)
    assert results(expected) == results(generate(engine, make(), drafter))
    assert drafter.accepted > 50 and drafter.refused > 10


# ALiBi, plain attention, an encoder, compressed keys and values, experts, windows without rings, and the recurrences.
@pytest.mark.parametrize(
    "case", [case if case in VARIED else pytest.param(case, marks=pytest.mark.rest) for case in ["embedded", *CASES]]
)
def test_drafts_change_nothing(checkpoints: Checkpoints, kernels: Kernels, case: str) -> None:
    folder = DEMO if case == "embedded" else checkpoints(case)[0]
    engine = load_engine(folder, kernels=kernels, **SIZES)
    assert engine.model.takes_drafts
    check(engine)


@pytest.mark.parametrize(
    "settings",
    [{"quantise": "int8"}, {"quantise": "int4"}, {"kv_cache": "int8"}, {"kv_cache": "fp8_e4m3"}],
    ids=lambda settings: "-".join(settings.values()),
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_formats_and_dtypes(
    checkpoints: Checkpoints, kernels: Kernels, settings: dict[str, str], dtype: torch.dtype
) -> None:
    check(load_engine(checkpoints("llama")[0], kernels=kernels, dtype=dtype, **settings, **SIZES), seed=1)


def constrained_prompts() -> list[Prompt]:
    return [
        Prompt(token_ids=[5 + n], max_new_tokens=60, sampling=sampled(n, is_constrained=True), rule=odd)
        for n in range(6)
    ]


@pytest.mark.parametrize("case", ["llama", "qwen3_next", "falcon_h1"])
def test_tokens_are_forced_behind_guesses_that_were_wrong(
    checkpoints: Checkpoints, kernels: Kernels, monkeypatch: pytest.MonkeyPatch, case: str
) -> None:
    engine, again = load_engine(checkpoints(case)[0], kernels=kernels, **SIZES), []
    chunk = SequenceState.chunk

    def noting(sequence: SequenceState, count: int) -> TokenRun:
        again.extend(sequence.again)
        return chunk(sequence, count)

    monkeypatch.setattr(SequenceState, "chunk", noting)
    check(engine, make=constrained_prompts)
    assert bool(again) == engine.model.has_states


def long_prompts() -> list[Prompt]:
    """That go through their rings several times, and neighbours."""
    return [replace(p, max_new_tokens=130, grows=False) for p in prompts()[:4]]


@pytest.mark.parametrize("kv_cache", ["auto", "int8"])
@pytest.mark.parametrize("case", ["gemma3_text", "gpt_oss"])
def test_what_a_window_sees_stays_in_its_ring(
    checkpoints: Checkpoints, kernels: Kernels, case: str, kv_cache: str
) -> None:
    folder, _ = checkpoints(case)
    engine, whole = (
        load_engine(folder, kernels=kernels, kv_cache=kv_cache, tokens=4096, rings=rings) for rings in (True, False)
    )
    ring = engine.kv_shape.ring
    assert ring is not None and ring.num_blocks * BLOCK_SIZE < 130
    check(engine, most=ring.most_at_once - 1, make=long_prompts)
    assert results(generate(engine, long_prompts())) == results(generate(whole, long_prompts()))


@pytest.mark.parametrize("case", ["llama", "t5"])
def test_blocks_that_come_and_go(checkpoints: Checkpoints, kernels: Kernels, tmp_path: Path, case: str) -> None:
    folder, _ = checkpoints(case)
    with offloaded(folder, "0%", tmp_path, stage_bytes=1) as placement:
        check(load_engine(folder, kernels=kernels, kv_placement=placement, **SIZES), seed=2)
        assert placement.staging is not None and placement.staging.times.written_blocks > 0


@pytest.mark.parametrize("case", ["bloom", "gemma3_text", "t5", "qwen3_next"])
def test_stages(checkpoints: Checkpoints, kernels: Kernels, case: str) -> None:
    with pipeline(checkpoints(case)[0], 2, kernels=kernels, **SIZES) as stages:
        check(stages, seed=3)  # type: ignore[arg-type]


def test_nothing_waits_for_ever_at_the_first_stage(checkpoints: Checkpoints) -> None:
    with pipeline(checkpoints("llama")[0], 2, **SIZES) as stages:
        tokens = started(stages)  # type: ignore[arg-type]
        for n in range(6):
            came = tokens[-1:] if n else ()
            tokens += step(stages, drafted(3 + n, tokens[-1], 102, came=came))[:1]  # type: ignore[arg-type]
        first = stages.engines[0].neighbours
        assert isinstance(first, StageNeighbours) and 1 == len(first._due)


@pytest.mark.parametrize("count", [1, 2])
def test_behind_a_draft_without_guesses_steps_are_ahead_of_their_replies(
    checkpoints: Checkpoints, kernels: Kernels, count: int
) -> None:
    with pipeline(checkpoints("qwen3_5")[0], count, kernels=kernels, **SIZES) as stages:
        engine: Engine = stages if count > 1 else stages.engines[0]  # type: ignore[assignment]
        sampling = {"frequency_penalty": 1.5, "repetition_penalty": 1.3}
        expected = started(engine, **sampling)
        for _ in range(5):
            expected += step(engine, pb.StepRequest(decode=True))
        found = started(engine, **sampling)
        found += step(engine, drafted(3, found[0], expected[1], 102 - expected[2]))
        assert 3 == len(found)
        requests = [drafted(5, found[-1], came=found[1:]), *[pb.StepRequest(decode=True)] * 2]
        ahead = [engine.launch(request) for request in requests]
        found += [token for launched in ahead if launched is not None for token in launched.finish().token_ids]
        assert expected == found


def test_what_transformers_runs_batched(tmp_path: Path, kernels: Kernels) -> None:
    save("olmo", tmp_path)
    assert load(shard_config(tmp_path))[1].takes_drafts
    check(load_engine(tmp_path, kernels=kernels, **SIZES))


def test_what_transformers_runs_one_by_one_takes_none(tmp_path: Path) -> None:
    save("gptj", tmp_path)
    assert not load(shard_config(tmp_path))[1].takes_drafts


@pytest.mark.rest
def test_ranks(checkpoints: Checkpoints, tmp_path: Path) -> None:
    folders = [checkpoints(case)[0] for case in ("bloom", "t5", "gemma3_text", "granitemoehybrid")]
    expected = {f"{folder}!": tensor_parallel.tokens(folder, Shard()) for folder in folders}
    assert [expected] * 2 == run_ranks([*expected], 2, tmp_path / "rendezvous")


def test_captured_steps_have_drafts_where_prompts_are(kernels: Kernels) -> None:
    engine = load_engine(DEMO, kernels=kernels, **SIZES)
    capture = Repeating()
    engine.backend.graph_capture = lambda sizes: capture  # type: ignore[method-assign]
    engine.allocate(SIZES["tokens"], SIZES["total_tokens"], sequences=8)
    assert engine.graphs is not None
    for captures in engine.graphs.kinds:
        for prepare in captures:
            prepare()
    check(engine)
    assert {9, 10} < capture.replayed.keys()


NEW: dict[str, Any] = {"token_ids": [5, 6, 7], "blocks": [0, 1]}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kept", [64, 3])
def test_on_a_cpu_steps_of_a_size_that_came_before_are_captured(
    kernels: Kernels, monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype, kept: int
) -> None:
    """They compute what they do uncaptured, however often a size is forgotten and comes again."""
    monkeypatch.setattr(graphs, "MOST_KEPT", kept)
    engine, plain = (load_engine(DEMO, kernels=kernels, captured=c, dtype=dtype, **SIZES) for c in (True, False))
    check(engine)
    expected = [p.tokens for p in generate(plain, prompts())]
    ours, theirs = (results(generate(one, prompts(), Drafter(expected, most=6))) for one in (engine, plain))
    assert ours == theirs
    assert engine.graphs is not None and engine.graphs.mixed is not None and plain.graphs is None
    found = list(engine.graphs.mixed._graphs.values())
    assert min(kept, 10) <= len(found) <= kept
    assert all(graph.replay is not None for graph in found)


def test_a_size_is_captured_when_it_comes_again(kernels: Kernels) -> None:
    engine = load_engine(DEMO, kernels=kernels, **SIZES)
    first = started(engine)
    step(engine, drafted(3, *first, 1, 2, 3))
    assert engine.graphs is not None and engine.graphs.mixed is not None
    graphs_of = engine.graphs.mixed._graphs
    assert Size(0, 1, 4, 4) not in graphs_of
    first = started(engine)
    step(engine, drafted(3, *first, 4, 5, 6))
    assert graphs_of[Size(0, 1, 4, 4)].replay is not None


def test_what_cannot_be_captured_is_computed(
    kernels: Kernels, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """And no step is lost for it, nor tried again."""
    engine = load_engine(DEMO, kernels=kernels, **SIZES)
    expected = generate(engine, prompts())
    engine.allocate(SIZES["tokens"], SIZES["total_tokens"])
    lay_out = Tables.step

    def by_values(self: Tables, layout: Layout, numbers: Tensor, present: Sequence[int] = ()) -> Any:
        numbers.nonzero()
        return lay_out(self, layout, numbers, present)

    monkeypatch.setattr(Tables, "step", by_values)
    for _ in range(3):
        drafter = Drafter([p.tokens for p in expected])
        assert results(expected) == results(generate(engine, prompts(), drafter)) and drafter.accepted
    assert 1 == sum("computed without graphs" in line for line in caplog.messages)


def test_of_large_models_no_steps_with_drafts_are_captured(kernels: Kernels, monkeypatch: pytest.MonkeyPatch) -> None:
    """What graphs of them keep would add up, and gain little."""
    monkeypatch.setattr(engines, "EXACT_BYTES", 1000)
    engine = load_engine(DEMO, kernels=kernels, **SIZES)
    check(engine)
    assert engine.graphs is not None and engine.graphs.mixed is not None and not engine.graphs.mixed._graphs


def started(engine: Engine, **sampling: Any) -> list[int]:
    """Sequence 1 with its prompt computed; its first token."""
    engine.launch(pb.StepRequest(reset=True))
    request = pb.StepRequest(chunk_ids=[1], chunk_tokens=[3])
    request.add.add(id=1, sampling=greedy(**sampling), **NEW)
    return step(engine, request)


def step(engine: Engine, request: pb.StepRequest) -> list[int]:
    launched = engine.launch(request)
    return [] if launched is None else launched.finish().token_ids


def drafted(position: int, *token_ids: int, came: Sequence[int] = (), **fields: Any) -> pb.StepRequest:
    return pb.StepRequest(drafts=[pb.Extension(id=1, position=position, token_ids=token_ids, came=came)], **fields)


@pytest.fixture(scope="module")
def engine(tiny_bloom: Path) -> Engine:
    return load_engine(tiny_bloom, **SIZES)


@pytest.mark.parametrize(
    ("before", "wrong", "told"),
    [
        ([], drafted(3), "needs token ids below"),
        ([], drafted(3, 5, 103), "needs token ids below"),
        ([], drafted(3, 5, came=[103]), "needs token ids below"),
        ([], drafted(2, 5, 6), "but it can from 3 … 3"),
        ([], drafted(4, 5), "but it can from 3 … 3"),
        ([], drafted(3, *[5] * 30), "no room for 30 tokens from 3 on"),
        ([drafted(3, 5, 6, 7)], drafted(3, 5, 6), "but it can from 4 … 6"),
        ([drafted(3, 5, 6, 7)], drafted(4, 5), "got 0 tokens"),
        (
            [drafted(3, 5, 6, 7)],
            pb.StepRequest(extend=[pb.Extension(id=1, position=3, token_ids=[5])], chunk_ids=[1], chunk_tokens=[1]),
            "but it can from 4 … 6",
        ),
        ([], drafted(3, 5, extend=[pb.Extension(id=1, position=3, token_ids=[5])]), "has 1 prompt tokens left"),
        ([], pb.StepRequest(drafts=[*drafted(3, 5).drafts, *drafted(3, 5).drafts]), "has a draft already"),
        ([], drafted(3, 5, masks=[pb.TokenMask(ids=[1], rows=[0, 1])]), "name one for each"),
    ],
)
def test_drafts_that_cannot_be_are_refused(
    engine: Engine, before: list[pb.StepRequest], wrong: pb.StepRequest, told: str
) -> None:
    started(engine)
    for request in before:
        step(engine, request)
    with pytest.raises(StepError, match=told):
        engine.launch(wrong)
    assert step(engine, drafted(3, 5)) == []  # the sequence is gone, and drafts of it are nothing
    assert step(engine, pb.StepRequest(decode=True)) == []


def test_a_sequence_on_a_draft_waits(engine: Engine) -> None:
    first = started(engine)
    assert step(engine, drafted(3, *first, 1, 2, decode=True))
    assert step(engine, pb.StepRequest(decode=True)) == []


def test_where_no_state_can_be_kept_a_draft_is_its_first_token(checkpoints: Checkpoints, kernels: Kernels) -> None:
    engine = load_engine(checkpoints("qwen3_5")[0], kernels=kernels, **SIZES)
    expected = generate(engine, prompts())
    assert engine._sequences is not None
    del engine._sequences.free_spares[2:]
    drafter = Drafter([p.tokens for p in expected])
    assert results(expected) == results(generate(engine, prompts(), drafter))
    assert 0 < drafter.accepted and 2 == len(engine._sequences.free_spares)


@pytest.mark.parametrize("before", [False, True])
def test_states_behind_guesses_are_not_kept(checkpoints: Checkpoints, before: bool) -> None:
    engine = load_engine(checkpoints("qwen3_5")[0], **SIZES)
    first = started(engine)
    kept: dict[str, Any] = {"kept_ids": [1], "kept_blocks": range(10, 10 + engine.checkpoint_blocks)}
    if before:
        step(engine, drafted(3, *first, 102, 102))
    with pytest.raises(StepError, match="a state behind them cannot be kept"):
        step(engine, pb.StepRequest(**kept) if before else drafted(3, *first, 102, **kept))


def test_a_ring_has_no_room_for_more(checkpoints: Checkpoints) -> None:
    engine = load_engine(checkpoints("gemma2")[0], tokens=4096, rings=True)
    request = pb.StepRequest(chunk_ids=[1], chunk_tokens=[3])
    request.add.add(id=1, token_ids=[5, 6, 7], blocks=[*range(10)], sampling=GREEDY)
    step(engine, request)
    with pytest.raises(StepError, match="takes 65 tokens in a step, but its ring 64"):
        step(engine, drafted(3, *[5] * 65))
