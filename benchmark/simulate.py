"""`lockstep-bench simulate`: what a fleet would do under a load, in virtual time, on hardware that one may not have.

Requests go through the router's own scheduler (`fleet.py`) onto shards whose steps take as long as a cost model says
(`cost.py`). Loads, lengths, figures and their names are those of `serving`, so that a prediction can be held against a
measurement (`--compare`); limits are the server's, with its defaults, and any of them can be swept. Nothing is loaded,
started or measured, and torch is not imported. docs/simulation.md says what a prediction is worth.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from functools import partial
from itertools import product
from pathlib import Path
from random import Random
from typing import Any

import numpy as np

from benchmark import fleet, launch, plan, shapes, workload
from benchmark.cost import Cost, Fitted, Roofline, fit, read_latency
from benchmark.fleet import ClosedLoop, OpenLoop, Request, Tally, Traffic
from benchmark.outcomes import PERCENTILES, Load
from benchmark.report import (
    PERCENTILE_RULE,
    BenchError,
    Result,
    RunContext,
    Summary,
    arguments_of,
    percentile,
    prepare_output,
    published,
    table,
)
from benchmark.roofline import Work
from benchmark.workload import Lengths
from router.config import RouterConfig
from router.limits import Limits, derive_lengths, resolve, useful_tokens
from router.queue import blocks_for

# The router's settings that decide who runs when; their defaults, bounds and help are `RouterConfig`'s.
LIMITS = (
    "max_batch_total_tokens",
    "max_batch_prefill_tokens",
    "prefill_chunk",
    "max_batch_size",
    "waiting_served_ratio",
    "max_waiting_tokens",
    "max_concurrent_requests",
)
SETTINGS = {field.name: field for field in fields(RouterConfig)}
REPLICAS = "replicas"
LENGTH = 100  # tokens of a prompt and of an answer
CONCURRENCY = 16
REQUESTS_PER_REPLICA = 1000  # so that the beginning and the end of a run, which are unlike the rest, weigh little
EFFICIENCY = 0.6  # of a data sheet: what good kernels reach; `latency` on the device says it better
BLOCK_SIZE = plan.BLOCK_SIZE
TARGETS = {"requests_per_second": 0.10, "ttft_ms": 0.20}  # how far a prediction may be off to count as right


@dataclass(frozen=True)
class Case:
    """One load with its lengths: what a row is about, whatever the settings."""

    mean: Lengths
    distribution: str  # of workload.DISTRIBUTIONS, a file of lengths, or "trace"
    load: Load | None  # None: a trace, which has its own times
    num_requests: int


@dataclass(frozen=True)
class Subject:
    """What is simulated: its step times, and how it is named in the report."""

    cost: Roofline | Fitted
    model: str
    device: str
    dtype: str
    num_shard: int
    quantize: str | None
    note: str
    kv_tokens: Callable[[RouterConfig], int]  # that the server would infer


# --------------------------------------------------------------------------------------------------- command line


def add_arguments(parser: argparse.ArgumentParser) -> None:
    _add_cost_arguments(parser.add_argument_group("shards"))
    _add_work_arguments(parser.add_argument_group("work"))
    _add_server_arguments(parser.add_argument_group("servers (limits: as the launcher's, of each replica)"))
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
        help="result.json of latency runs of one model: step times as measured; several --sequence-length are better",
    )  # fmt: skip
    group.add_argument("--shape", metavar="SHAPE", help="instead: a config.json, a model folder, or a shape by name")
    group.add_argument("--device", choices=list(plan.DEVICES), help="its data sheet, with --shape")
    group.add_argument("--num-shard", type=launch.positive, metavar="N", help="GPUs of a replica, with --shape (1)")
    group.add_argument("--dtype", choices=list(shapes.DTYPE_BYTES), help="with --shape (default: the published one)")
    group.add_argument("--quantize", choices=list(shapes.QUANTIZED_BYTES), help="with --shape: format of the layers")
    group.add_argument(
        "--efficiency", type=_share, metavar="E",
        help=f"share of the data sheet that steps reach, with --shape ({EFFICIENCY:g})",
    )  # fmt: skip
    group.add_argument(
        "--overhead-ms", type=_not_negative, default=0.0, metavar="MS", help="that every step takes besides (0)"
    )


def _add_work_arguments(group: argparse._ArgumentGroup) -> None:
    repeatable: dict[str, Any] = {"nargs": "+", "action": "extend"}
    group.add_argument("--input-length", type=launch.positive, metavar="N", help=f"prompt ({LENGTH})", **repeatable)
    group.add_argument("--output-length", type=launch.positive, metavar="N", help=f"answer ({LENGTH})", **repeatable)
    group.add_argument(
        "--length-distribution", metavar="KIND",
        help="fixed, uniform, lognormal, or a JSONL file of lengths, as in serving (fixed)",
    )  # fmt: skip
    group.add_argument(
        "--max-new-tokens", type=launch.positive, metavar="N",
        help="that requests ask for and reserve, where it is more than the answer (default: the answer's length)",
    )  # fmt: skip
    group.add_argument(
        "--concurrency", type=launch.positive, metavar="N", help=f"closed loops ({CONCURRENCY})", **repeatable
    )
    group.add_argument(
        "--request-rate", type=_positive, metavar="R", help="open loops, per second, of all replicas", **repeatable
    )
    group.add_argument(
        "--burstiness", type=_positive, default=1.0, metavar="CV",
        help="standard deviation / mean of the gaps between requests, gamma distributed; 1 is Poisson (1)",
    )  # fmt: skip
    group.add_argument(
        "--trace", type=Path, metavar="FILE",
        help='JSONL of {"arrival_s": …, "input_length": …, "output_length": …}, and "max_new_tokens" where it differs',
    )  # fmt: skip
    group.add_argument(
        "--num-requests", type=launch.positive, metavar="N", help=f"of a row ({REQUESTS_PER_REPLICA} x replicas)"
    )
    group.add_argument("--seed", type=int, default=0, help="of lengths, arrivals and dispatch (0)")
    group.add_argument("--ttft-objective", "--slo-ttft-ms", type=_positive, metavar="MS", help="for goodput")
    group.add_argument("--tpot-objective", "--slo-tpot-ms", type=_positive, metavar="MS", help="for goodput")


def _add_server_arguments(group: argparse._ArgumentGroup) -> None:
    group.add_argument("--replicas", type=launch.positive, default=1, metavar="N", help="servers (1)")
    group.add_argument(
        "--dispatch", choices=list(fleet.DISPATCHES), default=next(iter(fleet.DISPATCHES)),
        help="who gets a request: of two replicas at random that with fewer tokens outstanding (default), or in turn",
    )  # fmt: skip
    for name in LIMITS:
        setting = SETTINGS[name]
        default = setting.metadata.get("default", setting.default)
        group.add_argument(
            f"--{name.replace('_', '-')}", type=_limit(name), default=setting.default,
            metavar="N", help=f"{setting.metadata['help'].replace('%', '%%')} ({default})",
        )  # fmt: skip


def _number(is_valid: Callable[[float], bool], what: str) -> Callable[[str], float]:
    """An argparse type: a number that is `what`."""

    def number(text: str) -> float:
        value = float(text)
        if not is_valid(value):
            raise argparse.ArgumentTypeError(f"{text} is not {what}")
        return value

    return number


_positive = _number(lambda value: 0 < value < math.inf, "above 0")
_not_negative = _number(lambda value: 0 <= value < math.inf, "at least 0")
_share = _number(lambda value: 0 < value <= 1, "above 0 and at most 1")


def _limit(name: str) -> Callable[[str], float]:
    """An argparse type: a value of this setting."""
    least, is_ratio = SETTINGS[name].metadata["min"], isinstance(SETTINGS[name].default, float)

    def limit(text: str) -> float:
        value = float(text) if is_ratio else int(text)
        if not least <= value < math.inf:
            raise argparse.ArgumentTypeError(f"{name} is {text} but must be at least {least:g}")
        return value

    return limit


def _sweep(text: str) -> tuple[str, list[float]]:
    """`NAME=A,B,…` as the name and its values."""
    flag, equals, values = text.partition("=")
    name = flag.removeprefix("--").replace("-", "_")
    known = (REPLICAS, *LIMITS)
    if name not in known or not equals:
        raise argparse.ArgumentTypeError(f"{text} is not NAME=A,B,… with one of {', '.join(known)}")
    parse = launch.positive if name == REPLICAS else _limit(name)
    try:
        return name, [parse(value) for value in values.split(",")]
    except ValueError:
        raise argparse.ArgumentTypeError(f"{values} is not a list of numbers such as 1,2,4") from None


def run(args: argparse.Namespace) -> int:
    _complete(args)
    prepare_output(args.output)
    measured = None if args.compare is None else read_serving(args.compare)
    trace = read_trace(args.trace) if args.trace else None
    subject = _subject(args)
    settings = list(_settings(args))
    cases = _cases(args, trace) if measured is None else cases_of(measured)
    plans = [(values, case, _limits(args, values, cases, subject, trace)) for values in settings for case in cases]
    result = Result(_context(args, subject, cases), notes=[*_notes(args, subject), *_remarks(measured)])
    result.extra = {"cost": asdict(subject.cost)}
    with published(result, partial(markdown, swept=[name for name, _ in args.sweep]), args.output) as keep:
        for values, case, limits in plans:
            result.rows.append(_simulated(args, subject.cost, values, case, limits, trace))
            if measured is not None:
                result.extra["comparison"] = comparison(measured["rows"], result.rows)
            keep()
            print(progress(result.rows[-1]), file=sys.stderr)
    return 0


def _complete(args: argparse.Namespace) -> None:
    """Fill in defaults and refuse what contradicts itself. Raises BenchError."""
    work = ("input_length", "output_length", "length_distribution", "concurrency", "request_rate", "num_requests")
    given = [f"--{name.replace('_', '-')}" for name in work if getattr(args, name)]
    for flag, source in (("--trace", args.trace), ("--compare", args.compare)):
        if source is not None and given:
            raise BenchError(f"{flag} brings its own requests: leave out {', '.join(given)}")
    if args.trace is not None and args.compare is not None:
        raise BenchError("--trace and --compare both bring their own requests: leave out one of them")
    if args.compare is not None and args.sweep:
        raise BenchError("--compare is about one server: leave out --sweep and give the limits that it had")
    if len(names := [name for name, _ in args.sweep]) > len(set(names)):
        raise BenchError("--sweep names a setting twice: give all of its values in one list")
    _complete_cost(args)
    args.input_length = list(dict.fromkeys(args.input_length or [LENGTH]))
    args.output_length = list(dict.fromkeys(args.output_length or [LENGTH]))
    args.length_distribution = args.length_distribution or "fixed"
    args.request_rate = list(dict.fromkeys(args.request_rate or ()))
    args.concurrency = list(dict.fromkeys(args.concurrency or (() if args.request_rate else (CONCURRENCY,))))


def _complete_cost(args: argparse.Namespace) -> None:
    """Either measured files or a data sheet. Raises BenchError."""
    of_shape = ("device", "num_shard", "dtype", "quantize", "efficiency")
    if (args.cost is None) == (args.shape is None):
        raise BenchError("give either --cost with latency results, or --shape and --device")
    if args.cost is not None and (given := [name for name in of_shape if getattr(args, name) is not None]):
        names = ", ".join(f"--{name.replace('_', '-')}" for name in given)
        raise BenchError(f"--cost says how long steps take: leave out {names}, which belong to --shape")
    if args.shape is not None and args.device is None:
        raise BenchError(f"--shape needs --device, one of {', '.join(plan.DEVICES)}; or give --cost")
    args.num_shard = args.num_shard or 1
    args.efficiency = args.efficiency or EFFICIENCY


# --------------------------------------------------------------------------------------------------------- subject


def _subject(args: argparse.Namespace) -> Subject:
    return _fitted(args) if args.shape is None else _on_device(args)


def _on_device(args: argparse.Namespace) -> Subject:
    named, device = shapes.find(args.shape), plan.DEVICES[args.device]
    if named.shape.spec.encoder is not None:
        raise BenchError(f"{named.name} is an encoder-decoder, which the simulator does not know: take a decoder")
    work = Work(named.shape, args.dtype or named.shape.dtype, args.quantize)
    ceilings = device.ceilings(work.dtype, args.num_shard)

    def kv_tokens(config: RouterConfig) -> int:
        found = plan.capacity(
            work,
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

    return Subject(
        cost=Roofline.of(work, ceilings, args.efficiency, args.overhead_ms / 1000),
        model=named.name,
        device=args.device,
        dtype=work.dtype,
        num_shard=args.num_shard,
        quantize=args.quantize,
        note=f"Steps: {100 * args.efficiency:g} % of what {args.num_shard} x {args.device} could do at best "
        f"(docs/roofline.md), and {args.overhead_ms:g} ms.",
        kv_tokens=kv_tokens,
    )


def _fitted(args: argparse.Namespace) -> Subject:
    results = [read_latency(path) for path in args.cost]
    first = results[0]
    if len(models := {result["model"] for result in results}) > 1:
        raise BenchError(f"--cost has results of {len(models)} models, {', '.join(sorted(models))}: give those of one")
    cost = fit(results, args.overhead_ms / 1000)
    return Subject(
        cost=cost,
        model=first["model"],
        device=first["device"],
        dtype=first["dtype"],
        num_shard=first["num_shard"],
        quantize=first["quantize"],
        note=_fit_note(cost, len(results)),
        kv_tokens=lambda config: useful_tokens(config, derive_lengths(config, 0, has_encoder=False)),
    )


def _fit_note(cost: Fitted, num_results: int) -> str:
    context = (
        f"{cost.context_ms * 1e6:.3g} ns for each key that a decoding sequence looks at"
        if cost.context_ms
        else "any context costs what the measured one did (a second --sequence-length would tell)"
    )
    return (
        f"Steps: fitted to {num_results} latency result{'s' if num_results > 1 else ''}; {cost.base_ms:.2f} ms for an "
        f"empty step, shared by prompts and decoding; {context}; and {1000 * cost.overhead_s:g} ms. Memory is taken "
        "to be enough for max_concurrent_requests of the longest length, unless max_batch_total_tokens is given."
    )


# ------------------------------------------------------------------------------------------------- work and limits


def _cases(args: argparse.Namespace, trace: Sequence[Request] | None) -> list[Case]:
    if trace is not None:
        lengths = [Lengths(one.input_length, one.output_length) for one in trace]
        return [Case(workload.mean_lengths(lengths), "trace", None, len(trace))]
    kind = args.length_distribution
    if kind in workload.DISTRIBUTIONS:
        means = [Lengths(*pair) for pair in product(args.input_length, args.output_length)]
    else:
        means = [workload.mean_lengths(workload.read_lengths(Path(kind)))]
    loads = [Load(concurrency=one) for one in args.concurrency] + [Load(request_rate=one) for one in args.request_rate]
    return [Case(mean, kind, load, args.num_requests or 0) for mean, load in product(means, loads)]


def cases_of(serving: Mapping[str, Any]) -> list[Case]:
    """The work of a serving run, row by row."""
    return [
        Case(
            Lengths(row["input_length"], row["output_length"]),
            row["length_distribution"],
            Load(row["concurrency"], row["request_rate"]),
            row["requests"],
        )
        for row in serving["rows"]
    ]


def _settings(args: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Every combination of the swept values, with the other settings as given."""
    given = {name: getattr(args, name) for name in (REPLICAS, *LIMITS)}
    for values in product(*(values for _, values in args.sweep)):
        yield given | {name: value for (name, _), value in zip(args.sweep, values, strict=True)}


