"""What running and waiting requests are expected to need, where KV blocks are given as sequences grow.

A request is expected to become as long as those of its key and route did (`answer_lengths.py`), and may join the batch
if the most that all are expected to hold at once (`outlook.py`) fits into the cache, or a little more. Where that was
wrong, sequences are sent away and computed again later. An account steers how much: each token that is computed again
holds back a token of the cache from those that would join, up to a share of MOST_HELD_BACK, and every computed token
lends MOST_AGAIN of one, until MOST_AHEAD of the cache is lent beyond its end.

A second account bounds it: of all tokens up to any step no more than MOST_AT_ALL are computed again for want of blocks,
and what the cache holds once, and those that run then once each. Beyond that, whoever joins reserves all that it may
get and is not sent away, until the share has fallen. Left out: blocks, and who is sent away (`scheduler.py`).
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Generic

from router.scheduling.answer_lengths import AnswerLengths, bound_behind
from router.scheduling.outlook import Course, Outlook
from router.scheduling.plan import S, StepPlan

MOST_AGAIN = 0.02  # share of the computed tokens that had been computed before
MOST_AHEAD = 0.05  # share of the cache: with a tenth more is computed again, and as much gained
MOST_AT_ALL = 0.1  # as MOST_AGAIN: were it less, a surprise would have all reserve for long after it
MOST_HELD_BACK = 0.125  # share of the cache: else who comes back would slow down all that have still to come back
LOOKS = 4  # steps until what did not fit is looked at again, if none came or left: a look at 256 takes 50 µs


@dataclass(slots=True)
class DemandCounts:
    """What happened since the start of the router."""

    num_sent_away: int = 0  # running requests, for want of blocks
    num_waits: int = 0  # steps that a sequence let pass for want of a block
    tokens_again: int = 0  # computed once more, of those that came back
    blocks_asked: int = 0  # behind those of admission
    blocks_given: int = 0  # these, and those taken ahead
    num_answers: int = 0  # that are over
    num_outgrown: int = 0  # of these, those that became longer than was expected when they were admitted
    expected_tokens: int = 0  # of all answers that are over, when they were admitted
    error_tokens: int = 0  # by how much that was wrong, whichever way


class Forecast(Generic[S]):
    """Expectations of one scheduler's requests."""

    def __init__(self, block_size: int, num_lanes: int, most_tokens: int) -> None:
        """most_tokens: that the cache holds."""
        self.counts = DemandCounts()
        self.most_tokens = most_tokens
        self.owed = -MOST_AHEAD * most_tokens  # tokens that are held back; below 0: lent beyond the cache
        self.excess = 0.0  # tokens of those sent away beyond MOST_AT_ALL
        self._block_size = block_size
        self._step = 1 / num_lanes  # of a sequence, for each step: the lanes take turns
        self._lengths = AnswerLengths()
        self._outlook: Outlook[S] = Outlook()
        # Whose turn it was when some did not fit, how many did, and the version and time of the outlook.
        self._refused: tuple[S | None, int, int, float] = None, 0, 0, 0.0

    def expect(self, entry: S) -> None:
        """Say how long it becomes, by all that is known now."""
        if self.is_exhausted:
            entry.expected = entry.request.max_new_tokens
            return
        history = self._lengths.of(entry.owner, entry.route)
        entry.expected = history.expected(entry.num_reached, entry.request.max_new_tokens)

    def admitted(self, entry: S) -> None:
        """It has joined the batch."""
        if entry.num_counted is None:
            self._lengths.of(entry.owner, entry.route).began()
            entry.num_counted, entry.first_expected = 0, entry.expected
        self._outlook.set(entry, self._course(entry))

    def released(self, entry: S) -> None:
        """It has left the batch."""
        self._outlook.remove(entry)
        self._count(entry, entry.num_written)

    def grown(self, entry: S) -> bool:
        """It goes on behind the blocks that it had; whether something else is expected of it from now on.

        That is asked where it has become longer than it was expected to, and at some lengths on the way.
        """
        has_passed = self._count(entry, entry.num_written)
        if entry.expected > entry.num_reached and not has_passed:
            return False
        self.expect(entry)
        self._outlook.set(entry, self._course(entry))
        return True

    def finished(self, entry: S, *, is_cut: bool) -> None:
        """Its answer is complete. is_cut: only because its client wanted no more."""
        if entry.num_counted is None:
            return  # another server had all of it
        history, counts, written = self._lengths.of(entry.owner, entry.route), self.counts, entry.num_written
        self._count(entry, written)
        if not is_cut:
            history.ended(written)
        # By what was said first: what is said on the way follows the answer, and is seldom wrong.
        was_outgrown = written > entry.first_expected
        history.judged(was_outgrown=was_outgrown)
        counts.num_answers += 1
        counts.num_outgrown += was_outgrown
        counts.expected_tokens += entry.first_expected
        counts.error_tokens += abs(written - entry.first_expected)

    def _count(self, entry: S, written: int) -> bool:
        """Learn that it has so many tokens; whether it has passed a length at which answers are counted."""
        if entry.num_counted is None or written < bound_behind(entry.num_counted):
            return False
        self._lengths.of(entry.owner, entry.route).came(entry.num_counted, written)
        entry.num_counted = written
        return True

    @property
    def is_exhausted(self) -> bool:
        """Whether so much was sent away that who joins now reserves all that it may get."""
        return self.excess > self.most_tokens

    def fits(self, joining: S, leaving: Collection[S]) -> bool:
        """Whether the cache has room for it until all but `leaving` have ended."""
        self._look_again()
        return self._has_room([self._course(joining)], leaving)

    def num_fitting(self, joining: Sequence[S], known: int) -> int:
        """How many of these, from the first on, the cache has room for until all have ended: `known` at least."""
        self._look_again()
        courses = [self._course(entry) for entry in joining]
        if self._has_room(courses):
            return len(courses)
        # The peak never falls with another one, so that a few looks find how many are too many.
        num_more = range(known + 1, len(courses))
        num = known + bisect_left(num_more, True, key=lambda num: not self._has_room(courses[:num]))
        self._refused = joining[0], num, self._outlook.version, self._outlook.now
        return num

    def is_refused(self, head: S, num: int) -> bool:
        """Whether so many did not fit a few steps ago, `head` first, and none has come or left since then."""
        refused, num_fitting, version, looked_at = self._refused
        is_recent = version == self._outlook.version and self._outlook.now < looked_at + LOOKS
        return refused is head and num_fitting < num and is_recent

    def _look_again(self) -> None:
        for key in self._outlook.overdue():
            self._outlook.set(key, self._course(key))

    def _has_room(self, joining: Sequence[Course], leaving: Collection[S] = ()) -> bool:
        held_back = min(self.owed, MOST_HELD_BACK * self.most_tokens)
        return self._outlook.peak(joining, leaving) + held_back <= self.most_tokens

    def _course(self, entry: S) -> Course:
        request = entry.request
        left = max(1, entry.expected - entry.num_reached)
        longest = request.input_length + min(entry.expected + self._block_size, request.max_new_tokens)
        return self._outlook.course(longest - left, left)

    def planned(self, plan: StepPlan[S]) -> None:
        """A step was planned."""
        self._outlook.now += self._step
        num_tokens = plan.num_decoding + plan.prefill_tokens
        self.owed = max(-MOST_AHEAD * self.most_tokens, self.owed - MOST_AGAIN * num_tokens)
        self.excess = max(0.0, self.excess - MOST_AT_ALL * num_tokens)

    def sent_away(self, entry: S) -> None:
        """It leaves for want of blocks."""
        self.counts.num_sent_away += 1
        entry.num_lost = entry.num_computed
        self.excess += entry.num_lost

    def came_back(self, entry: S) -> None:
        """One that was sent away has joined again: what was not found of it is computed again.

        No more than the cache holds is owed, or a surprise would be felt long after it.
        """
        num_again = max(0, entry.num_lost - entry.num_prompt_scheduled)
        self.counts.tokens_again += num_again
        not_forgiven = num_again * (1 + MOST_AGAIN)  # by their own computation
        self.owed = min(self.owed + not_forgiven, float(self.most_tokens))
        self.excess = max(0.0, self.excess - (entry.num_lost - num_again))
        entry.num_lost = 0
