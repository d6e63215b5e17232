"""The engine: cached equals recomputed, neighbours do not matter, and a request can be rebuilt from its tokens."""

from __future__ import annotations

import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer
from transformers import AutoModelForCausalLM

from server.backends.cpu import Kernels, OneDnnBackend
from server.pb import generate_pb2 as pb
from server.stepping.engine import Engine
from server.stepping.sequences import StepError
from server.stepping.warmup import warm_up
from tests.server.conftest import DEMO
from tests.server.driver import GREEDY, PACKED, Prompt, agreed, all_logits, generate, greedy, load_engine, sampled


@pytest.fixture(scope="module")
def engine(tiny_bloom: Path) -> Engine:
    return load_engine(tiny_bloom, tokens=8192)


def fresh(prompt: Prompt) -> Prompt:
    """The same prompt, not yet run."""
    return replace(prompt, tokens=[], logprobs=[], top_ids=[], top_logprobs=[], prompt_values=[], prompt_top=[])


def every_pair() -> dict[str, list[int]]:
    """Bans pairs of tokens until most sequences meet one: each token behind those near it."""
    pairs = [[first, (first + step) % 103] for first in range(103) for step in range(20)]
    return {"banned_word_ids": [id for pair in pairs for id in pair], "banned_word_lengths": [2] * len(pairs)}


def mixed_prompts(count: int) -> list[Prompt]:
    """Prompts of many lengths, greedy and sampled, that join at different steps in chunks of different sizes."""
    rng = random.Random(5)
    samplings = [
        GREEDY,
        sampled(1),
        sampled(2, temperature=0.7, top_k=9),
        sampled(3, top_p=0.8),
        sampled(4, typical_p=0.7),
        sampled(5, repetition_penalty=1.3),
        sampled(6, frequency_penalty=0.6),
        sampled(7, presence_penalty=1.5),
        sampled(8, min_p=0.2),
        sampled(9, bias_ids=[5, 77], biases=[4.0, float("-inf")], **every_pair()),
        sampled(10, min_tokens=5, end_ids=list(range(0, 103, 2))),
        pb.SamplingParameters(temperature=1, top_p=1, typical_p=1, repetition_penalty=1.5),
    ]
    return [
        Prompt(
            token_ids=[rng.randrange(103) for _ in range(rng.randint(1, 70))],
            max_new_tokens=rng.randint(1, 20),
            sampling=samplings[i % len(samplings)],
            joins_at=rng.randint(0, 12),
            chunk=rng.choice([1, 7, 16, 1000]),
        )
        for i in range(count)
    ]


def test_decoding_with_the_cache_equals_one_full_forward(engine: Engine) -> None:
    (prompt,) = generate(engine, [Prompt([5, 6, 7, 8, 9], max_new_tokens=40)])
    logits = all_logits(engine, prompt.token_ids + prompt.tokens)
    expected = logits[len(prompt.token_ids) - 1 : -1]
    assert expected.argmax(dim=-1).tolist() == prompt.tokens
    torch.testing.assert_close(
        expected.log_softmax(dim=-1).max(dim=-1).values, torch.tensor(prompt.logprobs), atol=1e-4, rtol=0
    )


@pytest.mark.parametrize("chunk", [1, 5, 16, 33])
def test_a_chunked_prompt_yields_the_same_tokens(engine: Engine, chunk: int) -> None:
    prompt = Prompt(list(range(3, 70)), max_new_tokens=12)
    (whole,) = generate(engine, [fresh(prompt)])
    (chunked,) = generate(engine, [replace(fresh(prompt), chunk=chunk)])
    assert whole.tokens == chunked.tokens


def test_neighbours_arrival_and_chunks_do_not_change_a_sequence(engine: Engine) -> None:
    prompts = mixed_prompts(32)
    together = generate(engine, [fresh(p) for p in prompts])
    for prompt, crowded in zip(prompts, together, strict=True):
        (alone,) = generate(engine, [replace(fresh(prompt), joins_at=0, chunk=1000)])
        assert alone.tokens == crowded.tokens


def test_blocks_that_come_one_by_one_change_no_token(engine: Engine) -> None:
    prompts = [replace(prompt, max_new_tokens=50) for prompt in mixed_prompts(12)]
    whole = generate(engine, [fresh(p) for p in prompts])
    grown = generate(engine, [replace(fresh(p), grows=True) for p in prompts])
    assert [p.tokens for p in whole] == [p.tokens for p in grown]


