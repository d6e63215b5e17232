"""What `simulate` is asked about a fleet: the options, and the pools, conditions and prefixes that they describe."""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from random import Random
from typing import Any

from benchmark import options
from benchmark.cost import Roofline, StepWork
from benchmark.devices import DEVICES
from benchmark.fleets.conditions import ROLES, Conditions, Pool, Scaling, check_pools
from benchmark.fleets.steady import LEAST_REQUESTS
from benchmark.report import BenchError
from benchmark.subject import Subject, subject_of
from benchmark.traffic import ClosedLoop, OpenLoop, Request
from router.limits import Limits

# Of a pool in --pools, beside those of OWN: options of the command that a pool may set for itself.
OF_COST = ("shape", "device", "num_shard", "dtype", "quantize", "kv_cache_dtype", "efficiency", "overhead_ms")
OWN = ("name", "replicas", "role", "model", "price_per_hour", "autoscale")
TYPICAL = StepWork(prompt_tokens=256, prompt_pairs=256**2 / 2, decoding=32, context=32 * 512, sampled=32)
LimitsOf = Callable[[Subject], Limits]

_positive = options.number(above=0)
_not_negative = options.number(at_least=0)


def add_arguments(group: argparse._ArgumentGroup) -> None:
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
    group.add_argument(
        "--kv-link-gbit",
        type=_positive,
        default=400.0,
        metavar="G",
        help="Gbit/s between prefill and decode replicas (400)",
    )
    group.add_argument(
        "--autoscale",
        metavar="MIN:MAX:TARGET",
        help="limits of the number of replicas, and target of outstanding requests per replica",
    )
    group.add_argument(
        "--startup-s", type=_not_negative, default=60.0, metavar="S", help="start-up time of a replica (60)"
    )
    group.add_argument(
        "--calm-s",
        type=_not_negative,
        default=300.0,
        metavar="S",
        help="time below the target before a replica is removed (300)",
    )
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


def complete(args: argparse.Namespace) -> None:
    """Refuse what contradicts itself. Raises BenchError."""
    if args.trace is not None and args.prefix_length:
        raise BenchError("--trace brings its own prompts: leave out --prefix-length")
    if args.prefix_length and (args.input_length or [100])[0] <= args.prefix_length:
        raise BenchError(
            f"--prefix-length is {args.prefix_length} but --input-length is {(args.input_length or [100])[0]}: a "
            "prompt contains its prefix, so give a shorter one"
        )
    if args.fewest_replicas and (args.pools or args.autoscale):
        raise BenchError("--fewest-replicas looks for one number of replicas: leave out --pools and --autoscale")
    if args.fewest_replicas and args.ttft_objective is args.tpot_objective is None:
        raise BenchError("--fewest-replicas needs --ttft-objective, --tpot-objective or both, in ms")
    if args.fewest_replicas and args.num_requests and args.num_requests < LEAST_REQUESTS:
        raise BenchError(
            f"--num-requests is {args.num_requests}, and fewer than {LEAST_REQUESTS} do not tell whether a fleet keeps "
            "up: leave it out, so that there are as many as that takes"
        )
    if args.pools and args.prefill_share:
        raise BenchError("--pools has a `role` for each pool: leave out --prefill-share")
    if args.autoscale and args.prefill_share:
        raise BenchError("--autoscale is for one pool: give --pools with `autoscale` and `role` in place of both")
    for name, pattern, check in (("autoscale", "MIN:MAX:TARGET", _scaling), ("slow", "SHARE:FACTOR", _slow)):
        if (text := getattr(args, name)) is not None:
            _parsed(check, args, text, f"--{name}", pattern)


def _parsed(
    read: Callable[[argparse.Namespace, str], Any], args: argparse.Namespace, text: str, what: str, form: str
) -> Any:
    try:
        return read(args, text)
    except ValueError as error:
        reason = str(error) if str(error).startswith("autoscaling") else f"give {form}"
        raise BenchError(f"{what} is {text}: {reason}") from None


def _scaling(args: argparse.Namespace, text: str) -> Scaling:
    least, most, target = text.split(":")
    return Scaling(int(least), int(most), float(target), calm_s=args.calm_s)


def _slow(args: argparse.Namespace, text: str) -> tuple[float, float]:
    share, factor = (float(part) for part in text.split(":"))
    if not (0 <= share <= 1 and 0 < factor < math.inf):
        raise ValueError
    return share, factor


def conditions(args: argparse.Namespace) -> Conditions:
    """What befalls the fleet."""
    slow_share, slow_factor = _slow(args, args.slow or "0:1")
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


# ------------------------------------------------------------------------------------------------------------ pools


def pools(
    args: argparse.Namespace,
    subject: Subject,
    values: Mapping[str, Any],
    limits_of: LimitsOf,
    trace: Sequence[Request] | None,
) -> list[Pool]:
    """The pools that the options ask for. Raises BenchError, also for a model in the trace that no pool has."""
    if args.pools is not None:
        found = _read(args, subject, limits_of)
    else:
        scaling = None if args.autoscale is None else _scaling(args, args.autoscale)
        found = _split(
            args, _pool("all", subject, subject, limits_of, values["replicas"], args.price_per_hour, scaling)
        )
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
    subject: Subject,
    standard: Subject,
    limits_of: LimitsOf,
    count: int,
    price: float,
    scaling: Scaling | None,
    role: Any = "both",
    model: str | None = None,
) -> Pool:
    return Pool(
        name=name,
        limits=limits_of(subject),
        cost=subject.cost,
        num_replicas=count,
        role=role,
        model=model,
        share=standard.cost.seconds(TYPICAL) / subject.cost.seconds(TYPICAL),
        price=price,
        kv_bytes=subject.cost.kv_bytes_per_token if isinstance(subject.cost, Roofline) else 0.0,
        scaling=scaling,
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


def _read(args: argparse.Namespace, standard: Subject, limits_of: LimitsOf) -> list[Pool]:
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
    args: argparse.Namespace, record: Mapping[str, Any], where: str, standard: Subject, limits_of: LimitsOf
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
    subject = subject_of(own) if differing else standard
    text = record.get("autoscale")
    scaling = None if text is None else _parsed(_scaling, args, str(text), f"{where}: autoscale", "MIN:MAX:TARGET")
    name = str(record.get("name", where))
    return _pool(
        name, subject, standard, limits_of, count, price, scaling, record.get("role", "both"), record.get("model")
    )


# --------------------------------------------------------------------------------------------------------- prefixes


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
