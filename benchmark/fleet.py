"""Replicas of a server in virtual time: the router's own scheduler on shards whose steps take what a cost model says.

Every decision is `router.scheduler.Scheduler`'s; what is here instead of the router's batching loop is its order of
events, with nothing to wait for: plan until two steps are under way, take the oldest reply, plan again. Tokens have no
content. A token comes from every step once a prompt is through, so that a request's last step is known when its first
token is: the work per step does not grow with its sequences but for what the scheduler itself does.

Left out: HTTP, tokenising and detokenising, the router's own time (hidden behind the shards unless steps are very
short), clients that leave, the prefix cache, and shards that fail.
"""

from __future__ import annotations

import heapq
from array import array
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from random import Random

from benchmark.cost import Cost, StepWork
from benchmark.traffic import NEVER, Request, Traffic
from router.batcher import MAX_STEPS_UNDER_WAY
from router.entry import Scheduled, ValidRequest
from router.limits import Limits
from router.plan import StepPlan
from router.scheduler import Scheduler


@dataclass(slots=True, eq=False, kw_only=True)
class Simulated(Scheduled):
    """A request in the scheduler, with its times in virtual seconds."""

    output_length: int
    arrived_at: float
    admitted_at: float = 0.0
    first_token_at: float = 0.0

    @property
    def context(self) -> int:
        """Keys that the request's next decode step looks at."""
        return self.request.input_length + self.num_scheduled


@dataclass(slots=True)
class Tally:
    """What a simulation has seen, of all replicas. Samples are in seconds, one for each request that ended."""

    ttft: array[float] = field(default_factory=lambda: array("d"))
    tpot: array[float] = field(default_factory=lambda: array("d"))  # 0 for an answer of one token
    e2e: array[float] = field(default_factory=lambda: array("d"))
    queued: array[float] = field(default_factory=lambda: array("d"))
    gaps: array[float] = field(
        default_factory=lambda: array("d")
    )  # from one token of a request to its next, once for each step
    gap_counts: array[int] = field(default_factory=lambda: array("q"))  # how many requests saw each of `gaps`
    num_requests: int = 0
    num_refused: int = 0
    num_tokens: int = 0
    num_steps: int = 0
    num_step_tokens: int = 0  # computed, of prompts and answers; some answers' after their end
    num_given: int = 0  # tokens that reached clients
    started_at: float = NEVER  # the first arrival
    last_arrival_at: float = 0.0
    ended_by_then: int = 0  # requests, when the last one came
    given_by_then: int = 0  # tokens
    ended_at: float = 0.0
    busy: float = 0.0  # seconds that replicas computed, of all replicas together
    batch: float = 0.0  # integral over those seconds of the running sequences
    blocks: float = 0.0  # integral over those seconds of the KV blocks reserved
    peak_batch: int = 0
    peak_blocks: int = 0

    def arrived(self, now: float) -> None:
        """Count a request that comes at `now`, not before the others, and what was answered until then."""
        self.num_requests += 1
        self.started_at = min(self.started_at, now)
        self.last_arrival_at, self.ended_by_then, self.given_by_then = now, len(self.e2e), self.num_given

    def ended(self, entry: Simulated, now: float) -> None:
        """Count a request whose last token has reached its client at `now`."""
        gaps = entry.output_length - 1
        self.ttft.append(entry.first_token_at - entry.arrived_at)
        self.tpot.append((now - entry.first_token_at) / gaps if gaps else 0.0)
        self.e2e.append(now - entry.arrived_at)
        self.queued.append(entry.admitted_at - entry.arrived_at)
        self.num_tokens += entry.output_length
        self.ended_at = now


# ----------------------------------------------------------------------------------------------------------- replica


@dataclass(slots=True)
class _SimulatedStep:
    """A plan that a replica computes, or that waits for it to."""

    plan: StepPlan[Simulated]
    begins_at: float
    ends_at: float
    firsts: list[Simulated]  # whose prompts end in it


