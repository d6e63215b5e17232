"""The dashboard in deploy/grafana is about metrics and labels that a server has, and Prometheus is told where it is."""

from __future__ import annotations

import json
import re
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from launch.settings import public_settings
from tests.router.telemetry.test_metrics import page_with_keys, series_in
from tests.running import ROOT


def targets() -> Iterator[dict[str, Any]]:
    """Every query of every panel."""
    for panel in json.loads((ROOT / "deploy/grafana/lockstep.json").read_text())["panels"]:
        yield from panel.get("targets", [])


def labels_of(page: str) -> dict[str, set[str]]:
    """The labels of every sample's name in /metrics."""
    found: defaultdict[str, set[str]] = defaultdict(set)
    for series in series_in(page):
        name, _, labels = series.partition("{")
        found[name] |= set(re.findall(r'(\w+)="', labels))
    return dict(found)


def test_every_query_is_about_metrics_and_labels_of_the_server(tmp_path: Path) -> None:
    served = labels_of(page_with_keys(tmp_path))
    queries = list(targets())
    for target in queries:
        names = re.findall(r"\btgi_\w+", target["expr"])
        grouped = {label for by in re.findall(r"by \(([\w, ]+)\)", target["expr"]) for label in by.split(", ")}
        assert names and set(names) <= served.keys(), target["expr"]
        assert all(grouped <= served[name] for name in names), target["expr"]
        assert grouped - {"le"} == set(re.findall(r"{{(\w+)}}", target["legendFormat"])), target
    assert len(queries) > 50


def test_the_example_for_prometheus_asks_the_default_port() -> None:
    text = (ROOT / "deploy/prometheus/prometheus.yml").read_text()
    assert f'targets: ["127.0.0.1:{public_settings()["port"].default}"]' in text
