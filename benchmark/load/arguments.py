"""The options of `serving` that say what is sent and when, and what they contradict."""

from __future__ import annotations

import argparse
import math
from pathlib import Path
from typing import Any

from benchmark import options, workload
from benchmark.load.datasets import read_dataset
from benchmark.load.sources import CHOICES
from benchmark.load.traces import TracedRequest, read_trace
from benchmark.outcomes import Load, loads
from benchmark.report import BenchError
from benchmark.workload import Lengths

LENGTHS = (128, 512, 1024, 2048)  # the published sweeps'
CONCURRENCY = 16
ABOVE_ZERO = options.number(above=0)
REPEATABLE: dict[str, Any] = {"nargs": "+", "action": "extend"}
# Options that need another one beside them: without it they would do nothing.
NEEDS = {
    "split": ("dataset",), "prompt_column": ("dataset",), "speed": ("trace",),
    "prefix_length": ("prefixes",), "prefix_choice": ("prefixes",), "think_time": ("turns",),
    "most_tokens": ("dataset", "trace"), "max_concurrency": ("request_rate", "ramp", "trace"),
    "burstiness": ("request_rate", "ramp"),
}  # fmt: skip
# Options that exclude others, because each says the same thing another way.
EXCLUDES = {
    "trace": ("dataset", "prefixes", "turns", "concurrency", "request_rate", "ramp", "input_length", "output_length"),
    "dataset": ("prefixes", "input_length"),
}


def add_work_arguments(group: argparse._ArgumentGroup) -> None:
    """Declare what is sent: lengths, files, prefixes, turns."""
    lengths = " ".join(map(str, LENGTHS))
    group.add_argument("--input-length", type=options.positive, metavar="N", help=f"prompt ({lengths})", **REPEATABLE)
    group.add_argument("--output-length", type=options.positive, metavar="N", help=f"answer ({lengths})", **REPEATABLE)
    group.add_argument(
        "--length-distribution", default="fixed", metavar="KIND",
        help="around the lengths of the grid: fixed, uniform (half to one and a half) or lognormal (same mean); or in "
        'place of the grid a JSONL file of {"input_length": …, "output_length": …}',
    )  # fmt: skip
    group.add_argument(
        "--dataset", type=Path, metavar="PATH", help="prompts of a file or folder: ShareGPT JSON, JSONL, CSV"
    )
    group.add_argument("--split", metavar="NAME", help="files of a folder whose names contain this (train)")
    group.add_argument("--prompt-column", metavar="NAME", help="prompt column of the data set, if it is not recognised")
    group.add_argument(
        "--most-tokens", type=options.positive, metavar="N", help="skip requests with more tokens, input plus output"
    )
    group.add_argument("--prefixes", type=options.positive, metavar="N", help="number of shared prefixes")
    group.add_argument("--prefix-length", type=options.positive, metavar="N", help="tokens of a shared prefix")
    group.add_argument("--prefix-choice", choices=CHOICES, help="how requests choose a prefix (uniform)")
    group.add_argument(
        "--turns", type=options.positive, metavar="N", help="turns of a conversation; with a data set, at most"
    )
    group.add_argument("--think-time", type=ABOVE_ZERO, metavar="S", help="mean pause before a later turn (0)")
    group.add_argument("--seed", type=int, default=0, help="random seed of prompts, lengths and arrivals (0)")
    group.add_argument("--slo", nargs="*", help=argparse.SUPPRESS)  # of an earlier release: refused by name in this one
    group.add_argument("--ttft-objective", type=ABOVE_ZERO, metavar="MS", help="objective for goodput")
    group.add_argument("--tpot-objective", type=ABOVE_ZERO, metavar="MS", help="objective for goodput")


def add_load_arguments(group: argparse._ArgumentGroup) -> None:
    """Declare when it is sent, and how much of it."""
    group.add_argument(
        "--concurrency", type=options.positive, metavar="N", help="clients of a closed loop (16)", **REPEATABLE
    )
    group.add_argument(
        "--request-rate", type=ABOVE_ZERO, metavar="R", help="requests per second of an open loop", **REPEATABLE
    )
    group.add_argument(
        "--ramp", type=ABOVE_ZERO, nargs=2, metavar=("A", "B"), help="an open loop whose rate goes from A to B"
    )
    group.add_argument(
        "--burstiness", type=options.number(at_least=0), metavar="CV",
        help="standard deviation / mean of the gaps: 0 is constant, 1 Poisson, else gamma (1)",
    )  # fmt: skip
    group.add_argument("--trace", type=Path, metavar="FILE", help="replay Mooncake's JSONL or an Azure CSV")
    group.add_argument("--speed", type=ABOVE_ZERO, metavar="F", help="replay this many times as fast (1)")
    group.add_argument(
        "--max-concurrency", type=options.positive, metavar="N", help="requests at once in an open loop; others wait"
    )
    group.add_argument(
        "--num-requests", type=options.positive, metavar="N",
        help="conversations per row (4 x concurrency or 60 s, >= 32; all of a trace)",
    )  # fmt: skip
    group.add_argument("--duration", type=ABOVE_ZERO, metavar="S", help="seconds of a row in which conversations start")
    group.add_argument("--warmups", type=options.not_negative, default=1, metavar="N", help="requests before a row (1)")


