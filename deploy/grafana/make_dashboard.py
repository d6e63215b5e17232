"""Writes the dashboard: `python deploy/grafana/make_dashboard.py > deploy/grafana/lockstep.json`.

The panels are a table at the end of this file; what is before it gives them the form that Grafana imports. A test
compares the file with what this makes, another looks up every metric in `/metrics`, and `python -m tests.dashboard`
asks a real Prometheus every query.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

SCHEMA_VERSION = 41  # of Grafana's dashboards
DATASOURCE = {"type": "prometheus", "uid": "${datasource}"}
INSTANCES = '{instance=~"$instance"}'
COLUMNS = 24  # of Grafana's grid

Json = dict[str, Any]


@dataclass(frozen=True)
class Query:
    """One PromQL expression and the name of its lines, in which {{label}} is the value of a label."""

    expression: str
    legend: str


@dataclass(frozen=True)
class Panel:
    """One graph, or one number where `is_number`. Units are by Grafana's names."""

    title: str
    unit: str
    queries: Sequence[Query]
    description: str = ""
    most: float | None = None
    is_stacked: bool = False
    is_number: bool = False


def gauge(name: str, legend: str, by: str = "") -> Query:
    """The sum over all chosen servers."""
    return Query(total(name + INSTANCES, by), legend)


def rate(name: str, legend: str, by: str = "") -> Query:
    """How quickly a counter rises, a second."""
    return Query(rate_of(name, by), legend)


def quantiles(name: str, by: str = "") -> list[Query]:
    """Half, 95 and 99 of 100 observations of a histogram are below these; of each value of the label `by`."""
    prefix = f"{{{{{by}}}}} " if by else ""
    labels = f"le, {by}" if by else "le"
    return [
        Query(f"histogram_quantile({q}, {rate_of(f'{name}_bucket', labels)})", f"{prefix}p{q * 100:g}")
        for q in (0.5, 0.95, 0.99)
    ]


def ratio(part: str, whole: str, legend: str) -> Query:
    """One expression of another."""
    return Query(f"{part} / {whole}", legend)


def rate_of(name: str, by: str = "") -> str:
    """The expression of `rate`."""
    return total(f"rate({name}{INSTANCES}[$__rate_interval])", by)


def total(expression: str, by: str = "") -> str:
    """The sum of a vector, for each value of the labels `by`."""
    return f"sum by ({by}) ({expression})" if by else f"sum({expression})"


def dashboard() -> Json:
    """What Grafana imports."""
    return {
        "annotations": {"list": []},
        "description": "A Lockstep server: requests, latency, batch, KV cache, steps, recoveries and API keys.",
        "editable": True,
        "graphTooltip": 1,
        "links": [],
        "panels": list(numbered(PANELS)),
        "refresh": "10s",
        "schemaVersion": SCHEMA_VERSION,
        "tags": ["lockstep", "text-generation"],
        "templating": {"list": [datasource_variable(), instance_variable()]},
        "time": {"from": "now-30m", "to": "now"},
        "timepicker": {},
        "timezone": "browser",
        "title": "Lockstep",
        "uid": "lockstep",
        "version": 1,
    }