def test_growth_that_cannot_be_is_refused_and_one_that_comes_too_late_is_nothing(engine: Engine) -> None:
    engine.launch(pb.StepRequest(step=1, reset=True))
    engine.launch(
        pb.StepRequest(step=2, grown_ids=[99], grown_counts=[1], grown_blocks=[3])
    )  # a failed step dropped it
    request = pb.StepRequest(step=3, grown_ids=[99], grown_counts=[1], grown_blocks=[engine.num_blocks])
    with pytest.raises(StepError, match="needs more blocks below"):
        engine.launch(request)
    engine.launch(pb.StepRequest(step=4, reset=True))


@pytest.mark.parametrize(
    "sampling",
    [
        GREEDY,
        sampled(11, temperature=1.5),
        sampled(12, repetition_penalty=1.4, frequency_penalty=0.5, top_p=0.9),
        sampled(13, presence_penalty=2.0, min_p=0.1),
        greedy(bias_ids=[7], biases=[2.0], **every_pair()),
        greedy(min_tokens=12, end_ids=list(range(1, 103, 2))),
    ],
    ids=["greedy", "sampled", "penalties", "presence", "biases", "ends"],
)
def test_a_request_is_rebuilt_from_its_tokens(engine: Engine, sampling: pb.SamplingParameters) -> None:
    (whole,) = generate(engine, [Prompt([1, 2, 3], max_new_tokens=20, sampling=sampling)])
    resumed = Prompt([1, 2, 3, *whole.tokens[:9]], max_new_tokens=11, sampling=sampling, generated=9)
    (rest,) = generate(engine, [resumed])
    assert whole.tokens == whole.tokens[:9] + rest.tokens


@pytest.mark.parametrize("chunk", [4, 1000])
def test_prompt_logprobs_are_those_of_the_full_forward(engine: Engine, chunk: int) -> None:
    token_ids = [9, 4, 77, 31, 2, 60, 61, 8, 15]
    (prompt,) = generate(engine, [Prompt(token_ids, prompt_logprobs=True, chunk=chunk)])
    logprobs = all_logits(engine, token_ids).log_softmax(dim=-1)
    expected = [float(logprobs[i, token]) for i, token in enumerate(token_ids[1:])]
    assert expected == pytest.approx(prompt.prompt_values, abs=1e-4)


def test_raw_logprobs_are_those_of_the_full_forward(engine: Engine) -> None:
    sampling = sampled(3, temperature=2.0, top_k=9, presence_penalty=1.0, raw_logprobs=True)
    (raw,) = generate(engine, [Prompt([1, 2, 3], sampling=sampling, top_n_tokens=2)])
    logprobs = all_logits(engine, [1, 2, 3, *raw.tokens]).log_softmax(dim=-1)[2:-1]
    assert [float(row[token]) for row, token in zip(logprobs, raw.tokens, strict=True)] == pytest.approx(
        raw.logprobs, abs=1e-4
    )
    assert logprobs.topk(2).indices.tolist() == raw.top_ids


@pytest.mark.parametrize("chunk", [4, 1000])
@pytest.mark.parametrize("count", [9, 300])  # 300: more rows than are looked at together
def test_a_prompt_s_candidates_are_those_of_the_full_forward(engine: Engine, chunk: int, count: int) -> None:
    token_ids = random.Random(count).choices(range(103), k=count)
    sampling = sampled(3, temperature=2.0, raw_logprobs=True, bias_ids=[5], biases=[50.0])
    wanted = Prompt(token_ids, 2, sampling, top_n_tokens=3, prompt_logprobs=True, chunk=chunk)
    (prompt,) = generate(engine, [wanted])
    logprobs = all_logits(engine, token_ids).log_softmax(dim=-1)[:-1]
    best = logprobs.sort(dim=-1, descending=True, stable=True)
    assert best.indices[:, :3].flatten().tolist() == [id for id, _ in prompt.prompt_top]
    assert best.values[:, :3].flatten().tolist() == pytest.approx([value for _, value in prompt.prompt_top], abs=1e-4)
    for place, (token, value) in enumerate(zip(token_ids[1:], prompt.prompt_values, strict=True)):
        candidates = dict(prompt.prompt_top[3 * place : 3 * place + 3])
        assert value == candidates.get(token, value), "the same token has the very same number"


def test_a_prompt_has_candidates_only_where_raw_ones_are_wanted(engine: Engine) -> None:
    plain, raw = (
        replace(Prompt([1, 2, 3, 4], 1, top_n_tokens=2, prompt_logprobs=True), sampling=greedy(raw_logprobs=is_raw))
        for is_raw in (False, True)
    )
    generate(engine, [plain, raw])
    assert (3, 3, 0, 6) == (
        *(len(prompt.prompt_values) for prompt in (plain, raw)),
        *(len(prompt.prompt_top) for prompt in (plain, raw)),
    )


