"""What a simulated fleet is made of, and what befalls it: pools of replicas, failures, restarts, retries.

Plain data, checked where it is made, and the options of `simulate` that become it. How long the steps of a replica
take and how many tokens it can hold comes from a shape on a device's data sheet, or from `latency` results.
Encoder-decoders are refused. Times are in seconds.
"""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from random import Random
from typing import Any, Literal

from benchmark import options
from benchmark.cost import shapes
from benchmark.cost.devices import DEVICES, capacity, stored_as
from benchmark.cost.roofline import ServedModel
from benchmark.cost.shapes import BLOCK_SIZE
from benchmark.cost.step_times import Cost, Fitted, Fixed, Roofline, StepWork, fit, read_latency
from benchmark.fleet.traffic import Case, ClosedLoop, OpenLoop, Request
from benchmark.result import BenchError
from router.config import RouterConfig
from router.scheduling.limits import Limits, derive_lengths, useful_tokens

Role = Literal["both", "prefill", "decode"]
ROLES: tuple[Role, ...] = ("both", "prefill", "decode")


@dataclass(frozen=True)
class Pool:
    """Replicas of one kind."""

    name: str
    limits: Limits
    cost: Cost
    num_replicas: int
    role: Role = "both"
    model: str | None = None  # whose requests it takes; None: those of any
    share: float = 1.0  # how fast a replica is, relative to those of other pools
    price: float = 0.0  # of a replica, for an hour
    kv_bytes: float = 0.0  # of a prompt's token, which go from a prefill replica to one that decodes


@dataclass(frozen=True)
class Conditions:
    """What befalls a fleet. The default: nothing does."""

    retries: int = 0  # how often a request that is refused or lost is sent again …
    backoff_s: float = 0.1  # … about so long after the first time, and twice as long after each next
    mean_life_s: float = math.inf  # of a replica, until it fails
    failures_at: tuple[float, ...] = ()  # each of one replica, any
    restarts_at: tuple[float, ...] = ()  # of all, one after the other, each emptied before
    startup_s: float = 60.0  # until a replica that is started takes requests
    slow_share: float = 0.0  # of the replicas, …
    slow_factor: float = 1.0  # … whose steps take so many times as long
    delay_s: float = 0.0  # of every sending: between clients and a replica's steps, there and back
    link_bytes: float = 50e9  # a second, between a prefill replica and one that decodes
    link_s: float = 0.002  # of any such transfer
    affinity_tokens: int = 512  # the beginning of a prompt that `prefix-affine` goes by
    seed: int = 0


@dataclass(frozen=True)
class Slowed:
    """A cost model times a factor."""

    cost: Cost
    factor: float

    def seconds(self, work: StepWork) -> float:
        """How long the shards compute."""
        return self.factor * self.cost.seconds(work)


def check_pools(pools: list[Pool]) -> None:
    """Raise ValueError for pools that cannot serve together."""
    names = [pool.name for pool in pools]
    if len(names) > len(set(names)):
        raise ValueError(f"two pools have one name, of {', '.join(names)}: give each its own")
    for model in dict.fromkeys(pool.model for pool in pools):
        roles = {pool.role for pool in pools if pool.model == model}
        called = "the pools" if model is None else f"the pools of model {model}"
        if roles not in ({"both"}, {"prefill", "decode"}):
            raise ValueError(
                f"{called} have roles {', '.join(sorted(roles))}: give them all `both`, or some `prefill` and the "
                "others `decode`"
            )


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
        "to be enough for max_concurrent_requests of the longest length, unless max_batch_total_tokens is given."
    )


# -------------------------------------------------------------------------------------------------------------- options


# Of a pool in --pools, beside those of OWN: options of the command that a pool may set for itself.
OF_COST = ("shape", "device", "num_shard", "dtype", "quantize", "kv_cache_dtype", "efficiency", "overhead_ms")
OWN = ("name", "replicas", "role", "model", "price_per_hour")
LEAST_REQUESTS = 2000  # of which a p99 leaves 20


