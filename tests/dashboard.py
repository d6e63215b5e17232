"""Whether every query of the dashboard returns data: a server under load, and a real Prometheus that watches it.

`python -m tests.dashboard [--seconds 60] [--prometheus PROGRAM] [--promtool PROGRAM] [--grafana FOLDER]`. Prometheus
reads the configuration in deploy/prometheus/, with its key, looking every second. The load has everything that the
dashboard shows: streams that begin alike, refusals of every kind, deadlines, clients that go away, a shard that is
killed. Then every query of every panel is asked over the minute, with the variables put in as Grafana would. One line
of JSON a query; exit code 1 where one has no data. FOLDER is where `npm install @grafana/schema typescript` was run:
the compiler holds the file against Grafana's own types. Nothing listens beyond loopback.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import math
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import httpx2

from tests.ports import free_port
from tests.running import ROOT, Server, body
from tests.test_dashboard import dashboard, panels, queries

CONFIGURATION = ROOT / "deploy" / "prometheus" / "prometheus.yml"
KEYS = [
    {"name": "prometheus", "key": "for-prometheus"},
    {"name": "alice", "key": "for-alice"},
    {"name": "bob", "key": "for-bob", "requests_per_minute": 30, "max_concurrent_requests": 2},
    {"name": "carol", "key": "for-carol", "tokens_per_minute": 300},
]
VARIABLES = {"$__rate_interval": "15s", "$instance": ".*"}
BEGINNING = "Once upon a time there was a little fox that lived by the river. " * 4
PROBLEMS_OF_THE_FORMAT = 3  # promtool's exit code when metrics can be read and it would have named them otherwise

# `Plain` is a type with the values of its enums in their places, as JSON has them.
KINDS = "@grafana/schema/dist/esm/raw/composable"
TYPES = f"""
import type {{Dashboard, Panel, RowPanel}} from '@grafana/schema';
import type * as graph from '{KINDS}/timeseries/panelcfg/x/TimeSeriesPanelCfg_types.gen';
import type * as stat from '{KINDS}/stat/panelcfg/x/StatPanelCfg_types.gen';
type Plain<T> = T extends string ? `${{T}}` : T extends (infer U)[] ? Plain<U>[]
  : T extends object ? {{[K in keyof T]: Plain<T[K]>}} : T;
"""


def main(argv: Sequence[str] | None = None) -> int:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=int, default=60, help="of load")
    parser.add_argument("--prometheus", default="prometheus")
    parser.add_argument("--promtool", default="promtool")
    parser.add_argument("--grafana", type=Path, help="folder with node_modules")
    args = parser.parse_args(argv)
    with tempfile.TemporaryDirectory() as folder:
        if args.grafana is not None:
            check_types(args.grafana)
        keys = Path(folder, "keys.json")
        keys.touch(mode=0o600)
        keys.write_text(json.dumps({"keys": KEYS}))
        with Server("--api-keys-file", str(keys), "--max-batch-size", "4") as server:
            configuration = configure(Path(folder), server.url)
            subprocess.run([args.promtool, "check", "config", configuration], check=True)
            with watching(args.prometheus, configuration) as prometheus:
                asyncio.run(load(server, args.seconds))
                check_format(args.promtool, server.url)
                without = ask_everything(prometheus, args.seconds)
    print(f"{len(queries())} queries, {len(without)} without data: {without}")
    return 1 if without else 0


def configure(folder: Path, url: str) -> Path:
    """The example, of this server and with an eye on it every second, beside its key."""
    text = CONFIGURATION.read_text()
    changed = text.replace("127.0.0.1:3000", url.removeprefix("http://")).replace("15s", "1s")
    assert "credentials_file: lockstep-key" in changed
    path = folder / CONFIGURATION.name
    path.write_text(changed)
    (folder / "lockstep-key").write_text(str(KEYS[0]["key"]))
    return path


@contextlib.contextmanager
def watching(program: str, configuration: Path) -> Iterator[str]:
    """A Prometheus on a free port of loopback, and its URL."""
    address = f"127.0.0.1:{free_port()}"
    command = [program, f"--config.file={configuration}", f"--web.listen-address={address}", "--log.level=warn"]
    process = subprocess.Popen([*command, f"--storage.tsdb.path={configuration.parent / 'data'}"])
    try:
        for _ in range(300):
            with contextlib.suppress(httpx2.TransportError):
                if httpx2.get(f"http://{address}/-/ready").status_code == 200:
                    break
            assert process.poll() is None, "Prometheus ended"
            time.sleep(0.1)
        yield f"http://{address}"
    finally:
        process.terminate()
        process.wait()


async def load(server: Server, seconds: float) -> None:
    """Everything that the dashboard shows, until the time is over; one shard dies a third of the way."""
    end = time.monotonic() + seconds
    async with httpx2.AsyncClient(base_url=server.url, timeout=60) as client:
        tasks = [asyncio.create_task(ask_again(client, kind, end)) for kind in (0, 0, 0, 1, 2, 3, 4, 5, 6)]
        await asyncio.sleep(seconds / 3)
        os.kill(server.shards()[0], signal.SIGKILL)
        await asyncio.gather(*tasks)


async def ask_again(client: httpx2.AsyncClient, kind: int, end: float) -> None:
    """Requests of one kind, one after the other."""
    number = 0
    while time.monotonic() < end:
        number += 1
        key, asked, headers = [
            ("alice", body(f"{BEGINNING}Number {number}", max_new_tokens=60), {}),
            ("bob", body("Once", max_new_tokens=30), {}),
            ("carol", body("Once", max_new_tokens=50), {}),
            ("alice", body("Once", max_new_tokens=0), {}),
            ("alice", body(BEGINNING, max_new_tokens=200), {"x-request-timeout-ms": "40"}),
            ("alice", body(BEGINNING, max_new_tokens=200), {"x-request-timeout-ms": "400"}),
            ("alice", body("Once", max_new_tokens=200), {}),
        ][kind]
        headers = {"authorization": f"Bearer for-{key}"} | headers
        with contextlib.suppress(httpx2.HTTPError):
            async with client.stream("POST", "/generate_stream", json=asked, headers=headers) as stream:
                async for _ in stream.aiter_lines():
                    if kind == 6:  # goes away after the first token
                        break
        await asyncio.sleep(0.2 if kind else 0)


def check_format(promtool: str, url: str) -> None:
    """Prometheus' own reader reads /metrics. What it would have named otherwise it says itself."""
    page = httpx2.get(f"{url}/metrics", headers={"authorization": f"Bearer {KEYS[0]['key']}"}).content
    checked = subprocess.run([promtool, "check", "metrics"], input=page, capture_output=True)
    print((checked.stdout + checked.stderr).decode())
    assert checked.returncode in (0, PROBLEMS_OF_THE_FORMAT)


