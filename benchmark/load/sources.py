"""Makes the requests of a row: random prompts, with shared prefixes and later turns, or those of a file or a trace.

Everything is drawn before the clock starts. `draw` gives requests without times; those of a trace have their own. Which
tokens a text has is asked of the server's tokenizer, whoever wrote the text.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, count
from random import Random
from typing import Protocol

from benchmark import workload
from benchmark.http_client import as_text
from benchmark.load.datasets import Conversation, Said
from benchmark.load.traces import BLOCK_TOKENS, TracedRequest
from benchmark.report import BenchError
from benchmark.workload import Lengths, PlannedRequest, TextTooLong, TokenEnds, Turn

CHOICES = ("uniform", "zipf", "round-robin")


class Source(Protocol):
    """Where a row's requests come from."""

    async def draw(self, num_requests: int, random: Random) -> list[PlannedRequest]:
        """So many requests, or, of a trace, so many at most. Raises BenchError."""


@dataclass(frozen=True)
class Texts:
    """What prompts are made of: words, the tokenizer that counts them, and a seed of their own.

    Lengths and times are drawn from another one, so that they do not hang on which words fit a tokenizer.
    """

    ends: TokenEnds
    words: Sequence[str]
    random: Random

    async def exactly(self, num_tokens: int, prefix: str = "", random: Random | None = None) -> str:
        """Random words of exactly so many tokens with the prefix that they follow. Raises BenchError."""
        return await workload.exact_prompt(num_tokens, self.ends, random or self.random, self.words, prefix)

    async def length(self, text: str) -> int:
        """How many tokens a text has. Raises TextTooLong where the server does not say."""
        return len(await self.ends(text))


# ------------------------------------------------------------------------------------------------------ random words


@dataclass(frozen=True)
class Prefixes:
    """Beginnings that prompts share. choice: one of CHOICES; zipf: the k-th is 1 / k as likely as the first."""

    number: int
    length: int
    choice: str = "uniform"

    def chosen(self, num_requests: int, random: Random) -> list[int]:
        """The number of each request's prefix, from 0."""
        if self.choice == "round-robin":
            return [request % self.number for request in range(num_requests)]
        weights = [1 / (rank + 1) if self.choice == "zipf" else 1.0 for rank in range(self.number)]
        return random.choices(range(self.number), weights, k=num_requests)


@dataclass(frozen=True)
class Dialogue:
    """How conversations go on: so many turns, each after a pause of `think_s` seconds on average, exponential."""

    turns: int = 1
    think_s: float = 0.0

    def pause(self, random: Random) -> float:
        """Seconds from an answer to what is said next."""
        return random.expovariate(1 / self.think_s) if self.think_s else 0.0


class RandomSource:
    """Random words in drawn lengths: `draw_lengths` gives a number of them. Each later turn has the same lengths."""

    def __init__(
        self,
        texts: Texts,
        draw_lengths: Callable[[int, Random], Sequence[Lengths]],
        prefixes: Prefixes | None = None,
        dialogue: Dialogue | None = None,
    ) -> None:
        self._texts = texts
        self._draw_lengths = draw_lengths
        self._prefixes = prefixes
        self._dialogue = dialogue or Dialogue()

    async def draw(self, num_requests: int, random: Random) -> list[PlannedRequest]:
        """Prompts that differ, but for the prefixes. Raises BenchError."""
        lengths = self._draw_lengths(num_requests, random)
        begins = await self._begins(num_requests)
        requests = []
        for one, begin in zip(lengths, begins, strict=True):
            prompt = await self._texts.exactly(one.input_length, begin)
            requests.append(PlannedRequest(prompt, one, later=await self._later(one)))
        return requests

    async def _begins(self, num_requests: int) -> list[str]:
        if self._prefixes is None:
            return [""] * num_requests
        texts = [await self._texts.exactly(self._prefixes.length) for _ in range(self._prefixes.number)]
        return [texts[number] for number in self._prefixes.chosen(num_requests, self._texts.random)]

    async def _later(self, lengths: Lengths) -> tuple[Turn, ...]:
        turns = []
        for _ in range(self._dialogue.turns - 1):
            text = await self._texts.exactly(lengths.input_length)
            turns.append(Turn(({"role": "user", "content": text},), lengths, self._dialogue.pause(self._texts.random)))
        return tuple(turns)


# ------------------------------------------------------------------------------------------------------------- files


