"""A fleet of replicas in virtual time: what it is made of, who gets which request, and what lies between the replicas.

How long the steps of a replica take and how many tokens it can hold comes from a shape on a device's data sheet, or
from `latency` results. Three sources of events, of which the earliest is next: replies of replicas that compute, timers
(delays, transfers), and arrivals. The work per event does not grow with the fleet but for what a policy does itself.

Where prompts and answers have replicas of their own, the first gives the first token, and keys and values then take
their time to the second, which computes what no full block holds. Left out: encoder-decoders, replicas that fail, and
requests that are sent again. Times are in seconds.
"""

from __future__ import annotations

import argparse
import gc
import heapq
import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from random import Random
from typing import Any, Literal

from benchmark import options
from benchmark.cost import shapes
from benchmark.cost.devices import DEVICES, capacity, stored_as
from benchmark.cost.roofline import ServedModel
from benchmark.cost.shapes import BLOCK_SIZE
from benchmark.cost.step_times import Cost, Fitted, Fixed, Roofline, fit, read_latency
from benchmark.fleet.replica import Replica, SharedNames, Simulated, Tally
from benchmark.fleet.traffic import NEVER, Case, ClosedLoop, OpenLoop, Request, Traffic
from benchmark.result import BenchError
from router.config import RouterConfig
from router.scheduling.balancing import Balancer
from router.scheduling.limits import Limits, derive_lengths, useful_tokens
from router.scheduling.request import ValidRequest

Role = Literal["both", "prefill", "decode"]


@dataclass(frozen=True)
class Pool:
    """Replicas of one kind."""

    limits: Limits
    cost: Cost
    num_replicas: int
    role: Role = "both"
    price: float = 0.0  # of a replica, for an hour
    kv_bytes: float = 0.0  # of a prompt's token, which go from a prefill replica to one that decodes


@dataclass(frozen=True)
class Conditions:
    """What lies between clients and replicas."""

    delay_s: float = 0.0  # of every sending: between clients and a replica's steps, there and back
    link_bytes: float = 50e9  # a second, between a prefill replica and one that decodes
    link_s: float = 0.002  # of any such transfer
    affinity_tokens: int = 512  # the beginning of a prompt that `prefix-affine` goes by
    seed: int = 0


# ---------------------------------------------------------------------------------------------------- what a replica is


@dataclass(frozen=True)
class ReplicaModel:
    """What is simulated: its step times, and how it is named in the report."""

    cost: Roofline | Fitted | Fixed
    model: str
    device: str
    dtype: str
    num_shard: int
    quantize: str | None
    note: str
    kv_tokens: Callable[[RouterConfig], int]  # that the server would infer

    def check(self, cases: Sequence[Case], *, has_prefixes: bool) -> None:
        """Raise BenchError for work of which the step times say nothing. has_prefixes: beginnings are found cached."""
        if not isinstance(self.cost, Fitted) or self.cost.only is None:
            return
        if has_prefixes:
            raise BenchError(
                "--cost is of one --sequence-length, whose prompts were computed whole, and what is left of a prompt "
                "behind a cached beginning looks at more keys: give another result, too, measured with another "
                "--sequence-length, or --no-prefix-cache"
            )
        for case in cases:
            self.cost.check(case.mean.input_length, case.mean.output_length)
            if case.distribution != "fixed":
                raise BenchError(
                    f"--cost is of one --sequence-length, and lengths are {case.distribution}: give another result, "
                    "too, measured with another --sequence-length"
                )


def replica_model(args: argparse.Namespace) -> ReplicaModel:
    """What the arguments describe by either a shape or latency results. Raises BenchError."""
    if args.step_ms is not None:
        return _paced(args)
    return _fitted(args) if args.shape is None else _on_device(args)


def _paced(args: argparse.Namespace) -> ReplicaModel:
    """The null model with these flags."""
    return ReplicaModel(
        cost=Fixed((args.step_ms + args.overhead_ms) / 1000, args.token_us / 1e6),
        model="null",
        device="cpu",
        dtype="float32",
        num_shard=1,
        quantize=None,
        note=f"Steps: {args.step_ms + args.overhead_ms:g} ms, and {args.token_us:g} us for each prompt token.",
        kv_tokens=_useful_tokens,
    )