TYPICAL = StepWork(prompt_tokens=256, prompt_pairs=256**2 / 2, decoding=32, context=32 * 512, sampled=32)
LimitsOf = Callable[[ReplicaModel], Limits]

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
        "--pools", type=Path, metavar="FILE",
        help=f"JSON list of pools in place of --replicas: {', '.join(OWN)}, and {', '.join(OF_COST)} where they differ",
    )  # fmt: skip
    group.add_argument(
        "--prefill-share", type=options.number(above=0, at_most=1), metavar="S",
        help="share of the replicas that only prefill; the others decode",
    )  # fmt: skip
    group.add_argument("--kv-link-gbit", type=_positive, default=400.0, metavar="G", help="Gbit/s between both (400)")
    group.add_argument("--startup-s", type=_not_negative, default=60.0, metavar="S", help="start-up time (60)")
    group.add_argument(
        "--delay-ms", type=_not_negative, default=0.0, metavar="MS",
        help="round trip between clients and steps (network, HTTP, balancer), part of every TTFT (0)",
    )  # fmt: skip
    group.add_argument("--price-per-hour", type=_not_negative, default=0.0, metavar="P", help="price of a replica (0)")
    group.add_argument(
        "--fewest-replicas", type=options.positive, metavar="MAX",
        help="find the fewest replicas, at most MAX, that keep up, meet both objectives at p99 and refuse nothing",
    )  # fmt: skip
    _add_faults(group)


def _add_faults(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "--retries",
        type=options.not_negative,
        default=0,
        metavar="N",
        help="retries of a refused or failed request (0)",
    )
    group.add_argument(
        "--backoff-ms",
        type=_positive,
        default=100.0,
        metavar="MS",
        help="first wait before a retry, then doubled (100)",
    )
    group.add_argument("--mean-life-s", type=_positive, metavar="S", help="mean time until a replica fails (never)")
    group.add_argument(
        "--fail-at",
        type=_not_negative,
        nargs="+",
        default=[],
        metavar="S",
        help="times at which a random replica fails",
    )
    group.add_argument(
        "--rolling-restart-at",
        type=_not_negative,
        nargs="+",
        default=[],
        metavar="S",
        help="times of rolling restarts of all replicas",
    )
    group.add_argument(
        "--slow", metavar="SHARE:FACTOR", help="share of slow replicas, and the factor of their step times"
    )


def complete_fleet(args: argparse.Namespace) -> None:
    """Refuse what contradicts itself. Raises BenchError."""
    if args.trace is not None and args.prefix_length:
        raise BenchError("--trace brings its own prompts: leave out --prefix-length")
    if args.prefix_length and (args.input_length or [100])[0] <= args.prefix_length:
        raise BenchError(
            f"--prefix-length is {args.prefix_length} but --input-length is {(args.input_length or [100])[0]}: a "
            "prompt contains its prefix, so give a shorter one"
        )
    if args.fewest_replicas and args.pools:
        raise BenchError("--fewest-replicas looks for one number of replicas: leave out --pools")
    if args.fewest_replicas and args.ttft_objective is args.tpot_objective is None:
        raise BenchError("--fewest-replicas needs --ttft-objective, --tpot-objective or both, in ms")
    if args.fewest_replicas and args.num_requests and args.num_requests < LEAST_REQUESTS:
        raise BenchError(
            f"--num-requests is {args.num_requests}, and fewer than {LEAST_REQUESTS} do not tell whether a fleet keeps "
            "up: leave it out, so that there are as many as that takes"
        )
    if args.pools and args.prefill_share:
        raise BenchError("--pools has a `role` for each pool: leave out --prefill-share")
    _slow(args)


def _slow(args: argparse.Namespace) -> tuple[float, float]:
    """Which share of the replicas is slow, and how much. Raises BenchError."""
    try:
        share, factor = (float(part) for part in (args.slow or "0:1").split(":"))
    except ValueError:
        share = factor = math.nan
    if not (0 <= share <= 1 and 0 < factor < math.inf):
        raise BenchError(f"--slow is {args.slow}: give SHARE:FACTOR")
    return share, factor


def conditions_of(args: argparse.Namespace) -> Conditions:
    """What befalls the fleet."""
    slow_share, slow_factor = _slow(args)
    return Conditions(
        retries=args.retries,
        backoff_s=args.backoff_ms / 1000,
        mean_life_s=args.mean_life_s or math.inf,
        failures_at=tuple(args.fail_at),
        restarts_at=tuple(args.rolling_restart_at),
        startup_s=args.startup_s,
        slow_share=slow_share,
        slow_factor=slow_factor,
        delay_s=args.delay_ms / 1000,
        link_bytes=args.kv_link_gbit * 1e9 / 8,
        affinity_tokens=args.affinity_tokens,
        seed=args.seed,
    )


# ---------------------------------------------------------------------------------------------------------------- pools


