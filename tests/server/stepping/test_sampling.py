"""Sampling: each rule on logits small enough to check by eye, and noise that is a function of its counter."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from fractions import Fraction
from typing import Any

import pytest
import torch
from torch import Tensor

from server.backends.cpu.device import CpuDevice
from server.backends.protocol import Logits
from server.backends.reference.logits import StockLogits, exponential_noise
from server.ranks.collectives import Shard
from server.stepping.logit_rules import TokenBiases
from server.stepping.sampling import (
    History,
    Sampler,
    TokenChoice,
    Watermark,
    choose_captured,
    keep_min_p,
    keep_top_k,
    keep_top_p,
    keep_typical,
    settings_of,
)
from server.stepping.vocabulary import Vocabulary

CPU = CpuDevice()
WATERMARK = Watermark(gamma=0.5, delta=2.0)


def whole(size: int) -> Vocabulary:
    """All of a vocabulary, on one rank."""
    return Vocabulary(StockLogits(), Shard(), size)


def choose(
    logits: Tensor,
    choices: list[TokenChoice],
    position: int | Tensor = 5,
    histories: list[History | None] | None = None,
    watermark: Watermark = WATERMARK,
):  # type: ignore[no-untyped-def]
    rows = len(choices)
    sampler = Sampler(choices, watermark, CPU, whole(logits.shape[-1]))
    return sampler(
        logits.clone().expand(rows, -1).contiguous(),
        positions=torch.as_tensor(position).expand(rows),
        previous=torch.zeros(rows, dtype=torch.int64),
        histories=histories or [None] * rows,
    )


def kept(logits: Tensor) -> list[int]:
    """Ids that a warper left."""
    return torch.nonzero(logits[0] > float("-inf")).flatten().tolist()


def column(value: float) -> Tensor:
    return torch.tensor([[value]])


def test_greedy_takes_the_largest_logit_and_reports_the_plain_logprob() -> None:
    logits = torch.tensor([[0.0, 3.0, 1.0]])
    chosen = choose(logits, [TokenChoice()])
    assert [1] == chosen.token_ids.tolist()
    assert chosen.logprobs.item() == pytest.approx(3 - math.log(1 + math.e**3 + math.e))


def test_top_k_keeps_ties() -> None:
    logits = torch.tensor([[4.0, 2.0, 2.0, 1.0]])
    assert [0] == kept(keep_top_k(whole(4), logits, column(1).long(), most=1))
    assert [0, 1, 2] == kept(keep_top_k(whole(4), logits, column(2).long(), most=2))
    assert [0, 1, 2, 3] == kept(keep_top_k(whole(4), logits, column(99).long(), most=99))


def test_top_p_keeps_the_smallest_set_that_reaches_p() -> None:
    logits = torch.tensor([[0.5, 0.3, 0.15, 0.05]]).log()
    assert [0] == kept(keep_top_p(whole(4), logits, column(0.4)))
    assert [0, 1] == kept(keep_top_p(whole(4), logits, column(0.6)))
    assert [0, 1, 2] == kept(keep_top_p(whole(4), logits, column(0.9)))
    assert [0] == kept(keep_top_p(whole(4), logits, column(1e-6)))


def test_typical_p_prefers_tokens_near_the_entropy() -> None:
    logits = torch.tensor([[0.6, 0.2, 0.1, 0.1]]).log()
    entropy = -(logits.exp() * logits).sum()
    nearest = int((-logits - entropy).abs().argmin())
    assert [nearest] == kept(keep_typical(whole(4), logits, column(0.01)))
    assert [0, 1, 2, 3] == kept(keep_typical(whole(4), logits, column(1.0 - 1e-7)))


def test_typical_p_after_top_k_does_not_bring_a_token_back() -> None:
    logits = keep_top_k(whole(4), torch.tensor([[0.6, 0.2, 0.1, 0.1]]).log(), column(2).long(), most=2)
    assert set(kept(keep_typical(whole(4), logits, column(0.99)))) <= {0, 1}


def test_repetition_penalty_divides_positive_and_multiplies_negative_scores() -> None:
    logits = torch.tensor([[2.0, 1.9, -1.0, -1.1]])
    history = History([0, 2], 0, whole(4), CPU)
    chosen = choose(logits, [TokenChoice(repetition_penalty=2.0, top_n_tokens=4)], histories=[history])
    assert [1, 0, 3, 2] == chosen.top_ids[0].tolist()


def test_frequency_penalty_counts_generated_tokens_only() -> None:
    logits = torch.tensor([[2.0, 1.0]])
    asked, generated = History([0, 0], 0, whole(2), CPU), History([0, 0], 2, whole(2), CPU)
    choices = [TokenChoice(frequency_penalty=0.6)] * 2
    assert [0, 1] == choose(logits, choices, histories=[asked, generated]).token_ids.tolist()


def test_presence_penalty_is_taken_once_from_every_generated_token() -> None:
    """OpenAI's formula: the score less presence_penalty if the token was generated, however often."""
    logits = torch.tensor([[2.0, 1.8, 1.0]])
    history = History([2, 2, 0, 0, 0], 3, whole(3), CPU)  # token 2 is only in the prompt
    choices = [TokenChoice(presence_penalty=0.5, frequency_penalty=0.1, top_n_tokens=3)]
    chosen = choose(logits, choices, histories=[history])
    expected = torch.tensor([1.8, 2.0 - 0.5 - 0.3, 1.0])
    assert [1, 0, 2] == chosen.top_ids[0].tolist()
    torch.testing.assert_close(expected - expected.logsumexp(0), chosen.top_logprobs[0])