def _limits(
    args: argparse.Namespace,
    values: Mapping[str, Any],
    cases: Sequence[Case],
    subject: Subject,
    trace: Sequence[Request] | None,
) -> Limits:
    """What the server would settle on for these settings, set up for the longest request. Raises BenchError."""
    longest_input, longest_output = _longest(cases, trace)
    try:
        config = RouterConfig(
            model_id=subject.model,
            model_path="",
            shard_sockets=(),
            max_input_length=longest_input,
            max_total_tokens=longest_input + max(longest_output, args.max_new_tokens or 0),
            **{name: values[name] for name in LIMITS},
        )
        tokens = config.max_batch_total_tokens or subject.kv_tokens(config)
        return resolve(
            config,
            max_positions=0,
            has_encoder=False,
            vocab_size=1,
            max_batch_total_tokens=tokens,
            block_size=BLOCK_SIZE,
            num_blocks=blocks_for(tokens, BLOCK_SIZE),
            shares_prefixes=False,
        )
    except ValueError as error:
        raise BenchError(str(error)) from None


def _longest(cases: Sequence[Case], trace: Sequence[Request] | None) -> tuple[int, int]:
    """Longest prompt and answer, as `serving` sets up a server for them."""
    if trace is not None:
        return max(one.input_length for one in trace), max(one.max_new_tokens for one in trace)
    kind = cases[0].distribution
    if kind not in workload.DISTRIBUTIONS:
        given = workload.read_lengths(Path(kind))
        return max(one.input_length for one in given), max(one.output_length for one in given)
    factor = workload.LONGEST[kind]
    inputs, outputs = (max(getattr(case.mean, name) for case in cases) for name in ("input_length", "output_length"))
    return int(factor * inputs), int(factor * outputs)


