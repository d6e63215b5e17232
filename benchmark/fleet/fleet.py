"""A fleet of replicas in virtual time: who gets which request, and what lies between the replicas.

Three sources of events, of which the earliest is next: replies of replicas that compute, timers (delays, transfers),
and arrivals. The work per event does not grow with the fleet but for what a policy does itself.

Where prompts and answers have replicas of their own, the first gives the first token, and keys and values then take
their time to the second, which computes what no full block holds. Left out: replicas that fail, and requests that are
sent again.
"""

from __future__ import annotations

import gc
import heapq
import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from random import Random

from benchmark.fleet.pools import Conditions, Pool
from benchmark.fleet.replica import Replica, SharedNames, Simulated, Tally
from benchmark.fleet.traffic import NEVER, Request, Traffic
from router.scheduling.balancing import Balancer
from router.scheduling.request import ValidRequest


@dataclass(slots=True, eq=False)
class _Unit:
    """A replica with its place."""

    index: int  # in the fleet
    pool: Pool
    side: _Side
    number: int  # in its balancer
    replica: Replica


@dataclass(frozen=True, eq=False)
class _Side:
    """Replicas that do the same."""

    balancer: Balancer
    units: list[_Unit]


class Fleet:
    """One run of a fleet under a load. Every request must fit the limits of the pools that take it on its own."""

    def __init__(
        self,
        traffic: Traffic,
        pools: Sequence[Pool],
        conditions: Conditions,
        policy: str = "power-of-two",
        tally: Tally | None = None,
    ) -> None:
        """pools: one, or one that computes prompts and one that decodes. Raises ValueError for no such policy."""
        self.tally = tally or Tally()
        self._traffic = traffic
        self._conditions = conditions
        self._ids = itertools.count(1)
        self._names = SharedNames()
        self._timers: list[tuple[float, int, Callable[[float], None]]] = []
        self._timer_ids = itertools.count()
        self._replies: list[tuple[float, int]] = []  # when each unit that computes has its next reply
        self._units: list[_Unit] = []
        random = Random(conditions.seed)
        sides = {role: _Side(Balancer(policy, random), []) for role in dict.fromkeys(pool.role for pool in pools)}
        for pool in pools:
            for _ in range(pool.num_replicas):
                self._add(pool, sides[pool.role])
        self._front, self._back = sides.get("both") or sides["prefill"], sides.get("decode")

    def _add(self, pool: Pool, side: _Side) -> None:
        number = side.balancer.add()
        unit = _Unit(len(self._units), pool, side, number, Replica(pool.limits, pool.cost, self.tally))
        self._units.append(unit)
        side.units.append(unit)
        side.balancer.up(number)

    def run(self) -> Tally:
        """Run the traffic to its end."""
        gc.disable()  # nothing here goes in circles, and millions of objects would be looked at again and again
        try:
            self._run()
        finally:
            gc.enable()
        return self._charge()

    def _run(self) -> None:
        traffic, replies, timers, units = self._traffic, self._replies, self._timers, self._units
        while True:
            arrival_at = traffic.next_at()
            reply_at = replies[0][0] if replies else NEVER
            if timers and timers[0][0] < min(arrival_at, reply_at):
                now, _, happen = heapq.heappop(timers)
                happen(now)
            elif replies and reply_at <= arrival_at:  # of one moment the reply is first: the loop plans before it reads
                self._reply(reply_at, units[replies[0][1]])
            elif arrival_at < NEVER:
                request = traffic.take()
                self.tally.arrived(request.arrives_at)
                self._send(self._entry(request), request.arrives_at)
            else:
                break

    def _at(self, when: float, happen: Callable[[float], None]) -> None:
        heapq.heappush(self._timers, (when, next(self._timer_ids), happen))

    def _entry(self, request: Request) -> Simulated:
        valid = ValidRequest(range(request.input_length), request.max_new_tokens)
        return Simulated(
            next(self._ids), valid, output_length=request.output_length, arrived_at=request.arrives_at, asked=request,
            names=self._names,
        )  # fmt: skip

    def _send(self, entry: Simulated, now: float) -> None:
        """Have a request dispatched, once all that lies between it and the replicas has had its time."""
        if self._conditions.delay_s:
            self._at(now + self._conditions.delay_s, lambda then: self._dispatch(entry, then))
        else:
            self._dispatch(entry, now)

    def _dispatch(self, entry: Simulated, now: float) -> None:
        asked = entry.asked
        assert asked is not None
        if self._back is not None and entry.output_length > 1:
            entry.ask(ValidRequest(entry.request.token_ids, 1))
            entry.output_length, entry.is_first_leg = 1, True
        if not self._give(self._front, entry, now, self._prefix(asked)):
            self._refuse(now)

    def _prefix(self, asked: Request) -> int | None:
        if not asked.hashes:
            return None
        depth = max(1, self._conditions.affinity_tokens // asked.hash_tokens)
        return asked.hashes[min(depth, len(asked.hashes)) - 1]

    def _give(self, side: _Side, entry: Simulated, now: float, prefix: int | None = None) -> bool:
        """Give a request to the replica that the policy says; False where that is full."""
        tokens = entry.request.size().tokens
        number = side.balancer.send(tokens, prefix)
        assert number is not None, "every replica is up"
        unit = side.units[number]
        if unit.replica.is_full:
            side.balancer.done(number, tokens)
            return False
        was_idle = unit.replica.next_reply_at == NEVER
        if entry.began_at is None:
            unit.replica.submit(entry, now)
        else:
            unit.replica.receive(entry, now)
        if was_idle:
            heapq.heappush(self._replies, (unit.replica.next_reply_at, unit.index))
        return True

    def _refuse(self, now: float) -> None:
        self.tally.num_refused += 1
        self._traffic.refused(now)

    def _reply(self, now: float, unit: _Unit) -> None:
        ended = unit.replica.reply(now)
        if (next_at := unit.replica.next_reply_at) < NEVER:
            heapq.heapreplace(self._replies, (next_at, unit.index))
        else:
            heapq.heappop(self._replies)
        for entry in ended:
            unit.side.balancer.done(unit.number, entry.request.size().tokens)
            if entry.is_first_leg:
                self._transfer(unit.pool, entry, now)
            else:
                self._traffic.ended(now)

    def _transfer(self, pool: Pool, entry: Simulated, now: float) -> None:
        """Send keys and values to a replica that decodes; the request is there when they are."""
        asked, back = entry.asked, self._back
        assert asked is not None and back is not None
        num_bytes = pool.kv_bytes * asked.input_length
        self.tally.transferred += num_bytes
        request = ValidRequest(range(asked.input_length + 1), asked.max_new_tokens - 1)
        second = Simulated(
            next(self._ids), request, output_length=asked.output_length - 1, arrived_at=entry.arrived_at,
            asked=asked, began_at=entry.first_token_at, names=self._names,
        )  # fmt: skip

        def arrive(then: float) -> None:
            if not self._give(back, second, then):
                self.tally.in_vain(asked)
                self._refuse(then)

        self._at(now + self._conditions.link_s + num_bytes / self._conditions.link_bytes, arrive)

    def _charge(self) -> Tally:
        """Count what replicas cost while requests came; of a load that came in one moment, until its last answer."""
        tally = self.tally
        end = tally.last_arrival_at if tally.last_arrival_at > tally.started_at else tally.ended_at
        seconds = max(0.0, min(tally.ended_at, end) - tally.started_at)
        for unit in self._units:
            tally.paid_seconds += seconds
            tally.price += seconds / 3600 * unit.pool.price
        return tally
