"""Fairness between API keys: whose request is next, who makes room for it, and how much of a step each may take.

Pure arithmetic and counts: no clock, no asyncio, no secrets, so that every rule can be tested with literals. It is
asked only while requests of two keys or more are in the server. Without keys, or with one, admission is strictly first
in, first out (`queue.py`), and nothing here runs but the counting.

* **Who is next.** Always the oldest request of the key that holds least for its weight. What a key holds is the larger
  of two shares, of tokens and of places in the batch (Ghodsi et al. 2011, "Dominant Resource Fairness").
* **Who makes room.** A key is entitled to its weight's part of the batch, and to one request whatever its size. When a
  request that its key is entitled to does not fit, the youngest requests of those who hold most beyond their own part
  leave the batch until it does. They are rebuilt later from their tokens: their clients see a pause. One that was sent
  away before stays until it has got MIN_ADVANCE tokens, so that every request ends at last; and so does the last that a
  key has, so that many keys do not take turns.
* **Who leaves when KV blocks run out**, where they are given on demand: the youngest of the key that holds most for its
  weight. The first of all that run never does.
* **Prompts.** Keys that have prompt tokens to compute divide a step's budget by weight.
* **Before the batch.** What all requests wait for, permits and places in the queue, is divided by a threshold that
  follows what is free (Choudhury and Hahne 1998): a key may hold THRESHOLD times what it leaves.
"""

from __future__ import annotations

import heapq
import math
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol, TypeVar

# Of what is free: one key alone may hold three quarters of all, two keys three sevenths each.
THRESHOLD = 3
# Tokens that a request gets before it may be sent away once more. To rebuild it costs a prompt's time, which is that of
# some decode steps: so many tokens for each time keep that a small part.
MIN_ADVANCE = 16
TINY = 1e-9  # shares are sums of fractions


class Claimant(Protocol):
    """A request, for whoever divides."""

    owner: str  # the name of its API key
    weight: float

    @property
    def max_tokens(self) -> int:
        """The longest sequence that the request can reach."""

    @property
    def claim(self) -> int:
        """What it counts as in the batch: the sequence that it is expected to reach."""

    @property
    def arrival(self) -> int:
        """Its place among all requests that came."""

    @property
    def may_be_preempted(self) -> bool:
        """Whether it has got on since it was last sent away, or never was."""


C = TypeVar("C", bound=Claimant)


@dataclass(slots=True)
class Holding:
    """What the requests of one key take."""

    weight: float
    num_waiting: int = 0
    waiting_tokens: int = 0
    num_running: int = 0
    running_tokens: int = 0


class Ledger:
    """What each key that has requests in the server holds. Capacities: of tokens, and of places if they are limited."""

    def __init__(self, max_tokens: int, max_places: int | None) -> None:
        self.waiting_tokens = 0
        self.max_tokens = max_tokens
        self.max_places = max_places
        self._holdings: dict[str, Holding] = {}

    @property
    def is_contested(self) -> bool:
        """Whether requests of several keys are in the server."""
        return len(self._holdings) > 1

    @property
    def weights(self) -> dict[str, float]:
        """The weight of each key that has requests in the server."""
        return {owner: holding.weight for owner, holding in self._holdings.items()}

    def holding(self, owner: str) -> Holding:
        """What a key holds."""
        return self._holdings.get(owner) or Holding(1.0)

    def weigh(self, owner: str, weight: float) -> None:
        """A new request of a key that has others says what the key's weight is now."""
        if owner in self._holdings:
            self._holdings[owner].weight = weight

    def queued(self, one: Claimant) -> None:
        """Count a request that waits."""
        holding = self._holdings.setdefault(one.owner, Holding(one.weight))
        holding.num_waiting += 1
        holding.waiting_tokens += one.max_tokens
        self.waiting_tokens += one.max_tokens

    def unqueued(self, one: Claimant) -> None:
        """Count a request no more that has waited."""
        holding = self._holdings[one.owner]
        holding.num_waiting -= 1
        holding.waiting_tokens -= one.max_tokens
        self.waiting_tokens -= one.max_tokens
        self._forget(one.owner)

    def admitted(self, one: Claimant) -> None:
        """Move a request from the queue to the batch."""
        holding = self._holdings[one.owner]
        holding.num_running += 1
        holding.running_tokens += one.claim
        self.unqueued(one)

    def released(self, one: Claimant) -> None:
        """Count a request no more that has left the batch."""
        holding = self._holdings[one.owner]
        holding.num_running -= 1
        holding.running_tokens -= one.claim
        self._forget(one.owner)

    def outgrown(self, owner: str, tokens: int) -> None:
        """A running request counts as so many tokens more than before."""
        self._holdings[owner].running_tokens += tokens

    def _forget(self, owner: str) -> None:
        holding = self._holdings[owner]
        if not (holding.num_waiting or holding.num_running):
            del self._holdings[owner]

    def has_room(self, tokens: int, most: int, owner: str, weight: float) -> bool:
        """Whether so many more tokens may wait where `most` may; the owner "" has no others beside it.

        An empty queue takes a request of any length: it would never fit otherwise.
        """
        if not self.waiting_tokens:
            return True
        free = most - self.waiting_tokens
        held = self.holding(owner).waiting_tokens
        return may_take(tokens, held=held, free=free, weight=weight) if owner else tokens <= free

    def share(self, tokens: int, places: int) -> float:
        """The part of the batch that so many tokens and places are, by whichever is more."""
        part = tokens / self.max_tokens
        return part if self.max_places is None else max(part, places / self.max_places)

    def held(self, owner: str) -> float:
        """The part of the batch that a key holds."""
        holding = self.holding(owner)
        return self.share(holding.running_tokens, holding.num_running)

    def level(self, owner: str) -> float:
        """What a key holds for each unit of its weight."""
        return self.held(owner) / self.holding(owner).weight

    def entitlement(self, owner: str) -> float:
        """The part of the batch that a key may have, whoever else wants it."""
        return self.holding(owner).weight / sum(holding.weight for holding in self._holdings.values())