def ask_everything(prometheus: str, seconds: int) -> list[str]:
    """Ask and print. Returns the queries that have no data, or no number among it."""
    without = []
    instances = get(prometheus, "label/instance/values", **{"match[]": "tgi_queue_size"})
    print(json.dumps({"query": "label_values(tgi_queue_size, instance)", "values": instances}))
    if not instances:
        without.append("instance")
    now = time.time()
    for title, query in queries().items():
        for variable, value in VARIABLES.items():
            query = query.replace(variable, value)
        answer = get(prometheus, "query_range", query=query, start=now - seconds, end=now, step=1)
        values = [float(value) for series in answer["result"] for _, value in series["values"]]
        numbers = [value for value in values if not math.isnan(value)]
        largest = max(numbers, default=math.nan)
        row = {"query": title, "series": len(answer["result"]), "numbers": len(numbers), "max": round(largest, 6)}
        print(json.dumps(row))
        if not numbers:
            without.append(title)
    return without


def get(prometheus: str, path: str, **parameters: Any) -> Any:
    """The data of an answer of Prometheus' API."""
    answer = httpx2.get(f"{prometheus}/api/v1/{path}", params=parameters)
    assert answer.status_code == 200, answer.text
    return answer.json()["data"]


def check_types(folder: Path) -> None:
    """Grafana's types take the whole file, and each panel's options and lines those of its kind, no word more."""
    whole = dashboard()
    rows = [panel for panel in whole["panels"] if panel["type"] == "row"]
    constants = [("Dashboard", whole), *(("RowPanel", row) for row in rows)]
    for panel in panels():
        kind = {"timeseries": "graph", "stat": "stat"}[panel["type"]]
        constants += [("Panel", panel), (f"{kind}.Options", panel["options"])]
        if kind == "graph":
            constants.append(("graph.FieldConfig", panel["fieldConfig"]["defaults"]["custom"]))
    lines = [f"export const c{n}: Plain<{type}> = {json.dumps(value)};" for n, (type, value) in enumerate(constants)]
    (folder / "dashboard.ts").write_text("\n".join([TYPES, *lines]))
    compiler = folder / "node_modules" / ".bin" / "tsc"
    flags = ["--noEmit", "--strict", "--skipLibCheck", "--module", "esnext", "--moduleResolution", "bundler"]
    subprocess.run([compiler, *flags, "dashboard.ts"], cwd=folder, check=True)
    print(f"{len(constants)} parts of the dashboard are of Grafana's types")


if __name__ == "__main__":
    sys.exit(main())
