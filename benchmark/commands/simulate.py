"""`lockstep-bench simulate`: what a fleet would do under a load, in virtual time, on hardware that one may not have.

Requests (`fleet/traffic.py`) go through the router's own scheduler (`fleet/replica.py`) onto shards whose steps take as
long as a cost model says (`cost/step_times.py`); what comes of it is in `fleet/prediction.py`. Loads, lengths, figures
and their names are those of `serving`, so that a prediction can be held against a measurement (`--compare`); limits are
the server's, with its defaults, and any of them can be swept. Nothing is loaded, started or measured, and torch is not
imported. docs/simulating.md says what a prediction is worth.
"""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, fields
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

from benchmark import options
from benchmark.cost import shapes
from benchmark.cost.devices import DEVICES
from benchmark.cost.step_times import EFFICIENCY
from benchmark.fleet import traffic
from benchmark.fleet.capacity import REPLICAS, REQUESTS_PER_REPLICA, Run, Setting
from benchmark.fleet.fleet import (
    Pool,
    ReplicaModel,
    add_fleet_arguments,
    complete_fleet,
    has_prefixes,
    least_replicas,
    pools_of,
    replica_model,
)
from benchmark.fleet.prediction import comparison, markdown, read_serving, remarks, sentence
from benchmark.fleet.traffic import Case, Request
from benchmark.report import pictures
from benchmark.report.publishing import published
from benchmark.result import PERCENTILE_RULE, BenchError, Result, RunContext, arguments_of, prepare_output
from benchmark.terminal import Stage, shown
from router.config import RouterConfig
from router.scheduling.balancing import ALIASES, POLICIES
from router.scheduling.limits import Limits, Room, resolve
from router.scheduling.queue import blocks_for
from server.quantisation import sizes

# The router's settings that decide who runs when; their defaults, bounds and help are `RouterConfig`'s.
LIMITS = (
    "max_batch_total_tokens",
    "max_batch_prefill_tokens",
    "prefill_chunk",
    "max_inter_token_ms",
    "max_batch_size",
    "kv_admission",
    "waiting_served_ratio",
    "max_waiting_tokens",
    "max_concurrent_requests",
)
SETTINGS = {field.name: field for field in fields(RouterConfig)}
LENGTH = 100  # tokens of a prompt and of an answer
CONCURRENCY = 16