def complete(args: argparse.Namespace) -> None:
    """Fill in defaults, read the files, and refuse what contradicts itself or cannot be read. Raises BenchError."""
    _refuse_contradictions(args)
    if args.slo is not None:
        raise BenchError("--slo is gone: search for the rate that keeps objectives with guidellm or aiperf")
    args.trace_requests = read_trace(args.trace, args.speed or 1.0) if args.trace else None
    args.conversations = read_dataset(args.dataset, args.split, args.prompt_column) if args.dataset else None
    args.dataset_output = args.output_length[0] if args.dataset and args.output_length else None
    args.input_length = options.distinct(args.input_length or LENGTHS)
    args.output_length = options.distinct(args.output_length or LENGTHS)
    args.request_rate = options.distinct(args.request_rate or ())
    is_open = args.request_rate or args.ramp or args.trace
    args.concurrency = options.distinct(args.concurrency or (() if is_open else (CONCURRENCY,)))
    is_file = args.length_distribution not in workload.DISTRIBUTIONS
    args.lengths_file = Path(args.length_distribution) if is_file else None
    if args.lengths_file is not None:
        workload.read_lengths(args.lengths_file)
    if args.prefixes:
        _check_prefixes(args)


def _refuse_contradictions(args: argparse.Namespace) -> None:
    given = {name for name in (*NEEDS, *EXCLUDES) if getattr(args, name) is not None}
    for name in NEEDS:
        if name in given and not any(getattr(args, other) for other in NEEDS[name]):
            wanted = " or ".join(options.option(other) for other in NEEDS[name])
            raise BenchError(f"{options.option(name)} does nothing without {wanted}: give that, or leave it out")
    for name, others in EXCLUDES.items():
        if name in given and (surplus := options.options_given(args, others)):
            raise BenchError(f"{options.option(name)} says by itself what {', '.join(surplus)} says: give one of them")
    if args.dataset and args.length_distribution != "fixed":
        raise BenchError("--dataset has its own lengths: leave out --length-distribution")
    if args.dataset and len(args.output_length or ()) > 1:
        raise BenchError(f"--dataset takes one --output-length, not {len(args.output_length)}: run it once for each")
    if args.prefixes and args.prefix_length is None:
        raise BenchError("--prefixes is a number of prefixes: give their length with --prefix-length")


def _check_prefixes(args: argparse.Namespace) -> None:
    if args.lengths_file is not None:
        shortest = min(one.input_length for one in workload.read_lengths(args.lengths_file))
    else:
        shortest = min(args.input_length) * (1 if args.length_distribution == "fixed" else 0.5)
    if args.length_distribution == "lognormal":
        raise BenchError("--prefixes needs prompts that are longer than them: give another --length-distribution")
    if shortest <= args.prefix_length:
        raise BenchError(
            f"--prefix-length {args.prefix_length} leaves nothing of a prompt of {shortest:g} tokens, which it is part "
            "of: give a longer --input-length"
        )


def gaps_of(args: argparse.Namespace) -> float:
    """The standard deviation of the gaps between arrivals / their mean."""
    return 1.0 if args.burstiness is None else float(args.burstiness)


def loads_of(args: argparse.Namespace) -> list[Load]:
    """Closed loops, then open loops, then the ramp, or the trace."""
    if args.trace_requests is not None:
        return [_trace_load(args, args.trace_requests)]
    gaps = gaps_of(args)
    ramps = [Load(request_rate=sum(args.ramp) / 2, ramp=tuple(args.ramp))] if args.ramp else []
    found = loads(args.concurrency, args.request_rate) + ramps
    return [
        one
        if one.concurrency
        else Load(None, one.request_rate, one.ramp, burstiness=gaps, max_concurrency=args.max_concurrency)
        for one in found
    ]


def _trace_load(args: argparse.Namespace, trace: list[TracedRequest]) -> Load:
    taken = trace[: args.num_requests]
    rate = len(taken) / max(taken[-1].arrives_s, 1e-3)
    return Load(request_rate=rate, max_concurrency=args.max_concurrency, trace=args.trace.name)


def limits_of(args: argparse.Namespace) -> dict[str, int]:
    """The longest prompt and the most tokens of one request that can be drawn, by the names of the server's limits.

    Empty for a data set, whose tokens are not counted yet.
    """
    if args.conversations is not None:
        return {}
    if args.trace_requests is not None:
        every = [one.lengths for one in args.trace_requests]
        most = args.most_tokens or math.inf
        lengths = [one for one in every if one.input_length + one.output_length <= most] or every
    elif args.lengths_file is not None:
        lengths = workload.read_lengths(args.lengths_file)
    else:
        means = Lengths(max(args.input_length), max(args.output_length))
        lengths = [workload.longest_drawn(args.length_distribution, means)]
    before = (args.turns or 1) - 1  # turns that the last one carries
    return {
        "max_input_length": max((before + 1) * one.input_length + before * one.output_length for one in lengths),
        "max_total_tokens": (before + 1) * max(one.input_length + one.output_length for one in lengths),
    }
