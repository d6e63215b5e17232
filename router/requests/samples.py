"""What came of a request's samples, and which of them are given where more were drawn than are wanted."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from router.scheduling.request import Entry, Finished, PromptScores, Token


@dataclass(frozen=True, slots=True)
class Answer:
    """One complete sample."""

    prompt: tuple[Token, ...]
    tokens: list[Token]
    finished: Finished
    seed: int | None  # None when nothing was drawn at random
    prompt_scores: PromptScores | None = None  # in place of `prompt`, where log-probabilities are the model's own

    @property
    def mean_logprob(self) -> float:
        """By this the likeliest of several samples is chosen."""
        return sum(token.logprob or 0.0 for token in self.tokens) / max(len(self.tokens), 1)


def likeliest_first(answers: Sequence[Answer]) -> list[Answer]:
    """The likeliest sample, and the others in order."""
    best = max(answers, key=lambda answer: answer.mean_logprob)
    return [best, *(answer for answer in answers if answer is not best)]


def likeliest(answers: Sequence[Answer], num_prompts: int, count: int) -> list[int]:
    """The numbers of the `count` likeliest answers to each prompt, the best first; all in order where none is left out.

    answers: to each prompt as many, those to the first prompt first.
    """
    each = len(answers) // num_prompts
    found: list[int] = []
    for first in range(0, len(answers), each):
        numbers = range(first, first + each)
        found += sorted(numbers, key=lambda i: -answers[i].mean_logprob)[:count] if each > count else numbers
    return found


def one_per_prompt(entries: Sequence[Entry]) -> list[Entry]:
    """The first sample of each prompt: a prompt of several answers counts once."""
    found: dict[int, Entry] = {}
    for entry in entries:
        found.setdefault(id(entry.request.prompt_ids), entry)
    return list(found.values())
