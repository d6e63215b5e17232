"""The figures of `latency`: what follows from the runs of one batch size, and the tables that people read.

Arithmetic and text on finished runs; no clock and no shards, so that every formula is tested with plain numbers.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from statistics import median
from typing import Any

from benchmark.ceilings import Ceilings
from benchmark.report import SampleSummary, table
from benchmark.roofline import BytesAndFlops, ServedModel
from benchmark.steps import Times

STEPS = {"prefill": "Prefill", "decode_token": "Decode (token)", "decode_total": "Decode (total)"}
THROUGHPUT_STEPS = {"prefill": "Prefill", "decode_total": "Decode"}


@dataclass
class Point:
    """The runs of one batch size, in milliseconds."""

    batch_size: int
    sequence_length: int
    decode_length: int
    runs: list[Times] = field(default_factory=list)
    ceilings: list[Ceilings] = field(default_factory=list)  # beside each run; empty where no floor is known
    num_shard: int = 1

    @property
    def samples_ms(self) -> dict[str, list[float]]:
        """One value per run for each step of `STEPS`, to a tenth of a microsecond."""
        totals = [round(1000 * times.decode, 4) for times in self.runs]
        return {
            "prefill": [round(1000 * times.prefill, 4) for times in self.runs],
            "decode_token": [round(total / (self.decode_length - 1), 4) for total in totals],
            "decode_total": totals,
        }

    @property
    def computed_ms(self) -> dict[str, list[float]]:
        """For each sample the milliseconds in which, as it says, the first rank computed."""
        totals = [1000 * times.decode_computed for times in self.runs]
        return {
            "prefill": [1000 * times.prefill_computed for times in self.runs],
            "decode_token": [total / (self.decode_length - 1) for total in totals],
            "decode_total": totals,
        }

    def tokens(self, step: str) -> int:
        """Tokens that one sample of the step covers."""
        counts = {"prefill": self.sequence_length, "decode_token": 1, "decode_total": self.decode_length - 1}
        return self.batch_size * counts[step]

    def throughputs(self, step: str) -> list[float]:
        """Tokens per second of the step in each run."""
        return [1000 * self.tokens(step) / sample for sample in self.samples_ms[step]]

    def needed(self, step: str, served: ServedModel) -> BytesAndFlops:
        """What one sample of the step needs at least."""
        if step == "prefill":
            return served.prefill(self.batch_size, self.sequence_length)
        one = served.mean_decode(self.batch_size, self.sequence_length, self.decode_length)
        return one.times(1 if step == "decode_token" else self.decode_length - 1)


def rows(points: Sequence[Point], served: ServedModel | None) -> list[dict[str, Any]]:
    """The rows of the JSON, in the order of the tables."""
    return [_row(point, step, served) for step in STEPS for point in points]


def _row(point: Point, step: str, served: ServedModel | None) -> dict[str, Any]:
    samples = point.samples_ms[step]
    summary = SampleSummary.of(samples)
    floors = [] if served is None else [point.needed(step, served).floor_ms(ceilings) for ceilings in point.ceilings]
    percents = [100 * floor / sample for floor, sample in zip(floors, samples, strict=True)] if floors else []
    return {
        "step": step,
        "num_shard": point.num_shard,
        "batch_size": point.batch_size,
        "mean_ms": summary.mean,
        "min_ms": summary.min,
        "max_ms": summary.max,
        "p50_ms": summary.p50,
        "p90_ms": summary.p90,
        "p99_ms": summary.p99,
        "computed_p50_ms": SampleSummary.of(point.computed_ms[step]).p50,
        "tokens_per_second": SampleSummary.of(point.throughputs(step)).mean,
        "floor_ms": median(floors) if floors else None,
        "percent_of_limit": median(percents) if percents else None,
        "limit": point.ceilings[0].source if point.ceilings else None,  # what the share is a share of
        "ceilings": [asdict(ceilings) for ceilings in point.ceilings],  # beside each sample
        "samples_ms": samples,
        "tokens_per_sample": point.tokens(step),
    }


def latency_table(rows: Sequence[dict[str, Any]]) -> str:
    """Times of each step in milliseconds, as TGI's benchmark prints them."""
    names = ("mean_ms", "min_ms", "max_ms", "p50_ms", "p90_ms", "p99_ms")
    cells = [[STEPS[r["step"]], r["batch_size"], *(f"{r[name]:.2f} ms" for name in names)] for r in rows]
    return table(("Step", "Batch Size", "Average", "Lowest", "Highest", "p50", "p90", "p99"), cells)


