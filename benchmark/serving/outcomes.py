"""One row of `serving`: what became of its requests, the figures that follow, and the tables that people read.

Arithmetic and text on finished requests; no clock, no sockets, so that every formula is tested with plain numbers.
Failed requests are counted by kind and never enter a latency. Tokens are counted as they came, not as asked for; where
several come in one event, which of them has how many is not said, so that a reply's tokens count evenly for its events.

A record of each request goes to a file beside the report: everything from which the figures follow, in seconds since
the row began, by the client's clock. It is written when the row has ended, so that no disk delays a request.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import pairwise
from pathlib import Path
from statistics import fmean
from typing import Any

import orjson

from benchmark.result import Result, SampleSummary, footer, percentile, table
from benchmark.serving.datasets import Lengths
from benchmark.serving.http_client import Reply

LATE_MS = 10.0  # a client that sends later than this needs more of the machine, or another machine
MANY_TOKENS = 1.1  # of an event: from here on its times are not those of tokens; an end token without text is less
LATENCIES = ("ttft_ms", "tpot_ms", "inter_token_ms", "e2e_ms")
PERCENTILES = ("p50", "p90", "p99")
QUANTILES = (*range(100), 99.5, 99.9, 100)  # in percent


@dataclass(frozen=True, slots=True)
class Load:
    """How requests come: exactly one of the first two is set."""

    concurrency: int | None = None
    request_rate: float | None = None  # the mean over the run
    ramp: tuple[float, float] | None = None  # the rate at the beginning and at the end, where it changes
    burstiness: float = 1.0  # standard deviation / mean of the gaps: 0 constant, 1 Poisson
    max_concurrency: int | None = None  # with a rate: so many at once, others wait at the client
    trace: str | None = None  # the file whose times are replayed

    def __str__(self) -> str:
        if self.request_rate is None:
            return f"{self.concurrency} concurrent"
        rates = f"{self.ramp[0]:g} to {self.ramp[1]:g}" if self.ramp else f"{self.request_rate:g}"
        gaps = {0.0: ", constant gaps", 1.0: ""}.get(self.burstiness, f", gaps' deviation / mean {self.burstiness:g}")
        cap = f", {self.max_concurrency} at once" if self.max_concurrency else ""
        return f"{rates} requests/s{f' of {self.trace}' if self.trace else gaps}{cap}"

    def to_json(self) -> dict[str, Any]:
        """The keys of a row that say what its load was."""
        return asdict(self) | {"ramp": list(self.ramp) if self.ramp else None}


def load_of(row: Mapping[str, Any]) -> Load:
    """The load of a row, also of one from before loads had more than their first two fields."""
    given = {name: row[name] for name in Load.__dataclass_fields__ if name in row}
    return Load(**given | ({"ramp": tuple(given["ramp"])} if given.get("ramp") else {}))


def loads(concurrencies: Iterable[int], request_rates: Iterable[float]) -> list[Load]:
    """A closed loop for each number of streams, then an open loop for each rate in requests per second."""
    closed = [Load(concurrency=concurrency) for concurrency in concurrencies]
    return closed + [Load(request_rate=rate) for rate in request_rates]


@dataclass(frozen=True, slots=True)
class Outcome:
    """One request: what was wanted, when it should have been sent, and what came. Times only where it succeeded."""

    lengths: Lengths
    intended_at: float  # of time.perf_counter
    reply: Reply
    held_s: float = 0.0  # how long the cap on concurrent requests kept it at the client
    turn: int = 0  # of its conversation
    adapter: str = ""  # that it named

    @property
    def is_short(self) -> bool:
        """Whether the answer has fewer tokens than were asked for."""
        return self.reply.num_tokens < self.lengths.output_length

    @property
    def ttft_ms(self) -> float:
        """Milliseconds from the intended sending to the first token."""
        return 1000 * (self.reply.token_times[0] - self.intended_at)

    @property
    def e2e_ms(self) -> float:
        """Milliseconds from the intended sending to the last token."""
        return 1000 * (self.reply.token_times[-1] - self.intended_at)

    @property
    def tpot_ms(self) -> float | None:
        """Mean milliseconds between two tokens; None for an answer of one token."""
        gaps = self.reply.num_tokens - 1
        return 1000 * (self.reply.token_times[-1] - self.reply.token_times[0]) / gaps if gaps else None

    @property
    def tokens_at(self) -> list[tuple[float, float]]:
        """When how many tokens came, by the clock of the reply: its tokens spread evenly over its events."""
        share = self.reply.num_tokens / max(1, len(self.reply.token_times))
        return [(at, share) for at in self.reply.token_times]

    @property
    def inter_token_ms(self) -> list[float]:
        """Milliseconds between each event with tokens and the one before it."""
        times = self.reply.token_times
        return [1000 * (after - before) for before, after in pairwise(times)]

    @property
    def latency_per_token_ms(self) -> float:
        """The end-to-end time for each token of prompt and answer."""
        return self.e2e_ms / (self.lengths.input_length + self.reply.num_tokens)

    @property
    def latency_per_output_token_ms(self) -> float:
        """The end-to-end time for each token of the answer."""
        return self.e2e_ms / self.reply.num_tokens


@dataclass(frozen=True, slots=True)
class Objectives:
    """What a request must keep to count as good; None: anything will do."""

    ttft_ms: float | None = None
    tpot_ms: float | None = None

    def are_met(self, outcome: Outcome) -> bool:
        """Whether a request that succeeded kept the objectives."""
        return (self.ttft_ms is None or outcome.ttft_ms <= self.ttft_ms) and (
            self.tpot_ms is None or (outcome.tpot_ms or 0.0) <= self.tpot_ms
        )


# -------------------------------------------------------------------------------------------------------------- figures


def row_of(
    cell: Lengths, load: Load, outcomes: Sequence[Outcome], objectives: Objectives, distribution: str = "fixed"
) -> dict[str, Any]:
    """One row of the JSON. The row's time runs from the first intended sending to the last end of any request."""
    in_order = sorted(outcomes, key=lambda one: one.intended_at)  # as the samples are
    good = [outcome for outcome in in_order if outcome.reply.error is None]
    kinds = Counter(outcome.reply.error for outcome in outcomes if outcome.reply.error is not None)
    began = min(outcome.intended_at for outcome in outcomes)
    seconds = max(outcome.reply.ended_at for outcome in outcomes) - began
    samples = _samples(good) | {
        "requests_per_second": stretch_rates(((o.reply.ended_at - began, 1) for o in good), seconds),
        "output_tokens_per_second": stretch_rates(
            ((at - began, tokens) for o in good for at, tokens in o.tokens_at), seconds
        ),
    }
    return {
        "input_length": cell.input_length,
        "output_length": cell.output_length,
        "length_distribution": distribution,
        **load.to_json(),
        "requests_per_second": len(good) / seconds,
        "output_tokens_per_second": sum(outcome.reply.num_tokens for outcome in good) / seconds,
        "latency_per_token_ms": _mean(samples["latency_per_token_ms"]),
        "latency_per_output_token_ms": _mean(samples["latency_per_output_token_ms"]),
        **{name: percentiles(samples[name]) for name in LATENCIES},
        "goodput": _goodput(good, len(outcomes), seconds, objectives),
        "errors": kinds.total(),
        "errors_by_kind": dict(sorted(kinds.items())),
        "requests": len(outcomes),
        "output_tokens": sum(outcome.reply.num_tokens for outcome in good),
        "token_events": sum(len(outcome.reply.token_times) for outcome in good),
        "asked_tokens": sum(outcome.lengths.output_length for outcome in outcomes),
        "short": sum(outcome.is_short for outcome in good),
        "other_input_length": sum(_is_other_input(outcome) for outcome in good),
        "seconds": seconds,
        "sent_late_ms": percentiles([1000 * (o.reply.sent_at - o.intended_at - o.held_s) for o in outcomes]),
        "held_ms": percentiles([1000 * o.held_s for o in outcomes]),
        "later_turns": sum(outcome.turn > 0 for outcome in outcomes),
        "inter_token_quantiles_ms": quantiles(samples["inter_token_ms"]),
        "samples": {name: values for name, values in samples.items() if name != "inter_token_ms"},
    }


