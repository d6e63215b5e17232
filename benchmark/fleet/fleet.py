"""A fleet of replicas in virtual time: who gets which request, and what befalls the replicas meanwhile.

Three sources of events, of which the earliest is next: replies of replicas that compute, timers (transfers, retries,
failures, restarts), and arrivals. The work per event does not grow with the fleet but for what
a policy does itself.

A request that is lost with its replica, or refused, is sent again whole, after a back-off; its times go on counting
from its first sending. A replica that fails or restarts comes back with an empty prefix cache. Where prompts and
answers have replicas of their own, the first gives the first token, and keys and values then take their time to the
second, which computes what no full block holds.
"""

from __future__ import annotations

import gc
import heapq
import itertools
import math
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from random import Random

from benchmark.fleet.pools import Conditions, Pool, Slowed, check_pools
from benchmark.fleet.replica import Replica, SharedNames, Simulated, Tally
from benchmark.fleet.traffic import NEVER, Request, Traffic
from router.scheduling.balancing import Balancer
from router.scheduling.request import ValidRequest


@dataclass(slots=True, eq=False)
class _Unit:
    """A place for a replica, which may start and fail."""

    index: int  # in the fleet
    pool: Pool
    balancer: Balancer
    number: int  # in its balancer
    replica: Replica
    is_up: bool = False
    life: int = 0  # how often it was started
    emptied: Callable[[float], None] | None = None  # what happens when it is empty


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
        """Raises ValueError for pools that cannot serve together, and a policy that does not exist."""
        check_pools(list(pools))
        self.tally = tally or Tally()
        self._traffic = traffic
        self._conditions = conditions
        self._random = Random(conditions.seed)
        self._faults = Random(f"faults {conditions.seed}")  # so that a policy's draws do not change who fails
        self._ids = itertools.count(1)
        self._names = SharedNames()
        self._timers: list[tuple[float, int, Callable[[float], None]]] = []
        self._timer_ids = itertools.count()
        self._replies: list[tuple[float, int]] = []  # when each unit that computes has its next reply
        self._num_on_their_way = 0  # requests that no replica has: they will be sent again, or their blocks move
        self._units: list[_Unit] = []
        self._fronts: dict[str | None, Balancer] = {}
        self._backs: dict[str | None, Balancer] = {}
        self._by_number: dict[int, list[_Unit]] = {}
        for pool in pools:
            side = self._backs if pool.role == "decode" else self._fronts
            balancer = side.setdefault(pool.model, Balancer(policy, self._random))
            for _ in range(pool.num_replicas):
                self._up(self._added(pool, balancer), 0.0)
        for at in conditions.failures_at:
            self._at(at, self._fail_any)
        for at in conditions.restarts_at:
            self._at(at, self._restart_all)

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
            if timers and timers[0][0] < min(arrival_at, reply_at) and self._goes_on(arrival_at):
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

    def _goes_on(self, arrival_at: float) -> bool:
        return arrival_at < NEVER or bool(self._replies) or self._num_on_their_way > 0

    def _at(self, when: float, happen: Callable[[float], None]) -> None:
        heapq.heappush(self._timers, (when, next(self._timer_ids), happen))

    def _entry(self, request: Request, arrived_at: float | None = None, attempt: int = 0) -> Simulated:
        valid = ValidRequest(range(request.input_length), request.max_new_tokens)
        arrived = request.arrives_at if arrived_at is None else arrived_at
        return Simulated(
            next(self._ids), valid, output_length=request.output_length, arrived_at=arrived, asked=request,
            attempt=attempt, names=self._names,
        )  # fmt: skip

    # ------------------------------------------------------------------------------------------------- requests

    def _send(self, entry: Simulated, now: float) -> None:
        """Have a request dispatched, once all that lies between it and the replicas has had its time."""
        if not self._conditions.delay_s:
            self._dispatch(entry, now)
            return
        self._num_on_their_way += 1

        def arrive(then: float) -> None:
            self._num_on_their_way -= 1
            self._dispatch(entry, then)

        self._at(now + self._conditions.delay_s, arrive)

    def _dispatch(self, entry: Simulated, now: float) -> None:
        """Send a request to a replica that takes its model."""
        asked = entry.asked
        assert asked is not None
        model = asked.model if asked.model in self._fronts else None
        if model in self._backs and entry.output_length > 1:
            entry.ask(ValidRequest(entry.request.token_ids, 1))
            entry.output_length, entry.is_first_leg = 1, True
        front = self._fronts.get(model)
        number = None if front is None else front.send(entry.request.size().tokens, self._prefix(asked))
        if front is None or number is None:
            self._again(entry, now)
        else:
            self._give(self._by_number[id(front)][number], entry, now)

    def _prefix(self, asked: Request) -> int | None:
        if not asked.hashes:
            return None
        depth = max(1, self._conditions.affinity_tokens // asked.hash_tokens)
        return asked.hashes[min(depth, len(asked.hashes)) - 1]

    def _give(self, unit: _Unit, entry: Simulated, now: float) -> None:
        if unit.replica.is_full:
            unit.balancer.done(unit.number, entry.request.size().tokens)
            self._again(entry, now)
            return
        was_idle = unit.replica.next_reply_at == NEVER
        entry.replica = unit.index
        if entry.began_at is None:
            unit.replica.submit(entry, now)
        else:
            unit.replica.receive(entry, now)
        if was_idle:
            heapq.heappush(self._replies, (unit.replica.next_reply_at, entry.replica))

    def _again(self, entry: Simulated, now: float) -> None:
        """Send a request again, after a while that grows each time; or never, when it was sent often enough."""
        asked, conditions = entry.asked, self._conditions
        assert asked is not None
        if entry.attempt >= conditions.retries:
            self.tally.num_refused += 1
            self._traffic.refused(now)
            return
        self.tally.num_retried += 1
        self._num_on_their_way += 1
        delay = conditions.backoff_s * 2**entry.attempt * (0.5 + self._faults.random())
        again = self._entry(asked, entry.arrived_at, entry.attempt + 1)

        def send(then: float) -> None:
            self._num_on_their_way -= 1
            self._send(again, then)

        self._at(now + delay, send)

    def _reply(self, now: float, unit: _Unit) -> None:
        """Take a reply, unless it is that of a replica that has failed since."""
        replica, replies = unit.replica, self._replies
        if replica.next_reply_at != now:
            heapq.heappop(replies)
            return
        ended = replica.reply(now)
        if (next_at := replica.next_reply_at) < NEVER:
            heapq.heapreplace(replies, (next_at, unit.index))
        else:
            heapq.heappop(replies)
        for entry in ended:
            unit.balancer.done(unit.number, entry.request.size().tokens)
            if entry.is_first_leg:
                self._transfer(unit.pool, entry, now)
            else:
                self._traffic.ended(now)
        if ended and unit.emptied is not None and not replica.num_outstanding:
            emptied, unit.emptied = unit.emptied, None
            emptied(now)

    def _transfer(self, pool: Pool, entry: Simulated, now: float) -> None:
        """Send keys and values to a replica that decodes; the request is there when they are."""
        asked = entry.asked
        assert asked is not None
        num_bytes = pool.kv_bytes * asked.input_length
        self.tally.transferred += num_bytes
        self._num_on_their_way += 1
        request = ValidRequest(range(asked.input_length + 1), asked.max_new_tokens - 1)
        second = Simulated(
            next(self._ids), request, output_length=asked.output_length - 1, arrived_at=entry.arrived_at,
            asked=asked, attempt=entry.attempt, began_at=entry.first_token_at, names=self._names,
        )  # fmt: skip

        def arrive(then: float) -> None:
            self._num_on_their_way -= 1
            back = self._backs[pool.model]
            number = back.send(request.size().tokens)
            if number is None or self._by_number[id(back)][number].replica.is_full:
                if number is not None:
                    back.done(number, request.size().tokens)
                self.tally.in_vain(entry, 1)
                self._again(entry, then)
            else:
                self._give(self._by_number[id(back)][number], second, then)

        self._at(now + self._conditions.link_s + num_bytes / self._conditions.link_bytes, arrive)

    # ------------------------------------------------------------------------------------------------- replicas

    def _added(self, pool: Pool, balancer: Balancer) -> _Unit:
        """A place for a replica, which is not up."""
        unit = _Unit(len(self._units), pool, balancer, balancer.add(pool.share), self._replica(pool))
        self._units.append(unit)
        self._by_number.setdefault(id(balancer), []).append(unit)
        return unit

    def _replica(self, pool: Pool) -> Replica:
        slow = self._conditions.slow_share > 0 and self._faults.random() < self._conditions.slow_share
        cost = Slowed(pool.cost, self._conditions.slow_factor) if slow else pool.cost
        return Replica(pool.limits, cost, self.tally)

    def _start(self, unit: _Unit, now: float) -> None:
        """Start a replica anew, with nothing in its cache."""
        unit.life += 1
        life = unit.life

        def up(then: float) -> None:
            if unit.life == life:
                unit.replica = self._replica(unit.pool)
                self._up(unit, then)

        self._at(now + self._conditions.startup_s, up)

    def _up(self, unit: _Unit, now: float) -> None:
        unit.is_up = True
        unit.balancer.up(unit.number)
        if (mean := self._conditions.mean_life_s) < math.inf:
            life = unit.life
            self._at(now + self._faults.expovariate(1 / mean), lambda then: self._fail(unit, then, life))

    def _down(self, unit: _Unit) -> None:
        unit.is_up = False
        unit.balancer.down(unit.number)

    def _fail(self, unit: _Unit, now: float, life: int) -> None:
        """Lose a replica and all that it has, unless it was restarted since; start it again."""
        if unit.life != life:
            return
        lost = unit.replica.abandon()
        self._down(unit)
        unit.replica = self._replica(unit.pool)
        emptied, unit.emptied = unit.emptied, None
        self.tally.num_lost += len(lost)
        for entry in lost:
            unit.balancer.done(unit.number, entry.request.size().tokens)
            self._again(entry, now)
        if emptied is not None:
            emptied(now)
        else:
            self._start(unit, now)

    def _fail_any(self, now: float) -> None:
        if up := [unit for unit in self._units if unit.is_up]:
            unit = self._faults.choice(up)
            self._fail(unit, now, unit.life)

    def _when_empty(self, unit: _Unit, now: float, happen: Callable[[float], None]) -> None:
        """Give a replica no more requests, and go on when it has answered those that it has."""
        self._down(unit)
        if unit.replica.num_outstanding:
            unit.emptied = happen
        else:
            happen(now)

    def _restart_all(self, now: float) -> None:
        """One replica after the other: each is emptied, started again, and up before the next one goes."""
        units = deque(unit for unit in self._units if unit.is_up)

        def next_one(then: float) -> None:
            while units and not units[0].is_up:
                units.popleft()
            if units:
                unit = units.popleft()
                self._when_empty(unit, then, partial(begin, unit))

        def begin(unit: _Unit, then: float) -> None:
            self._start(unit, then)
            self._at(then + self._conditions.startup_s, next_one)

        next_one(now)

    def _charge(self) -> Tally:
        """Count what replicas cost while requests came; of a load that came in one moment, until its last answer."""
        tally = self.tally
        end = tally.last_arrival_at if tally.last_arrival_at > tally.started_at else tally.ended_at
        seconds = max(0.0, min(tally.ended_at, end) - tally.started_at)
        for unit in self._units:
            tally.replica_seconds += tally.ended_at
            tally.paid_seconds += seconds
            tally.price += seconds / 3600 * unit.pool.price
        return tally
