"""What a simulated run says: its figures, how they compare with a measured `serving` result, and the tables of both.

Figures have `serving`'s names where it has them, so that a prediction can be held against a measurement. Arithmetic and
text on what `fleet.Fleet` has counted: nothing is simulated here, and nothing says why a prediction is off.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from benchmark.fleet.replica import Tally
from benchmark.result import BenchError, Result, percentile, table
from benchmark.serving.outcomes import PERCENTILES, Load, percentiles

TARGETS = {"requests_per_second": 0.10, "ttft_ms": 0.20}  # how far a prediction may be off to count as right
COMPARED = ("requests_per_second", "output_tokens_per_second", "ttft_ms", "tpot_ms", "inter_token_ms", "e2e_ms")


# -------------------------------------------------------------------------------------------------------------- figures


def figures(tally: Tally, num_replicas: int, objectives: tuple[float | None, float | None]) -> dict[str, Any]:
    """What a row says, under `serving`'s names where it has them. objectives: TTFT and TPOT in ms, None: any."""
    seconds = tally.ended_at - tally.started_at
    return {
        "requests": tally.num_requests,
        "refused": tally.num_refused,
        "seconds": seconds,
        "requests_per_second": len(tally.e2e) / seconds,
        "output_tokens_per_second": tally.num_tokens / seconds,
        "while_arriving": _while_arriving(tally),
        "goodput": _goodput(tally, seconds, objectives),
        **times(tally),
        "inter_token_ms": _weighted_percentiles(tally.gaps, tally.gap_counts),
        "e2e_ms": percentiles(tally.e2e, 1000),
        "queue_ms": percentiles(tally.queued, 1000),
        "batch_size": {"mean": tally.batch / tally.busy, "peak": tally.peak_batch},
        "kv_share": {"mean": tally.kv / tally.busy, "peak": tally.peak_kv},
        "busy_share": tally.busy / (tally.ended_at * num_replicas),
        "steps": tally.num_steps,
        "mean_step_ms": 1000 * tally.busy / tally.num_steps,
        "tokens_per_step": tally.num_step_tokens / tally.num_steps,
        "fleet": _fleet(tally, seconds * num_replicas),
    }


def times(tally: Tally) -> dict[str, Any]:
    """Of the requests that have ended, those that objectives are about."""
    return {
        "ttft_ms": percentiles(tally.ttft, 1000),
        "tpot_ms": percentiles([value for value in tally.tpot if value], 1000),
    }


def _fleet(tally: Tally, seconds: float) -> dict[str, float]:
    """What is of a fleet alone; hours and tokens are those until the last arrival, which is when the load ends.

    seconds: of all replicas, where the tally does not know.
    """
    has_window = tally.last_arrival_at > tally.started_at
    until_then, all_tokens = tally.given_by_then + tally.prompts_by_then, tally.num_tokens + tally.num_prompts_sold
    num_tokens = until_then if has_window else all_tokens
    return {
        "prefix_hit_share": tally.num_cached_tokens / max(tally.num_prompt_tokens, 1),
        "transferred_gb": tally.transferred / 1e9,
        "replica_hours": (tally.paid_seconds or seconds) / 3600,
        "price": tally.price,
        "price_per_million_tokens": tally.price / max(num_tokens, 1) * 1e6,
    }


def _while_arriving(tally: Tally) -> dict[str, float] | None:
    """Throughput from the first arrival to the last: without the end, when replicas run empty. None for one moment."""
    seconds = tally.last_arrival_at - tally.started_at
    if seconds <= 0:
        return None
    return {
        "seconds": seconds,
        "requests_per_second": tally.ended_by_then / seconds,
        "output_tokens_per_second": tally.given_by_then / seconds,
    }


def _goodput(tally: Tally, seconds: float, objectives: tuple[float | None, float | None]) -> dict[str, Any] | None:
    """How many requests met the objectives; refused ones did not. None without objectives."""
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


