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
from array import array
from collections.abc import Sequence

from router.scheduling.limits import Limits

# Sizes to choose from, in tokens. Steps of these are captured on GPUs; of larger ones, multiples of the last, they are
# not. With fewer tokens than the first, a step is mostly the reading of weights, and a prompt takes too many of them.
CHUNKS = (64, 128, 256, 384, 512)
# Where steps with prompts are not captured, a chunk costs what it has: with fewer sizes, a bound that lies just below
# one of them would make every chunk much smaller than it might be.
FINE_CHUNKS = (*range(64, 256, 16), *range(256, 513, 32))
# The sizes of the first steps that have both, after which times are known. Large ones first: the streams of that time
# have only begun, and first tokens come soon where many requests come together, as after a start. Then small ones:
# where every step has prompts, only steps of different sizes tell a token's price from that of the rest. Where a
# stream has run for a while already, the small ones alone.
FIRST_CHUNKS = (512, 512, 512, 512, 64, 64, 64, 64)
NUM_LARGE = FIRST_CHUNKS.count(512)
A_WHILE = 16  # steps without prompts

OWN_STEPS = 2.0  # times that a step may take of what it would take without prompts
MARGIN = 1.15  # how much longer than it needs a larger chunk must be allowed to take, so that sizes do not alternate
MEMORY = 0.98  # what is left of a step's weight with each later one: 50 steps count
MOST_GAIN = 1e100
DOUBT = 0.99  # what is left of the longest step without prompts with each shorter one
CREDIT = 1.25  # how much longer than the longest a step may count: one that was interrupted says little
# A step that takes another time than expected by more than this share is a surprise: one stream alone may have had the
# price of a step taken for that of a sequence, and then there are fifty.
SURPRISE = 0.2
MOST_SWEEPS = 20
MOST_NOTED = 64  # steps that are learnt from at once
# If every step has prompts, the cost of any step and the extra cost of a step with both cannot be told apart. Shrinking
# the extra cost a little with each step attributes the time to the cost of any step.
SHRINKAGE = (1.0, 1.0, 1.0, 1.02)


class StepTimes:
    """What steps take: seconds for each prompt token and each decoding sequence, for any step, and for one with both.

    Least squares over the latest steps, none of the four negative. An error counts as a share of what was expected or
    of what was measured, whichever is more: so a step that was interrupted, or whose reply was read late together with
    the next one's, weighs no more than others. Each step improves the four in turn (coordinate descent), once or, where
    it is a surprise, until it is none, so that what the latest steps do not tell apart stays as it was.
    """

    def __init__(self) -> None:
        # Arrays: a simulation has thousands of these, and numbers that lie together are read together.
        self._costs = array("d", [0.0] * 4)
        self._products = [array("d", [0.0] * 4) for _ in self._costs]
        self._answers = array("d", [0.0] * 4)
        self._gain = 1.0  # of a step's weight: each next one grows by as much as the ones before it should fade

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
        weight = self._next_gain() / max(seconds, self._dot(parts)) ** 2
        present = [(one, part) for one, part in enumerate(parts) if part]
        for one, part in present:
            share, products = weight * part, self._products[one]
            self._answers[one] += share * seconds
            for other, its_part in present:
                products[other] += share * its_part
        for _ in range(MOST_SWEEPS):
            self._improve()
            if abs(self._dot(parts) - seconds) <= SURPRISE * seconds:
                break

    def _next_gain(self) -> float:
        """How much the next step counts. Only ratios of sums matter, so all of them may be made smaller together."""
        self._gain /= MEMORY
        if self._gain > MOST_GAIN:
            self._answers, *self._products = (
                array("d", [one / MOST_GAIN for one in sums]) for sums in (self._answers, *self._products)
            )
            self._gain /= MOST_GAIN
        return self._gain

    def _improve(self) -> None:
        """Improve the costs in turn, each for what the others are."""
        costs = self._costs
        for one, products in enumerate(self._products):
            if products[one]:
                others = self._dot(products) - products[one] * costs[one]
                costs[one] = max(0.0, (self._answers[one] - others) / (products[one] * SHRINKAGE[one]))

    def _dot(self, row: Sequence[float]) -> float:
        w, x, y, z = self._costs
        a, b, c, d = row
        return a * w + b * x + c * y + d * z