def traffic(case: Case, args: argparse.Namespace, count: int) -> Traffic:
    """The requests of a row, from one seed. Drawn in the order in which `serving` draws them, so that the same seed is
    the same work where its warm-ups draw nothing before."""
    assert case.load is not None, "a trace is its own traffic"
    random = Random(f"{args.seed} {case.mean} {case.load}")
    if case.distribution in workload.DISTRIBUTIONS:
        lengths = workload.draw_lengths(case.distribution, case.mean, count, random)
    else:
        lengths = random.choices(workload.read_lengths(Path(case.distribution)), k=count)
    rate = case.load.request_rate
    times = [0.0] * count if rate is None else arrival_times(rate, args.burstiness, count, random)
    asked = args.max_new_tokens or 0
    requests = (
        Request(at, one.input_length, one.output_length, max(one.output_length, asked))
        for at, one in zip(times, lengths, strict=True)
    )
    return OpenLoop(requests) if case.load.concurrency is None else ClosedLoop(requests, case.load.concurrency)


def arrival_times(rate: float, variation: float, count: int, random: Random) -> list[float]:
    """`count` ascending times at `rate` per second, whose gaps have this standard deviation / mean."""
    if variation == 1:
        return workload.poisson_times(rate, count, random)
    shape, times, now = variation**-2, [], 0.0
    for _ in range(count):
        now += random.gammavariate(shape, 1 / (rate * shape))
        times.append(now)
    return times