class Replica:
    """One server in virtual time: a router's scheduler, and shards whose steps take what a cost model says."""

    def __init__(self, limits: Limits, cost: Cost, tally: Tally) -> None:
        self.outstanding_tokens = 0  # of requests waiting and running, as long as they may become
        self._limits = limits
        self._cost = cost
        self._tally = tally
        self._scheduler: Scheduler[Simulated] = Scheduler(limits)
        self._num_outstanding = 0
        self._under_way: deque[_SimulatedStep] = deque()
        self._free_at = 0.0  # when the shards will have computed what was sent
        self._replied_at = 0.0
        self._streaming = 0  # requests between their first token and their last
        self._context = 0  # keys that the next decode step looks at
        self._last_tokens: dict[int, list[Simulated]] = {}  # step -> whose last token it gives

    @property
    def next_reply_at(self) -> float:
        """When the oldest step under way is answered, in virtual seconds; NEVER when the replica is idle."""
        return self._under_way[0].ends_at if self._under_way else NEVER

    @property
    def is_full(self) -> bool:
        """Whether one more request is refused."""
        return self._num_outstanding >= self._limits.max_concurrent_requests

    def submit(self, entry: Simulated, now: float) -> None:
        """Queue a request. A loop that waits for a reply will look at it then, an idle one now."""
        self.submit_together([entry], now)

    def submit_together(self, entries: Sequence[Simulated], now: float) -> None:
        """Queue requests that come at one moment, so that the next step may take them all."""
        for entry in entries:
            self._scheduler.add(entry)
            self._num_outstanding += 1
            self.outstanding_tokens += entry.request.size().tokens
        if not self._under_way:
            self._fill(now)

    def reply(self, now: float) -> int:
        """Take the reply to the oldest step; returns how many requests ended with it."""
        step = self._under_way.popleft()
        self._scheduler.computed(step.plan)
        self._scheduler.timed(step.plan, step.ends_at - step.begins_at)
        self._tally.num_given += self._streaming + len(step.firsts)
        if self._streaming:
            self._tally.gaps.append(now - self._replied_at)
            self._tally.gap_counts.append(self._streaming)
        self._replied_at = now
        for entry in step.firsts:
            entry.first_token_at = now
        ended = self._last_tokens.pop(step.plan.number, ())
        for entry in ended:
            self._end(entry, now)
        self._streaming += len(step.firsts) - len(ended)
        self._fill(now)
        return len(ended)

    def _end(self, entry: Simulated, now: float) -> None:
        entry.is_over = True
        self._num_outstanding -= 1
        self.outstanding_tokens -= entry.request.size().tokens
        self._tally.ended(entry, now)

    def _fill(self, now: float) -> None:
        """Send steps until two are under way or nothing is left to do."""
        while len(self._under_way) < MAX_STEPS_UNDER_WAY and (plan := self._scheduler.plan()) is not None:
            firsts = self._completed(plan)
            for entry in plan.admitted:
                entry.admitted_at = now
            for entry in firsts:
                self._last_tokens.setdefault(plan.number + entry.output_length - 1, []).append(entry)
            begins_at = max(now, self._free_at)
            self._free_at = begins_at + self._cost.seconds(self._work(plan, firsts))
            self._under_way.append(_SimulatedStep(plan, begins_at, self._free_at, firsts))
            self._note(plan, self._free_at - begins_at)

    def _completed(self, plan: StepPlan[Simulated]) -> list[Simulated]:
        """Requests whose prompts end in this step."""
        running = self._scheduler.running
        return [entry for id in plan.chunks if not (entry := running[id]).num_prompt_left]

    def _work(self, plan: StepPlan[Simulated], firsts: Sequence[Simulated]) -> StepWork:
        """What the step computes. Keeps count of the context, which grows by one key for each sequence that decodes."""
        for entry in plan.retired:
            self._context -= entry.context
        decoding, context = len(plan.decoding), self._context
        self._context += decoding + sum(entry.context for entry in firsts)
        pairs, read = 0.0, 0
        for id, num_tokens in plan.chunks.items():
            before = self._scheduler.running[id].num_prompt_scheduled - num_tokens
            pairs += num_tokens * before + num_tokens**2 / 2
            read += before
        return StepWork(plan.prefill_tokens, pairs, read, decoding, context, decoding + len(firsts))

    def _note(self, plan: StepPlan[Simulated], seconds: float) -> None:
        tally, batch = self._tally, len(self._scheduler.running)
        blocks = self._limits.num_blocks - self._scheduler.num_free_blocks
        tally.num_steps += 1
        tally.num_step_tokens += plan.prefill_tokens + len(plan.decoding)
        tally.busy += seconds
        tally.batch += batch * seconds
        tally.blocks += blocks * seconds
        tally.peak_batch = max(tally.peak_batch, batch)
        tally.peak_blocks = max(tally.peak_blocks, blocks)


# ------------------------------------------------------------------------------------------------------------- fleet

Dispatch = Callable[[int, Sequence[Replica], Random], int]  # the request's number -> the replica's


def _in_turn(number: int, replicas: Sequence[Replica], random: Random) -> int:
    """Choose the replicas one after the other."""
    return number % len(replicas)


def _better_of_two(number: int, replicas: Sequence[Replica], random: Random) -> int:
    """Choose, of two replicas at random, the one with fewer tokens outstanding (Mitzenmacher 2001).

    This is nearly as good as asking all, at a cost that does not grow with the fleet.
    """
    one, other = int(random.random() * len(replicas)), int(random.random() * len(replicas))
    return one if replicas[one].outstanding_tokens <= replicas[other].outstanding_tokens else other


DISPATCHES: Mapping[str, Dispatch] = {"better-of-two": _better_of_two, "round-robin": _in_turn}


def simulate(
    traffic: Traffic,
    limits: Limits,
    cost: Cost,
    *,
    num_replicas: int = 1,
    dispatch: str = "better-of-two",
    seed: int = 0,
) -> Tally:
    """Run the traffic to its end on so many equal replicas. Every request must fit the limits on its own."""
    tally, random, choose = Tally(), Random(seed), DISPATCHES[dispatch]
    replicas = [Replica(limits, cost, tally) for _ in range(num_replicas)]
    replies: list[tuple[float, int]] = []  # a heap: when each replica that computes has its next reply
    while True:
        arrival_at = traffic.next_at()
        if replies and replies[0][0] <= arrival_at:  # of one moment the reply is first: the loop plans before it reads
            now, index = replies[0]
            replica = replicas[index]
            for _ in range(replica.reply(now)):
                traffic.ended(now)
            if (next_at := replica.next_reply_at) < NEVER:
                heapq.heapreplace(replies, (next_at, index))
            else:
                heapq.heappop(replies)
        elif arrival_at < NEVER:
            index = choose(tally.num_requests, replicas, random)
            replica, was_idle = replicas[index], replicas[index].next_reply_at == NEVER
            request = traffic.take()
            tally.arrived(request.arrives_at)
            if replica.is_full:
                tally.num_refused += 1
                traffic.refused(request.arrives_at)
                continue
            replica.submit(_entry(tally.num_requests, request), request.arrives_at)
            if was_idle:
                heapq.heappush(replies, (replica.next_reply_at, index))
        else:
            return tally


def _entry(id: int, request: Request) -> Simulated:
    valid = ValidRequest(range(request.input_length), request.max_new_tokens)
    return Simulated(id, valid, output_length=request.output_length, arrived_at=request.arrives_at)