def throughput_table(rows: Sequence[dict[str, Any]]) -> str:
    """Tokens per second of prefill and decode, as TGI's benchmark prints them."""
    cells = [[THROUGHPUT_STEPS[r["step"]], r["batch_size"], *_rates(r)] for r in rows if r["step"] in THROUGHPUT_STEPS]
    return table(("Step", "Batch Size", "Average", "Lowest", "Highest"), cells)


def _rates(row: dict[str, Any]) -> list[str]:
    return [f"{rate:.2f} tokens/secs" for rate in throughputs_of(row)]


def throughputs_of(row: Mapping[str, Any]) -> tuple[float, float, float]:
    """Tokens per second of a row's runs: their mean, the lowest and the highest."""
    rates = SampleSummary.of([1000 * row["tokens_per_sample"] / sample for sample in row["samples_ms"]])
    return rates.mean, rates.min, rates.max


def of_splits(rows: Sequence[dict[str, Any]]) -> dict[int, list[dict[str, Any]]]:
    """The rows by the number of shards."""
    found: dict[int, list[dict[str, Any]]] = {}
    for row in rows:
        found.setdefault(row["num_shard"], []).append(row)
    return found


def efficiencies(rows: Sequence[dict[str, Any]], *, is_shared: bool) -> list[tuple[str, int, dict[int, float]]]:
    """Of each step and batch size: (step, batch size, {number of shards: efficiency}).

    Efficiency: time with the fewest shards x their devices / (time x devices). 1: twice as many need half as long.
    is_shared: all shards are on one device, whatever their number.
    """
    least = min(row["num_shard"] for row in rows)
    costs = [row["mean_ms"] * (1 if is_shared else row["num_shard"]) for row in rows]
    abouts = [(row["step"], row["batch_size"]) for row in rows]
    base = {about: cost for about, cost, row in zip(abouts, costs, rows, strict=True) if row["num_shard"] == least}
    found: dict[tuple[str, int], dict[int, float]] = {about: {} for about in base}
    for about, cost, row in zip(abouts, costs, rows, strict=True):
        if about in base:
            found[about][row["num_shard"]] = base[about] / cost
    return [(step, batch_size, by_count) for (step, batch_size), by_count in found.items()]


def efficiency_table(rows: Sequence[dict[str, Any]], *, is_shared: bool) -> str:
    """How much of each further shard arrives; empty where there is one split."""
    counts = list(of_splits(rows))
    if len(counts) < 2:
        return ""
    fewest = f"time with {min(counts)} shard{'s' if min(counts) > 1 else ''}"
    formula = f"{fewest} / time, as all share the cores" if is_shared else f"{fewest} × {min(counts)} / (time × shards)"
    title = f"Efficiency: {formula}, of averages."
    cells = [
        [STEPS[step], batch_size, *(f"{100 * by_count[n]:.1f} %" if n in by_count else "-" for n in counts)]
        for step, batch_size, by_count in efficiencies(rows, is_shared=is_shared)
    ]
    return f"{title}\n\n{table(('Step', 'Batch Size', *(f'{n} shards' for n in counts)), cells)}"


def floor_table(rows: Sequence[dict[str, Any]]) -> str:
    """The floor of each row and how near it came; empty where no floor is known."""
    known = [row for row in rows if row["floor_ms"] is not None]
    cells = [
        [STEPS[r["step"]], r["batch_size"], f"{r['p50_ms']:.2f} ms", f"{r['floor_ms']:.2f} ms", _percent(r)]
        for r in known
    ]
    if not known:
        return ""
    return table(("Step", "Batch Size", "p50", "Floor", f"% of limit ({known[0]['limit']})"), cells)


def _percent(row: dict[str, Any]) -> str:
    return f"{row['percent_of_limit']:.1f} %"