def read_trace(path: Path) -> list[Request]:
    """The requests of a trace in the order of their arrival. Raises BenchError that names the line."""
    try:
        lines = path.read_text().splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise BenchError(f"cannot read --trace {path}: {error}") from None
    requests = [_request_of(line, f"{path}:{number}") for number, line in enumerate(lines, 1) if line.strip()]
    if not requests:
        raise BenchError(f"{path} has no requests: write one JSON object a line")
    return sorted(requests)


def _request_of(line: str, where: str) -> Request:
    try:
        record = json.loads(line)
        at, lengths = float(record["arrival_s"]), (record["input_length"], record["output_length"])
        request = Request(at, *lengths, max_new_tokens=record.get("max_new_tokens", lengths[1]))
        is_valid = all(type(length) is int for length in request[1:]) and min(request[1:3]) >= 1
        is_valid = is_valid and 0 <= at < math.inf and request.max_new_tokens >= request.output_length
    except (ValueError, KeyError, TypeError, AttributeError):
        is_valid = False
    if not is_valid:
        raise BenchError(
            f'{where}: expected {{"arrival_s": 0.5, "input_length": 128, "output_length": 64}}, with lengths of at '
            "least 1 and max_new_tokens, if given, of at least output_length"
        )
    return request


# ---------------------------------------------------------------------------------------------------------- figures


