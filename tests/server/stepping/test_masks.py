"""What a grammar allows: tokens of a step, sequences that wait for it, and tokens that join at once."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from server.backends.cpu import Kernels
from server.backends.cpu.device import CpuDevice
from server.backends.reference.logits import StockLogits
from server.pb import generate_pb2 as pb
from server.ranks.collectives import Shard
from server.stepping.engine import Engine
from server.stepping.logit_rules import Allowed, Masks, TokenBiases
from server.stepping.sampling import Sampler, TokenChoice, Watermark
from server.stepping.sequences import StepError, allowed_tokens
from server.stepping.vocabulary import Vocabulary
from tests.server.driver import Prompt, all_logits, generate, greedy, load_engine, sampled

CPU = CpuDevice()
NEVER = float("-inf")


@pytest.fixture(scope="module", params=["reference", "cpu"])
def engine(request: pytest.FixtureRequest, tiny_bloom: Path) -> Engine:
    kernels: Kernels | None = request.getfixturevalue("kernels") if request.param == "cpu" else None
    return load_engine(tiny_bloom, tokens=8192, kernels=kernels)


def mask(**kind: Any) -> Allowed:
    return allowed_tokens(pb.TokenMask(**kind), 19)


def listed(*ids: int) -> pb.TokenIds:
    return pb.TokenIds(ids=ids)


def tokens_of(allowed: Allowed, start: int = 0, width: int = 19) -> list[int]:
    """What is left of zeros in one rank's part of 19 tokens."""
    vocabulary = Vocabulary(StockLogits(), Shard(), 19, start, width)
    logits = Masks([allowed], CPU, vocabulary).apply(torch.zeros(1, width))
    return [start + column for column, value in enumerate(logits[0].tolist()) if value == 0]


def test_a_mask_says_the_same_in_all_its_forms() -> None:
    allowed = [0, 3, 8, 17, 18]
    others = [token for token in range(19) if token not in allowed]
    bits = sum(1 << token for token in allowed).to_bytes(3, "little")
    for form in (mask(allowed=listed(*allowed)), mask(forbidden=listed(*others)), mask(bits=bits)):
        assert allowed == tokens_of(form)


def test_what_is_beyond_the_vocabulary_is_not_there() -> None:
    assert [0, 18] == tokens_of(mask(allowed=listed(0, 18, 19, 500)))
    assert [18] == tokens_of(mask(bits=(1 << 18 | 1 << 19 | 1 << 40).to_bytes(8, "little")))
    assert [1] == tokens_of(mask(bits=b"\x02"))  # and where the bits end, nothing is allowed


@pytest.mark.parametrize(("start", "width"), [(0, 7), (7, 7), (14, 7), (10, 10)])
def test_each_rank_masks_its_own_part(start: int, width: int) -> None:
    allowed = [1, 6, 7, 13, 14, 18]
    expected = [token for token in allowed if start <= token < start + width]
    assert expected == tokens_of(mask(allowed=listed(*allowed)), start, width)


def choose(choices: list[TokenChoice], allowed: Sequence[Allowed | None]) -> list[int]:
    rows = len(choices)
    sampler = Sampler(choices, Watermark(0.5, 2.0), CPU, Vocabulary(StockLogits(), Shard(), 19))
    logits = torch.arange(19.0).repeat(rows, 1)
    zeros = torch.zeros(rows, dtype=torch.int64)
    return sampler(logits, zeros, zeros, [None] * rows, [None] * rows, allowed).token_ids.tolist()


def test_rows_are_masked_by_their_own_masks_alone() -> None:
    few, many = mask(allowed=listed(2, 5)), mask(forbidden=listed(18, 17))
    constrained = TokenChoice(is_constrained=True)
    assert [18, 5, 16, 5] == choose([TokenChoice(), constrained, constrained, constrained], [None, few, many, few])


@pytest.mark.parametrize("do_sample", [False, True])
def test_a_grammar_counts_more_than_bans_where_these_leave_nothing(do_sample: bool) -> None:
    bans = TokenBiases(((5, NEVER), (6, NEVER)))
    choices = [TokenChoice(do_sample=do_sample, seed=s, is_constrained=True, biases=bans) for s in range(20)]
    assert {5, 6} >= set(choose(choices, [mask(allowed=listed(5, 6))] * 20))
    assert {2} == set(choose(choices, [mask(allowed=listed(2, 5, 6))] * 20))


def test_where_bans_leave_nothing_the_model_still_chooses() -> None:
    bans = TokenBiases(((5, NEVER), (6, NEVER)))
    logits = torch.zeros(1, 19)
    logits[0, 6] = 3.0
    choice = TokenChoice(is_constrained=True, biases=bans)
    sampler = Sampler([choice], Watermark(0.5, 2.0), CPU, Vocabulary(StockLogits(), Shard(), 19))
    zeros = torch.zeros(1, dtype=torch.int64)
    chosen = sampler(logits, zeros, zeros, [None], [None], [mask(allowed=listed(5, 6))])
    assert [6] == chosen.token_ids.tolist()
    expected = torch.tensor([0.0, 3.0]).log_softmax(dim=0)[1].item()
    assert [pytest.approx(expected)] == chosen.logprobs.tolist()


def odd(tokens: Sequence[int]) -> tuple[list[int], list[int]]:
    """Odd tokens alone, and behind the third one two certain ones."""
    return [8, 50] if len(tokens) == 3 else [], list(range(1, 103, 2))


