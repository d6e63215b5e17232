"""The highest rate of requests at which a server keeps objectives: bracketed by doubling, then halved in between.

Each probe is an open loop at one rate. It misses if a percentile is beyond its bound, if more requests fail than the
percentile leaves out, or if the queue grows while it lasts: a server that is overloaded a little keeps any bound on
times for a while. A probe therefore lasts so long that an overload of `GROWTH` makes the last requests wait longer than
the bound. What is found is tried once more, and lowered until it holds: one lucky probe is no answer.

Left out: how requests are sent (`loops.py`), and which lengths they have (`workload.py`).
"""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from statistics import fmean
from typing import Any

from benchmark import options
from benchmark.outcomes import Outcome
from benchmark.progress import Progress, Stage
from benchmark.report import BenchError, percentile, table

METRICS = ("ttft", "tpot", "itl", "e2e")
GROWTH = 0.025  # of the rate: an overload that a probe must see
LEAST_SECONDS = 10.0
LEAST_REQUESTS = 20  # of a probe, and as many as the percentile leaves one out of
PRECISION = 0.03  # between the highest rate that held and the lowest that did not
MOST_REQUESTS = 50_000  # of a probe
LOWERED = 0.95  # by so much, where a rate held only once
MOST_LOWERINGS = 5
NUM_HALVINGS = 5  # of a bracket whose ends are a factor of 2 apart


@dataclass(frozen=True)
class Objective:
    """`ttft:p99:500ms`: this percentile of this time is at most so long."""

    metric: str
    percent: float
    bound_ms: float

    @classmethod
    def parse(cls, text: str) -> Objective:
        """An argparse type."""
        metric, _, rest = text.partition(":")
        which, _, bound = rest.partition(":")
        number = bound.removesuffix("ms") if bound.endswith("ms") else bound.removesuffix("s")
        scale = 1000.0 if bound.endswith("s") and not bound.endswith("ms") else 1.0
        try:
            percent, bound_ms = float(which.removeprefix("p")), scale * float(number)
        except ValueError:
            percent = bound_ms = math.nan
        is_good = metric in METRICS and which.startswith("p") and 0 < percent < 100 and 0 < bound_ms < math.inf
        if not is_good:
            raise argparse.ArgumentTypeError(
                f"{text} is no objective: write one of {', '.join(METRICS)}, a percentile and a bound, such as "
                "ttft:p99:500ms"
            )
        return cls(metric, percent, bound_ms)

    def __str__(self) -> str:
        return f"{self.metric}:p{self.percent:g}:{self.bound_ms:g}ms"

    def samples(self, outcome: Outcome) -> list[float]:
        """What one request that succeeded gives, in milliseconds."""
        if self.metric == "itl":
            return outcome.inter_token_ms
        if self.metric == "tpot":
            return [] if outcome.tpot_ms is None else [outcome.tpot_ms]
        return [outcome.ttft_ms if self.metric == "ttft" else outcome.e2e_ms]

    def found_ms(self, good: Sequence[Outcome]) -> float | None:
        """The percentile; None where no request tells."""
        ordered = sorted(sample for outcome in good for sample in self.samples(outcome))
        return percentile(ordered, self.percent) if ordered else None


@dataclass(frozen=True)
class Probe:
    """One rate that was tried, in requests per second. missed: why it is too high; empty: it held."""

    rate: float
    seconds: float
    requests: int
    found_ms: dict[str, float | None]
    missed: str

    def row(self) -> dict[str, Any]:
        """For the JSON."""
        return {
            "request_rate": self.rate, "seconds": self.seconds, "requests": self.requests,
            "objectives_ms": self.found_ms, "held": not self.missed, "missed": self.missed or None,
        }  # fmt: skip


Send = Callable[[float, int], Awaitable[Sequence[Outcome]]]  # so many requests at a rate


