"""Requests made of words, files and traces; a word is a token here, so that they can be read."""

from __future__ import annotations

import asyncio
from random import Random

import pytest

from benchmark.result import BenchError
from benchmark.serving.datasets import Lengths, Said, TracedRequest
from benchmark.serving.workload import (
    DatasetSource,
    Dialogue,
    PlannedRequest,
    Prefixes,
    RandomSource,
    Source,
    Texts,
    TraceSource,
    Turn,
    longest,
)
from tests.benchmark.mock_server import word_ends

WORDS = [f"w{number}" for number in range(1000)]


async def ends(text: str) -> list[int]:
    return word_ends(text)


def texts() -> Texts:
    return Texts(ends, WORDS, Random(0))


def drawn(source: Source, count: int) -> list[PlannedRequest]:
    return asyncio.run(source.draw(count, Random(0)))


def fixed(count: int, random: Random) -> list[Lengths]:
    return [Lengths(20, 5)] * count


def words_of(request: PlannedRequest) -> list[str]:
    assert isinstance(request.prompt, str)
    return request.prompt.split(" ")


@pytest.mark.parametrize("choice", ["uniform", "zipf", "round-robin"])
def test_prompts_share_their_prefixes_and_nothing_else(choice: str) -> None:
    found = [words_of(one) for one in drawn(RandomSource(texts(), fixed, Prefixes(3, 12, choice)), 300)]
    assert {20} == {len(words) for words in found}
    begins = [tuple(words[:12]) for words in found]
    assert 3 == len(set(begins))
    assert 300 == len({tuple(words[12:]) for words in found})
    often = sorted((begins.count(one) for one in set(begins)), reverse=True)
    expected = [164, 82, 55] if choice == "zipf" else [100, 100, 100]
    assert expected == pytest.approx(often, abs=0 if choice == "round-robin" else 30)


def test_conversations_have_turns_with_pauses() -> None:
    [request] = drawn(RandomSource(texts(), fixed, dialogue=Dialogue(3, 2.0)), 1)
    assert [Lengths(20, 5)] * 2 == [turn.lengths for turn in request.later]
    assert all(turn.think_s > 0 for turn in request.later)
    assert {"max_input_length": 20 + 5 + 20 + 5 + 20, "max_total_tokens": 75} == longest([request])


def test_the_next_turn_carries_what_was_said() -> None:
    turn = Turn(({"role": "user", "content": "three"},), Lengths(1, 9))
    after = PlannedRequest("one", Lengths(1, 4), later=(turn, turn), adapter="a").after("two two", 2)
    assert "a" == after.adapter
    assert ["one", "two two", "three"] == [said["content"] for said in after.prompt if not isinstance(said, str)]
    assert (Lengths(4, 9), 1, 1) == (after.lengths, after.turn, len(after.later))


def test_a_file_keeps_its_texts_and_lengths() -> None:
    user, system = {"role": "user", "content": "a b c"}, {"role": "system", "content": "s"}
    conversations = [
        (Said((user,), "d e"), Said((user,), None, None, 7)),
        (Said((), None, 11, 4),),
        (Said((system, user), None),),
    ]
    found = drawn(DatasetSource(texts(), conversations, 9, dialogue=Dialogue(2)), 6)
    by_length = {request.lengths: request for request in found}
    assert {Lengths(3, 9), Lengths(11, 4), Lengths(4, 9)} == by_length.keys()  # 9: an --output-length is for all
    assert "a b c" == by_length[Lengths(3, 9)].prompt
    assert 11 == len(words_of(by_length[Lengths(11, 4)]))
    assert [Lengths(3, 7)] == [turn.lengths for turn in by_length[Lengths(3, 9)].later]
    assert (system, user) == by_length[Lengths(4, 9)].prompt


def test_answers_of_a_file_are_counted() -> None:
    said = Said(({"role": "user", "content": "a"},), "b c d")
    assert [Lengths(1, 3)] == [one.lengths for one in drawn(DatasetSource(texts(), [(said,)], None), 1)]


def test_what_is_too_long_is_left_out() -> None:
    conversations = [(Said((), None, length, 1),) for length in (5, 50)]
    assert {5} == {one.lengths.input_length for one in drawn(DatasetSource(texts(), conversations, None, 10), 8)}
    with pytest.raises(BenchError, match="all 2 conversations have more than 3 tokens: give a higher --most-tokens"):
        drawn(DatasetSource(texts(), conversations, None, 3), 8)
    with pytest.raises(BenchError, match="all requests of the trace have more than 3 tokens"):
        TraceSource(texts(), [TracedRequest(0.0, Lengths(5, 5))], 3)


def test_prompts_without_an_answer_need_a_length() -> None:
    said = Said(({"role": "user", "content": "a"},))
    with pytest.raises(BenchError, match="give one --output-length"):
        drawn(DatasetSource(texts(), [(said,)], None), 1)


def test_equal_hashes_of_a_trace_are_equal_words() -> None:
    trace = [TracedRequest(at, Lengths(1100, 5), blocks) for at, blocks in ((0.0, (1, 2, 3)), (2.0, (1, 9, 4)))]
    first, second = drawn(TraceSource(texts(), trace), 5)
    assert [0.0, 2.0] == [first.send_after_s, second.send_after_s]
    assert 1100 == len(words_of(first)) == len(words_of(second))
    same = [one == other for one, other in zip(words_of(first), words_of(second), strict=True)]
    assert all(same[:511]) and sum(same[511:]) < 10