def test_tokens_are_the_likeliest_of_those_allowed(engine: Engine) -> None:
    (prompt,) = generate(engine, [Prompt([5, 6, 7], 12, greedy(is_constrained=True), top_n_tokens=3, rule=odd)])
    assert [8, 50] == prompt.tokens[3:5]
    logits = all_logits(engine, [5, 6, 7, *prompt.tokens])[2:-1].clone()
    logits[:, ::2] = NEVER
    chosen = [i for i in range(len(prompt.tokens)) if i not in (3, 4)]
    assert logits.argmax(dim=-1)[chosen].tolist() == [prompt.tokens[i] for i in chosen]
    found = logits.log_softmax(dim=-1).max(dim=-1).values[chosen]
    torch.testing.assert_close(found, torch.tensor(prompt.logprobs), atol=1e-4, rtol=0)
    assert all(token % 2 for tops in prompt.top_ids for token in tops)
    assert not prompt.prompt_values  # those of forced tokens are 0


def test_raw_logprobs_are_those_of_the_model_for_forced_tokens_too(engine: Engine) -> None:
    sampling = greedy(is_constrained=True, raw_logprobs=True)
    (prompt,) = generate(engine, [Prompt([5, 6, 7], 12, sampling, top_n_tokens=2, rule=odd)])
    logprobs = all_logits(engine, [5, 6, 7, *prompt.tokens])[2:-1].log_softmax(dim=-1)
    own = logprobs.gather(1, torch.tensor(prompt.tokens).unsqueeze(1)).squeeze(1)
    torch.testing.assert_close(own[3:5], torch.tensor(prompt.prompt_values), atol=1e-4, rtol=0)
    chosen = [i for i in range(len(prompt.tokens)) if i not in (3, 4)]
    torch.testing.assert_close(own[chosen], torch.tensor(prompt.logprobs), atol=1e-4, rtol=0)
    assert logprobs.topk(2).indices[3:5].flatten().tolist() == [id for id, _ in prompt.prompt_top]
    assert logprobs.topk(2).indices[chosen].tolist() == prompt.top_ids


SAMPLINGS = {
    "greedy": greedy(is_constrained=True),
    "sampled": sampled(3, temperature=1.3, is_constrained=True),
    "penalties": sampled(4, repetition_penalty=1.4, frequency_penalty=0.5, is_constrained=True),
    "words": greedy(
        is_constrained=True,
        banned_word_ids=[id for last in range(1, 100, 4) for id in (50, last)],
        banned_word_lengths=[2] * 25,
    ),
}


@pytest.mark.parametrize("sampling", SAMPLINGS.values(), ids=SAMPLINGS)
def test_tokens_after_forced_ones_are_those_of_a_request_that_had_them(
    engine: Engine, sampling: pb.SamplingParameters
) -> None:
    (whole,) = generate(engine, [Prompt([1, 2, 3], 16, sampling, rule=odd)])
    resumed = Prompt([1, 2, 3, *whole.tokens[:5]], 11, sampling, generated=5, rule=lambda tokens: odd([0] * 9))
    (rest,) = generate(engine, [resumed])
    assert whole.tokens == whole.tokens[:5] + rest.tokens


def test_who_sits_steps_out_and_who_does_not_get_the_tokens_that_they_get_alone(engine: Engine) -> None:
    prompts = [Prompt([i, 2, 3], 16, s, rule=odd, holds=True, joins_at=i % 3) for i, s in enumerate(SAMPLINGS.values())]
    prompts += [
        Prompt([i, 20], 20, s, joins_at=i % 2) for i, s in enumerate([greedy(), sampled(8), sampled(9, top_k=4)])
    ]
    alone = [generate(engine, [replace(p, joins_at=0, holds=False, tokens=[])])[0].tokens for p in prompts]
    together = generate(engine, prompts)
    assert alone == [prompt.tokens for prompt in together]


def test_a_failed_step_drops_only_who_took_part(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    assert engine._sequences is not None
    blocks = iter(range(8))
    request = pb.StepRequest(chunk_ids=[1, 2], chunk_tokens=[2, 2])
    for id in (1, 2):
        request.add.add(id=id, token_ids=[3, 4], blocks=[next(blocks)], sampling=greedy())
    assert engine.launch(request) is not None
    held = pb.StepRequest(decode=True, held=[2], masks=[pb.TokenMask(ids=[1], allowed=listed(4))])
    monkeypatch.setattr(engine, "_run", lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        engine.launch(held)
    assert {2} == set(engine._sequences.sequences)
    monkeypatch.undo()
    engine.launch(pb.StepRequest(retire=[2]))


@pytest.mark.parametrize(
    ("token_ids", "sentence"),
    [([], "below the vocabulary size"), ([4, 103], "below the vocabulary size"), ([4] * 17, "no room for 17")],
)
@pytest.mark.parametrize("chunks", [{"chunk_ids": [1], "chunk_tokens": [1]}, {}], ids=["computed", "not yet"])
def test_an_extension_that_breaks_the_contract_is_refused(
    engine: Engine, chunks: dict[str, list[int]], token_ids: list[int], sentence: str
) -> None:
    request = pb.StepRequest(chunk_ids=[1], chunk_tokens=[2])
    request.add.add(id=1, token_ids=[3, 4], blocks=[0], sampling=greedy())
    engine.launch(request)
    wrong = pb.StepRequest(extend=[pb.Extension(id=1, position=2, token_ids=token_ids)], **chunks)
    with pytest.raises(StepError, match=sentence):
        engine.launch(wrong)
    engine.launch(pb.StepRequest(retire=[1]))


def test_a_constrained_sequence_gets_no_token_without_a_mask(engine: Engine) -> None:
    request = pb.StepRequest(chunk_ids=[1], chunk_tokens=[2])
    request.add.add(id=1, token_ids=[3, 4], blocks=[0], sampling=greedy(is_constrained=True))
    with pytest.raises(AssertionError, match="a grammar says"):
        engine.launch(request)
