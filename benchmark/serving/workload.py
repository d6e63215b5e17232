"""What a serving benchmark sends, and when: lengths, prompts of exactly so many tokens, arrivals, requests of a row.

Requests are random prompts, with shared prefixes and later turns, or those of a file or a trace. Everything is drawn
from one seed before the clock starts, so that two systems get the same work at the same moments. No HTTP and no clock
here: which tokens a text has is asked of the server's tokenizer, whoever wrote the text. Prompts are different from
each other: equal ones would measure a server's prefix cache.
"""

from __future__ import annotations

import json
import math
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, count, islice, takewhile
from pathlib import Path
from random import Random
from typing import Protocol

from tokenizers import Tokenizer

from benchmark.result import BenchError
from benchmark.serving.datasets import BLOCK_TOKENS, Conversation, Lengths, Said, TracedRequest
from benchmark.serving.http_client import as_text
from benchmark.serving.outcomes import Load

# A log-normal's shape: sigma 0.5 puts the p90 at 1.9 times the median, near what chat traffic shows.
LOG_NORMAL_SIGMA = 0.5
# Longest log-normal length, as a multiple of the mean, so that servers' limits can be set: 0.1 % of the draws are cut.
LONGEST_DRAW = 4
# Cutting a text can merge or split its last token; a new last word nearly always ends that in two or three attempts.
PROMPT_ATTEMPTS = 50
WORDS: Sequence[str] = (
    "the of and to in is you that it he was for on are as with his they at be this have from or one had by word but "
    "not what all were we when your can said there use an each which she do how their if will up other about out many "
    "then them these so some her would make like him into time has look two more write go see number no way could "
    "people my than first water been call who oil its now find long down day did get come made may part over new sound "
    "take only little work know place year live me back give most very after thing our just name good sentence man"
).split()

# The words of `shapes.make_model_folder`'s tokenizer, to which English is one unknown token.
MEANINGLESS_WORDS: Sequence[str] = tuple(f"t{id}" for id in range(1, 256))

# Where each token of a text ends, in characters; 0 for special tokens that are not in the text.
TokenEnds = Callable[[str], Awaitable[list[int]]]


@dataclass(frozen=True, slots=True)
class Turn:
    """A later turn of a conversation: what is said `think_s` seconds after the answer before it."""

    messages: Sequence[Mapping[str, str]]
    lengths: Lengths  # of this turn alone
    think_s: float = 0.0


@dataclass(frozen=True, slots=True)
class PlannedRequest:
    """One request as it will be sent, with the turns that follow its answer."""

    prompt: str | Sequence[Mapping[str, str]]
    lengths: Lengths
    send_after_s: float = 0.0  # since the start of the row; closed loops send when a stream is free
    later: Sequence[Turn] = ()
    turn: int = 0  # 0: begins a conversation
    adapter: str = ""  # that it names; empty: none

    def after(self, answer: str, num_tokens: int) -> PlannedRequest:
        """The next turn's request, which carries the conversation so far. num_tokens: of the answer."""
        turn, *rest = self.later
        said = [{"role": "user", "content": self.prompt}] if isinstance(self.prompt, str) else self.prompt
        history = (*said, {"role": "assistant", "content": answer}, *turn.messages)
        length = self.lengths.input_length + num_tokens + turn.lengths.input_length
        lengths = Lengths(length, turn.lengths.output_length)
        return PlannedRequest(history, lengths, 0.0, tuple(rest), self.turn + 1, self.adapter)


# ------------------------------------------------------------------------------------------------------------- arrivals


def unit_times(burstiness: float, random: Random) -> Iterator[float]:
    """Ascending times without end, one a second on average.

    burstiness: the gaps' standard deviation / mean; 0 is a constant gap, 1 is Poisson, anything else gamma.
    """
    now = 0.0
    shape = burstiness**-2 if burstiness else math.inf
    while True:
        if burstiness == 1:
            now += random.expovariate(1.0)
        else:
            now += random.gammavariate(shape, 1 / shape) if burstiness else 1.0
        yield now