def _simulated(
    args: argparse.Namespace,
    cost: Cost,
    values: Mapping[str, Any],
    case: Case,
    limits: Limits,
    trace: Sequence[Request] | None,
) -> dict[str, Any]:
    """One row."""
    count = case.num_requests or REQUESTS_PER_REPLICA * values[REPLICAS]
    requests = OpenLoop(iter(trace)) if trace is not None else traffic(case, args, count)
    tally = fleet.simulate(
        requests, limits, cost, num_replicas=values[REPLICAS], dispatch=args.dispatch, seed=args.seed
    )
    settled = dict(values) | {name: getattr(limits, name) for name in LIMITS}
    objectives = (args.ttft_objective, args.tpot_objective)
    return _about(case) | {"settings": settled} | figures(tally, limits, values[REPLICAS], objectives)


def _about(case: Case) -> dict[str, Any]:
    return {
        "input_length": case.mean.input_length,
        "output_length": case.mean.output_length,
        "length_distribution": case.distribution,
        "concurrency": case.load and case.load.concurrency,
        "request_rate": case.load and case.load.request_rate,
    }


def figures(
    tally: Tally, limits: Limits, num_replicas: int, objectives: tuple[float | None, float | None]
) -> dict[str, Any]:
    """What a row says, under `serving`'s names where it has them. objectives: TTFT and TPOT in ms, None: any."""
    seconds = tally.ended_at - tally.started_at
    return {
        "requests": tally.num_requests,
        "refused": tally.num_refused,
        "seconds": seconds,
        "requests_per_second": len(tally.e2e) / seconds,
        "output_tokens_per_second": tally.num_tokens / seconds,
        "goodput": _goodput(tally, seconds, objectives),
        "ttft_ms": _percentiles(tally.ttft),
        "tpot_ms": _percentiles([value for value in tally.tpot if value]),
        "inter_token_ms": _weighted_percentiles(tally.gaps, tally.gap_counts),
        "e2e_ms": _percentiles(tally.e2e),
        "queue_ms": _percentiles(tally.queued),
        "batch_size": {"mean": tally.batch / tally.busy, "peak": tally.peak_batch},
        "kv_share": {
            "mean": tally.blocks / tally.busy / limits.num_blocks,
            "peak": tally.peak_blocks / limits.num_blocks,
        },
        "busy_share": tally.busy / (seconds * num_replicas),
        "steps": tally.num_steps,
        "mean_step_ms": 1000 * tally.busy / tally.num_steps,
        "tokens_per_step": tally.num_step_tokens / tally.num_steps,
    }