def _parts(decoding: int, prompt_tokens: int) -> tuple[float, float, float, float]:
    return prompt_tokens, decoding, 1.0, float(decoding > 0 < prompt_tokens)


class ChunkSize:
    """Chooses each step's chunk from the times of the steps before it.

    most: tokens of any step. seconds: what a step may take in which sequences decode; None: OWN_STEPS times what it
    would take without prompts. sizes: to choose from, ascending, and multiples of the last.
    """

    def __init__(self, most: int, seconds: float | None = None, sizes: Sequence[int] = CHUNKS) -> None:
        self._most = most
        self._sizes = sizes
        self._seconds = seconds
        self._times = StepTimes()
        self._noted: list[tuple[int, int, float]] = []  # steps that are still to be learnt from, in order
        self._num_first = 0  # of FIRST_CHUNKS, how many are over
        self._num_alone = 0  # steps without prompts
        self._longest = math.inf  # seconds of the longest step without prompts of late, or about as many
        self._chosen = FIRST_CHUNKS[0]
        self._tried = (FIRST_CHUNKS[0], 0.0)  # prompt tokens and seconds of the last step that had both

    def note(self, decoding: int, prompt_tokens: int, seconds: float) -> None:
        """Learn from a step, which took so long from when it could begin; it is looked at when a size is asked for."""
        if (decoding or prompt_tokens) and seconds > 0:
            self._noted.append((decoding, prompt_tokens, seconds))
            if len(self._noted) == MOST_NOTED:
                self._learn()

    def _learn(self) -> None:
        for step in self._noted:
            self._learn_from(*step)
        self._noted.clear()

    def _learn_from(self, decoding: int, prompt_tokens: int, seconds: float) -> None:
        self._times.note(decoding, prompt_tokens, seconds)
        if decoding and prompt_tokens:
            self._num_first += 1
            self._tried = (prompt_tokens, seconds)
            self._longest /= DOUBT  # it may be longer by now
        elif decoding:
            least = DOUBT * self._longest if self._num_alone else 0.0
            self._longest = max(min(seconds, CREDIT * self._longest), least)
            self._num_alone += 1
            if self._num_alone == A_WHILE and not self._num_first:
                self._num_first = NUM_LARGE

    def tokens(self, decoding: int) -> int:
        """Prompt tokens of the next step, in which so many sequences decode, at least one."""
        self._learn()
        is_first = self._num_first < len(FIRST_CHUNKS)
        self._chosen = FIRST_CHUNKS[self._num_first] if is_first else self._choose(decoding)
        return min(self._chosen, self._most)

    def _choose(self, decoding: int) -> int:
        """The largest size that is allowed, but a larger one than the last only if it is allowed by a margin.

        What is known of one sequence says little of fifty. So a size follows the next smaller one, and not where the
        last step with prompts took longer than it might.
        """
        times, (tried, took) = self._times, self._tried
        seconds = self._seconds or OWN_STEPS * min(times.seconds(decoding, 0), self._longest)
        tokens = times.prompt_tokens(decoding, seconds)
        if took > MARGIN * seconds:
            tokens = min(tokens, tried * seconds / took)
        fitting = self._largest(tokens)
        if fitting <= self._chosen:
            return fitting
        return max(self._chosen, min(self._largest(tokens / MARGIN), self._next_above(tried)))

    def _largest(self, tokens: float) -> int:
        """The largest size of at most so many tokens; the smallest if none is. None needs to be larger than a step."""
        largest = self._sizes[-1]
        if tokens >= largest:
            return int(min(tokens, self._most + largest)) // largest * largest
        return max((size for size in self._sizes if size <= tokens), default=self._sizes[0])

    def _next_above(self, size: int) -> int:
        return next((other for other in self._sizes if other > size), size + self._sizes[-1])


def chunk_size(limits: Limits) -> ChunkSize | int:
    """The chunk of a step in which others decode, or what chooses it."""
    most, chunk = limits.max_batch_prefill_tokens, limits.prefill_chunk
    if chunk == "auto":
        seconds = None if limits.max_inter_token_ms is None else limits.max_inter_token_ms / 1000
        return ChunkSize(most, seconds, CHUNKS if limits.pads_chunks else FINE_CHUNKS)
    return most if chunk is None else min(chunk, most)