# --------------------------------------------------------------------------------------------------------- command line


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options of this command."""
    _add_cost_arguments(parser.add_argument_group("shards"))
    _add_work_arguments(parser.add_argument_group("work"))
    _add_server_arguments(parser.add_argument_group("servers (limits: as the launcher's, of each replica)"))
    add_fleet_arguments(parser.add_argument_group("fleet"))
    parser.add_argument(
        "--sweep", type=_sweep, action="append", default=[], metavar="NAME=A,B,…",
        help=f"a row for each value, of each combination if repeated: {', '.join((REPLICAS, *LIMITS))}",
    )  # fmt: skip
    parser.add_argument(
        "--compare", type=Path, metavar="FILE",
        help="a serving run's result.json: simulate the same work and print predicted / measured",
    )  # fmt: skip
    parser.add_argument("--output", type=Path, metavar="DIR", help="folder for result.md and result.json")


def _add_cost_arguments(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "--cost", type=Path, nargs="+", metavar="FILE",
        help="result.json of latency runs of one model, for measured step times; two lengths to simulate others",
    )  # fmt: skip
    group.add_argument(
        "--step-ms", type=_positive, metavar="MS", help="instead: a fixed step time, like the null model"
    )
    group.add_argument(
        "--token-us", type=_not_negative, default=0.0, metavar="US", help="with --step-ms: time per prompt token (0)"
    )
    group.add_argument("--shape", metavar="SHAPE", help="instead: a config.json, a model folder, or a shape by name")
    group.add_argument("--device", choices=list(DEVICES), help="device whose data sheet is used, with --shape")
    group.add_argument("--num-shard", type=options.positive, metavar="N", help="GPUs of a replica, with --shape (1)")
    group.add_argument("--dtype", choices=list(shapes.DTYPE_BYTES), help="with --shape (default: the published one)")
    group.add_argument("--quantize", choices=list(sizes.IN_FLIGHT), help="with --shape: format of the layers")
    group.add_argument("--kv-cache-dtype", choices=shapes.KV_CACHE_DTYPES, help="with --shape (default: the model's)")
    group.add_argument(
        "--efficiency", type=_share, metavar="E",
        help=f"share of the data sheet that steps reach, with --shape ({EFFICIENCY:g}, an assumption)",
    )  # fmt: skip
    group.add_argument("--overhead-ms", type=_not_negative, default=0.0, metavar="MS", help="added to every step (0)")


def _add_work_arguments(group: argparse._ArgumentGroup) -> None:
    repeatable: dict[str, Any] = {"nargs": "+", "action": "extend"}
    group.add_argument("--input-length", type=options.positive, metavar="N", help=f"prompt ({LENGTH})", **repeatable)
    group.add_argument("--output-length", type=options.positive, metavar="N", help=f"answer ({LENGTH})", **repeatable)
    group.add_argument(
        "--length-distribution", metavar="KIND",
        help="fixed, uniform, lognormal, or a JSONL file of lengths, as in serving (fixed)",
    )  # fmt: skip
    group.add_argument(
        "--max-new-tokens", type=options.positive, metavar="N",
        help="tokens that requests ask for and reserve (default: the length of the answer)",
    )  # fmt: skip
    group.add_argument(
        "--concurrency", type=options.positive, metavar="N", help=f"closed loops ({CONCURRENCY})", **repeatable
    )
    group.add_argument(
        "--request-rate",
        type=_positive,
        metavar="R",
        help="requests per second of an open loop, over all replicas",
        **repeatable,
    )
    group.add_argument(
        "--burstiness", type=_positive, default=1.0, metavar="CV",
        help="standard deviation / mean of the gaps between requests, gamma distributed; 1 is Poisson (1)",
    )  # fmt: skip
    group.add_argument(
        "--trace", type=Path, metavar="FILE",
        help='JSONL of {"arrival_s": …, "input_length": …, "output_length": …}, and "max_new_tokens" where it differs; '
        "or a trace as `serving` reads them",
    )  # fmt: skip
    group.add_argument(
        "--num-requests",
        type=options.positive,
        metavar="N",
        help=f"requests per row ({REQUESTS_PER_REPLICA} x replicas)",
    )
    group.add_argument("--seed", type=int, default=0, help="random seed of lengths, arrivals and dispatch (0)")
    group.add_argument("--ttft-objective", "--slo-ttft-ms", type=_positive, metavar="MS", help="objective for goodput")
    group.add_argument("--tpot-objective", "--slo-tpot-ms", type=_positive, metavar="MS", help="objective for goodput")


def _add_server_arguments(group: argparse._ArgumentGroup) -> None:
    group.add_argument("--replicas", type=options.positive, default=1, metavar="N", help="servers (1)")
    group.add_argument(
        "--dispatch", choices=[*POLICIES, *ALIASES], default=next(iter(POLICIES)),
        help="replica of a request: of two at random the one with fewer outstanding tokens (default), round robin, "
        "the one with the fewest, or the one that has the prefix",
    )  # fmt: skip
    for name in LIMITS:
        setting = SETTINGS[name]
        default = setting.metadata.get("default", setting.default)
        group.add_argument(
            options.option(name), type=_limit(name), metavar="N",
            help=f"{setting.metadata['help'].replace('%', '%%')} ({default})",
        )  # fmt: skip


_positive = options.number(above=0)
_not_negative = options.number(at_least=0)
_share = options.number(above=0, at_most=1)


def _limit(name: str) -> Callable[[str], float | str]:
    """An argparse type: a value of this setting."""
    if choices := SETTINGS[name].metadata.get("choices"):
        return partial(_one_of, name, choices)
    least, is_ratio = SETTINGS[name].metadata["min"], isinstance(SETTINGS[name].default, float)

    def limit(text: str) -> float | str:
        if text in SETTINGS[name].metadata.get("words", ()):
            return text
        value = float(text) if is_ratio else int(text)
        if not least <= value < math.inf:
            raise argparse.ArgumentTypeError(f"{name} is {text} but must be at least {least:g}")
        return value

    return limit


def _one_of(name: str, choices: Sequence[str], text: str) -> str:
    if text not in choices:
        raise argparse.ArgumentTypeError(f"{name} is {text} but must be one of {', '.join(choices)}")
    return text


def _sweep(text: str) -> tuple[str, list[float | str]]:
    """An argparse type: `NAME=A,B,…` as the name and its values."""
    flag, equals, values = text.partition("=")
    name = flag.removeprefix("--").replace("-", "_")
    known = (REPLICAS, *LIMITS)
    if name not in known or not equals:
        raise argparse.ArgumentTypeError(f"{text} is not NAME=A,B,… with one of {', '.join(known)}")
    parse: Callable[[str], float | str] = options.positive if name == REPLICAS else _limit(name)
    try:
        return name, [parse(value) for value in values.split(",")]
    except ValueError:
        raise argparse.ArgumentTypeError(f"{values} is not a list of numbers such as 1,2,4") from None


# ------------------------------------------------------------------------------------------------------------------ run


def run(args: argparse.Namespace) -> int:
    """Simulate every load under every setting and print the tables; 0. Raises BenchError."""
    _complete(args)
    prepare_output(args.output)
    measured = None if args.compare is None else read_serving(args.compare)
    trace = traffic.read_trace(args.trace) if args.trace else None
    told = _settle_limits(args, (measured or {}).get("server") or {})
    replica = replica_model(args)
    settings = list(_settings(args))
    cases = traffic.cases(args, trace) if measured is None else traffic.cases_of(measured)
    is_prefixed = has_prefixes(args, trace)
    replica.check(cases, has_prefixes=is_prefixed)

    def pools(values: Mapping[str, Any], count: int) -> Sequence[Pool]:
        limits = _limits(args, values, cases, replica, trace, has_prefixes=is_prefixed)
        return pools_of(args, replica, limits, count)

    plans = [(Setting(values, partial(pools, values)), Run(args, case, trace)) for values in settings for case in cases]
    result = Result(_context(args, replica, cases), notes=[*_notes(args, replica), *_told(told), *remarks(measured)])
    result.extra = {"cost": asdict(replica.cost)}
    swept = [name for name, _ in args.sweep] + [REPLICAS] * bool(args.fewest_replicas)
    render, draw = partial(markdown, swept=swept), None if args.sweep else pictures.draw_load
    stages = [Stage(str(run.case.load or "a trace"), _num_requests(setting, run)) for setting, run in plans]
    with published(result, render, args.output, draw) as keep, shown(f"simulating {replica.model}", stages) as view:
        for setting, run in view.each(plans):
            result.rows.append(run.row(setting, view))
            if measured is not None:
                result.extra["comparison"] = comparison(measured["rows"], result.rows)
            keep()
            print(sentence(result.rows[-1]), file=sys.stderr)
    return 0


def _complete(args: argparse.Namespace) -> None:
    """Fill in defaults and refuse what contradicts itself. Raises BenchError."""
    work = ("input_length", "output_length", "length_distribution", "concurrency", "request_rate", "num_requests")
    given = options.options_given(args, work)
    for flag, source in (("--trace", args.trace), ("--compare", args.compare)):
        if source is not None and given:
            raise BenchError(f"{flag} brings its own requests: leave out {', '.join(given)}")
    if args.trace is not None and args.compare is not None:
        raise BenchError("--trace and --compare both bring their own requests: leave out one of them")
    if args.compare is not None and args.sweep:
        raise BenchError("--compare is about one server: leave out --sweep and give the limits that it had")
    if args.fewest_replicas and any(name == REPLICAS for name, _ in args.sweep):
        raise BenchError("--fewest-replicas looks for one number of replicas: leave out --sweep replicas")
    if len(names := [name for name, _ in args.sweep]) > len(set(names)):
        raise BenchError("--sweep names a setting twice: give all of its values in one list")
    _complete_cost(args)
    args.input_length = options.distinct(args.input_length or [LENGTH])
    args.output_length = options.distinct(args.output_length or [LENGTH])
    args.length_distribution = args.length_distribution or "fixed"
    args.request_rate = options.distinct(args.request_rate or ())
    args.concurrency = options.distinct(args.concurrency or (() if args.request_rate else (CONCURRENCY,)))


def _complete_cost(args: argparse.Namespace) -> None:
    """Require measured files or a data sheet, but not both. Raises BenchError."""
    of_shape = ("device", "num_shard", "dtype", "quantize", "kv_cache_dtype", "efficiency")
    if sum(source is not None for source in (args.cost, args.shape, args.step_ms)) != 1:
        raise BenchError("give either --cost with latency results, or --shape and --device, or --step-ms")
    if args.cost is not None and (given := options.options_given(args, of_shape)):
        names = ", ".join(given)
        raise BenchError(f"--cost says how long steps take: leave out {names}, which belong to --shape")
    if args.shape is not None and args.device is None:
        raise BenchError(f"--shape needs --device, one of {', '.join(DEVICES)}; or give --cost")
    if args.step_ms is not None and (given := options.options_given(args, of_shape)):
        raise BenchError(f"--step-ms says how long steps take: leave out {', '.join(given)}, which belong to --shape")
    if args.step_ms is None and args.token_us:
        raise BenchError(f"--token-us is {args.token_us:g} without --step-ms, to which it belongs: give that too")
    complete_fleet(args)
    args.num_shard = args.num_shard or 1
    args.efficiency = args.efficiency or EFFICIENCY


def _settle_limits(args: argparse.Namespace, server: Mapping[str, Any]) -> dict[str, Any]:
    """Where the user gave no limit, take what the measured server said, or else the default; what the server said."""
    open_ones = [name for name in LIMITS if getattr(args, name) is None]
    told = {name: server[name] for name in open_ones if server.get(name) is not None}
    vars(args).update({name: SETTINGS[name].default for name in open_ones} | told)
    return told


def _told(limits: Mapping[str, Any]) -> Iterator[str]:
    if limits:
        values = ", ".join(f"{name} {value}" for name, value in limits.items())
        yield f"Limits of the measured server, as it told serving: {values}."


def _settings(args: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Every combination of the swept values, with the other settings as given."""
    given = {name: getattr(args, name) for name in (REPLICAS, *LIMITS)}
    if args.fewest_replicas:
        given[REPLICAS] = least_replicas(args)
    for values in product(*(values for _, values in args.sweep)):
        yield given | {name: value for (name, _), value in zip(args.sweep, values, strict=True)}


