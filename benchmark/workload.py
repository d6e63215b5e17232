"""What a serving benchmark sends, and when: arrival times, lengths, and prompts with an exact number of tokens.

Everything is drawn from one seed before the clock starts, so that two systems get the same work at the same moments.
No HTTP and no clock here. Prompts are different from each other: equal ones would measure a server's prefix cache.
"""

from __future__ import annotations

import json
import math
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from random import Random

from tokenizers import Tokenizer

from benchmark.report import BenchError

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
class Lengths:
    """Lengths of one request in tokens: its prompt, and its answer."""

    input_length: int
    output_length: int


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

    def after(self, answer: str, num_tokens: int) -> PlannedRequest:
        """The next turn's request, which carries the conversation so far. num_tokens: of the answer."""
        turn, *rest = self.later
        said = [{"role": "user", "content": self.prompt}] if isinstance(self.prompt, str) else self.prompt
        history = (*said, {"role": "assistant", "content": answer}, *turn.messages)
        length = self.lengths.input_length + num_tokens + turn.lengths.input_length
        return PlannedRequest(history, Lengths(length, turn.lengths.output_length), 0.0, tuple(rest), self.turn + 1)


# ---------------------------------------------------------------------------------------------------------- arrivals


def poisson_times(rate: float, count: int, random: Random) -> list[float]:
    """Intended send times in seconds of `count` requests at `rate` per second: independent exponential gaps."""
    times, now = [], 0.0
    for _ in range(count):
        now += random.expovariate(rate)
        times.append(now)
    return times


# ----------------------------------------------------------------------------------------------------------- lengths


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


# ----------------------------------------------------------------------------------------------------------- prompts


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
