"""`lockstep-bench latency --profile`: where the time of a step goes, so that the next person starts from facts.

One run of each batch size under a profiler on the first rank. A step's time is split three ways: operators (or, on a
GPU, kernels), what the shard's own code adds around them, and the wire with everything that the other side does. The
profiler slows short operators down, so these runs are not among the recorded ones.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmark.report import table
from benchmark.steps import StepDriver
from router.client import OperatorTime, Shards
from router.entry import Sampling

MOST_DECODES = 16  # steps: enough for a mean, few enough for a trace that a browser opens
SHOWN = 12  # operators in a table


@dataclass(frozen=True)
class Profile:
    """The mean step of one phase, in milliseconds."""

    phase: str
    batch_size: int
    steps: int
    step_ms: float  # from request to reply, or between replies
    computed_ms: float  # of that, from the shard's start of the step to its sampled tokens
    operators: Sequence[OperatorTime]  # of all steps together

    def rows(self) -> list[dict[str, Any]]:
        """Where a step's time goes: operators, then the host, then the wire."""
        busy = sum(operator.self_ns for operator in self.operators) / 1e6 / self.steps
        shown = [(o.name, o.calls / self.steps, o.self_ns / 1e6 / self.steps) for o in self.operators[:SHOWN]]
        others = self.operators[SHOWN:]
        if others:
            rest = sum(o.self_ns for o in others) / 1e6 / self.steps
            shown.append((f"{len(others)} others", sum(o.calls for o in others) / self.steps, rest))
        shown.append(("host: the shard around them", 0, max(0.0, self.computed_ms - busy)))
        shown.append(("wire: request, reply, waiting", 0, max(0.0, self.step_ms - max(busy, self.computed_ms))))
        return [
            {
                "phase": self.phase,
                "batch_size": self.batch_size,
                "where": name,
                "calls_per_step": calls,
                "ms_per_step": milliseconds,
                "percent": 100 * milliseconds / self.step_ms,
            }
            for name, calls, milliseconds in shown
        ]


async def profile_batch(
    shards: Shards,
    driver: StepDriver,
    prompts: Sequence[Sequence[int]],
    sampling: Sequence[Sampling],
    decode_length: int,
    output: Path | None,
) -> list[Profile]:
    """Run one batch under the profiler. Traces go to the folder `output`, where there is one."""
    batch_size, decodes = len(prompts), min(decode_length - 1, MOST_DECODES)
    recorded: dict[str, list[OperatorTime]] = {}

    @asynccontextmanager
    async def watch(phase: str) -> AsyncIterator[None]:
        await shards.start_profile()
        yield
        trace = output / f"trace-{phase}-{batch_size}.json" if output else None
        recorded[phase] = await shards.stop_profile(str(trace.resolve()) if trace else "")

    times = await driver.run(prompts, 1 + decodes, sampling, watch=watch)
    return [
        _profile("prefill", batch_size, 1, times.prefill, times.prefill_computed, recorded["prefill"]),
        _profile("decode", batch_size, decodes, times.decode, times.decode_computed, recorded["decode"]),
    ]


def _profile(
    phase: str, batch_size: int, steps: int, seconds: float, computed: float, operators: Sequence[OperatorTime]
) -> Profile:
    return Profile(phase, batch_size, steps, 1000 * seconds / steps, 1000 * computed / steps, operators)


def profile_table(rows: Sequence[dict[str, Any]]) -> str:
    """One table of all profiles; empty where none was asked for."""
    cells = [
        [
            row["phase"],
            row["batch_size"],
            row["where"],
            f"{row['calls_per_step']:.0f}" if row["calls_per_step"] else "",
            f"{row['ms_per_step']:.2f} ms",
            f"{row['percent']:.1f} %",
        ]
        for row in rows
    ]
    return table(("Step", "Batch Size", "Where", "Calls", "Time", "Share"), cells) if cells else ""