# ---------------------------------------------------------------------------------------------------------- who is next


def fair_order(waiting: Iterable[C], ledger: Ledger) -> Iterator[C]:
    """The waiting requests in the order of admission, each as if those before it had been admitted."""
    queues: dict[str, deque[tuple[int, C]]] = {}
    for position, one in enumerate(waiting):
        queues.setdefault(one.owner, deque()).append((position, one))
    heap = [(ledger.level(owner), queue[0][0], owner) for owner, queue in queues.items()]
    heapq.heapify(heap)
    while heap:
        level, _, owner = heap[0]
        _, one = queues[owner].popleft()
        yield one
        if queues[owner]:
            level += ledger.share(one.claim, 1) / one.weight
            heapq.heapreplace(heap, (level, queues[owner][0][0], owner))
        else:
            heapq.heappop(heap)


# ------------------------------------------------------------------------------------------------------- who makes room


def preempted_for(head: C, running: Sequence[C], ledger: Ledger, fits: Callable[[Sequence[C]], bool]) -> list[C]:
    """The running requests to send away so that `head` fits; empty if it must wait.

    running: in order of admission. fits: whether `head` does once these have left; more never fit worse than fewer.
    """
    if not _is_entitled(head, ledger):
        return []
    held = {owner: ledger.held(owner) for owner in ledger.weights}
    candidates: dict[str, list[C]] = {}
    for one in running:
        if one.owner != head.owner and one.may_be_preempted:
            candidates.setdefault(one.owner, []).append(one)
    chosen: list[C] = []
    while over := [
        (held[owner] / ledger.entitlement(owner), owner)
        for owner, ones in candidates.items()
        if ones and _can_spare(ones[-1], held[owner], head, ledger)
    ]:
        _, owner = max(over)
        victim = candidates[owner].pop()
        held[owner] -= ledger.share(victim.claim, 1)
        chosen.append(victim)
        if fits(chosen):
            return chosen
    return []


def sent_away(running: Sequence[C], ledger: Ledger, fits: Callable[[Sequence[C]], bool]) -> list[C]:
    """Who leaves when KV blocks run out: of the key that holds most for its weight, whoever came last, and so on.

    Never whoever came first of all, so that one request always gets on; nobody where all would not be enough that have
    got on since they last made room. fits: whether these are enough.
    """
    first = min(running, key=lambda one: one.arrival, default=None)
    candidates = [one for one in running if one is not first and one.may_be_preempted]
    levels = {owner: ledger.level(owner) for owner in {one.owner for one in candidates}}
    chosen: list[C] = []
    while candidates:
        victim = max(candidates, key=lambda one: (levels[one.owner], one.arrival))
        candidates.remove(victim)
        levels[victim.owner] -= ledger.share(victim.claim, 1) / ledger.holding(victim.owner).weight
        chosen.append(victim)
        if fits(chosen):
            return chosen
    return []


def _can_spare(victim: Claimant, held: float, head: Claimant, ledger: Ledger) -> bool:
    """Whether a key that holds so much has more than its part, and without `victim` still more than the head's key.

    Otherwise the two would only change places: with more keys than places in the batch, all would take turns for ever.
    """
    rest = (held - ledger.share(victim.claim, 1)) / ledger.holding(victim.owner).weight
    return held > ledger.entitlement(victim.owner) + TINY and rest > ledger.level(head.owner) + TINY


def _is_entitled(head: Claimant, ledger: Ledger) -> bool:
    holding = ledger.holding(head.owner)
    if not holding.num_running:
        return True
    share = ledger.share(holding.running_tokens + head.claim, holding.num_running + 1)
    return share <= ledger.entitlement(head.owner) + TINY


# -------------------------------------------------------------------------------------------------------------- prompts


def divide(budget: int, wanted: Mapping[str, int], weights: Mapping[str, float]) -> dict[str, int]:
    """Whole parts of `budget` by weight, none larger than wanted; what some leave goes to the others.

    Each gets one at least, as far as the budget goes.
    """
    parts = dict.fromkeys(wanted, 0)
    while (open_ := [owner for owner in wanted if parts[owner] < wanted[owner]]) and budget:
        total = sum(weights[owner] for owner in open_)
        round_budget = budget
        for place, owner in enumerate(open_, 1):
            fair = max(1, int(round_budget * weights[owner] / total))
            kept = sum(not parts[other] for other in open_[place:])  # one for each that has none yet
            part = min(fair, wanted[owner] - parts[owner], max(1, budget - kept), budget)
            parts[owner] += part
            budget -= part
    return parts


# ----------------------------------------------------------------------------------------------------- before the batch


def may_take(count: int, *, held: int, free: int, weight: float) -> bool:
    """Whether a key that holds `held` of something may take `count` of the `free` ones.

    One that has none may always, if there is enough.
    """
    if count > free:
        return False
    return not held or not count or held + count <= most_held(free=free - count, weight=weight)


def most_held(*, free: int, weight: float) -> int:
    """What a key may hold where so much stays free."""
    return math.floor(THRESHOLD * weight * free)