@dataclass
class Search:
    """Looks for the highest rate at which all objectives hold. send: sends so many requests at a rate."""

    objectives: Sequence[Objective]
    send: Send
    say: Callable[[str], None]
    seconds: float | None = None  # of a probe; None: as long as an overload needs to be seen
    probes: list[Probe] = field(default_factory=list)
    view: Progress | None = None  # told of each probe, and of about how many follow

    @property
    def probe_seconds(self) -> float:
        """How long requests are sent in one probe."""
        if self.seconds is not None:
            return self.seconds
        waits = [objective.bound_ms / 1000 for objective in self.objectives if objective.metric in ("ttft", "e2e")]
        return max([LEAST_SECONDS, *(wait / GROWTH for wait in waits)])

    @property
    def least_requests(self) -> int:
        """So many that the strictest percentile leaves one of them out."""
        return max([LEAST_REQUESTS, *(math.ceil(100 / (100 - one.percent) - 1e-6) for one in self.objectives)])

    async def run(self, start: float, least: float) -> float:
        """The rate, from a first guess on. Raises BenchError where even `least` is too much, at which requests hardly
        meet each other."""
        held, missed = await self._bracket(min(max(start, least), MOST_REQUESTS / self.probe_seconds), least)
        while missed > held * (1 + PRECISION):
            middle = math.sqrt(held * missed)
            if await self._holds(middle, following=1 + num_halvings(middle / held)):
                held = middle
            else:
                missed = middle
        for _ in range(MOST_LOWERINGS):
            if await self._holds(held, following=0):
                return held
            held *= LOWERED
        raise BenchError(
            f"no rate near {held:.3g} requests/s kept {self._wanted()} twice in a row: the server, or the machine, is "
            "not steady; give longer probes by --probe-seconds"
        )

    async def _bracket(self, start: float, least: float) -> tuple[float, float]:
        """A rate that holds, and one above that does not."""
        is_held, rate = await self._holds(start), start
        while (following := rate * 2 if is_held else max(rate / 2, least)) != rate:
            if is_held and following * self.probe_seconds > MOST_REQUESTS:
                raise BenchError(
                    f"{rate:.3g} requests/s still kept {self._wanted()}, and twice as many were more than "
                    f"{MOST_REQUESTS} requests a probe: give tighter bounds, or shorter probes by --probe-seconds"
                )
            if await self._holds(following) != is_held:
                return (rate, following) if is_held else (following, rate)
            rate = following
        why = self.probes[-1].missed
        raise BenchError(f"not even {rate:.3g} requests/s kept {self._wanted()} ({why}): give looser bounds")

    async def _holds(self, rate: float, following: int = 2 + NUM_HALVINGS) -> bool:
        """Try a rate. following: about how many further probes there will be."""
        seconds = self.probe_seconds
        if self.view is not None:
            later = [Stage("another rate", seconds=seconds)] * following
            self.view.expect([Stage(f"{rate:.3g} requests/s", seconds=seconds), *later])
            self.view.begin()
        count = max(self.least_requests, round(rate * seconds))
        outcomes = await self.send(rate, count)
        probe = judged(rate, outcomes, self.objectives)
        self.probes.append(probe)
        self.say(f"{rate:.3g} requests/s, {count} requests: {probe.missed or 'held'}")
        return not probe.missed

    def _wanted(self) -> str:
        return " and ".join(map(str, self.objectives))


def num_halvings(apart: float) -> int:
    """How often a bracket whose ends have this ratio is halved until it is narrow enough."""
    return max(0, math.ceil(math.log2(math.log(apart) / math.log(1 + PRECISION)))) if apart > 1 + PRECISION else 0


def judged(rate: float, outcomes: Sequence[Outcome], objectives: Sequence[Objective]) -> Probe:
    """Whether a probe's requests kept the objectives, and what was missed first."""
    good = [outcome for outcome in outcomes if outcome.reply.error is None]
    found = {str(objective): objective.found_ms(good) for objective in objectives}
    began = min(outcome.intended_at for outcome in outcomes)
    seconds = max(outcome.intended_at for outcome in outcomes) - began
    failed = len(outcomes) - len(good)
    missed = ""
    for objective, value in zip(objectives, found.values(), strict=True):
        if failed > len(outcomes) * (1 - objective.percent / 100):
            missed = f"{failed} of {len(outcomes)} requests failed"
        elif value is None:
            missed = f"no answer has a {objective.metric}"
        elif value > objective.bound_ms:
            missed = f"{objective.metric} p{objective.percent:g} {value:.0f} ms"
        if missed:
            break
    if not missed and grows(good, seconds):
        missed = "the queue grew"
    return Probe(rate, seconds, len(outcomes), found, missed)


