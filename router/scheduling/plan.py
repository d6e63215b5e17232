"""What one step does, as the scheduler plans it and the batching loop sends it, and whose turn the next step is.

A model that is cut into pipeline stages computes several micro-batches at once: while one stage computes the step of
one lane, the next stage computes that of another. A sequence stays in the lane that admitted it, and each lane admits
its part of what waits, so that all are about as full. A model that is not cut has one lane, whose steps follow each
other.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any, Generic, NamedTuple, TypeVar

from router.scheduling.adapters import Placed
from router.scheduling.fairness import divide
from router.scheduling.prefix_moves import Restored, Saved
from router.scheduling.request import Scheduled

S = TypeVar("S", bound=Scheduled)
NOTHING: Mapping[int, Any] = MappingProxyType({})
MOST_UNDER_WAY = 2  # steps of a lane: one that is computed, and one that waits for its tokens


class FilledBlock(NamedTuple):
    """A block that a step completes. Its owner's `entry.id` differs from `id` once the shards lost that sequence."""

    entry: Scheduled
    id: int
    key: bytes
    block: int
    depth: int  # its place among the sequence's blocks


class WindowCopy(NamedTuple):
    """A block of tokens that is copied from the rings of windowed layers to KV blocks."""

    sequence: int
    place: int  # among the sequence's blocks of tokens
    names: Sequence[bytes]  # keys of what it becomes …
    blocks: Sequence[int]  # … and where that is


class Extension(NamedTuple):
    """What a running sequence goes on with: its latest token, and what is forced or guessed behind it."""

    position: int  # of its latest token
    token_ids: Sequence[int]
    came: Sequence[int]  # of its draft before; empty: it decoded plainly

    @classmethod
    def of(cls, entry: Scheduled, behind: Sequence[int]) -> Extension:
        """Of a sequence all of whose tokens have come back."""
        ids = entry.generated_ids
        position = len(entry.request.token_ids) + len(ids) - 1
        return cls(position, [ids[-1], *behind], ids[len(ids) - entry.came :] if entry.came else ())


class Loaded(NamedTuple):
    """What a sequence goes on from that is admitted behind a prefix."""

    blocks: Sequence[int]
    places: range  # of the blocks of tokens that these are of, where they are of windowed layers; else empty


class StepPlan(NamedTuple, Generic[S]):
    """What one step does. Most steps only decode, and leave out all that is behind `saves`."""

    number: int
    lane: int = 0  # The micro-batch whose sequences it computes.
    decoding: Sequence[S] = ()  # Each of them gets one token.
    concerned: Mapping[int, S] = (
        NOTHING  # All with a chunk, a token or blocks in this step, by id: if it fails, they are lost.
    )
    saves: Sequence[Saved] = ()  # Blocks whose content goes to the host before the step is computed.
    retired: Sequence[S] = ()  # They leave the batch before the step is computed.
    preempted: Mapping[int, S] = NOTHING  # So do these, which wait again under new ids, by the ids that they had.
    admitted: Sequence[S] = ()  # They join it with this step.
    chunks: Mapping[int, int] = NOTHING  # For each sequence whose prompt is computed, how many of its tokens are.
    prefill_tokens: int = 0  # All tokens of chunks, or of the prompts that an encoder reads.
    join_reason: str | None = None  # Why others were admitted to a batch that runs already; None: neither is so.
    restores: Sequence[Restored] = ()  # Blocks of those admitted whose content comes from the host.
    filled: Sequence[FilledBlock] = ()  # The blocks that this step completes.
    held: Sequence[int] = ()  # Sequences that do not decode: their grammars have not answered, or they lack a block.
    extended: Mapping[int, Extension] = NOTHING  # Running sequences whose grammars force tokens, and these.
    constrained: Sequence[S] = ()  # Those that get a token of what their grammars allow.
    grown: Mapping[int, Sequence[int]] = NOTHING  # Running sequences that get more blocks, and these.
    loaded: Mapping[int, Loaded] = NOTHING  # What those admitted go on from, beside the blocks of their prefixes.
    copies: Sequence[WindowCopy] = ()  # What goes from rings to blocks before the step is computed.
    kept: Mapping[int, Sequence[int]] = NOTHING  # Blocks that states go to when the step is computed.
    drafts: Mapping[int, Extension] = NOTHING  # Running sequences with guesses: each gets a token, or some of these.
    awaiting: Sequence[S] = ()  # Those that sit this step out, to go on with guesses once their latest token has come.
    proposals: int = 0  # Tokens that a speculative model proposes for the next step …
    proposed: Sequence[int] = ()  # … behind what each of these sequences gets in this one.
    adapters: Sequence[Placed] = ()  # Rows that have another adapter from here on, once the first have left.
    completed: Collection[int] = ()  # Of those with a chunk, the ones whose prompt ends with it: each gets a token.

    @property
    def num_decoding(self) -> int:
        """How many sequences go on from their latest tokens; each gets one, or with guesses that are right, more."""
        return len(self.decoding) + len(self.drafts)

    def gives_token(self, id: int) -> bool:
        """Whether this sequence, which is concerned, gets a token: others get but a part of a prompt, or blocks."""
        if id in self.chunks:
            return id in self.completed
        return id in self.drafts or self.concerned[id] in self.decoding

    @property
    def is_awaited(self) -> bool:
        """Whether no step of its lane is planned before its reply: it has guesses, or the next one will."""
        return self.proposals > 0 or self.num_guesses > 0

    @property
    def num_guesses(self) -> int:
        """Tokens that are computed beside their latest ones."""
        return sum(len(draft.token_ids) - 1 for draft in self.drafts.values())

    def num_repeats(self, num_running: int) -> int:
        """How many steps after this one are the same if none comes or leaves before its end: all must decode."""
        if (
            self.proposals
            or len(self.decoding) < num_running
            or any(entry.request.grammar is not None for entry in self.decoding)
        ):
            return 0
        return min((entry.granted - entry.num_scheduled for entry in self.decoding), default=0)

    def again(self, number: int, saves: Sequence[Saved]) -> StepPlan[S]:
        """The same sequences decode once more, on the blocks that they have."""
        return StepPlan(number, self.lane, self.decoding, self.concerned, saves)

    def cached(self, entry: S) -> int:
        """How many prompt tokens of `entry`, which this step admits, were found in the prefix cache."""
        return entry.num_prompt_scheduled - self.chunks[entry.id]