def arrival_times(load: Load, count: int | None, seconds: float | None, random: Random) -> list[float]:
    """Intended send times in seconds: `count` of them, or all before `seconds`, or what comes first of the two.

    Gaps of mean 1 are drawn first and then stretched by the rate, so that any kind of gap goes with any course of it.
    """
    assert load.request_rate is not None and (count or seconds), "an open loop ends somewhere"
    first, last = load.ramp or (load.request_rate, load.request_rate)
    lasts = seconds if seconds is not None else (count or 0) / load.request_rate
    times = (_when(passed, first, last, lasts) for passed in unit_times(load.burstiness, random))
    bounded = times if seconds is None else takewhile(lambda at: at < seconds, times)
    return list(islice(bounded, count))


def _when(passed: float, first: float, last: float, seconds: float) -> float:
    """When so many requests are due, at a rate that goes evenly from `first` to `last` in `seconds`, then stays."""
    slope = (last - first) / seconds
    if slope == 0:
        return passed / first
    within = (first + last) / 2 * seconds
    if passed >= within:
        return seconds + (passed - within) / last
    # first * t + slope * t**2 / 2 = passed, in the form that loses no digits to a small slope
    return 2 * passed / (first + math.sqrt(first**2 + 2 * slope * passed))


# -------------------------------------------------------------------------------------------------------------- lengths


