"""How many prompt tokens a step computes beside sequences that decode: as many as those can bear to wait for.

A chunk of a prompt is a pause in every running stream. What a token of it costs differs a thousandfold between devices,
so the size follows from measured steps: a step with a chunk may take twice what the decoding sequences' own step takes,
or as long as the operator says. That a step's token budget is what bounds the time between tokens is Sarathi-Serve's
idea (Agrawal et al. 2024, arXiv 2403.02310).

Pure arithmetic over (sequences that decode, prompt tokens, seconds), without clock or sequences: the batching loop
gives real times, `lockstep-bench simulate` virtual ones. Left out: the length of contexts, and that a captured step
costs the same for all sizes that are filled up to its own; a fit that forgets follows both, as loads change slowly.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

# Sizes to choose from, in tokens. Steps of these are captured on GPUs; of larger ones, multiples of the last, they are
# not. With fewer tokens than the first, a step is mostly the reading of weights, and a prompt takes too many of them.
CHUNKS = (64, 128, 256, 384, 512)
# The sizes of the first steps with somebody decoding, after which times are known. Large ones first: those who stream
# by then have only begun to, and first tokens come soon where many requests come together, as after a start. Then small
# ones: where every step has prompts, only steps of different sizes tell a token's price from that of the rest.
FIRST_CHUNKS = (512, 512, 512, 512, 64, 64, 64, 64)

OWN_STEPS = 2.0  # times that a step may take of what it would take without prompts
MARGIN = 1.15  # how much longer than it needs a larger chunk must be allowed to take, so that sizes do not alternate
MEMORY = 0.98  # what is left of a step's weight with each later one: 50 steps count
# Where no step is without prompts, what is of any step and what is of having both are one: it is taken for the former,
# because this makes the cost of having both a little smaller with each step.
SHRINKAGE = (1.0, 1.0, 1.0, 1.02)


class StepTimes:
    """What steps take: seconds for each prompt token and each decoding sequence, for any step, and for one with both.

    Least squares over the latest steps, none of the four negative. An error counts as a share of what was expected or
    of what was measured, whichever is more: so a step that was interrupted, or whose reply was read late together with
    the next one's, weighs no more than others. Each step improves the four in turn (coordinate descent), so that what
    the latest steps do not tell apart stays as it was.
    """

    def __init__(self) -> None:
        self._costs = [0.0, 0.0, 0.0, 0.0]
        self._products = [[0.0, 0.0, 0.0, 0.0] for _ in self._costs]
        self._answers = [0.0, 0.0, 0.0, 0.0]

    def seconds(self, decoding: int, prompt_tokens: int) -> float:
        """What such a step takes; 0 before any is known."""
        return self._dot(_parts(decoding, prompt_tokens))

    def prompt_tokens(self, decoding: int, seconds: float) -> float:
        """How many prompt tokens fit into a step of so many sequences and seconds; infinity where they cost nothing."""
        of_token, *_, of_both = self._costs
        left = max(0.0, seconds - self.seconds(decoding, 0) - of_both)
        return left / of_token if of_token else math.inf

    def note(self, decoding: int, prompt_tokens: int, seconds: float) -> None:
        """Learn from a step of so many sequences and tokens. seconds: above 0."""
        parts = _parts(decoding, prompt_tokens)
        weight = 1 / max(seconds, self._dot(parts)) ** 2
        answers, costs = self._answers, self._costs
        for one, products in enumerate(self._products):
            share = weight * parts[one]
            answers[one] = MEMORY * answers[one] + share * seconds
            products[:] = [MEMORY * product + share * part for product, part in zip(products, parts, strict=True)]
            if products[one]:
                others = self._dot(products) - products[one] * costs[one]
                costs[one] = max(0.0, (answers[one] - others) / (products[one] * SHRINKAGE[one]))

    def _dot(self, row: Sequence[float]) -> float:
        costs = self._costs
        return row[0] * costs[0] + row[1] * costs[1] + row[2] * costs[2] + row[3] * costs[3]


def _parts(decoding: int, prompt_tokens: int) -> tuple[float, float, float, float]:
    return prompt_tokens, decoding, 1.0, float(decoding > 0 < prompt_tokens)


class ChunkSize:
    """Chooses each step's chunk from the times of the steps before it.

    most: tokens of any step. seconds: what a step may take in which sequences decode; None: OWN_STEPS times what it
    would take without prompts.
    """

    def __init__(self, most: int, seconds: float | None = None) -> None:
        self._most = most
        self._seconds = seconds
        self._times = StepTimes()
        self._first = iter(FIRST_CHUNKS)
        self._chosen = FIRST_CHUNKS[0]

    def note(self, decoding: int, prompt_tokens: int, seconds: float) -> None:
        """Learn from a step, which took so long from when it could begin."""
        if (decoding or prompt_tokens) and seconds > 0:
            self._times.note(decoding, prompt_tokens, seconds)

    def tokens(self, decoding: int) -> int:
        """Prompt tokens of the next step, in which so many sequences decode, at least one."""
        self._chosen = next(self._first, None) or self._choose(decoding)
        return min(self._chosen, self._most)

    def _choose(self, decoding: int) -> int:
        """The largest size that is allowed, but a larger one than the last only if it is allowed by a margin."""
        times = self._times
        seconds = OWN_STEPS * times.seconds(decoding, 0) if self._seconds is None else self._seconds
        tokens = times.prompt_tokens(decoding, seconds)
        fitting = self._largest(tokens)
        return fitting if fitting <= self._chosen else max(self._chosen, self._largest(tokens / MARGIN))

    def _largest(self, tokens: float) -> int:
        """The largest size of at most so many tokens; the smallest if none is. None needs to be larger than a step."""
        largest = CHUNKS[-1]
        if tokens >= largest:
            return int(min(tokens, self._most + largest)) // largest * largest
        return max((size for size in CHUNKS if size <= tokens), default=CHUNKS[0])
