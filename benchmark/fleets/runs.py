"""One row of `simulate`: a load under one setting, run through a fleet, or through fleets until one is large enough.

What a fleet is made of comes from `asked.py`, limits from the command, and what a row says from `prediction.py`.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from benchmark import traffic
from benchmark.fleet import Tally
from benchmark.fleets import asked, sizing
from benchmark.fleets.conditions import Pool
from benchmark.fleets.events import Fleet
from benchmark.fleets.steady import LEAST_REQUESTS, OPEN, Verdict, Watched
from benchmark.prediction import figures, times
from benchmark.progress import Progress
from benchmark.report import BenchError
from benchmark.traffic import Case, OpenLoop, Request

REPLICAS = "replicas"
REQUESTS_PER_REPLICA = 1000  # so that the beginning and the end of a run, which are unlike the rest, weigh little
MOST_PER_REPLICA = 5_000  # requests, until which it must be clear whether the fleet keeps up


@dataclass(frozen=True)
class Setting:
    """The values of one combination, and the pools that so many replicas make."""

    values: Mapping[str, Any]
    pools: Callable[[int], Sequence[Pool]]


@dataclass(frozen=True)
class Run:
    """Runs one load. trace: in place of a load that is drawn."""

    args: argparse.Namespace
    case: Case
    trace: Sequence[Request] | None

    def row(self, setting: Setting, view: Progress) -> dict[str, Any]:
        """The row under one setting, or that of the fewest replicas that keep the objectives. Raises BenchError."""
        if self.args.fewest_replicas is None:
            pools = setting.pools(setting.values[REPLICAS])
            count = self.num_requests(sum(pool.num_replicas for pool in pools))
            tally, verdict = self._run(pools, count, view.advance, until_clear=False)
            if not tally.e2e:
                raise BenchError(
                    f"none of {tally.num_requests} requests was answered, {tally.num_refused} were refused: give more "
                    "--replicas, --retries or a larger --max-concurrent-requests"
                )
            return self._row(setting, pools, tally, verdict)
        least = asked.least_replicas(self.args)
        share = 1 / sizing.num_runs(least, self.args.fewest_replicas)

        def with_replicas(count: int) -> sizing.Trial:
            trial = self._trial({**setting.values, REPLICAS: count}, setting)
            view.advance(share)
            print(f"{REPLICAS} {count}: {trial.problem or 'enough'}", file=sys.stderr)
            return trial

        return sizing.fewest(with_replicas, least, self.args.fewest_replicas, self._objectives)

    def num_requests(self, num_replicas: int) -> int:
        """How many requests a run has, where it does not go on until something is clear."""
        if self.trace is not None:
            return len(self.trace)
        return self.case.num_requests or REQUESTS_PER_REPLICA * num_replicas

    @property
    def _objectives(self) -> sizing.Objectives:
        return self.args.ttft_objective, self.args.tpot_objective

    def _trial(self, values: Mapping[str, Any], setting: Setting) -> sizing.Trial:
        """A fleet of so many replicas under the load, until it is clear whether it keeps up."""
        pools = setting.pools(values[REPLICAS])
        most = len(self.trace) if self.trace else self.case.num_requests or MOST_PER_REPLICA * values[REPLICAS]
        tally, verdict = self._run(pools, most, lambda share: None, until_clear=self.trace is None)
        if not tally.e2e:
            return sizing.Trial({}, "none of its requests was answered")
        row = self._row(Setting(values, setting.pools), pools, tally, verdict)
        if missed := sizing.missed(row, self._objectives):
            return sizing.Trial(row, missed if verdict.word == OPEN else self._overload(verdict) or missed)
        overload = self._overload(verdict)
        if overload and verdict.word == OPEN and self.case.num_requests:
            raise BenchError(f"of {values[REPLICAS]} replicas, {overload}: leave --num-requests out, or raise it")
        return sizing.Trial(row, overload)

    def _overload(self, verdict: Verdict) -> str:
        """Why a run shows no capacity. A trace is what it is: that its load changes says nothing of the fleet."""
        is_whole = self.trace is not None and verdict.num_requests >= LEAST_REQUESTS and verdict.word == OPEN
        return "" if is_whole else verdict.problem

    def _run(
        self, pools: Sequence[Pool], count: int, advance: Callable[[float], None], *, until_clear: bool
    ) -> tuple[Tally, Verdict]:
        args = self.args
        if self.trace is not None:
            drawn: traffic.Traffic = OpenLoop(iter(self.trace))
        elif until_clear:
            drawn = traffic.in_blocks(self.case, args, count)
        else:
            drawn = traffic.draw(self.case, args, count)
        tally = Tally()

        def is_missed() -> bool:
            return bool(sizing.missed(times(tally), self._objectives))

        watched = Watched(asked.prefixed(drawn, args), count, advance, is_missed if until_clear else None)
        Fleet(watched, pools, asked.conditions(args), args.dispatch, tally).run()
        return tally, watched.verdict

    def _row(self, setting: Setting, pools: Sequence[Pool], tally: Tally, verdict: Verdict) -> dict[str, Any]:
        """What the row is about, the limits, and the figures."""
        limits = pools[0].limits
        settled = {name: getattr(limits, name, value) for name, value in setting.values.items()}
        found = figures(tally, sum(pool.num_replicas for pool in pools), self._objectives)
        return {**traffic.about(self.case), "settings": settled, **found, "queue": verdict.word}