def _on_device(args: argparse.Namespace) -> ReplicaModel:
    named, device = shapes.find(args.shape), DEVICES[args.device]
    if named.shape.spec.encoder is not None:
        raise BenchError(f"{named.name} is an encoder-decoder, which the simulator does not know: take a decoder")
    quantize = stored_as(named, args.quantize)
    dtype = args.dtype or named.shape.dtype
    served = ServedModel(named.shape, dtype, quantize, args.kv_cache_dtype, ranks=args.num_shard)
    cost = Roofline.of(served, device.ceilings(served), args.efficiency, args.overhead_ms / 1000, device.sums(served))

    def kv_tokens(config: RouterConfig) -> int:
        found = capacity(
            served,
            device,
            args.num_shard,
            argparse.Namespace(
                max_batch_prefill_tokens=config.max_batch_prefill_tokens,
                max_concurrent_requests=config.max_concurrent_requests,
                max_total_tokens=config.max_total_tokens,
            ),
        )
        if found.problem:
            raise BenchError(f"{named.name} on {args.device}: {found.problem}")
        return found.max_batch_total_tokens

    return ReplicaModel(
        cost=cost,
        model=named.name,
        device=args.device,
        dtype=served.dtype,
        num_shard=args.num_shard,
        quantize=served.quantize,
        note=f"Steps: {100 * args.efficiency:g} % of what {args.num_shard} x {args.device} could do at best "
        f"(docs/benchmarking.md), and {args.overhead_ms:g} ms.",
        kv_tokens=kv_tokens,
    )


def _fitted(args: argparse.Namespace) -> ReplicaModel:
    results = [read_latency(path) for path in args.cost]
    first = results[0]
    if len(models := {result["model"] for result in results}) > 1:
        raise BenchError(f"--cost has results of {len(models)} models, {', '.join(sorted(models))}: give those of one")
    cost = fit(results, args.overhead_ms / 1000)
    return ReplicaModel(
        cost=cost,
        model=first["model"],
        device=first["device"],
        dtype=first["dtype"],
        num_shard=first["num_shard"],
        quantize=first["quantize"],
        note=_fit_note(cost, len(results)),
        kv_tokens=_useful_tokens,
    )


def _useful_tokens(config: RouterConfig) -> int:
    lengths = derive_lengths(config, 0, has_encoder=False)
    return useful_tokens(config, lengths, block_size=BLOCK_SIZE, has_encoder=False)


def _fit_note(cost: Fitted, num_results: int) -> str:
    context = (
        f"{cost.context_ms * 1e6:.3g} ns for each key that a decoding sequence looks at"
        if cost.only is None
        else f"for {cost.only[0]} tokens in and {cost.only[1]} out alone"
    )
    return (
        f"Steps: fitted to {num_results} latency result{'s' if num_results > 1 else ''}; {cost.base_ms:.2f} ms for an "
        f"empty step, shared by prompts and decoding; {context}; and {1000 * cost.overhead_s:g} ms. Memory is taken "
        "to be enough for --max-concurrent-requests of the longest length, unless --max-batch-total-tokens is given."
    )


# -------------------------------------------------------------------------------------------------------------- options


LEAST_REQUESTS = 2000  # of which a p99 leaves 20


_positive = options.number(above=0)
_not_negative = options.number(at_least=0)


def add_fleet_arguments(group: argparse._ArgumentGroup) -> None:
    """Declare the options of fleets."""
    group.add_argument("--prefix-length", type=options.positive, metavar="N", help="tokens of a shared prefix")
    group.add_argument(
        "--prefixes", type=options.positive, default=1, metavar="N", help="number of different shared prefixes (1)"
    )
    group.add_argument("--no-prefix-cache", action="store_true", help="no prefix cache: compute every prompt whole")
    group.add_argument(
        "--affinity-tokens", type=options.positive, default=512, metavar="N",
        help="tokens of the prefix that --dispatch prefix-affine compares (512)",
    )  # fmt: skip
    group.add_argument(
        "--prefill-share", type=options.number(above=0, at_most=1), metavar="S",
        help="share of the replicas that only prefill; the others decode",
    )  # fmt: skip
    group.add_argument("--kv-link-gbit", type=_positive, default=400.0, metavar="G", help="Gbit/s between both (400)")
    group.add_argument(
        "--delay-ms", type=_not_negative, default=0.0, metavar="MS",
        help="round trip between clients and steps (network, HTTP, balancer), part of every TTFT (0)",
    )  # fmt: skip
    group.add_argument("--price-per-hour", type=_not_negative, default=0.0, metavar="P", help="price of a replica (0)")
    group.add_argument(
        "--fewest-replicas", type=options.positive, metavar="MAX",
        help="find the fewest replicas, at most MAX, that keep up, meet both objectives at p99 and refuse nothing",
    )  # fmt: skip