def _samples(good: Sequence[Outcome]) -> dict[str, list[float]]:
    """One value a request, in the requests' order, but for inter_token_ms: one for each pair of events."""
    return {
        "ttft_ms": [outcome.ttft_ms for outcome in good],
        "tpot_ms": [tpot for outcome in good if (tpot := outcome.tpot_ms) is not None],
        "inter_token_ms": [gap for outcome in good for gap in outcome.inter_token_ms],
        "e2e_ms": [outcome.e2e_ms for outcome in good],
        "latency_per_token_ms": [outcome.latency_per_token_ms for outcome in good],
        "latency_per_output_token_ms": [outcome.latency_per_output_token_ms for outcome in good],
    }


def _mean(samples: Sequence[float]) -> float | None:
    return fmean(samples) if samples else None


def percentiles(samples: Sequence[float], scale: float = 1.0) -> dict[str, float] | None:
    """Mean, p50, p90 and p99 of the samples, each times `scale`; None without samples."""
    if not samples:
        return None
    summary = SampleSummary.of(samples)
    return {name: scale * getattr(summary, name) for name in ("mean", *PERCENTILES)}


def quantiles(samples: Sequence[float]) -> list[float]:
    """The samples' percentiles at `QUANTILES`, from which their distribution can be drawn; empty without samples."""
    ordered = sorted(samples)
    return [percentile(ordered, q) for q in QUANTILES] if ordered else []