def test_presence_penalty_counts_what_is_generated_from_then_on() -> None:
    history = History([2], 0, whole(3), CPU)
    logits, choices = torch.tensor([[2.0, 1.9, 1.8]]), [TokenChoice(presence_penalty=2.0)]
    found = [choose(logits, choices, histories=[history]).token_ids.item() for _ in range(4)]
    assert [0, 1, 2, 0] == found


def test_min_p_keeps_what_is_likely_enough_beside_the_best() -> None:
    logits = torch.tensor([[0.5, 0.3, 0.15, 0.05]]).log()
    assert [0, 1, 2, 3] == kept(keep_min_p(whole(4), logits, column(0.09)))
    assert [0, 1, 2] == kept(keep_min_p(whole(4), logits, column(0.29)))
    assert [0] == kept(keep_min_p(whole(4), logits, column(1.0)))
    assert [1, 2] == kept(keep_min_p(whole(3), torch.tensor([[1.0, 2.0, 2.0]]), column(1.0)))


def test_min_p_looks_at_probabilities_after_temperature() -> None:
    logits = torch.tensor([[0.5, 0.3, 0.2]]).log()
    cold, hot = (TokenChoice(do_sample=True, min_p=0.4, temperature=t, top_n_tokens=3) for t in (0.5, 2.0))
    removed = [(choose(logits, [choice]).top_logprobs[0] == float("-inf")).tolist() for choice in (cold, hot)]
    assert [[False, True, True], [False, False, False]] == removed


def test_temperature_sharpens_and_flattens() -> None:
    logits = torch.tensor([[1.0, 0.0]])
    cold = choose(logits, [TokenChoice(do_sample=True, temperature=0.01, seed=s) for s in range(50)])
    hot = choose(logits, [TokenChoice(do_sample=True, temperature=100.0, seed=s) for s in range(200)])
    assert [0] * 50 == cold.token_ids.tolist()
    assert 60 < hot.token_ids.sum() < 140


LEAST, MOST = 1.2e-38, 3.4e38  # what a client may send
NEIGHBOURS = [5.0, 5.0000005, -5.0, 4.9999995, 0.001, -0.001, 0.0]  # 5 with the two float32 beside it
EXTREME = [
    {"min_p": 1.0},
    {"temperature": LEAST},
    {"temperature": 1e-11},
    {"temperature": LEAST, "top_k": 3, "top_p": 0.9, "typical_p": 0.9},
    {"temperature": LEAST, "top_p": LEAST},
    {"top_p": LEAST},
    {"top_k": 1},
    {"top_p": LEAST, "typical_p": LEAST, "temperature": LEAST},
]
PENALTIES = [LEAST, 1e-20, 0.5, 1.0, 2.0, 1e20, MOST]


@pytest.mark.parametrize("extreme", EXTREME, ids=str)
@pytest.mark.parametrize("penalty", PENALTIES)
def test_extremes_that_leave_one_token_leave_the_right_one(
    make_logits: Callable[[], Logits], extreme: dict[str, Any], penalty: float
) -> None:
    """The best one by exact arithmetic, by any seed, with a probability of one: no overflow, no NaN, no luck."""
    seen = [0, 2, 5]
    exact = [
        Fraction(x) * (1 if id not in seen else Fraction(penalty) if x < 0 else 1 / Fraction(penalty))
        for id, x in enumerate(torch.tensor(NEIGHBOURS).tolist())
    ]
    best = max(range(len(exact)), key=exact.__getitem__)
    seeds = range(40)
    choices = [TokenChoice(do_sample=True, seed=seed, repetition_penalty=penalty, **extreme) for seed in seeds]
    vocabulary = Vocabulary(make_logits(), Shard(), len(NEIGHBOURS))
    histories = [History(seen, 0, vocabulary, CPU) if choices[0].needs_history else None for _ in seeds]
    chosen = Sampler(choices, WATERMARK, CPU, vocabulary)(
        torch.tensor([NEIGHBOURS]).repeat(len(seeds), 1),
        torch.arange(len(seeds)),
        torch.zeros(len(seeds), dtype=torch.int64),
        histories,
    )
    assert {best} == set(chosen.token_ids.tolist())
    assert {0.0} == set(chosen.logprobs.tolist())


