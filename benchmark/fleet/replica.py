"""Replicas of a server in virtual time: the router's own scheduler on shards whose steps take what a cost model says.

Every decision is `router.scheduling`'s; what is here instead of the router's batching loop is its order of events, with
nothing to wait for: plan until two steps are under way, take the oldest reply, plan again. Tokens have no content. A
token comes from every step once a prompt is through, so that a request's last step is known when its first token is:
the work per step does not grow with its sequences but for what the scheduler itself does. One that is sent away loses
the tokens that are under way, as in the real loop, and ends as much later as it waits.

Which replica gets a request is in `fleet.py`.

Left out: HTTP, tokenising and detokenising, the router's own time (hidden behind the shards unless steps are very
short), clients that leave, and the blocks of answers in the prefix cache.
"""

from __future__ import annotations

from array import array
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import takewhile
from struct import Struct

from benchmark.cost.step_times import Cost, StepWork
from benchmark.fleet.traffic import NEVER, Request
from router.scheduling.forecast import DemandCounts
from router.scheduling.limits import Limits
from router.scheduling.plan import MOST_UNDER_WAY, StepPlan
from router.scheduling.prefix_index import TierIndex
from router.scheduling.prefix_moves import Restored
from router.scheduling.request import PrefixKeys, Scheduled, ValidRequest
from router.scheduling.scheduler import Scheduler

_unique = Struct("<qI").pack  # of a request, and of a block's place in it
_shared = Struct("<QIx").pack  # one byte longer, so that none is the other


class NamedKeys(PrefixKeys):
    """Keys of a prompt that has no content: of the beginning that its hashes name, and behind it keys of its own."""

    def __init__(self, keys: list[bytes]) -> None:
        self.keys = keys


MOST_NAMES = 10_000  # that are kept, of a trace whose every request has its own