def _uniform(random: Random, mean: int) -> int:
    """A length from half the mean to one and a half times the mean, all equally likely."""
    return random.randint(math.ceil(mean / 2), mean + mean // 2)


def _log_normal(random: Random, mean: int) -> int:
    location = math.log(mean) - LOG_NORMAL_SIGMA**2 / 2
    return min(max(1, round(random.lognormvariate(location, LOG_NORMAL_SIGMA))), LONGEST_DRAW * mean)


DISTRIBUTIONS: Mapping[str, Callable[[Random, int], int]] = {
    "fixed": lambda _, mean: mean,
    "uniform": _uniform,
    "lognormal": _log_normal,
}
LONGEST: Mapping[str, float] = {"fixed": 1, "uniform": 1.5, "lognormal": LONGEST_DRAW}


def draw_lengths(distribution: str, mean: Lengths, count: int, random: Random) -> list[Lengths]:
    """Lengths around a cell of the grid; `distribution` is a key of DISTRIBUTIONS."""
    draw = DISTRIBUTIONS[distribution]
    return [Lengths(draw(random, mean.input_length), draw(random, mean.output_length)) for _ in range(count)]


def read_lengths(path: Path) -> list[Lengths]:
    """A JSONL of `{"input_length": …, "output_length": …}`. Raises BenchError."""
    try:
        lines = path.read_text().splitlines()
    except (OSError, UnicodeDecodeError) as error:
        names = ", ".join(DISTRIBUTIONS)
        raise BenchError(f"{path} is none of {names}, and cannot be read as a file of lengths: {error}") from None
    numbered = [(number, line) for number, line in enumerate(lines, 1) if line.strip()]
    if not numbered:
        raise BenchError(f'{path} has no lengths: each line is {{"input_length": 128, "output_length": 64}}')
    return [_lengths_of(line, f"{path}:{number}") for number, line in numbered]


def _lengths_of(line: str, where: str) -> Lengths:
    try:
        record = json.loads(line)
        lengths = Lengths(record["input_length"], record["output_length"])
    except (ValueError, KeyError, TypeError):
        lengths = Lengths(0, 0)
    if any(not isinstance(length, int) or length < 1 for length in (lengths.input_length, lengths.output_length)):
        raise BenchError(f'{where}: expected {{"input_length": 128, "output_length": 64}}, both at least 1')
    return lengths


def longest_drawn(distribution: str, longest_mean: Lengths) -> Lengths:
    """The longest lengths that can be drawn, around means of at most `longest_mean`, or from a file of lengths.

    distribution: a key of DISTRIBUTIONS, else the name of the file. Raises BenchError when that cannot be read.
    """
    if distribution not in DISTRIBUTIONS:
        return longest_of(read_lengths(Path(distribution)))
    factor = LONGEST[distribution]
    return Lengths(int(factor * longest_mean.input_length), int(factor * longest_mean.output_length))


def longest_of(lengths: Sequence[Lengths]) -> Lengths:
    """The longest prompt and the longest answer, which need not be of one request."""
    return Lengths(max(one.input_length for one in lengths), max(one.output_length for one in lengths))


def mean_lengths(lengths: Sequence[Lengths]) -> Lengths:
    """The means of both lengths, rounded to whole tokens, to name a row by."""
    count = len(lengths)
    return Lengths(
        round(sum(one.input_length for one in lengths) / count),
        round(sum(one.output_length for one in lengths) / count),
    )


# -------------------------------------------------------------------------------------------------------------- prompts


class TextTooLong(BenchError):
    """A server counts no tokens of a text with more than its longest prompt has."""


async def exact_prompt(
    num_tokens: int, token_ends: TokenEnds, random: Random, words: Sequence[str] = WORDS, prefix: str = ""
) -> str:
    """Random words that the tokenizer makes exactly `num_tokens` of, special tokens included. Raises BenchError.

    prefix: what the prompt begins with, of fewer tokens than are wanted.
    """
    num_words = num_tokens - len(prefix.split(" ")) if prefix else num_tokens
    text = " ".join([prefix] * bool(prefix) + random.choices(words, k=max(1, num_words)))
    for _ in range(PROMPT_ATTEMPTS):
        try:
            ends = await token_ends(text)
        except TextTooLong:
            parts = text.split(" ")
            text = " ".join(parts[: -max(1, len(parts) // 8)])
            continue
        surplus = len(ends) - num_tokens
        if surplus == 0:
            return text
        in_text = [end for end in ends if end > 0]
        if surplus >= len(in_text):
            break
        more = random.choices(words, k=max(1, -surplus // 4))
        text = text[: in_text[-surplus - 1]] if surplus > 0 else " ".join([text, *more])
    raise BenchError(f"found no prompt of exactly {num_tokens} tokens for this tokenizer: use another --input-length")


def local_token_ends(folder: Path) -> TokenEnds:
    """A function that finds where tokens end by the tokenizer.json of a folder. Raises BenchError."""
    path = folder / "tokenizer.json"
    if not path.is_file():
        raise BenchError(f"{path} is missing: give --tokenizer the folder of the model's tokenizer.json")
    tokenizer = Tokenizer.from_file(str(path))

    async def ends(text: str) -> list[int]:
        return [stop for _, stop in tokenizer.encode(text).offsets]

    return ends


# ---------------------------------------------------------------------------------------------------- requests of a row


CHOICES = ("uniform", "zipf", "round-robin")


def chosen(number: int, choice: str, num_requests: int, random: Random) -> list[int]:
    """Which of so many things, from 0, each request has. zipf: the k-th is 1 / k as likely as the first."""
    if choice == "round-robin":
        return [request % number for request in range(num_requests)]
    weights = [1 / (rank + 1) if choice == "zipf" else 1.0 for rank in range(number)]
    return random.choices(range(number), weights, k=num_requests)


def with_adapters(
    requests: Sequence[PlannedRequest], names: Sequence[str], choice: str, random: Random
) -> list[PlannedRequest]:
    """The requests, each with an adapter of these names; a conversation keeps its own."""
    numbers = chosen(len(names), choice, len(requests), random)
    return [replace(one, adapter=names[number]) for one, number in zip(requests, numbers, strict=True)]


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
        return await exact_prompt(num_tokens, self.ends, random or self.random, self.words, prefix)

    async def length(self, text: str) -> int:
        """How many tokens a text has. Raises TextTooLong where the server does not say."""
        return len(await self.ends(text))


# --------------------------------------------------------------------------------------------------------- random words


@dataclass(frozen=True)
class Prefixes:
    """Beginnings that prompts share. choice: one of CHOICES."""

    number: int
    length: int
    choice: str = "uniform"

    def chosen(self, num_requests: int, random: Random) -> list[int]:
        """The number of each request's prefix, from 0."""
        return chosen(self.number, self.choice, num_requests, random)


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


# ---------------------------------------------------------------------------------------------------------------- files


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