@pytest.mark.parametrize("penalty", PENALTIES)
@pytest.mark.parametrize("temperature", [LEAST, 1.0, MOST])
def test_extremes_together_give_numbers(penalty: float, temperature: float) -> None:
    logits = torch.randn(1, 200, generator=torch.Generator().manual_seed(0)) * 300
    for more in ({}, {"do_sample": True}, {"do_sample": True, "top_p": 0.9, "typical_p": 0.9, "top_k": 50}):
        given = TokenChoice(
            temperature=temperature, repetition_penalty=penalty, frequency_penalty=-2.0, top_n_tokens=5, **more
        )
        history = History(list(range(0, 200, 3)), 20, whole(200), CPU)
        chosen = choose(logits, [given], histories=[history])
        assert chosen.logprobs.isfinite().all() and not chosen.top_logprobs.isnan().any()
        assert (chosen.logprobs <= 1e-4).all()


@pytest.mark.parametrize("extreme", [e for e in EXTREME if not {"typical_p", "min_p"} & e.keys()], ids=str)
def test_captured_sampling_is_as_exact(extreme: dict[str, Any]) -> None:
    rows = 40
    choices = [TokenChoice(do_sample=True, seed=seed, **extreme) for seed in range(rows)]
    settings = torch.tensor(settings_of(choices, rows), dtype=torch.float64)
    logits = torch.tensor([NEIGHBOURS]).repeat(rows, 1)
    token_ids, logprobs = choose_captured(whole(len(NEIGHBOURS)), logits, settings, torch.arange(rows))
    assert ({1}, {0.0}) == (set(token_ids.tolist()), set(logprobs.tolist()))


def test_positions_of_one_seed_are_independent() -> None:
    draws = choose(torch.zeros(1, 2), [TokenChoice(do_sample=True, seed=1)] * 4000, torch.arange(4000)).token_ids
    pairs = torch.bincount(draws[:-1] * 2 + draws[1:], minlength=4) / 3999
    torch.testing.assert_close(pairs, torch.full((4,), 0.25), atol=0.03, rtol=0)


def test_a_row_is_the_same_whatever_stands_beside_it() -> None:
    logits = torch.randn(1, 300, generator=torch.Generator().manual_seed(0))
    mine = TokenChoice(do_sample=True, seed=2**63 + 5, top_p=0.9, top_k=40)
    others = [TokenChoice(do_sample=True, seed=s, typical_p=0.5, watermark=True) for s in range(6)]
    alone = choose(logits, [mine])
    crowded = choose(logits, [*others, mine, TokenChoice()])
    assert alone.token_ids[0] == crowded.token_ids[6]
    assert alone.logprobs[0] == pytest.approx(float(crowded.logprobs[6]))


def test_noise_is_exponential_and_a_pure_function() -> None:
    low, high, positions = torch.tensor([[7]]), torch.tensor([[0]]), torch.tensor([3])
    noise = exponential_noise(low, high, positions, torch.arange(200_000))
    assert torch.equal(noise, exponential_noise(low, high, positions, torch.arange(200_000)))
    assert torch.equal(noise[:, :50], exponential_noise(low, high, positions, torch.arange(50)))
    assert noise.mean().item() == pytest.approx(1.0, abs=0.02)
    assert noise.var().item() == pytest.approx(1.0, abs=0.05)
    assert (noise > 0).all()


def test_noise_is_finite_where_a_float_rounds_its_share_to_one() -> None:
    low, high, positions = torch.tensor([[75007466]]), torch.tensor([[0]]), torch.tensor([20])
    logits = torch.full((1, 10), float("-inf"))
    logits[0, 2] = 1.5
    assert 16 < exponential_noise(low, high, positions, torch.tensor([2])).item() < 17
    assert [2] == StockLogits().race(logits, low, high, positions).tolist()