def pools_of(
    args: argparse.Namespace,
    replica: ReplicaModel,
    values: Mapping[str, Any],
    limits_of: LimitsOf,
    trace: Sequence[Request] | None,
) -> list[Pool]:
    """The pools that the options ask for. Raises BenchError, also for a model in the trace that no pool has."""
    if args.pools is not None:
        found = _read(args, replica, limits_of)
    else:
        found = _split(args, _pool("all", replica, replica, limits_of, values["replicas"], args.price_per_hour))
    try:
        check_pools(found)
    except ValueError as error:
        raise BenchError(f"{args.pools}: {error}") from None
    models = {pool.model for pool in found}
    for asked in {request.model for request in trace or ()} | ({None} if trace is None else set()):
        if asked not in models and None not in models:
            named = "requests that name no model" if asked is None else f"model {asked}"
            raise BenchError(f"no pool takes {named}: the pools' models are {', '.join(sorted(map(str, models)))}")
    return found


def _pool(
    name: str,
    replica: ReplicaModel,
    standard: ReplicaModel,
    limits_of: LimitsOf,
    count: int,
    price: float,
    role: Any = "both",
    model: str | None = None,
) -> Pool:
    return Pool(
        name=name,
        limits=limits_of(replica),
        cost=replica.cost,
        num_replicas=count,
        role=role,
        model=model,
        share=standard.cost.seconds(TYPICAL) / replica.cost.seconds(TYPICAL),
        price=price,
        kv_bytes=replica.cost.kv_bytes_per_token if isinstance(replica.cost, Roofline) else 0.0,
    )


def least_replicas(args: argparse.Namespace) -> int:
    """Of any fleet that is tried."""
    return 1 if args.prefill_share is None else 2


def _split(args: argparse.Namespace, pool: Pool) -> list[Pool]:
    """One pool as it is, or as one that computes prompts and one that decodes, by the share of this many replicas."""
    if args.prefill_share is None:
        return [pool]
    count = pool.num_replicas
    prompts = max(1, round(args.prefill_share * count))
    if args.fewest_replicas:
        prompts = min(prompts, count - 1)
    if prompts >= count:
        raise BenchError(
            f"--prefill-share {args.prefill_share:g} of {count} replicas leaves none to decode: give a smaller share "
            "or more --replicas"
        )
    return [
        replace(pool, name="prefill", role="prefill", num_replicas=prompts),
        replace(pool, name="decode", role="decode", num_replicas=count - prompts),
    ]


def _read(args: argparse.Namespace, standard: ReplicaModel, limits_of: LimitsOf) -> list[Pool]:
    try:
        records = json.loads(args.pools.read_text())
    except (OSError, ValueError) as error:
        raise BenchError(f"cannot read --pools {args.pools}: {error}") from None
    if not isinstance(records, list) or not records or not all(isinstance(one, dict) for one in records):
        raise BenchError(f'{args.pools}: expected a list such as [{{"name": "h200", "replicas": 4, "device": "h200"}}]')
    return [
        _of_record(args, record, f"{args.pools}, pool {n}", standard, limits_of) for n, record in enumerate(records, 1)
    ]


def _of_record(
    args: argparse.Namespace, record: Mapping[str, Any], where: str, standard: ReplicaModel, limits_of: LimitsOf
) -> Pool:
    if unknown := sorted(set(record) - {*OF_COST, *OWN}):
        raise BenchError(f"{where}: {', '.join(unknown)} is not known; it may have {', '.join((*OWN, *OF_COST))}")
    count, price = record.get("replicas", 1), record.get("price_per_hour", args.price_per_hour)
    checks = {
        "replicas": type(count) is int and count >= 1,
        "price_per_hour": isinstance(price, int | float) and 0 <= price < math.inf,
        "role": record.get("role", "both") in ROLES,
        "device": record.get("device", args.device) in (None, *DEVICES),
    }
    allowed = {"replicas": "a whole number of at least 1", "price_per_hour": "a number of at least 0"}
    allowed |= {"role": f"one of {', '.join(ROLES)}", "device": f"one of {', '.join(DEVICES)}"}
    if wrong := [name for name, is_right in checks.items() if not is_right]:
        raise BenchError(f"{where}: {wrong[0]} is {record[wrong[0]]} but must be {allowed[wrong[0]]}")
    differing = {name: record[name] for name in OF_COST if name in record}
    if differing and args.shape is None and "shape" not in differing:
        raise BenchError(
            f"{where}: {', '.join(differing)} needs a shape: give one there, or --shape in place of --cost"
        )
    own = argparse.Namespace(**vars(args) | differing | ({"step_ms": None, "cost": None} if differing else {}))
    replica = replica_model(own) if differing else standard
    name = str(record.get("name", where))
    return _pool(name, replica, standard, limits_of, count, price, record.get("role", "both"), record.get("model"))


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