class SharedNames:
    """Keys of the beginnings that hashes name: equal ones are one object, which is found sooner and held once."""

    def __init__(self) -> None:
        self._known: dict[Sequence[int], list[bytes]] = {}

    def keys(self, hashes: Sequence[int], hash_tokens: int, block_size: int) -> list[bytes]:
        """A key for each block that is full of tokens that have hashes."""
        found = self._known.get(hashes)
        if found is None:
            if len(self._known) >= MOST_NAMES:
                self._known.clear()
            places = range(len(hashes) * hash_tokens // block_size)
            named = [hashes[((n + 1) * block_size - 1) // hash_tokens] & 2**64 - 1 for n in places]
            found = self._known[hashes] = [_shared(name, n) for n, name in enumerate(named)]
        return found


@dataclass(slots=True, eq=False, kw_only=True)
class Simulated(Scheduled):
    """A request in the scheduler, with its times in virtual seconds."""

    output_length: int
    arrived_at: float
    admitted_at: float = 0.0
    first_token_at: float = 0.0
    asked: Request | None = None  # what the client sent
    is_first_leg: bool = False  # its first token is computed here, and the others elsewhere
    began_at: float | None = None  # where its first token was computed elsewhere: when that came
    prompt_length: int = 0  # of the request
    most_tokens: int = 0  # that it asks for
    names: SharedNames = field(default_factory=SharedNames)  # the fleet's
    name: int = 0  # its first id, by which its blocks are known
    ends_in: int = 0  # the step that gives its last token, once its prompt is through; 0: not yet, or not any more
    paused_at: float = 0.0  # when it got the last token before it was sent away; 0: it was not
    under_way: Iterable[_SimulatedStep] = ()  # steps, where it runs
    num_dropped: int = 0  # tokens that were under way when it was sent away

    # What the scheduler asks of every sequence in every step, without a look at the request: there are no grammars. A
    # fleet of a thousand replicas has no request at hand that it looked at a while ago.

    @property
    def num_prompt_left(self) -> int:
        """Tokens of the prompt, and of what is rebuilt, that no step sent so far computes."""
        return self.prompt_length + self.num_known - self.num_prompt_scheduled

    @property
    def num_written(self) -> int:
        """Tokens of its answer that have come back."""
        return min(self.num_scheduled - sum(step.yields(self) for step in self.under_way), self.output_length)

    @property
    def is_held(self) -> bool:
        """Never: it has no grammar."""
        return False

    @property
    def is_scheduled_to_its_end(self) -> bool:
        """Whether the steps sent so far yield its last token."""
        return self.num_scheduled == self.most_tokens

    def __post_init__(self) -> None:
        """Copy from the request what is asked for in every step."""
        self.name = self.id
        self.ask(self.request)

    def ask(self, request: ValidRequest) -> None:
        """From now on it is about this request, which nobody has begun."""
        self.request = request
        self.prompt_length, self.most_tokens = len(request.token_ids), request.max_new_tokens

    def begin_sequence(self, block_size: int | None, border: int = 0, most_at_once: int = 0) -> None:
        """Start over with the tokens that have come back."""
        num_scheduled = self.num_scheduled
        Scheduled.begin_sequence(self, block_size, border, most_at_once)
        self.num_dropped, self.under_way = num_scheduled - self.num_scheduled, ()

    def prefix_keys(self, block_size: int) -> PrefixKeys:
        """A key for each full block of the prompt. Equal hashes are equal keys, as equal tokens would be."""
        num_blocks = self.request.input_length // block_size
        asked, known = self.asked, 0
        keys: list[bytes] = []
        if asked is not None and asked.hashes and self.began_at is None:
            keys = self.names.keys(asked.hashes, asked.hash_tokens, block_size)[:num_blocks]
            known = len(keys)
        return NamedKeys(keys + [_unique(self.name, n) for n in range(known, num_blocks)])

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
    pauses: array[float] = field(default_factory=lambda: array("d"))  # those gaps in which a request had been sent away
    num_requests: int = 0
    num_refused: int = 0
    num_prompt_tokens: int = 0  # of those admitted, each time
    num_prompt_tokens_in_vain: int = 0  # of these, of requests that were refused later
    num_cached_tokens: int = 0  # of these, found in the prefix cache
    transferred: float = 0.0  # bytes of keys and values, from one replica to another
    paid_seconds: float = 0.0  # of replicas, until the last arrival: what follows belongs to no load
    price: float = 0.0  # of those seconds
    num_tokens: int = 0
    num_steps: int = 0
    num_step_tokens: int = 0  # computed, of prompts and answers; some answers' after their end
    num_given: int = 0  # tokens that reached clients, but for those of requests that were refused later
    started_at: float = NEVER  # the first arrival
    last_arrival_at: float = 0.0
    ended_by_then: int = 0  # requests, when the last one came
    given_by_then: int = 0  # tokens
    prompts_by_then: int = 0  # tokens of prompts that were admitted, and not in vain
    ended_at: float = 0.0
    busy: float = 0.0  # seconds that replicas computed, of all replicas together
    batch: float = 0.0  # integral over those seconds of the running sequences
    kv: float = 0.0  # integral over those seconds of the share of a replica's KV blocks that is reserved
    peak_batch: int = 0
    peak_kv: float = 0.0

    def arrived(self, now: float) -> None:
        """Count a request that comes at `now`, not before the others, and what was answered until then."""
        self.num_requests += 1
        self.started_at = min(self.started_at, now)
        self.last_arrival_at, self.ended_by_then, self.given_by_then = now, len(self.e2e), self.num_given
        self.prompts_by_then = self.num_prompts_sold

    @property
    def num_prompts_sold(self) -> int:
        """Tokens of prompts that were admitted, and not in vain."""
        return self.num_prompt_tokens - self.num_prompt_tokens_in_vain

    def in_vain(self, asked: Request) -> None:
        """Count no longer what was done for a request that goes on nowhere: its prompt and its first token."""
        self.num_given -= 1
        self.num_prompt_tokens_in_vain += asked.input_length

    def ended(self, entry: Simulated, now: float) -> None:
        """Count a request whose last token has reached its client at `now`."""
        began_at = entry.first_token_at if entry.began_at is None else entry.began_at
        num_tokens = entry.output_length + (entry.began_at is not None)
        self.ttft.append(began_at - entry.arrived_at)
        self.tpot.append((now - began_at) / (num_tokens - 1) if num_tokens > 1 else 0.0)
        self.e2e.append(now - entry.arrived_at)
        self.queued.append(entry.admitted_at - entry.arrived_at)
        self.num_tokens += num_tokens
        self.ended_at = now


class Arrived(TierIndex):
    """Keys and values that came from another replica: the step that admits their request has them in its blocks."""

    def __init__(self) -> None:
        super().__init__()
        self._keys: set[bytes] = set()

    def add(self, keys: Sequence[bytes]) -> None:
        """These are there."""
        self._keys.update(keys)

    def find(self, keys: Iterable[bytes]) -> list[bytes]:
        """The first of them that are there."""
        return list(takewhile(self._keys.__contains__, keys)) if self._keys else []

    def restore(self, keys: Sequence[bytes], blocks: Sequence[int], sequence: int) -> list[Restored]:
        """Put them into these blocks. Nobody else asks for them."""
        self._keys.difference_update(keys)
        return [Restored(key, 0, block) for key, block in zip(keys, blocks, strict=True)]

    def restoring(self, restores: Sequence[Restored], step: int) -> None:
        """Nothing follows from it: no slot is kept."""

    def restored(self, restores: Sequence[Restored]) -> None:
        """Nothing follows from it either."""


# -------------------------------------------------------------------------------------------------------------- replica


@dataclass(slots=True)
class _SimulatedStep:
    """A plan that a replica computes, or that waits for it to."""

    plan: StepPlan[Simulated]
    begins_at: float
    ends_at: float
    firsts: list[Simulated]  # whose prompts end in it

    def yields(self, entry: Simulated) -> bool:
        """Whether the request gets a token from it."""
        return entry in self.firsts or entry in self.plan.decoding


class Replica:
    """One server in virtual time: a router's scheduler, and shards whose steps take what a cost model says."""

    def __init__(
        self, limits: Limits, cost: Cost, tally: Tally, scheduler: type[Scheduler[Simulated]] = Scheduler
    ) -> None:
        """scheduler: another one, to compare."""
        self._limits = limits
        self._cost = cost
        self._tally = tally
        self._arrived = Arrived()
        self._scheduler = scheduler(limits, self._arrived)
        self.num_outstanding = 0  # requests waiting and running
        self._under_way: deque[_SimulatedStep] = deque()
        self._free_at = 0.0  # when the shards will have computed what was sent
        self._replied_at = 0.0
        self._streaming = 0  # requests between their first token and their last
        self._context = 0  # keys that the next decode step looks at
        self._last_tokens: dict[int, list[Simulated]] = {}  # step -> whose last token it gives
        self._num_planned = 0  # steps

    @property
    def next_reply_at(self) -> float:
        """When the oldest step under way is answered, in virtual seconds; NEVER when the replica is idle."""
        return self._under_way[0].ends_at if self._under_way else NEVER

    @property
    def counts(self) -> DemandCounts:
        """What giving blocks on demand has led to, nothing where they are reserved."""
        return DemandCounts() if self._scheduler.forecast is None else self._scheduler.forecast.counts

    @property
    def is_full(self) -> bool:
        """Whether one more request is refused."""
        return self.num_outstanding >= self._limits.max_concurrent_requests

    def submit(self, entry: Simulated, now: float) -> None:
        """Queue a request. A loop that waits for a reply will look at it then, an idle one now."""
        self.submit_together([entry], now)

    def submit_together(self, entries: Sequence[Simulated], now: float) -> None:
        """Queue requests that come at one moment, so that the next step may take them all."""
        for entry in entries:
            entry.id = self._scheduler.new_id()
            self._scheduler.add(entry)
            self.num_outstanding += 1
        if not self._under_way:
            self._fill(now)

    def receive(self, entry: Simulated, now: float) -> None:
        """Queue a request whose prompt another replica has computed: its full blocks are here."""
        self._arrived.add(entry.prefix_keys(self._limits.block_size).keys)
        self.submit(entry, now)

    def reply(self, now: float) -> Sequence[Simulated]:
        """Take the reply to the oldest step; returns the requests that ended with it."""
        step = self._under_way.popleft()
        self._scheduler.computed(step.plan)
        self._scheduler.timed(step.plan, step.ends_at - step.begins_at)
        self._tally.num_given += self._streaming + len(step.firsts)
        if self._streaming:
            self._tally.gaps.append(now - self._replied_at)
            self._tally.gap_counts.append(self._streaming)
        self._replied_at = now
        for entry in step.firsts:
            self._first(entry, now)
        ended = self._last_tokens.pop(step.plan.number, ())
        for entry in ended:
            self._end(entry, now)
        self._streaming += len(step.firsts) - len(ended)
        self._fill(now)
        return ended

    def _first(self, entry: Simulated, now: float) -> None:
        """It gets the first token of all, or after it was sent away."""
        if entry.paused_at:
            self._tally.gaps.append(now - entry.paused_at)
            self._tally.gap_counts.append(1)
            self._tally.pauses.append(now - entry.paused_at)
            entry.paused_at = 0.0
        else:
            entry.first_token_at = now

    def _end(self, entry: Simulated, now: float) -> None:
        self._scheduler.finished(entry, is_cut=entry.output_length == entry.most_tokens)
        entry.is_over = True
        self.num_outstanding -= 1
        if not entry.is_first_leg:
            self._tally.ended(entry, now)

    def _fill(self, now: float) -> None:
        """Send steps until two are under way or nothing is left to do."""
        while len(self._under_way) < MOST_UNDER_WAY and (plan := self._scheduler.plan()) is not None:
            for entry in plan.preempted.values():
                self._pause(entry)
            for id in plan.held:
                self._postpone(self._scheduler.running[id])
            firsts = self._completed(plan) if plan.chunks else []
            for entry in plan.admitted:
                self._admitted(plan, entry, now)
            for entry in firsts:
                self._ends_in(entry, plan.number + entry.output_length - entry.num_rebuilt - 1)
            begins_at = max(now, self._free_at)
            self._free_at = begins_at + self._cost.seconds(self._work(plan, firsts))
            self._under_way.append(_SimulatedStep(plan, begins_at, self._free_at, firsts))
            self._note(plan, self._free_at - begins_at)
            self._num_planned = plan.number

    def _admitted(self, plan: StepPlan[Simulated], entry: Simulated, now: float) -> None:
        entry.under_way = self._under_way
        if entry.num_preempted:
            return  # it comes back
        entry.admitted_at = now
        if entry.began_at is None:
            self._tally.num_prompt_tokens += entry.request.input_length
            self._tally.num_cached_tokens += plan.cached(entry)

    def _ends_in(self, entry: Simulated, step: int) -> None:
        entry.ends_in = step
        self._last_tokens.setdefault(step, []).append(entry)

    def _pause(self, entry: Simulated) -> None:
        """It is sent away, and what the steps under way yield of it is dropped."""
        if not entry.ends_in:
            return
        self._context -= entry.context + entry.num_dropped
        self._last_tokens[entry.ends_in].remove(entry)
        entry.ends_in = 0
        for step in self._under_way:
            if entry in step.firsts:
                step.firsts.remove(entry)
                return
        self._streaming -= 1
        entry.paused_at = self._replied_at

    def _postpone(self, entry: Simulated) -> None:
        """It gets its tokens a step later, for want of a block."""
        if entry.ends_in > self._num_planned:
            self._last_tokens[entry.ends_in].remove(entry)
            self._ends_in(entry, entry.ends_in + 1)

    def _completed(self, plan: StepPlan[Simulated]) -> list[Simulated]:
        """Requests whose prompts end in this step."""
        running = self._scheduler.running
        return [entry for id in plan.chunks if not (entry := running[id]).num_prompt_left]

    def _work(self, plan: StepPlan[Simulated], firsts: Sequence[Simulated]) -> StepWork:
        """What the step computes. Keeps count of the context, which grows by one key for each sequence that decodes."""
        for entry in plan.retired:
            self._context -= entry.context
        decoding, context = len(plan.decoding), self._context
        if not plan.chunks:
            self._context += decoding
            return StepWork(0, 0.0, 0, decoding, context, decoding)
        self._context += decoding + sum(entry.context for entry in firsts)
        pairs, read = 0.0, 0
        for id, num_tokens in plan.chunks.items():
            before = self._scheduler.running[id].num_prompt_scheduled - num_tokens
            pairs += num_tokens * before + num_tokens**2 / 2
            read += before
        return StepWork(plan.prefill_tokens, pairs, read, decoding, context, decoding + len(firsts))

    def _note(self, plan: StepPlan[Simulated], seconds: float) -> None:
        tally, batch = self._tally, len(self._scheduler.running)
        kv = 1 - self._scheduler.num_free_blocks / self._limits.num_blocks
        tally.num_steps += 1
        tally.num_step_tokens += plan.prefill_tokens + len(plan.decoding)
        tally.busy += seconds
        tally.batch += batch * seconds
        tally.kv += kv * seconds
        tally.peak_batch = max(tally.peak_batch, batch)
        tally.peak_kv = max(tally.peak_kv, kv)
