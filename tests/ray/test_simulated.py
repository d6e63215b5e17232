"""What `simulate` foretells of three replicas on Ray Serve, held against them: row 6's trace at a known rate.

The replicas are null models, whose steps take a known time and no processor, since three models that compute would take
it from each other on this machine. Their prefix caches are real: they are the router's.
"""

from __future__ import annotations

import asyncio
import json
import random
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

import httpx2
import pytest

ray = pytest.importorskip("ray", reason="Ray is an extra: `make test-ray` has an environment with it")

from benchmark.__main__ import main  # noqa: E402
from benchmark.serving.outcomes import Load  # noqa: E402
from benchmark.serving.workload import arrival_times  # noqa: E402
from lockstep_ray.requests import size_of  # noqa: E402
from tests.ray.fleet import Fleet, Told, client, serving, stream  # noqa: E402
from tests.ray.traces import Arrived, keep, trace  # noqa: E402
from tests.running import Server  # noqa: E402

pytestmark = [pytest.mark.ray, pytest.mark.filterwarnings("ignore")]
RATE = 6.0  # requests a second, of three replicas: some four under way at a time, as in row 6
STEP_MS, TOKEN_US = "50", "800"  # a prompt of 180 tokens takes 194 ms, and 53 where it is found
KV_TOKENS, PREFILL_TOKENS = "4096", "400"
LIMITS = ["--max-batch-total-tokens", KV_TOKENS, "--max-batch-prefill-tokens", PREFILL_TOKENS]
LENGTHS = ["--max-total-tokens", "400", "--max-input-length", "380"]
FLAGS = ["--model-id", "null", "--null-step-ms", STEP_MS, "--null-token-us", TOKEN_US, *LIMITS, *LENGTHS]
COST = ["--step-ms", STEP_MS, "--token-us", TOKEN_US]
MARGIN = 0.15
SHORT: dict[str, Any] = {"inputs": "Tell me", "parameters": {"max_new_tokens": 1}}
ROWS: list[str] = []


@dataclass(frozen=True)
class One:
    """A replica by itself, idle. step_ms: the step's part of the TTFT; lengths: of prompts, in tokens, by window."""

    ttft_ms: float
    step_ms: float
    lengths: dict[int, list[int]]


@pytest.fixture(scope="module")
def one() -> One:
    with Server(*FLAGS) as server:
        (num_tokens,) = lengths(server.url, [SHORT])
        step_ms = float(STEP_MS) + float(TOKEN_US) / 1000 * num_tokens
        found = {window: lengths(server.url, trace(window, 7)) for window in (60, 8)}
        return One(idle_ttft_ms(server.url), step_ms, found)


@pytest.fixture(scope="module")
def fleet(one: One) -> Iterator[Fleet]:
    with serving() as found:
        yield found
        head = "| requests | dispatch | delay when idle, server + Ray (ms) | hit rate, measured | simulated "
        head += "| TTFT median (ms), measured | simulated |"
        print("\n" + "\n".join([head, "|---|---|--:|--:|--:|--:|--:|", *ROWS]))


def lengths(url: str, requests: list[dict[str, Any]]) -> list[int]:
    """Of their prompts, in tokens."""
    with httpx2.Client(base_url=url) as http:
        return [len(http.post("/tokenize", json={"inputs": one["inputs"]}).json()) for one in requests]


def idle_ttft_ms(url: str, warmups: int = 10, count: int = 30) -> float:
    """The median for requests one after the other, too short to leave anything in a prefix cache."""

    async def ask() -> list[Told]:
        async with client(url) as http:
            return [await stream(http, SHORT) for _ in range(warmups + count)]

    told = asyncio.run(ask())
    assert all(one.is_whole for one in told)
    return 1000 * median(one.first_token_s for one in told[warmups:])


def send(url: str, requests: list[dict[str, Any]], at_s: list[float]) -> tuple[list[Told], list[float]]:
    """Send each at its time; returns what came of them, and when they were really sent, since the first one."""
    sent = [0.0] * len(requests)

    async def ask() -> list[Told]:
        async with client(url) as http:
            began = time.monotonic()

            async def one(number: int) -> Told:
                await asyncio.sleep(began + at_s[number] - time.monotonic())
                sent[number] = time.monotonic()
                return await stream(http, requests[number])

            return list(await asyncio.gather(*map(one, range(len(requests)))))

    told = asyncio.run(ask())
    return told, [at - min(sent) for at in sent]


def simulated(path: Path, policy: str, delay_ms: float, capsys: pytest.CaptureFixture[str]) -> dict[str, Any]:
    """The row of `simulate` for a trace."""
    fleet = ["--replicas", "3", "--dispatch", policy, "--delay-ms", f"{delay_ms:.1f}", "--trace", str(path)]
    capsys.readouterr()
    assert 0 == main(["simulate", *COST, *LIMITS, *fleet])
    (row,) = json.loads(capsys.readouterr().out.splitlines()[-1])["rows"]
    found: dict[str, Any] = row
    return found


@pytest.mark.parametrize("window", [60, 8])
@pytest.mark.parametrize("policy", ["round-robin", "prefix-affine"])
def test_simulate_foretells_what_is_found_in_caches_and_first_tokens(
    fleet: Fleet, one: One, policy: str, window: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    fleet.deploy(policy=policy, flags=FLAGS)  # new replicas with another policy, whose caches are empty
    fleet.until_running(3)
    idle_ms = idle_ttft_ms(fleet.url)
    requests, path = trace(window, 7), tmp_path / "trace.jsonl"
    before = fleet.counters()
    times = arrival_times(Load(request_rate=RATE), len(requests), None, random.Random(window))
    told, sent = send(fleet.url, requests, times)
    after = fleet.counters()
    assert [] == [each.error for each in told if not each.is_whole]
    arrived = [
        Arrived(at, length, size_of(body)[1] or 0)
        for at, length, body in zip(sent, one.lengths[window], requests, strict=True)
    ]
    keep(path, arrived)
    names = ("tgi_request_prefix_hit_tokens", "tgi_batch_prefill_tokens")
    hits, computed = (after[name] - before[name] for name in names)
    assert sum(one.lengths[window]) == hits + computed
    row = simulated(path, policy, idle_ms - one.step_ms, capsys)
    measured = (hits / (hits + computed), 1000 * median(each.first_token_s for each in told))
    foretold = (row["fleet"]["prefix_hit_share"], row["ttft_ms"]["p50"])
    delays = f"{one.ttft_ms - one.step_ms:.1f} + {idle_ms - one.ttft_ms:.1f}"
    figures = f"{measured[0]:.3f} | {foretold[0]:.3f} | {measured[1]:.0f} | {foretold[1]:.0f}"
    ROWS.append(f"| those of {window} prefixes at a time | {policy} | {delays} | {figures} |")
    assert pytest.approx(measured, rel=MARGIN) == foretold