def _goodput(tally: Tally, seconds: float, objectives: tuple[float | None, float | None]) -> dict[str, Any] | None:
    """Refused requests did not meet the objectives."""
    if objectives == (None, None):
        return None
    ttft_ms, tpot_ms = objectives
    most_ttft, most_tpot = (math.inf if ms is None else ms / 1000 for ms in objectives)
    met = sum(ttft <= most_ttft and tpot <= most_tpot for ttft, tpot in zip(tally.ttft, tally.tpot, strict=True))
    return {
        "ttft_objective_ms": ttft_ms,
        "tpot_objective_ms": tpot_ms,
        "share": met / tally.num_requests,
        "requests_per_second": met / seconds,
    }


def _percentiles(samples: Sequence[float]) -> dict[str, float] | None:
    """Of samples in seconds, in milliseconds."""
    if not samples:
        return None
    summary = Summary.of(samples)
    return {name: 1000 * getattr(summary, name) for name in ("mean", *PERCENTILES)}


def _weighted_percentiles(values: Sequence[float], counts: Sequence[int]) -> dict[str, float] | None:
    """The same of samples that were seen `counts` times each."""
    if not values:
        return None
    seconds, seen = np.asarray(values), np.asarray(counts)
    order = np.argsort(seconds, kind="stable")
    upto = np.cumsum(seen[order])
    total = int(upto[-1])
    ranks = {name: percentile(range(total), float(name[1:])) for name in PERCENTILES}
    found = {name: seconds[order[np.searchsorted(upto, rank, side="right")]] for name, rank in ranks.items()}
    return {"mean": 1000 * float(seconds @ seen) / total} | {name: 1000 * float(at) for name, at in found.items()}