def _limits(
    args: argparse.Namespace,
    values: Mapping[str, Any],
    cases: Sequence[Case],
    replica: ReplicaModel,
    trace: Sequence[Request] | None,
    *,
    has_prefixes: bool,
) -> Limits:
    """What the server would settle on for these settings, set up for the longest request. Raises BenchError."""
    longest_input, longest_output = traffic.longest(cases, trace)
    try:
        config = RouterConfig(
            model_id=replica.model,
            model_path="",
            shard_sockets=(),
            max_input_length=longest_input,
            max_total_tokens=longest_input + max(longest_output, args.max_new_tokens or 0),
            **{name: values[name] for name in LIMITS},
        )
        tokens = config.max_batch_total_tokens or replica.kv_tokens(config)
        return resolve(
            config,
            Room(tokens, tokens),
            max_positions=0,
            has_encoder=False,
            vocab_size=1,
            max_batch_total_tokens=tokens,
            block_size=shapes.BLOCK_SIZE,
            num_blocks=blocks_for(tokens, shapes.BLOCK_SIZE),
            takes_drafts=False,
            shares_prefixes=has_prefixes,
            pads_chunks=replica.device != "cpu",
        )
    except ValueError as error:
        raise BenchError(str(error)) from None


def _num_requests(setting: Setting, run: Run) -> int:
    """How long a row takes, in requests."""
    return run.num_requests(sum(pool.num_replicas for pool in setting.pools(setting.values[REPLICAS])))


