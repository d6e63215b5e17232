"""`lockstep-bench promises`: what Lockstep promises of time and memory, measured several times and given a verdict.

`make test` does not ask how long something took, because a busy machine would fail it for no reason that is the code's.
This command does: it is run before a release, and when code changes that a promise is about. Each promise is one line
of `PROMISES`; the servers that it starts, and what it does to them, are in `trials.py`. A promise is kept when the
median over the repetitions is within its bound. Exit codes: 0 all are kept, 1 one is broken or could not be measured.
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

from benchmark import launch, options, trials
from benchmark.progress import Stage, shown
from benchmark.publishing import published
from benchmark.report import Result, RunContext, arguments_of, footer, prepare_output, table

REPETITIONS = 5  # the fewest of which two may be disturbed without moving the median
KEPT, BROKEN = "kept", "broken"


@dataclass(frozen=True)
class Promise:
    """One figure that is promised to be at most `bound`."""

    name: str  # under which its trial returns the figure
    sentence: str
    bound: float
    unit: str  # empty for a ratio
    reason: str  # why the bound is what it is
    trial: trials.Trial


PROMISES: Sequence[Promise] = (
    Promise(
        "taken-port",
        "a launch on a taken port is refused",
        1.0,
        "s",
        "The launcher binds the port before it loads anything: one second is what Python itself may need to start.",
        trials.taken_port,
    ),
    Promise(
        "ready",
        "the embedded model is ready after its launch",
        15.0,
        "s",
        "A newcomer still waits for it. Importing torch in the shard is most of it, on two cores 4 to 8 seconds.",
        trials.start,
    ),
    Promise(
        "first-request",
        "first request after ready / median of the next ten",
        3.0,
        "",
        "Whatever a first request triggers happens before the server is ready; caches of the processor stay cold.",
        trials.start,
    ),
    Promise(
        "slow-readers",
        "p99 gap of a stream beside 50 clients that hardly read / beside 50 that read at once",
        2.0,
        "",
        "A client that does not read costs the others no more than one that does; the rest is left to a p99's scatter: "
        "0.7 to 1.7 was measured, and 3.4 of a router that lost half a millisecond at each write to such a client.",
        trials.crowd,
    ),
    Promise(
        "refusal",
        "slowest of ten answers by 429 of a server that is full",
        1.0,
        "s",
        "A refusal must be quick enough for the client to try another server.",
        trials.crowd,
    ),
    Promise(
        "client",
        "time that `serving` takes for a token of 256 streams of ready-made frames, by the slowest API",
        20.0,
        "µs",
        "A client that counts 50,000 tokens a second limits no server that is measured here; its frames have a core of "
        "their own.",
        trials.client,
    ),
    Promise(
        "loading-memory",
        "memory of a shard beyond its weights while it loads a checkpoint",
        60.0,
        "MB",
        "Weights are read in pieces, one matrix at a time: no second copy of a model that barely fits.",
        trials.loading,
    ),
)


# --------------------------------------------------------------------------------------------------- command line


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options of this command."""
    names = [promise.name for promise in PROMISES]
    parser.add_argument(
        "--only", nargs="+", choices=names, default=names, metavar="NAME", help=f"some of {', '.join(names)} (all)"
    )
    parser.add_argument(
        "--repeat", type=options.positive, default=REPETITIONS, metavar="N", help=f"repetitions ({REPETITIONS})"
    )
    launch.add_kernels_argument(parser)
    parser.add_argument("--output", type=Path, metavar="DIR", help="folder for result.md and result.json")


def run(args: argparse.Namespace) -> int:
    """Measure the promises that the arguments name; 0 when all of them are kept. Raises BenchError."""
    prepare_output(args.output)
    promises = [promise for promise in PROMISES if promise.name in args.only]
    result = Result(_context(args), notes=[f"{promise.name}: {promise.reason}" for promise in promises])
    samples: dict[str, list[float]] = {promise.name: [] for promise in promises}
    names = {promise.trial: promise.name for promise in promises}
    stages = [Stage(f"{name}, time {n + 1} of {args.repeat}") for n in range(args.repeat) for name in names.values()]
    with (
        published(result, markdown, args.output) as keep,
        shown("measuring what is promised", stages) as view,
        tempfile.TemporaryDirectory() as scratch,
    ):
        for trial in view.each(list(names) * args.repeat):
            found = trial(trials.Means(Path(scratch), args.cpu_kernels))
            for name in samples.keys() & found.keys():
                samples[name].append(found[name])
            result.rows = [row_of(promise, samples[promise.name]) for promise in promises if samples[promise.name]]
            keep()
    return 1 if any(row["verdict"] == BROKEN for row in result.rows) else 0


# -------------------------------------------------------------------------------------------------------- report


def row_of(promise: Promise, samples: Sequence[float]) -> dict[str, Any]:
    """One row of the JSON: the promise, and what its repetitions, at least one, say of it."""
    middle = median(samples)
    return {
        "promise": promise.name,
        "sentence": promise.sentence,
        "unit": promise.unit,
        "bound": promise.bound,
        "median": middle,
        "min": min(samples),
        "max": max(samples),
        "samples": list(samples),
        "verdict": KEPT if middle <= promise.bound else BROKEN,
    }


def markdown(result: Result) -> str:
    """The table of promises, and what to know about them."""
    return f"{promise_table(result.rows)}\n\n{footer(result)}"


def promise_table(rows: Sequence[Mapping[str, Any]]) -> str:
    """One line for each promise, in its own unit."""
    cells = [
        [
            row["promise"],
            row["sentence"],
            _quantity(row["bound"], row["unit"]),
            _quantity(row["median"], row["unit"]),
            f"{_quantity(row['min'], row['unit'])} to {_quantity(row['max'], row['unit'])}",
            row["verdict"],
        ]
        for row in rows
    ]
    return table(("Name", "Promise", "At most", "Median", "Range", "Verdict"), cells)


def _quantity(value: float, unit: str) -> str:
    return f"{value:.3g} {unit}".rstrip()


def _context(args: argparse.Namespace) -> RunContext:
    return RunContext.gather(
        "promises",
        model="the embedded model, the null model, and a random BLOOM",
        device="cpu",
        dtype="each model's own",
        num_shard=1,
        threads=0,
        quantize=None,
        arguments=arguments_of(args),
        work={"only": list(args.only), "repeat": args.repeat},
    )