def grows(good: Sequence[Outcome], seconds: float) -> bool:
    """Whether first tokens came later and later: as much as an overload of GROWTH makes them."""
    ordered = sorted(good, key=lambda outcome: outcome.intended_at)
    quarter = len(ordered) // 4
    if not quarter:
        return False
    first = fmean(outcome.ttft_ms for outcome in ordered[:quarter])
    last = fmean(outcome.ttft_ms for outcome in ordered[-quarter:])
    between = 0.75 * seconds  # of the middles of both quarters
    return last - first > 1000 * GROWTH * between


# ------------------------------------------------------------------------------------------- of the command `serving`


def add_arguments(group: argparse._ArgumentGroup) -> None:
    """Declare the options of a search."""
    group.add_argument(
        "--slo", type=Objective.parse, nargs="+", action="extend", default=[], metavar="TIME:PERCENTILE:BOUND",
        help="search for the highest rate that keeps these, such as ttft:p99:500ms tpot:p90:50ms (or itl, e2e)",
    )  # fmt: skip
    above_zero = options.number(above=0)
    group.add_argument("--slo-start-rate", type=above_zero, metavar="R", help="where the search begins (one stream's)")
    group.add_argument(
        "--probe-seconds", type=above_zero, metavar="S",
        help="of each rate that is tried (10, or 40 times the largest bound of ttft and e2e)",
    )  # fmt: skip


def check(args: argparse.Namespace) -> None:
    """Refuse what contradicts a search. Raises BenchError."""
    loads = ("concurrency", "request_rate", "num_requests", "ramp", "trace", "duration")
    if args.slo and (given := options.options_given(args, loads)):
        raise BenchError(f"--slo chooses the load: leave out {', '.join(given)}, or --slo")
    if not args.slo and (given := options.options_given(args, ("slo_start_rate", "probe_seconds"))):
        raise BenchError(f"{', '.join(given)} is for a search: give --slo too, or leave it out")


async def searched(
    args: argparse.Namespace,
    send: Callable[[float | None, int], Awaitable[Sequence[Outcome]]],
    found: dict[str, Any],
    view: Progress | None = None,
) -> float:
    """The highest rate; `found` gets what was tried, also where nothing is found. Raises BenchError.

    send: so many requests at a rate; None: one after the other.
    """
    found |= {"objectives": [str(objective) for objective in args.slo], "requests_per_second": None, "probes": []}
    [first] = await send(None, 1)
    if first.reply.error is not None:
        raise BenchError(f"the first request failed: {first.reply.error}")
    alone = 1000 / first.e2e_ms  # requests per second of one stream
    say = partial(print, file=sys.stderr, flush=True)
    search = Search(args.slo, send, say, args.probe_seconds, view=view)
    try:
        found["requests_per_second"] = await search.run(args.slo_start_rate or alone, alone / 2)
    finally:
        found["probes"] = [probe.row() for probe in search.probes]
    return float(found["requests_per_second"])


def sections(searches: Sequence[dict[str, Any]]) -> str:
    """What was found for each pair of lengths, and how."""
    parts = []
    for one in searches:
        wanted = " and ".join(one["objectives"])
        found = (
            "none was found" if one["requests_per_second"] is None else f"{one['requests_per_second']:.4g} requests/s"
        )
        lengths = f"{one['input_length']} in, {one['output_length']} out"
        parts.append(f"## Highest rate with {wanted}, {lengths}: {found}")
        parts += [slo_table(one["probes"])] if one["probes"] else []
    return "\n\n".join(parts)


def slo_table(rows: Sequence[dict[str, Any]]) -> str:
    """What was tried, in its order."""
    names = list(rows[0]["objectives_ms"])
    cells = [
        [
            f"{row['request_rate']:.4g}",
            row["requests"],
            *(_cell(row["objectives_ms"][name]) for name in names),
            row["missed"] or "held",
        ]
        for row in rows
    ]
    return table(("Requests/s", "Requests", *(f"{name} (found, ms)" for name in names), ""), cells, centred=True)


def _cell(value: float | None) -> str:
    return "-" if value is None else f"{value:.1f}"