@pytest.mark.parametrize("is_captured", [False, True])
def test_raw_logprobs_of_every_path_are_the_oracle_s(is_captured: bool, kernels: Kernels) -> None:
    """Plain, drawn and changed scores, alone and together, in captured decode steps and others."""
    engine = load_engine(DEMO, kernels=kernels, captured=is_captured)
    assert is_captured == (engine.graphs is not None)
    oracle = AutoModelForCausalLM.from_pretrained(DEMO, local_files_only=True).eval()
    samplings = [
        greedy(raw_logprobs=True),
        greedy(raw_logprobs=True, presence_penalty=1.5, repetition_penalty=1.3),
        greedy(raw_logprobs=True, bias_ids=[300], biases=[100.0]),  # a forced token
        sampled(1, raw_logprobs=True),
        sampled(2, raw_logprobs=True, temperature=1.7, top_k=40, top_p=0.9),
        sampled(3, raw_logprobs=True, min_p=0.02, watermark=True, typical_p=0.9),
    ]
    prompts = [Prompt([17, 300 + i, 40], 6, sampling, top_n_tokens=i % 3) for i, sampling in enumerate(samplings)]
    alone = [generate(engine, [fresh(prompt)])[0] for prompt in prompts]
    for prompt, other in zip(generate(engine, prompts), alone, strict=True):
        assert prompt.tokens == other.tokens
        with torch.inference_mode():
            logits = oracle(torch.tensor([prompt.token_ids + prompt.tokens])).logits[0]
        logprobs = logits.log_softmax(dim=-1)[len(prompt.token_ids) - 1 : -1]
        expected = logprobs.gather(1, torch.tensor(prompt.tokens).unsqueeze(1)).flatten().tolist()
        assert expected == pytest.approx(prompt.logprobs, abs=1e-3) == other.logprobs
        n = prompt.top_n_tokens
        assert not n or logprobs.topk(n).indices.tolist() == prompt.top_ids


def test_candidates_are_the_most_likely_tokens(engine: Engine) -> None:
    prompt, neighbour = generate(engine, [Prompt([5, 6], top_n_tokens=3), Prompt([7], top_n_tokens=0)])
    assert [ids[0] for ids in prompt.top_ids] == prompt.tokens
    assert [3] * 8 == [len(ids) for ids in prompt.top_ids]
    assert [0] * 8 == [len(ids) for ids in neighbour.top_ids]


def test_the_next_step_is_launched_before_the_last_is_read(engine: Engine) -> None:
    (expected,) = generate(engine, [Prompt([5, 6, 7], max_new_tokens=3)])
    request = pb.StepRequest(step=1, chunk_ids=[1], chunk_tokens=[3])
    request.add.add(id=1, token_ids=[5, 6, 7], blocks=[0], sampling=GREEDY)
    launched = [engine.launch(request)] + [engine.launch(pb.StepRequest(decode=True)) for _ in range(2)]
    assert expected.tokens == [step.finish().token_ids[0] for step in launched if step is not None]
    assert engine.launch(pb.StepRequest(retire=[1])) is None


def test_a_failed_step_drops_its_sequences_and_nothing_else(engine: Engine) -> None:
    good, bad = pb.StepRequest(chunk_ids=[1], chunk_tokens=[2]), pb.StepRequest(chunk_ids=[2], chunk_tokens=[9])
    good.add.add(id=1, token_ids=[5, 6, 7], blocks=[0], sampling=GREEDY)
    bad.add.add(id=2, token_ids=[5, 6], blocks=[1], sampling=GREEDY)
    assert engine.launch(good) is not None
    with pytest.raises(StepError, match="sequence 2 has 2 prompt tokens left, not 9"):
        engine.launch(bad)
    rest = engine.launch(pb.StepRequest(retire=[2], chunk_ids=[1], chunk_tokens=[1]))
    assert rest is not None
    assert [1] == rest.finish().ids
    engine.launch(pb.StepRequest(retire=[1]))