def _goodput(good: Sequence[Outcome], num_sent: int, seconds: float, objectives: Objectives) -> dict[str, Any] | None:
    """How many requests met the objectives; failed ones did not. None without objectives."""
    if objectives == Objectives():
        return None
    met = sum(objectives.are_met(outcome) for outcome in good)
    return {
        "ttft_objective_ms": objectives.ttft_ms,
        "tpot_objective_ms": objectives.tpot_ms,
        "share": met / num_sent,
        "requests_per_second": met / seconds,
    }


def _is_other_input(outcome: Outcome) -> bool:
    counted = outcome.reply.num_prompt_tokens
    return outcome.turn == 0 and counted is not None and counted != outcome.lengths.input_length


# --------------------------------------------------------------------------------------------------------------- tables


def progress(row: Mapping[str, Any], load: Load) -> str:
    """A finished row in one line."""
    rates = f"{row['requests_per_second']:.2f} requests/s, {row['output_tokens_per_second']:.2f} output token/s"
    return f"{row['input_length']} in, {row['output_length']} out, {load}: {rates}, {row['errors']} errors"


def markdown(result: Result) -> str:
    """The published sweeps' table for each load, then what it leaves out."""
    parts = [f"# {result.context.model}"]
    by_load: dict[Load, list[dict[str, Any]]] = {}
    for row in result.rows:
        by_load.setdefault(load_of(row), []).append(row)
    for load, rows in by_load.items():
        parts += [f"## {load}", throughput_table(rows), latency_table(rows)]
        parts += [goodput_table(rows)] if rows[0]["goodput"] else []
        parts += ["\n".join(f"- {line}" for row in rows for line in remarks(row))]
    return "\n\n".join(part for part in [*parts, footer(result)] if part)


def throughput_table(rows: Sequence[Mapping[str, Any]]) -> str:
    """Requests and tokens per second of each row, and mean latencies."""
    headers = (
        "Input Length", "Output Length", "Throughput (requests/s)", "Throughput (output token/s)",
        "Average latency per token (ms)", "Average latency per output token (ms)",
    )  # fmt: skip
    names = (
        "requests_per_second", "output_tokens_per_second", "latency_per_token_ms", "latency_per_output_token_ms",
    )  # fmt: skip
    cells = [[row["input_length"], row["output_length"], *(_cell(row[name]) for name in names)] for row in rows]
    return table(headers, cells, centred=True)


def latency_table(rows: Sequence[Mapping[str, Any]]) -> str:
    """Percentiles of each latency in milliseconds, a line for each row."""
    titles = ("TTFT", "TPOT", "Inter-token", "E2E")
    headers = [f"{title} {name} (ms)" for title in titles for name in PERCENTILES]
    cells = [
        [
            row["input_length"],
            row["output_length"],
            *(_cell((row[latency] or {}).get(name)) for latency in LATENCIES for name in PERCENTILES),
            f"{row['errors']} of {row['requests']}",
        ]
        for row in rows
    ]
    return table(("Input Length", "Output Length", *headers, "Errors"), cells, centred=True)


def goodput_table(rows: Sequence[Mapping[str, Any]]) -> str:
    """Which share of the requests met the objectives, and how many of those came in a second."""
    headers = (
        "Input Length", "Output Length", "TTFT objective (ms)", "TPOT objective (ms)", "Met (%)",
        "Goodput (requests/s)",
    )  # fmt: skip
    cells = [
        [
            row["input_length"],
            row["output_length"],
            _cell(row["goodput"]["ttft_objective_ms"]),
            _cell(row["goodput"]["tpot_objective_ms"]),
            f"{100 * row['goodput']['share']:.1f}",
            _cell(row["goodput"]["requests_per_second"]),
        ]
        for row in rows
    ]
    return table(headers, cells, centred=True)