# --------------------------------------------------------------------------------------------------------------- report


def _context(args: argparse.Namespace, replica: ReplicaModel, cases: Sequence[Case]) -> RunContext:
    arguments = arguments_of(args) | {"cost": [str(path) for path in args.cost or ()]}
    return RunContext.gather(
        "simulate",
        model=replica.model,
        device=replica.device,
        dtype=replica.dtype,
        num_shard=replica.num_shard,
        threads=0,
        quantize=replica.quantize,
        arguments=arguments,
        work={"model": replica.model, "seed": args.seed, "cases": [asdict(case) for case in cases]},
    )


def _notes(args: argparse.Namespace, replica: ReplicaModel) -> list[str]:
    return [
        f"Simulated, in virtual time: {replica.model}, {replica.dtype}. docs/simulating.md says what is left out.",
        replica.note,
        f"Limits are the server's defaults unless given or swept. Requests go to replicas by {args.dispatch}.",
        "Times count from a request's arrival; throughput until the last request has ended, and, without the end in "
        "which replicas run empty, while requests came. A refused stream sends again after a round trip. Goodput: "
        "requests that keep the objectives; refused ones do not. Busy: share of the time that replicas computed; batch "
        "size and KV cache (blocks reserved): means over that time.",
        PERCENTILE_RULE,
    ]
