"""What one step does, as the scheduler plans it and the batching loop sends it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Mapping
from typing import Generic, NamedTuple, TypeVar

from router.entry import Scheduled
from router.fairness import divide
from router.tiers.moving import Restored, Saved

S = TypeVar("S", bound=Scheduled)


class FilledBlock(NamedTuple):
    """A block that a step completes. Its owner's `entry.id` differs from `id` once the shards lost that sequence."""

    entry: Scheduled
    id: int
    key: bytes
    block: int
    depth: int  # its place among the sequence's blocks


class StepPlan(NamedTuple, Generic[S]):
    """What one step does."""

    number: int
    retired: list[S]  # They leave the batch before the step is computed.
    preempted: dict[int, S]  # So do these, which wait again under new ids, by the ids that they had.
    admitted: list[S]  # They join it with this step.
    chunks: dict[int, int]  # For each sequence whose prompt is computed, how many of its tokens are.
    decoding: list[S]  # Each of them gets one token.
    held: list[int]  # Sequences that could decode, but for what their grammars have not said yet.
    extended: dict[int, list[int]]  # Their last tokens, and forced ones behind them, which join running sequences.
    constrained: list[S]  # Those that get a token of what their grammars allow.
    prefill_tokens: int  # All tokens of chunks, or of the prompts that an encoder reads.
    join_reason: str | None  # Why others were admitted to a batch that runs already; None where neither is so.
    filled: list[FilledBlock]  # The blocks that this step completes.
    saves: list[Saved]  # Blocks whose content goes to the host before the step is computed.
    restores: list[Restored]  # Blocks of those admitted whose content comes from there.
    concerned: dict[int, S]  # All with a chunk or a token in this step, by id. If it fails, the shards drop them.
    lane: int = 0  # The micro-batch whose sequences it computes.

    def num_repeats(self, num_running: int) -> int:
        """How many steps after this one are the same if nobody comes or leaves before its end: all must decode."""
        if len(self.decoding) < num_running or any(entry.request.grammar is not None for entry in self.decoding):
            return 0
        return min((entry.request.max_new_tokens - entry.num_scheduled for entry in self.decoding), default=0)

    def again(self, number: int, saves: list[Saved]) -> StepPlan[S]:
        """The same sequences decode once more."""
        return StepPlan(
            number, [], {}, [], {}, self.decoding, [], {}, [], 0, None, [], saves, [], self.concerned, self.lane
        )

    def cached(self, entry: S) -> int:
        """How many prompt tokens of `entry`, which this step admits, were found in the prefix cache."""
        return entry.num_prompt_scheduled - self.chunks[entry.id]


def continue_prompts(entries: Iterable[Scheduled], budget: int) -> dict[int, int]:
    """Chunks of prompts that were begun in an earlier step, in the order of `entries`: sequence -> tokens."""
    chunks = {}
    for entry in entries:
        if budget and entry.num_prompt_left:
            chunks[entry.id] = min(budget, entry.num_prompt_left)
            budget -= chunks[entry.id]
    return chunks


def divide_prompts(
    entries: Collection[Scheduled], budget: int, head: Scheduled | None, weights: Mapping[str, float]
) -> dict[int, int]:
    """The same between several keys: each has its part of the budget, and so has the key whose request is next.

    head: that request, if it fits into the batch.
    """
    wanted: Counter[str] = Counter()
    for entry in entries:
        wanted[entry.owner] += entry.num_prompt_left
    if head is not None:
        wanted[head.owner] += head.request.size(rebuilt=head.num_known).prefill
    chunks: dict[int, int] = {}
    for owner, part in divide(budget, wanted, weights).items():
        chunks |= continue_prompts((entry for entry in entries if entry.owner == owner), part)
    return {entry.id: chunks[entry.id] for entry in entries if entry.id in chunks}


def take_unsent(entries: Iterable[Scheduled]) -> dict[int, list[int]]:
    """What the shards are told of tokens that grammars force, with the first chunk of them."""
    extended = {}
    for entry in entries:
        if entry.unsent:
            extended[entry.id], entry.unsent = entry.unsent, []
    return extended