def _weighted_percentiles(values: Sequence[float], counts: Sequence[int]) -> dict[str, float] | None:
    """Mean and percentiles, in milliseconds, of values in seconds that were seen `counts` times each."""
    if not values:
        return None
    seconds, seen = np.asarray(values), np.asarray(counts)
    order = np.argsort(seconds, kind="stable")
    upto = np.cumsum(seen[order])
    total = int(upto[-1])
    ranks = {name: percentile(range(total), float(name[1:])) for name in PERCENTILES}
    found = {name: seconds[order[np.searchsorted(upto, rank, side="right")]] for name, rank in ranks.items()}
    return {"mean": 1000 * float(seconds @ seen) / total} | {name: 1000 * float(at) for name, at in found.items()}


# ----------------------------------------------------------------------------------------------------------- comparison


def read_serving(path: Path) -> dict[str, Any]:
    """Read a result.json of `serving`. Raises BenchError when it is none, or has no rows."""
    try:
        result = json.loads(path.read_text())
        is_serving = result["command"] == "serving" and len(result["rows"]) > 0
    except OSError as error:
        raise BenchError(f"cannot read {path}: {error.strerror}; give the result.json of a serving run") from None
    except (ValueError, KeyError, TypeError):
        is_serving = False
    if not is_serving:
        raise BenchError(f"{path} is no result of a serving run, or has no rows: give the result.json of one")
    for row in result["rows"]:
        usual = {"ramp": None, "burstiness": 1.0, "max_concurrency": None, "trace": None}
        if unusual := [name for name, value in usual.items() if row.get(name, value) != value]:
            raise BenchError(
                f"{path} has a row with {unusual[0]} {row[unusual[0]]}, and only closed loops and arrivals at random "
                "of one rate are simulated again: measure those"
            )
    return dict(result)


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


def remarks(measured: Mapping[str, Any] | None) -> Iterator[str]:
    """Sentences on what makes the measured result and a simulation of it differ."""
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


# --------------------------------------------------------------------------------------------------------------- tables


def sentence(row: Mapping[str, Any]) -> str:
    """A simulated row in one line."""
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
        return value if isinstance(value, str) else "-" if value is None else format(scale * value, form)

    return cell


def _latency(title: str, key: str) -> list[Column]:
    return [(f"{title} {name} (ms)", _of(key, name)) for name in PERCENTILES]


TABLES: Sequence[Sequence[Column]] = (
    (
        ("Throughput (requests/s)", _of("requests_per_second")),
        ("Throughput (output token/s)", _of("output_tokens_per_second")),
        ("While requests came (requests/s)", _of("while_arriving", "requests_per_second")),
        ("While requests came (token/s)", _of("while_arriving", "output_tokens_per_second")),
        ("Goodput (requests/s)", _of("goodput", "requests_per_second")),
        ("Met (%)", _of("goodput", "share", ".1f", 100)),
        ("Refused", _of("refused", form=".0f")),
        ("Queue", _of("queue", form="")),
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
    (
        ("Found in the prefix cache (%)", _of("fleet", "prefix_hit_share", ".1f", 100)),
        ("KV moved (GB)", _of("fleet", "transferred_gb", ".1f")),
        ("Replica hours", _of("fleet", "replica_hours")),
        ("Price", _of("fleet", "price")),
        ("Price per million tokens", _of("fleet", "price_per_million_tokens", ".4f")),
    ),
)


def _figure_table(rows: Sequence[Mapping[str, Any]], swept: Sequence[str], columns: Sequence[Column]) -> str:
    headers = ["Load", "In", "Out", *swept, *(title for title, _ in columns)]
    cells = [
        [
            _load(row),
            row["input_length"],
            row["output_length"],
            *(_setting(row["settings"][name]) for name in swept),
            *(cell(row) for _, cell in columns),
        ]
        for row in rows
    ]
    return table(headers, cells, centred=True)


def _setting(value: float | str | None) -> str:
    return f"{value:g}" if isinstance(value, int | float) else str(value)


def comparison_table(result: Result) -> str:
    """Predicted beside measured figures; empty without --compare."""
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