class DatasetSource:
    """Conversations of a file in random order, again from the first when all were taken.

    output_length: of all answers for which the file has no number. most_tokens: conversations of more, prompts and
    answers together, are left out.
    """

    def __init__(
        self,
        texts: Texts,
        conversations: Sequence[Conversation],
        output_length: int | None,
        most_tokens: int | None = None,
        dialogue: Dialogue | None = None,
    ) -> None:
        self._texts = texts
        self._conversations = conversations
        self._output_length = output_length
        self._most_tokens = most_tokens or math.inf
        self._dialogue = dialogue or Dialogue()

    async def draw(self, num_requests: int, random: Random) -> list[PlannedRequest]:
        """Requests with the lengths that the file and the tokenizer say. Raises BenchError."""
        order = random.sample(range(len(self._conversations)), len(self._conversations))
        requests: list[PlannedRequest] = []
        for passed in count():
            if len(requests) == num_requests:
                return requests
            if passed == len(order) and not requests:
                raise BenchError(
                    f"all {len(order)} conversations have more than {self._most_tokens} tokens: give a higher "
                    "--most-tokens"
                )
            taken = self._conversations[order[passed % len(order)]][: self._dialogue.turns]
            if (request := await self._request(taken)) is not None:
                requests.append(request)
        raise AssertionError("count() has no end")

    async def _request(self, said: Conversation) -> PlannedRequest | None:
        """The conversation as a request; None where it is too long."""
        turns, total = [], 0
        for one in said:
            turn = await self._turn(one)
            total += 0 if turn is None else turn.lengths.input_length + turn.lengths.output_length
            if turn is None or total > self._most_tokens:
                return None
            turns.append(turn)
        first, *later = turns
        alone = len(first.messages) == 1 and first.messages[0]["role"] == "user"
        prompt = first.messages[0]["content"] if alone else tuple(first.messages)
        return PlannedRequest(prompt, first.lengths, later=tuple(later))

    async def _turn(self, said: Said) -> Turn | None:
        try:
            messages = said.messages or (
                {"role": "user", "content": await self._texts.exactly(said.input_length or 1)},
            )
            input_length = (said.input_length if not said.messages else None) or await self._texts.length(
                as_text(messages)
            )
            lengths = Lengths(input_length, await self._answer_length(said))
        except TextTooLong as error:
            if self._most_tokens == math.inf:
                raise BenchError(f"a prompt is longer than the server takes ({error}): give --most-tokens") from None
            return None
        return Turn(messages, lengths, self._dialogue.pause(self._texts.random))

    async def _answer_length(self, said: Said) -> int:
        known = said.output_length or self._output_length
        if known is None and said.answer is None:
            raise BenchError("the data set has prompts without an answer: give one --output-length for all of them")
        return known or max(1, await self._texts.length(said.answer or ""))


class TraceSource:
    """The requests of a trace with their times. Prompts begin alike as far as their blocks' hashes are the same."""

    def __init__(self, texts: Texts, trace: Sequence[TracedRequest], most_tokens: int | None = None) -> None:
        self._texts = texts
        most = most_tokens or math.inf
        self._trace = [one for one in trace if one.lengths.input_length + one.lengths.output_length <= most]
        self._blocks: dict[int, str] = {}
        if not self._trace:
            raise BenchError(
                f"all requests of the trace have more than {most_tokens} tokens: give a higher --most-tokens"
            )

    async def draw(self, num_requests: int, random: Random) -> list[PlannedRequest]:
        """The first requests of the trace, at most so many. Raises BenchError."""
        seed = random.random()
        return [await self._request(one, seed) for one in self._trace[:num_requests]]

    async def _request(self, one: TracedRequest, seed: float) -> PlannedRequest:
        whole = min(len(one.blocks), (one.lengths.input_length - 1) // BLOCK_TOKENS)
        prefix = " ".join([await self._block(block, seed) for block in one.blocks[:whole]])
        prompt = await self._texts.exactly(one.lengths.input_length, prefix)
        return PlannedRequest(prompt, one.lengths, one.arrives_s)

    async def _block(self, block: int, seed: float) -> str:
        """The words of a block, which are the same wherever its hash is."""
        if block not in self._blocks:
            self._blocks[block] = await self._texts.exactly(BLOCK_TOKENS - 1, random=Random(f"{seed} {block}"))
        return self._blocks[block]


def at_times(requests: Sequence[PlannedRequest], times: Sequence[float]) -> list[PlannedRequest]:
    """The requests, each at its time."""
    return [replace(request, send_after_s=at) for request, at in zip(requests, times, strict=True)]


def longest_turn(request: PlannedRequest) -> Lengths:
    """The lengths of the last turn of a request's conversation, which carries all before it."""
    before = accumulate((one.lengths.input_length + one.lengths.output_length for one in request.later), initial=0)
    if not request.later:
        return request.lengths
    last = request.later[-1].lengths
    carried = request.lengths.input_length + request.lengths.output_length + list(before)[-2]
    return Lengths(carried + last.input_length, last.output_length)


def longest(requests: Sequence[PlannedRequest]) -> Mapping[str, int]:
    """The longest prompt, and the most tokens of a prompt and its answer, by the names of the server's limits."""
    found = [longest_turn(request) for request in requests]
    return {
        "max_input_length": max(one.input_length for one in found),
        "max_total_tokens": max(one.input_length + one.output_length for one in found),
    }
