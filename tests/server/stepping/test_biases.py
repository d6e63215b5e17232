"""Biases of single tokens and banned words: what they add, to which rows, and how they follow their sequences."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch

from router.requests import validation
from server.backends.cpu.device import CpuDevice
from server.backends.reference.logits import StockLogits
from server.ranks.collectives import Shard
from server.stepping.logit_rules import MOST_WORD_TOKENS, RecentTokens, TokenBiases
from server.stepping.sampling import Chosen, Sampler, TokenChoice, Watermark
from server.stepping.vocabulary import Vocabulary

CPU = CpuDevice()
NEVER = float("-inf")


def choose(
    scores: Sequence[float],
    choices: list[TokenChoice],
    recents: list[RecentTokens | None] | None = None,
    position: int = 5,
) -> Chosen:
    rows = len(choices)
    vocabulary = Vocabulary(StockLogits(), Shard(), len(scores))
    return Sampler(choices, Watermark(0.5, 2.0), CPU, vocabulary)(
        torch.tensor([scores]).repeat(rows, 1),
        torch.full((rows,), position),
        torch.zeros(rows, dtype=torch.int64),
        [None] * rows,
        recents or [None] * rows,
    )


def banning(*words: tuple[int, ...]) -> TokenChoice:
    return TokenChoice(biases=TokenBiases(banned_words=words))


def test_a_bias_is_added_before_temperature_and_to_its_row_alone() -> None:
    biased = TokenChoice(do_sample=True, temperature=0.5, top_n_tokens=3, biases=TokenBiases(((0, 3.0), (2, -1.0))))
    chosen = choose([1.0, 2.0, 3.0], [TokenChoice(), biased, TokenChoice(top_n_tokens=3)])
    assert chosen.top_ids is not None and chosen.top_logprobs is not None
    expected = torch.tensor([4.0, 2.0, 2.0]) / 0.5
    assert [0, 1, 2] == chosen.top_ids[1].tolist()
    torch.testing.assert_close(expected.log_softmax(0), chosen.top_logprobs[1])
    assert [2, 1, 0] == chosen.top_ids[2].tolist()
    assert 2 == chosen.token_ids[0]


@pytest.mark.parametrize("do_sample", [False, True])
def test_a_token_of_bias_minus_infinity_is_never_generated(do_sample: bool) -> None:
    biases = TokenBiases(((1, NEVER), (3, NEVER)))
    choices = [TokenChoice(do_sample=do_sample, seed=seed, top_n_tokens=4, biases=biases) for seed in range(50)]
    chosen = choose([0.0, 50.0, 1.0, 40.0], choices)
    assert set(chosen.token_ids.tolist()) <= {0, 2}
    assert chosen.top_logprobs is not None and [NEVER, NEVER] == chosen.top_logprobs[0, 2:].tolist()
    assert chosen.logprobs.isfinite().all()


def test_a_word_is_banned_by_its_last_token_where_the_others_were_just_generated() -> None:
    choices = [banning((7, 2)), banning((7, 2)), banning((6, 7, 2)), banning((5, 7, 2)), banning((7, 2), (7, 1))]
    recents = [RecentTokens(tokens, CPU) for tokens in ([7], [7, 5], [5, 6, 7], [5, 6, 7], [7])]
    chosen = choose([0.0, 1.0, 2.0], choices, list(recents))
    assert [1, 2, 1, 2, 0] == chosen.token_ids.tolist()


def test_end_tokens_are_not_generated_before_their_position() -> None:
    choices = [TokenChoice(biases=TokenBiases(end_ids=(2, 1), first_end=at)) for at in (4, 5, 6)]
    chosen = choose([0.0, 1.0, 2.0], [*choices, TokenChoice()], position=5)
    assert [2, 2, 0, 2] == chosen.token_ids.tolist()


def test_a_word_of_the_longest_kind_is_banned() -> None:
    word = tuple(range(MOST_WORD_TOKENS - 1))
    recents = [RecentTokens([9, 9, *word], CPU), RecentTokens(word[1:], CPU), RecentTokens([1, *word[1:]], CPU)]
    assert [1, 2, 2] == choose([0.0, 1.0, 2.0], [banning((*word, 2))] * 3, list(recents)).token_ids.tolist()
    assert validation.MOST_WORD_TOKENS == MOST_WORD_TOKENS  # of the router


def test_what_was_not_generated_is_no_part_of_a_word() -> None:
    recent = RecentTokens([], CPU)
    choices = [banning((0, 0), (1, 1), (2, 2))]
    found = [choose([0.0, 1.0, 2.0], choices, [recent]).token_ids.item() for _ in range(5)]
    assert [2, 1, 2, 1, 2] == found


def test_recent_tokens_follow_their_sequences_into_any_batch() -> None:
    words = [((2, 1), (1, 2)), ((2, 2), (1, 1, 2)), ((2, 0), (0, 0, 1), (1, 2))]
    alone, together = ([RecentTokens([2], CPU) for _ in words] for _ in range(2))
    scores = [1.0, 1.5, 1.6]
    for members in ([0], [0, 1], [1, 2, 0], [0, 1], [2], [2, 1, 0], [1, 2, 0]):
        expected = [choose(scores, [banning(*words[m])], [alone[m]]).token_ids.item() for m in members]
        batch: list[RecentTokens | None] = [None, *(together[m] for m in members)]
        choices = [TokenChoice(), *(banning(*words[m]) for m in members)]
        assert [2, *expected] == choose(scores, choices, batch).token_ids.tolist()