def complete_fleet(args: argparse.Namespace) -> None:
    """Refuse what contradicts itself. Raises BenchError."""
    if args.trace is not None and args.prefix_length:
        raise BenchError("--trace brings its own prompts: leave out --prefix-length")
    if args.prefix_length and (args.input_length or [100])[0] <= args.prefix_length:
        raise BenchError(
            f"--prefix-length is {args.prefix_length} but --input-length is {(args.input_length or [100])[0]}: a "
            "prompt contains its prefix, so give a shorter one"
        )
    if args.fewest_replicas and args.ttft_objective is args.tpot_objective is None:
        raise BenchError("--fewest-replicas needs --ttft-objective, --tpot-objective or both, in ms")
    if args.fewest_replicas and args.num_requests and args.num_requests < LEAST_REQUESTS:
        raise BenchError(
            f"--num-requests is {args.num_requests}, and fewer than {LEAST_REQUESTS} do not tell whether a fleet keeps "
            "up: leave it out, so that there are as many as that takes"
        )


def conditions_of(args: argparse.Namespace) -> Conditions:
    """What lies between clients and replicas."""
    return Conditions(
        delay_s=args.delay_ms / 1000,
        link_bytes=args.kv_link_gbit * 1e9 / 8,
        affinity_tokens=args.affinity_tokens,
        seed=args.seed,
    )


# ---------------------------------------------------------------------------------------------------------------- pools


def pools_of(args: argparse.Namespace, replica: ReplicaModel, limits: Limits, count: int) -> list[Pool]:
    """One pool of so many replicas, or one that computes prompts and one that decodes. Raises BenchError."""
    kv_bytes = replica.cost.kv_bytes_per_token if isinstance(replica.cost, Roofline) else 0.0
    pool = Pool(limits, replica.cost, count, price=args.price_per_hour, kv_bytes=kv_bytes)
    if args.prefill_share is None:
        return [pool]
    prompts = max(1, round(args.prefill_share * count))
    if args.fewest_replicas:
        prompts = min(prompts, count - 1)
    if prompts >= count:
        raise BenchError(
            f"--prefill-share {args.prefill_share:g} of {count} replicas leaves none to decode: give a smaller share "
            "or more --replicas"
        )
    return [
        replace(pool, role="prefill", num_replicas=prompts),
        replace(pool, role="decode", num_replicas=count - prompts),
    ]


def least_replicas(args: argparse.Namespace) -> int:
    """Of any fleet that is tried."""
    return 1 if args.prefill_share is None else 2


# ------------------------------------------------------------------------------------------------------------- prefixes


def has_prefixes(args: argparse.Namespace, trace: Sequence[Request] | None) -> bool:
    """Whether the prefix cache has something to find, and is not turned off."""
    return not args.no_prefix_cache and bool(args.prefix_length or any(one.hashes for one in trace or ()))


class Prefixed:
    """Traffic whose prompts begin with one of several beginnings, each as likely as the others."""

    def __init__(self, traffic: OpenLoop | ClosedLoop, length: int, count: int, random: Random) -> None:
        self._length, self._count, self._random = length, count, random
        self._traffic = traffic
        self.next_at, self.ended, self.refused = traffic.next_at, traffic.ended, traffic.refused

    def take(self) -> Request:
        """The next request, with its beginning."""
        prefix = int(self._random.random() * self._count)
        return self._traffic.take()._replace(hashes=(prefix,), hash_tokens=self._length)


def prefixed(traffic: Any, args: argparse.Namespace) -> Any:
    """The traffic with the beginnings that are asked for."""
    if not args.prefix_length:
        return traffic
    return Prefixed(traffic, args.prefix_length, args.prefixes, Random(f"prefixes {args.seed}"))


# ------------------------------------------------------------------------------------------------------------ the fleet


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