class Lane(Generic[S]):
    """One micro-batch."""

    def __init__(self, number: int) -> None:
        self.number = number
        self.size = 0  # sequences in it
        self.under_way = 0  # steps that were planned and not answered
        self.is_awaited = False  # whether one of those has guesses or proposals, so that nothing can be planned yet
        self.steps_since_admission = 0
        self.before: StepPlan[S] | None = None  # its latest step that was not a repetition
        self.num_repeats = 0  # how many steps may be the same as that one, if none comes or leaves before its end

    def repeatable(self) -> StepPlan[S] | None:
        """Its step before, if the next one may be the same: that only decoded, and none leaves."""
        if (before := self.before) is None or not self.num_repeats:
            return None
        if any(entry.is_over or entry.cancelled for entry in before.decoding):
            return None
        return before

    def planned(self, plan: StepPlan[S]) -> None:
        """Its next step."""
        self.before, self.num_repeats = plan, plan.num_repeats(self.size)
        self.is_awaited = plan.is_awaited


class Lanes(Generic[S]):
    """All lanes of one scheduler, and whose turn it is."""

    def __init__(self, count: int) -> None:
        self.all: list[Lane[S]] = [Lane(number) for number in range(count)]
        self._turn = 0

    def __len__(self) -> int:
        return len(self.all)

    def turns(self) -> Iterator[Lane[S]]:
        """The lanes that may have another step, in turn. `taken` has to be told of the one whose step is taken."""
        if len(self.all) == 1:  # how many steps it has under way, the batching loop bounds
            if not self.all[0].is_awaited:
                yield self.all[0]
            return
        for lane in self.all[self._turn :] + self.all[: self._turn]:
            if lane.under_way < MOST_UNDER_WAY and not lane.is_awaited:
                yield lane

    def taken(self, lane: Lane[S]) -> None:
        """A step of this lane is under way: it is the next one's turn."""
        lane.under_way += 1
        self._turn = (lane.number + 1) % len(self.all)

    def answered(self, plan: StepPlan[S]) -> None:
        """The oldest step under way, this one, has been answered."""
        lane = self.all[plan.lane]
        lane.under_way -= 1
        if plan.is_awaited:
            lane.is_awaited = False

    def places(self, lane: Lane[S], waiting: int) -> int | None:
        """How many may join a lane, of so many that wait, so that all are about as full; None: any number."""
        if len(self.all) == 1:
            return None
        total = waiting + sum(other.size for other in self.all)
        return max(0, -(-total // len(self.all)) - lane.size)

    def restart(self) -> None:
        """The shards have lost everything that was under way."""
        for lane in self.all:
            lane.under_way, lane.is_awaited = 0, False


def continue_prompts(entries: Iterable[Scheduled], budget: int) -> dict[int, int]:
    """Chunks of prompts that were begun in an earlier step, in the order of `entries`: sequence -> tokens."""
    chunks = {}
    for entry in entries:
        if budget and entry.num_prompt_left and entry.num_known < entry.granted:
            chunks[entry.id] = entry.prompt_chunk(budget)
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


def take_unsent(entries: Iterable[Scheduled]) -> dict[int, Extension]:
    """What the shards are told of tokens that grammars force, with the first chunk of them."""
    extended = {}
    for entry in entries:
        if entry.has_unsent:
            extended[entry.id] = Extension.of(entry, entry.forced)
            entry.has_unsent, entry.came = False, None
    return extended