# ------------------------------------------------------------------------------------------------------- comparison


def read_serving(path: Path) -> dict[str, Any]:
    """A result.json of `serving`. Raises BenchError."""
    try:
        result = json.loads(path.read_text())
        is_serving = result["command"] == "serving" and len(result["rows"]) > 0
    except OSError as error:
        raise BenchError(f"cannot read {path}: {error.strerror}; give the result.json of a serving run") from None
    except (ValueError, KeyError, TypeError):
        is_serving = False
    if not is_serving:
        raise BenchError(f"{path} is no result of a serving run, or has no rows: give the result.json of one")
    return dict(result)


COMPARED = ("requests_per_second", "output_tokens_per_second", "ttft_ms", "tpot_ms", "inter_token_ms", "e2e_ms")


def comparison(measured: Sequence[Mapping[str, Any]], predicted: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """One entry for each row and figure that both have: predicted / measured, of latencies the medians."""
    return [
        {
            "row": number,
            "figure": name,
            "measured": was,
            "predicted": is_,
            "ratio": is_ / was,
            "is_on_target": None if name not in TARGETS else abs(is_ / was - 1) <= TARGETS[name],
        }
        for number, rows in enumerate(zip(measured, predicted, strict=False))
        for name in COMPARED
        for was, is_ in [[_median(row[name]) for row in rows]]
        if was and is_
    ]


def _remarks(measured: Mapping[str, Any] | None) -> Iterator[str]:
    """What makes a comparison other than it seems."""
    if measured is None:
        return
    rows = measured["rows"]
    if short := sum(row.get("short", 0) for row in rows):
        yield (
            f"{short} measured answers were short, because the model ended them by itself, and simulated ones are not: "
            "measure with serving --random-weights."
        )
    if failed := sum(row.get("errors", 0) for row in rows):
        yield f"{failed} measured requests failed, which nothing here foresees."
    if any(row["request_rate"] for row in rows) and measured["arguments"].get("warmups"):
        yield (
            "Warm-ups were measured before, so that requests arrived at other times than here in open loops: measure "
            "with serving --warmups 0."
        )


def _median(figure: float | Mapping[str, float] | None) -> float | None:
    return figure["p50"] if isinstance(figure, Mapping) else figure


# ---------------------------------------------------------------------------------------------------------- report


def _context(args: argparse.Namespace, subject: Subject, cases: Sequence[Case]) -> RunContext:
    arguments = arguments_of(args) | {"cost": [str(path) for path in args.cost or ()]}
    return RunContext.gather(
        "simulate",
        model=subject.model,
        device=subject.device,
        dtype=subject.dtype,
        num_shard=subject.num_shard,
        threads=0,
        quantize=subject.quantize,
        arguments=arguments,
        work={"model": subject.model, "seed": args.seed, "cases": [asdict(case) for case in cases]},
    )


def _notes(args: argparse.Namespace, subject: Subject) -> list[str]:
    return [
        f"Simulated, in virtual time: {subject.model}, {subject.dtype}. docs/simulation.md says what is left out.",
        subject.note,
        f"Limits are the server's defaults unless given or swept. Requests go to replicas by {args.dispatch}.",
        "Times count from a request's arrival; throughput until the last request has ended. Goodput: requests that "
        "keep the objectives; refused ones do not. Busy: share of the time that replicas computed; batch size and KV "
        "cache (blocks reserved): means over that time.",
        PERCENTILE_RULE,
    ]


def progress(row: Mapping[str, Any]) -> str:
    rates = f"{row['requests_per_second']:.2f} requests/s, {row['output_tokens_per_second']:.2f} output token/s"
    return f"{_load(row)}: {rates}, {row['refused']} refused, {row['seconds']:.1f} simulated seconds"


def _load(row: Mapping[str, Any]) -> str:
    has_load = row["concurrency"] or row["request_rate"]
    return str(Load(row["concurrency"], row["request_rate"])) if has_load else "trace"


def markdown(result: Result, swept: Sequence[str]) -> str:
    """Throughput, latencies and occupancy: in each a line for each row."""
    parts = [f"# {result.context.model} on {result.context.device}", comparison_table(result)]
    parts += [_figure_table(result.rows, swept, columns) for columns in TABLES]
    return "\n\n".join([part for part in parts if part] + ["\n".join(f"- {line}" for line in _footer(result))])


def _footer(result: Result) -> Iterator[str]:
    yield from result.notes
    if result.failure:
        yield f"**Incomplete**: {result.failure}"


Column = tuple[str, Callable[[Mapping[str, Any]], str]]


def _of(key: str, name: str | None = None, form: str = ".2f", scale: float = 1.0) -> Callable[[Mapping[str, Any]], str]:
    """How a figure of a row is written."""

    def cell(row: Mapping[str, Any]) -> str:
        value = row[key] if name is None else (row[key] or {}).get(name)
        return "-" if value is None else format(scale * value, form)

    return cell


def _latency(title: str, key: str) -> list[Column]:
    return [(f"{title} {name} (ms)", _of(key, name)) for name in PERCENTILES]


TABLES: Sequence[Sequence[Column]] = (
    (
        ("Throughput (requests/s)", _of("requests_per_second")),
        ("Throughput (output token/s)", _of("output_tokens_per_second")),
        ("Goodput (requests/s)", _of("goodput", "requests_per_second")),
        ("Met (%)", _of("goodput", "share", ".1f", 100)),
        ("Refused", _of("refused", form=".0f")),
        ("Busy (%)", _of("busy_share", form=".1f", scale=100)),
    ),
    (*_latency("TTFT", "ttft_ms"), *_latency("Inter-token", "inter_token_ms"), *_latency("TPOT", "tpot_ms")),
    (*_latency("E2E", "e2e_ms"), *_latency("Queue", "queue_ms")),
    (
        ("Batch size, mean", _of("batch_size", "mean", ".1f")),
        ("Batch size, peak", _of("batch_size", "peak", ".0f")),
        ("KV cache, mean (%)", _of("kv_share", "mean", ".1f", 100)),
        ("KV cache, peak (%)", _of("kv_share", "peak", ".1f", 100)),
        ("Step, mean (ms)", _of("mean_step_ms")),
        ("Tokens a step", _of("tokens_per_step", form=".1f")),
    ),
)


def _figure_table(rows: Sequence[Mapping[str, Any]], swept: Sequence[str], columns: Sequence[Column]) -> str:
    headers = ["Load", "In", "Out", *swept, *(title for title, _ in columns)]
    cells = [
        [
            _load(row),
            row["input_length"],
            row["output_length"],
            *(f"{row['settings'][name]:g}" for name in swept),
            *(cell(row) for _, cell in columns),
        ]
        for row in rows
    ]
    return table(headers, cells, centred=True)


def comparison_table(result: Result) -> str:
    """Empty without --compare."""
    entries = result.extra.get("comparison", [])
    cells = [
        [
            _load(result.rows[one["row"]]),
            result.rows[one["row"]]["input_length"],
            result.rows[one["row"]]["output_length"],
            one["figure"] if one["figure"].endswith("second") else f"{one['figure']} p50",
            f"{one['measured']:.2f}",
            f"{one['predicted']:.2f}",
            f"{one['ratio']:.3f}",
            {None: "", True: "yes", False: "no"}[one["is_on_target"]],
        ]
        for one in entries
    ]
    targets = ", ".join(f"{name} ±{100 * share:g} %" for name, share in TARGETS.items())
    headers = ("Load", "In", "Out", "Figure", "Measured", "Predicted", "Predicted / measured", f"On target ({targets})")
    return table(headers, cells, centred=True) if cells else ""