def _cell(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f}"


def remarks(row: Mapping[str, Any]) -> Iterator[str]:
    """Sentences on rows that a reader would take for something else."""
    name = f"{row['input_length']} x {row['output_length']}"
    if row["errors"]:
        kinds = ", ".join(f"{count} {kind}" for kind, count in row["errors_by_kind"].items())
        which = "all requests" if row["errors"] == row["requests"] else f"{row['errors']} of {row['requests']} requests"
        yield f"{name}: {which} failed: {kinds}."
    if row["short"]:
        yield f"{name}: {row['short']} of {row['requests']} answers were short: the model ended them by itself."
    if row["output_tokens"] > MANY_TOKENS * row["token_events"]:
        yield (
            f"{name}: {row['output_tokens']} tokens came in {row['token_events']} events: times between tokens are "
            "those between events."
        )
    if limits := row.get("client", {}).get("limits"):
        yield (
            f"**{name}: the client limited this run**, so its figures are worse than the server's: "
            f"{' and '.join(limits)}. Give it a core of its own, or another machine."
        )
    if row.get("sent_again"):
        yield (
            f"{name}: {row['sent_again']} prompts were sent again after all {row['drawn_requests']} were used up: a "
            "prefix cache may have answered for them. Give a higher --num-requests."
        )
    if row.get("max_concurrency") and row["held_ms"]["p99"] > LATE_MS:
        yield f"{name}: the cap kept 1 % of the requests at the client for {row['held_ms']['p99']:.0f} ms or more."
    if row["other_input_length"]:
        yield f"{name}: the server counted another prompt length in {row['other_input_length']} requests."


# -------------------------------------------------------------------------------------------------------------- records


RECORDS_FILE = "requests.jsonl"


def records_of(row: int, outcomes: Sequence[Outcome], began: float) -> Iterator[dict[str, Any]]:
    """A record of each request in the order of their intended sending. began: of the row, by time.perf_counter."""
    for number, one in enumerate(sorted(outcomes, key=lambda one: one.intended_at)):
        reply = one.reply
        times = [round(at - began, 6) for at in reply.token_times]
        yield {
            "row": row,
            "request": number,
            "turn": one.turn,
            "adapter": one.adapter or None,
            "intended_s": round(one.intended_at - began, 6),
            "sent_s": round(reply.sent_at - began, 6),
            "held_s": round(one.held_s, 6),
            "first_token_s": times[0] if times else None,
            "token_s": times,
            "ended_s": round(reply.ended_at - began, 6),
            "input_length": one.lengths.input_length,
            "output_length": one.lengths.output_length,
            "prompt_tokens": reply.num_prompt_tokens,
            "output_tokens": reply.num_tokens,
            "status": reply.status,
            "error": reply.error,
            "detail": reply.detail,
        }


class Records:
    """The file of a run's records; nothing without a folder."""

    def __init__(self, folder: Path | None) -> None:
        self._path = folder and folder / RECORDS_FILE
        self._rows = 0

    def add(self, outcomes: Sequence[Outcome], began: float) -> None:
        """Append the records of the next row. A full disk is a warning: the report has the row's figures."""
        row, self._rows = self._rows, self._rows + 1
        if self._path is None:
            return
        try:
            with self._path.open("ab" if row else "wb") as file:
                file.writelines(orjson.dumps(one) + b"\n" for one in records_of(row, outcomes, began))
        except OSError as error:
            print(f"warning: cannot write {self._path}: {error.strerror}; free some space", file=sys.stderr)


# ------------------------------------------------------------------------------------------------------------ stretches


STRETCHES = 400  # of a run, so that what comes in waves can be seen to


def stretch_rates(ended: Iterable[tuple[float, float]], seconds: float) -> list[float]:
    """Per second, what ended in each of `STRETCHES` equal parts of a run; their mean is the rate of the whole run.

    ended: how much, and how many seconds after the run's beginning. Empty for a run without length.
    """
    if seconds <= 0:
        return []
    amounts = [0.0] * STRETCHES
    for after, amount in ended:
        amounts[min(max(int(after / seconds * STRETCHES), 0), STRETCHES - 1)] += amount
    return [amount * STRETCHES / seconds for amount in amounts]
