"""Every parameter: thousands of samples have the exact distribution, and any batch gives a sequence the same tokens."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache, partial
from itertools import pairwise

import pytest
import torch
from torch import Tensor

from server.backends.cpu.device import CpuDevice
from server.backends.protocol import Logits
from server.backends.reference.logits import StockLogits
from server.ranks.collectives import Shard
from server.stepping.logit_rules import History, RecentTokens, TokenBiases
from server.stepping.sampling import Chosen, Sampler, TokenChoice, Watermark, choose_captured, greenlist, settings_of
from server.stepping.vocabulary import Vocabulary
from tests.server.stepping.exact_sampling import NEVER, distribution, fit
from tests.server.stepping.test_vocabulary import on_ranks

CPU = CpuDevice()
SAMPLES, SIZE = 6_000, 60
WATERMARK = Watermark(gamma=0.5, delta=2.0)
PROMPT, GENERATED = [4, 9, 9, 30], [5, 9, 5, 17, 5]
LOGITS = torch.randn(SIZE, generator=torch.Generator().manual_seed(8)) * 2
LOGITS[[5, 9, 17, 30]] += 2.0  # what penalties are about is likely

CASES = {
    "plain": TokenChoice(),
    "temperature": TokenChoice(temperature=1.7),
    "top_k": TokenChoice(top_k=12),
    "top_p": TokenChoice(top_p=0.8),
    "min_p": TokenChoice(min_p=0.05),
    "typical_p": TokenChoice(typical_p=0.7),
    "repetition_penalty": TokenChoice(repetition_penalty=1.6),
    "frequency_penalty": TokenChoice(frequency_penalty=0.7),
    "presence_penalty": TokenChoice(presence_penalty=1.3),
    "presence_penalty below 0": TokenChoice(presence_penalty=-0.9),
    "watermark": TokenChoice(watermark=True),
    "logit_bias": TokenChoice(biases=TokenBiases(((1, 4.0), (5, -3.0), (30, NEVER)))),
    "bad_words": TokenChoice(biases=TokenBiases(banned_words=((5, 9), (17, 5, 30), (5, 5, 17)))),
    "min_tokens": TokenChoice(biases=TokenBiases(end_ids=(9, 17), first_end=10)),
    "min_tokens that are out": TokenChoice(biases=TokenBiases(end_ids=(9, 17), first_end=9)),
    "everything": TokenChoice(
        temperature=1.5,
        top_k=40,
        top_p=0.97,
        min_p=0.004,
        typical_p=0.96,
        repetition_penalty=1.2,
        frequency_penalty=0.1,
        presence_penalty=0.2,
        watermark=True,
        biases=TokenBiases(((1, 2.0),), ((5, 9),), end_ids=(3,), first_end=10),
    ),
}


def asked(case: TokenChoice, seed: int) -> TokenChoice:
    return replace(case, do_sample=True, seed=seed)


def exact(case: TokenChoice) -> list[float]:
    whole = Vocabulary(StockLogits(), Shard(), SIZE)
    green = greenlist(torch.tensor(GENERATED[-1:]), whole, WATERMARK.gamma)[0] * WATERMARK.delta
    return distribution(LOGITS.tolist(), case, prompt=PROMPT, generated=GENERATED, favoured=green.tolist())


def sample(logits: Tensor, vocabulary: Vocabulary, choices: Sequence[TokenChoice], positions: Tensor) -> Chosen:
    """One token for each row of this rank's logits [R, Vl], behind the same tokens."""
    rows, case = len(choices), choices[0]
    history = History([*PROMPT, *GENERATED], len(GENERATED), vocabulary, CPU) if case.needs_history else None
    recent = RecentTokens(GENERATED, CPU) if case.biases.banned_words else None
    return Sampler(choices, WATERMARK, CPU, vocabulary)(
        logits.clone(), positions, torch.full((rows,), GENERATED[-1]), [history] * rows, [recent] * rows
    )


@cache
def samples(name: str) -> list[int]:
    """SAMPLES tokens that the reference draws for a case on one rank, each with a seed of its own."""
    choices = [asked(CASES[name], seed) for seed in range(SAMPLES)]
    vocabulary = Vocabulary(StockLogits(), Shard(), SIZE)
    chosen = sample(LOGITS.repeat(SAMPLES, 1), vocabulary, choices, positions_behind())
    return chosen.token_ids.tolist()


def positions_behind() -> Tensor:
    return torch.full((SAMPLES,), len(PROMPT) + len(GENERATED))


@pytest.mark.parametrize("name", CASES)
def test_samples_have_the_exact_distribution(name: str) -> None:
    assert fit(samples(name), exact(CASES[name])) > 1e-3


@pytest.mark.parametrize("make_logits", ["kernels"], indirect=True)
@pytest.mark.parametrize("name", CASES)
def test_samples_of_two_ranks_have_the_exact_distribution(name: str, make_logits: Callable[[], Logits]) -> None:
    choices = [asked(CASES[name], seed) for seed in range(SAMPLES)]
    draw = partial(sample, choices=choices, positions=positions_behind())
    ranks, _ = on_ranks(LOGITS.repeat(SAMPLES, 1), 2, make_logits, lambda part, vocabulary: draw(part, vocabulary))
    for chosen in ranks:
        assert fit(chosen.token_ids.tolist(), exact(CASES[name])) > 1e-3