def numbered(rows: dict[str, list[Panel]]) -> Iterator[Json]:
    """Rows and panels in their places: each row of a heading and lines of three graphs or of six numbers."""
    y, id = 0, 0
    for title, panels in rows.items():
        id += 1
        yield {
            "collapsed": False, "gridPos": place(0, y, COLUMNS, 1), "id": id, "panels": [], "title": title,
            "type": "row",
        }  # fmt: skip
        y += 1
        width, height = (4, 4) if panels[0].is_number else (8, 8)
        for number, panel in enumerate(panels):
            id += 1
            line, column = divmod(number, COLUMNS // width)
            yield {"id": id, "gridPos": place(column * width, y + line * height, width, height)} | body(panel)
        y += -(-len(panels) * width // COLUMNS) * height


def place(x: int, y: int, width: int, height: int) -> Json:
    """Where a panel is."""
    return {"h": height, "w": width, "x": x, "y": y}


def body(panel: Panel) -> Json:
    """All of a panel but its place."""
    defaults: Json = {"color": {"mode": "palette-classic"}, "mappings": [], "min": 0, "unit": panel.unit}
    if panel.most is not None:
        defaults["max"] = panel.most
    if not panel.is_number:
        defaults["custom"] = {
            "drawStyle": "line",
            "fillOpacity": 30 if panel.is_stacked else 8,
            "lineWidth": 1,
            "showPoints": "never",
            "stacking": {"group": "A", "mode": "normal" if panel.is_stacked else "none"},
        }
    return {
        "datasource": DATASOURCE,
        "description": panel.description,
        "fieldConfig": {"defaults": defaults, "overrides": []},
        "options": options_of_a_number() if panel.is_number else options_of_a_graph(),
        "targets": [
            {
                "datasource": DATASOURCE,
                "editorMode": "code",
                "expr": query.expression,
                "legendFormat": query.legend,
                "range": True,
                "refId": chr(ord("A") + number),
            }
            for number, query in enumerate(panel.queries)
        ],
        "title": panel.title,
        "type": "stat" if panel.is_number else "timeseries",
    }


def options_of_a_graph() -> Json:
    """The legend is a table below the graph."""
    return {
        "legend": {"calcs": ["mean", "max"], "displayMode": "table", "placement": "bottom", "showLegend": True},
        "tooltip": {"mode": "multi", "sort": "desc"},
    }


def options_of_a_number() -> Json:
    """The latest value before its history."""
    return {
        "colorMode": "value",
        "graphMode": "area",
        "justifyMode": "auto",
        "orientation": "auto",
        "percentChangeColorMode": "standard",
        "reduceOptions": {"calcs": ["lastNotNull"], "fields": "", "values": False},
        "showPercentChange": False,
        "textMode": "auto",
        "wideLayout": True,
    }


def datasource_variable() -> Json:
    """Which Prometheus."""
    return {
        "hide": 0,
        "includeAll": False,
        "label": "Data source",
        "multi": False,
        "name": "datasource",
        "options": [],
        "query": "prometheus",
        "refresh": 1,
        "regex": "",
        "type": "datasource",
    }


def instance_variable() -> Json:
    """Which servers."""
    query = "label_values(tgi_queue_size, instance)"
    return {
        "allValue": ".*",
        "current": {"selected": True, "text": ["All"], "value": ["$__all"]},
        "datasource": DATASOURCE,
        "hide": 0,
        "includeAll": True,
        "label": "Server",
        "multi": True,
        "name": "instance",
        "options": [],
        "query": {"query": query, "refId": "PrometheusVariableQueryEditor-VariableQuery"},
        "refresh": 2,
        "regex": "",
        "sort": 1,
        "type": "query",
    }


FOUND = rate_of("tgi_request_prefix_hit_tokens")
COMPUTED = rate_of("tgi_batch_prefill_tokens")
BLOCKS = total("tgi_kv_blocks_total" + INSTANCES)
FREE_BLOCKS = total("tgi_kv_blocks_free" + INSTANCES)
FULLEST = Query(f"max(tgi_kv_used_ratio{INSTANCES})", "of the fullest")
# A token is counted where it is timed: the first of a request there, every other one here.
TOKENS = (
    f"{rate_of('tgi_request_inter_token_duration_count')} + {rate_of('tgi_request_time_to_first_token_duration_count')}"
)

PANELS: dict[str, list[Panel]] = {
    "Now": [
        Panel("Requests", "reqps", [rate("tgi_request_count", "received")], is_number=True),
        Panel("Tokens", "cps", [Query(TOKENS, "generated")], "Delivered to clients, a second.", is_number=True),
        Panel(
            "Time to first token", "s", [quantiles("tgi_request_time_to_first_token_duration")[1]], is_number=True,
        ),
        Panel("Between tokens", "s", [quantiles("tgi_request_inter_token_duration")[1]], is_number=True),
        Panel("Waiting", "short", [gauge("tgi_queue_size", "requests")], is_number=True),
        Panel(
            "KV cache in use", "percentunit",
            [Query(f"1 - {FREE_BLOCKS} / {BLOCKS}", "used"), FULLEST], most=1, is_number=True,
        ),
    ],
    "Requests and errors": [
        Panel(
            "Requests", "reqps",
            [
                rate("tgi_request_count", "received"),
                rate("tgi_request_success", "completed"),
                rate("tgi_request_failure", "not completed"),
            ],
        ),
        Panel(
            "Not completed, by reason", "reqps", [rate("tgi_request_failure", "{{err}}", "err")],
            "overloaded: more than the server or the key may have; dropped: the client went away.", is_stacked=True,
        ),
        Panel("Deadlines passed, by stage", "reqps", [rate("tgi_request_timeout", "{{stage}}", "stage")]),
        Panel(
            "Tokens", "cps",
            [Query(TOKENS, "generated"), Query(COMPUTED, "of prompts, computed")],
            "A second.",
        ),
        Panel(
            "Tokens in vain", "cps",
            [rate("tgi_request_surplus_tokens", "computed and dropped")],
            "After an end, or of a preempted request.",
        ),
        Panel(
            "Lengths", "short",
            [
                Query(quantiles("tgi_request_input_length")[1].expression, "prompt p95"),
                Query(quantiles("tgi_request_max_new_tokens")[1].expression, "asked for p95"),
                Query(quantiles("tgi_request_generated_tokens")[1].expression, "generated p95"),
            ],
            "Tokens of a request.",
        ),
    ],
    "Latency": [
        Panel(
            "Time to first token", "s", quantiles("tgi_request_time_to_first_token_duration"), "Waiting included.",
        ),
        Panel("Between tokens", "s", quantiles("tgi_request_inter_token_duration"), "Of one request."),
        Panel("Waiting for admission", "s", quantiles("tgi_request_queue_duration")),
        Panel("Whole requests", "s", quantiles("tgi_request_duration")),
        Panel("Generation", "s", quantiles("tgi_request_inference_duration"), "From admission to the last token."),
        Panel("Validation", "s", quantiles("tgi_request_validation_duration"), "From arrival to the queue."),
        Panel("Mean time per token", "s", quantiles("tgi_request_mean_time_per_token_duration"), "Of each request."),
    ],
    "Queue and batch": [
        Panel(
            "Requests", "short",
            [
                gauge("tgi_batch_current_size", "running"), gauge("tgi_batch_held_size", "held by grammars"),
                gauge("tgi_queue_size", "waiting"),
            ],
            "Held requests run, but wait until their grammar allows the next token.",
        ),
        Panel("Prompt and new tokens of waiting requests, at most", "short", [gauge("tgi_queue_tokens", "waiting")]),
        Panel(
            "Tokens reserved", "short",
            [
                gauge("tgi_batch_current_max_tokens", "reserved"),
                gauge("tgi_batch_max_total_tokens", "most"),
            ],
        ),
        Panel("Admitted in one step", "short", quantiles("tgi_batch_next_size")),
        Panel(
            "Joining a running batch", "cps", [rate("tgi_batch_concat", "{{reason}}", "reason")],
            "backpressure: enough were waiting; wait_exceeded: they had waited for enough steps.",
        ),
        Panel("Preempted for another key", "cps", [rate("tgi_request_preempted", "requests")]),
        Panel(
            "Largest since the start", "short",
            [
                gauge("tgi_batch_peak_batch_size", "requests running"),
                gauge("tgi_batch_peak_reserved_tokens", "tokens reserved"),
                gauge("tgi_batch_peak_prefill_tokens", "prompt tokens in a step"),
            ],
        ),
    ],
    "KV cache and prefixes": [
        Panel(
            "KV blocks", "short",
            [Query(f"{BLOCKS} - {FREE_BLOCKS}", "held by requests"), Query(FREE_BLOCKS, "free")],
            "Free blocks may hold prefixes that can be found again.", is_stacked=True,
        ),
        Panel(
            "Prompt tokens", "cps", [Query(FOUND, "found in the cache"), Query(COMPUTED, "computed")],
            is_stacked=True,
        ),
        Panel(
            "Prefix hits", "percentunit", [ratio(FOUND, f"({FOUND} + {COMPUTED})", "of prompt tokens")], most=1,
        ),
    ],
    "Steps": [
        Panel("Steps", "cps", [rate("tgi_batch_inference_count", "{{method}}", "method")], is_stacked=True),
        Panel(
            "From sending a step to its reply", "s", quantiles("tgi_batch_inference_duration", "method"),
            "One step may wait behind another.",
        ),
        Panel(
            "Forward pass and sampling", "s", quantiles("tgi_batch_forward_duration", "method"),
            "On rank 0. A slow rank makes it longer, whichever it is.",
        ),
        Panel("Text and delivery", "s", quantiles("tgi_batch_decode_duration", "method"), "After each step."),
        Panel(
            "Steps that failed or succeeded", "cps",
            [
                rate("tgi_batch_inference_success", "{{method}} succeeded", "method"),
                rate("tgi_batch_inference_failure", "{{method}} failed", "method"),
            ],
        ),
    ],
    "Recoveries": [
        Panel(
            "Recoveries in an hour", "short",
            [Query(total(f"increase(tgi_shards_recovery_count{INSTANCES}[1h])"), "recoveries")],
            "Shards were lost and replaced.",
        ),
        Panel(
            "Time without shards", "percentunit", [rate("tgi_shards_recovery_seconds", "down")],
            "Counted when it is over.",
        ),
    ],
    "API keys": [
        Panel("Requests", "reqps", [rate("tgi_key_request_count", "{{key}}", "key")]),
        Panel("Requests in the server", "short", [gauge("tgi_key_current_requests", "{{key}}", "key")]),
        Panel("Tokens", "cps", [rate("tgi_key_tokens", "{{key}} {{kind}}", "key, kind")], "Counted at the end."),
        Panel("Refused", "reqps", [rate("tgi_key_refused", "{{key}} {{limit}}", "key, limit")], "By which limit."),
    ],
}  # fmt: skip


if __name__ == "__main__":
    print(json.dumps(dashboard(), indent=2))