def test_every_half_of_the_seed_and_the_position_changes_the_noise() -> None:
    def noise(low: int, high: int, position: int) -> Tensor:
        return exponential_noise(
            torch.tensor([[low]]), torch.tensor([[high]]), torch.tensor([position]), torch.arange(1000)
        )

    base = noise(1, 1, 1)
    for other in (noise(2, 1, 1), noise(1, 2, 1), noise(1, 1, 2)):
        correlation = torch.corrcoef(torch.cat([base, other]))[0, 1].item()
        assert abs(correlation) < 0.1


def test_watermark_favours_the_share_gamma_of_the_vocabulary() -> None:
    logits = torch.zeros(1, 4000)
    chosen = choose(logits, [TokenChoice(watermark=True, top_n_tokens=4000)], watermark=Watermark(0.25, 3.0))
    values = chosen.top_logprobs[0]
    favoured = int((values > values.mean()).sum())
    assert 900 < favoured < 1100
    assert float(values[0] - values[-1]) == pytest.approx(3.0, abs=1e-4)


def test_removed_candidates_report_minus_infinity() -> None:
    chosen = choose(torch.tensor([[3.0, 2.0, 1.0]]), [TokenChoice(do_sample=True, top_k=1, top_n_tokens=2)])
    assert chosen.logprobs.item() == pytest.approx(0.0)
    assert chosen.top_logprobs[0, 1] == float("-inf")


RAW = [
    TokenChoice(do_sample=True, temperature=3.0, top_k=2, seed=5),
    TokenChoice(do_sample=True, min_p=0.9, seed=6),
    TokenChoice(repetition_penalty=3.0, presence_penalty=2.0, frequency_penalty=1.0),
    TokenChoice(watermark=True),
    TokenChoice(biases=TokenBiases(((3, 50.0), (1, float("-inf"))))),
    TokenChoice(do_sample=True, seed=7),
    TokenChoice(),
]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("choices", [RAW, RAW[:1], RAW[2:3], RAW[4:5]], ids=["all", "sampled", "penalised", "biased"])
def test_raw_logprobs_are_the_models_and_change_no_token(choices: list[TokenChoice], dtype: torch.dtype) -> None:
    logits = torch.randn(1, 30, generator=torch.Generator().manual_seed(3)).mul(3).to(dtype)
    of_model = logits.float().log_softmax(dim=-1)[0]
    found = []
    for is_raw in (False, True):
        asked = [replace(c, raw_logprobs=is_raw, top_n_tokens=4 * is_raw) for c in choices]
        histories = [History([3, 1, 2], 2, whole(30), CPU) if c.needs_history else None for c in asked]
        found.append(choose(logits, [*asked, TokenChoice(do_sample=True, top_k=1)], histories=[*histories, None]))
    usual, raw = found
    assert usual.token_ids.tolist() == raw.token_ids.tolist()
    torch.testing.assert_close(of_model[raw.token_ids[:-1]], raw.logprobs[:-1], atol=1e-5, rtol=1e-5)
    best = of_model.sort(descending=True, stable=True)
    assert raw.top_ids is not None and raw.top_logprobs is not None
    for row in range(len(choices)):
        assert best.indices[:4].tolist() == raw.top_ids[row].tolist()
        torch.testing.assert_close(best.values[:4], raw.top_logprobs[row], atol=1e-5, rtol=1e-5)
    assert 0.0 == raw.logprobs[-1]  # a neighbour that did not ask


def test_raw_logprobs_that_are_the_usual_ones_are_chosen_as_simply() -> None:
    assert TokenChoice(raw_logprobs=True).is_plain
    assert TokenChoice(raw_logprobs=True, temperature=0.5).is_plain
    assert TokenChoice(raw_logprobs=True, do_sample=True).is_simple
    assert not TokenChoice(raw_logprobs=True, do_sample=True, temperature=0.5).is_simple
    assert not TokenChoice(raw_logprobs=True, presence_penalty=0.5).is_simple


def test_histories_follow_their_sequences_into_any_batch() -> None:
    prompts = [[1, 2], [2, 2], [0, 3]]
    choices = [TokenChoice(repetition_penalty=1.5, frequency_penalty=0.4, presence_penalty=0.1)] * 3
    logits = torch.tensor([[2.0, 1.9, 1.8, 1.7, 1.6]])
    alone = [History(prompt, 1, whole(5), CPU) for prompt in prompts]
    together = [History(prompt, 1, whole(5), CPU) for prompt in prompts]
    for members in ([0], [0, 1], [1, 2, 0], [0, 1], [2], [2, 1, 0], [1, 2, 0]):
        expected = [choose(logits, choices[:1], histories=[alone[m]]).token_ids.item() for m in members]
        batch = [together[m] for m in members]
        assert expected == choose(logits, choices[: len(members)], histories=list(batch)).token_ids.tolist()