def test_samples_of_one_seed_at_all_positions_have_the_exact_distribution() -> None:
    case, positions = CASES["temperature"], torch.arange(SAMPLES)
    vocabulary = Vocabulary(StockLogits(), Shard(), SIZE)
    chosen = sample(LOGITS.repeat(SAMPLES, 1), vocabulary, [asked(case, 2**63 + 11)] * SAMPLES, positions)
    assert fit(chosen.token_ids.tolist(), exact(case)) > 1e-3


@pytest.mark.parametrize("name", ["plain", "temperature", "top_k", "top_p"])
def test_captured_samples_have_the_exact_distribution(name: str) -> None:
    choices = [asked(CASES[name], seed) for seed in range(SAMPLES)]
    settings = torch.tensor(settings_of(choices, SAMPLES), dtype=torch.float64)
    vocabulary = Vocabulary(StockLogits(), Shard(), SIZE)
    drawn, _ = choose_captured(vocabulary, LOGITS.repeat(SAMPLES, 1), settings, torch.full((SAMPLES,), 9))
    assert fit(drawn.tolist(), exact(CASES[name])) > 1e-3


@pytest.mark.parametrize(("one", "other"), [*pairwise(CASES), ("temperature", "plain")])
def test_samples_do_not_fit_the_distribution_of_another_parameter(one: str, other: str) -> None:
    assert fit(samples(one), exact(CASES[other])) < 1e-6


# Sequences that step together. What stands in for a model: the logits that follow each token.

STEPS = 14
MODEL = torch.randn(SIZE, SIZE, generator=torch.Generator().manual_seed(9)) * 2
PAIRS = tuple((a, b) for a in range(SIZE) for b in range(a % 2, SIZE, 2))
HARD_TO_MEET = ("plain", "bad_words", "min_tokens", "min_tokens that are out")
FELT = [
    *(case for name, case in CASES.items() if name not in HARD_TO_MEET),
    TokenChoice(biases=TokenBiases(banned_words=PAIRS)),
    TokenChoice(biases=TokenBiases(end_ids=tuple(range(0, SIZE, 2)), first_end=len(PROMPT) + 7)),
]
SEQUENCES = [
    *(asked(case, seed) for seed, case in enumerate(FELT, start=180)),
    *(case for case in FELT if case.changes_scores),
    TokenChoice(raw_logprobs=True, presence_penalty=1.0, top_n_tokens=3),
]


def step_together(part: Tensor, vocabulary: Vocabulary, choices: Sequence[TokenChoice], *, join_late: bool) -> Chosen:
    """The tokens of these sequences, [S, STEPS] with -1 at the end, by one rank's part of `MODEL` [V, Vl].

    join_late: some begin at later steps, and end later.
    """
    joins_at = [place % 5 if join_late else 0 for place in range(len(choices))]
    tokens: list[list[int]] = [[] for _ in choices]
    histories = [History(PROMPT, 0, vocabulary, CPU) if c.needs_history else None for c in choices]
    recents = [RecentTokens([], CPU) if c.biases.banned_words else None for c in choices]
    for step in range(STEPS + max(joins_at)):
        rows = [s for s, first in enumerate(joins_at) if first <= step < first + STEPS]
        previous = torch.tensor([tokens[s][-1] if tokens[s] else PROMPT[-1] for s in rows])
        sampler = Sampler([choices[s] for s in rows], WATERMARK, CPU, vocabulary)
        positions = torch.tensor([len(PROMPT) + len(tokens[s]) for s in rows])
        chosen = sampler(part[previous], positions, previous, [histories[s] for s in rows], [recents[s] for s in rows])
        for s, token in zip(rows, chosen.token_ids.tolist(), strict=True):
            tokens[s].append(token)
    return Chosen(torch.tensor(tokens), torch.zeros(0))


@pytest.mark.parametrize("world_size", [1, 2])
def test_every_parameter_gives_the_same_tokens_alone_and_in_a_crowd(
    world_size: int, make_logits: Callable[[], Logits]
) -> None:
    whole = Vocabulary(make_logits(), Shard(), SIZE)
    alone = torch.cat([step_together(MODEL, whole, [choice], join_late=False).token_ids for choice in SEQUENCES])
    crowd = partial(step_together, choices=SEQUENCES, join_late=True)
    if world_size == 1:
        ranks = [crowd(MODEL, whole)]
    else:
        ranks, _ = on_ranks(MODEL, world_size, make_logits, lambda part, vocabulary: crowd(part, vocabulary))
    for chosen in ranks:
        assert alone.tolist() == chosen.token_ids.tolist()
    neutral = [TokenChoice(do_sample=choice.do_sample, seed=choice.seed) for choice in SEQUENCES]
    without = torch.cat([step_together(MODEL, whole, [choice], join_late=False).token_ids for choice in neutral])
    assert (alone != without).any(dim=1).all(), "a parameter changed nothing"