def test_sampling_a_few_rows_at_a_time_changes_nothing(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = generate(engine, mixed_prompts(20))
    monkeypatch.setattr("server.stepping.next_tokens.LOGIT_ROWS", 3)
    parts = generate(engine, mixed_prompts(20))
    for one, other in zip(whole, parts, strict=True):
        assert one.tokens == other.tokens
        assert one.logprobs == pytest.approx(other.logprobs, abs=1e-4)


def test_rows_are_free_again_after_many_sequences(engine: Engine) -> None:
    generate(engine, mixed_prompts(40))
    table = engine._sequences
    assert table is not None
    assert not table.sequences
    assert len(table.free_rows) == table.num_rows - 1


@PACKED
def test_packed_weights_agree_with_plain_ones(tiny_bloom: Path) -> None:
    plain, packed = (load_engine(tiny_bloom, dtype=torch.bfloat16, backend=b) for b in (None, OneDnnBackend([])))
    token_ids = list(range(4, 60))
    expected = all_logits(plain, token_ids)
    assert (expected - all_logits(packed, token_ids)).abs().mean() < 0.01 * expected.std()


@PACKED
def test_packed_weights_give_the_tokens_of_plain_ones() -> None:
    """Of a trained model: where a random one chooses, the best tokens are nearer than bfloat16 tells apart."""
    text = (
        "Once upon a time there was a little fox who lived in the forest. One day the fox went to the river and found"
    )
    token_ids = Tokenizer.from_file(str(DEMO / "tokenizer.json")).encode(text).ids
    chunked = Prompt(token_ids, max_new_tokens=8, chunk=7, top_n_tokens=2)  # most of its steps sample nothing
    plain, packed = (load_engine(DEMO, dtype=torch.bfloat16, backend=b) for b in (None, OneDnnBackend([])))
    (expected,), (found,) = generate(plain, [chunked]), generate(packed, [fresh(chunked)])
    assert agreed(expected, found, near=0.25) > 4


def test_int8_weights_stay_close_to_dense_ones(tiny_bloom: Path, engine: Engine) -> None:
    token_ids = list(range(4, 60))
    dense = all_logits(engine, token_ids)
    int8 = all_logits(load_engine(tiny_bloom, quantise="int8"), token_ids)
    assert (dense - int8).abs().mean() < 0.05 * dense.std()


def test_a_cache_that_does_not_fit_is_refused_with_the_size_that_does(engine: Engine) -> None:
    sizes = {"prefill_tokens": 64, "total_tokens": 64, "top_n_tokens": 5, "sequences": 0, "fraction": 1.0}
    with pytest.raises(ValueError, match=r"use --max-batch-total-tokens \d+ or less"):
        warm_up(engine, wanted_tokens=10**9, useful_tokens=10**9, **sizes)
    warm_up(engine, wanted_tokens=8192, useful_tokens=8192, **sizes)


@pytest.mark.parametrize(
    ("wrong", "sentence"),
    [
        ({"bias_ids": [103], "biases": [1.0]}, "sequence 7 needs biased, banned and end ids below 103"),
        (
            {"banned_word_ids": [1, 103], "banned_word_lengths": [2]},
            "sequence 7 needs biased, banned and end ids below 103",
        ),
        ({"min_tokens": 1, "end_ids": [103]}, "sequence 7 needs biased, banned and end ids below 103"),
        ({"bias_ids": [1, 2], "biases": [1.0]}, "sequence 7 has 2 biased ids and 1 biases"),
        ({"banned_word_ids": [1], "banned_word_lengths": [1]}, "sequence 7 needs banned words of 2 to 32 tokens"),
        ({"banned_word_ids": [1], "banned_word_lengths": [2]}, "sequence 7 needs banned words of 2 to 32 tokens"),
    ],
    ids=str,
)
def test_sampling_that_breaks_the_contract_is_refused(engine: Engine, wrong: dict[str, Any], sentence: str) -> None:
    request = pb.StepRequest(chunk_ids=[7], chunk_tokens=[1])
    request.add.add(id=7, token_ids=[5], blocks=[0], sampling=greedy(**wrong))
    with pytest.raises(StepError, match=sentence):
        engine.launch(request)


def test_a_banned_word_is_not_generated(engine: Engine) -> None:
    (free,) = generate(engine, [Prompt([1, 2, 3], max_new_tokens=12)])
    word = free.tokens[:2]
    banning = greedy(banned_word_ids=word, banned_word_lengths=[2])
    (banned,) = generate(engine, [Prompt([1, 2, 3], max_new_tokens=12, sampling=banning)])
    assert free.tokens[0] == banned.tokens[0]
    assert all(word != banned.tokens[at : at + 2] for at in range(11))


def test_end_tokens_come_only_after_so_many_others(engine: Engine) -> None:
    (free,) = generate(engine, [Prompt([1, 2, 3], max_new_tokens=12)])
    late = greedy(min_tokens=5, end_ids=sorted(set(free.tokens)))
    (masked,) = generate(engine, [Prompt([1, 2, 3], max_new_tokens=12, sampling=late)])
    (rest,) = generate(engine, [Prompt([1, 2, 3, *masked.tokens[:5]], max_new_tokens=7)])
    assert not set(free.tokens) & set(masked.tokens[:5])
    assert rest.tokens == masked.tokens[5:]
