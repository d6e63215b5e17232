"""The dashboard in deploy/grafana: made by its script, and about metrics that a server has. No Prometheus is asked."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections import defaultdict
from typing import Any

import pytest

from tests.router.test_metrics import page_with_keys, series_in
from tests.running import ROOT

FOLDER = ROOT / "deploy" / "grafana"
ROW_WIDTH = 24


def dashboard() -> dict[str, Any]:
    """The file that Grafana imports."""
    return dict(json.loads((FOLDER / "lockstep.json").read_text()))


def panels() -> list[dict[str, Any]]:
    """Graphs and numbers, without the rows' headings."""
    return [panel for panel in dashboard()["panels"] if panel["type"] != "row"]


def queries() -> dict[str, str]:
    """Every query as it is in the file, by its panel's id and title and its own letter."""
    return {
        f"{panel['id']} {panel['title']} {target['refId']}": target["expr"]
        for panel in panels()
        for target in panel["targets"]
    }


def metrics_in(query: str) -> list[str]:
    return re.findall(r"\btgi_\w+", query)


@pytest.fixture(scope="module")
def labels_of(tmp_path_factory: pytest.TempPathFactory) -> dict[str, set[str]]:
    """The labels of every sample's name in /metrics of a server with keys."""
    found: defaultdict[str, set[str]] = defaultdict(set)
    for series in series_in(page_with_keys(tmp_path_factory.mktemp("keys"))):
        name, _, labels = series.partition("{")
        found[name] |= set(re.findall(r'(\w+)="', labels))
    return dict(found)


def test_the_file_is_what_the_script_makes() -> None:
    made = subprocess.run([sys.executable, FOLDER / "make_dashboard.py"], capture_output=True, text=True, check=True)
    assert made.stdout == (FOLDER / "lockstep.json").read_text()


def test_every_metric_of_a_query_is_one_of_the_servers(labels_of: dict[str, set[str]]) -> None:
    named = {title: metrics_in(query) for title, query in queries().items()}
    assert all(named.values())
    assert [] == [(title, name) for title, names in named.items() for name in names if name not in labels_of]


def test_every_metric_of_the_server_is_in_a_query(labels_of: dict[str, set[str]]) -> None:
    drawn = {name for query in queries().values() for name in metrics_in(query)}
    buckets = {name for name, labels in labels_of.items() if "le" in labels}
    parts = {name.removesuffix("bucket") + part for name in buckets for part in ("sum", "count")}
    assert [] == sorted(labels_of.keys() - parts - drawn)


def test_queries_group_by_labels_that_their_metrics_have_and_legends_name_them(labels_of: dict[str, set[str]]) -> None:
    for panel in panels():
        for target in panel["targets"]:
            query = target["expr"]
            grouped = {label for by in re.findall(r"by \(([\w, ]+)\)", query) for label in by.split(", ")}
            for name in metrics_in(query):
                assert grouped <= labels_of[name], query
            assert grouped - {"le"} == set(re.findall(r"{{(\w+)}}", target["legendFormat"])), query


def test_every_query_is_of_the_chosen_servers_and_every_rate_of_the_chosen_interval() -> None:
    for query in queries().values():
        assert len(metrics_in(query)) == query.count('{instance=~"$instance"}'), query
        assert set(re.findall(r"\[(.*?)\]", query)) <= {"$__rate_interval", "1h"}
    assert {"datasource", "instance"} == {variable["name"] for variable in dashboard()["templating"]["list"]}


def test_panels_have_units_legends_and_the_datasource_that_is_chosen() -> None:
    for panel in panels():
        assert panel["fieldConfig"]["defaults"]["unit"]
        assert all(target["legendFormat"] for target in panel["targets"])
        sources = [panel["datasource"], *(target["datasource"] for target in panel["targets"])]
        assert all({"type": "prometheus", "uid": "${datasource}"} == source for source in sources)


def test_panels_lie_beside_each_other_and_have_an_id_each() -> None:
    every = dashboard()["panels"]
    assert len(every) == len({panel["id"] for panel in every})
    cells = [
        (place["x"] + x, place["y"] + y)
        for place in (panel["gridPos"] for panel in every)
        for x in range(place["w"])
        for y in range(place["h"])
    ]
    assert len(cells) == len(set(cells))
    assert all(x < ROW_WIDTH for x, _ in cells)


def test_the_example_for_prometheus_asks_the_default_port_with_a_key() -> None:
    text = (ROOT / "deploy" / "prometheus" / "prometheus.yml").read_text()
    settings = (ROOT / "docs" / "settings.md").read_text()
    port = re.search(r"\| `PORT` \| +\| (\d+) \|", settings)
    assert port is not None and f'targets: ["127.0.0.1:{port.group(1)}"]' in text
    assert re.search(r"authorization:\n +type: Bearer\n +credentials_file: \S+\n", text)
