"""The search for the highest rate, against queues whose capacity is known: in virtual time, and one over HTTP."""

from __future__ import annotations

import argparse
import asyncio
import heapq
import json
from collections.abc import Sequence
from pathlib import Path
from random import Random

import pytest

from benchmark import slo
from benchmark.__main__ import main
from benchmark.http_client import Reply
from benchmark.outcomes import Outcome
from benchmark.report import BenchError
from benchmark.workload import Lengths, poisson_times
from tests.benchmark.mock_server import mock_server

TOKENS, GAP = 11, 0.02


class Queue:
    """A server of `slots`, each of which makes a token each 20 ms; the first one at once."""

    def __init__(self, slots: int, *, fails_every: int = 0, is_even: bool = True) -> None:
        self._slots, self._fails_every, self._is_even = slots, fails_every, is_even
        self._random = Random(0)

    @property
    def capacity(self) -> float:
        """Requests per second."""
        return self._slots / (TOKENS * GAP)

    async def send(self, rate: float, count: int) -> Sequence[Outcome]:
        times = [n / rate for n in range(count)] if self._is_even else poisson_times(rate, count, self._random)
        free = [0.0] * self._slots
        found = []
        for number, at in enumerate(times, 1):
            begin = max(at, heapq.heappop(free))
            heapq.heappush(free, begin + TOKENS * GAP)
            tokens = [begin + GAP * (n + 1) for n in range(TOKENS)]
            error = "429" if self._fails_every and number % self._fails_every == 0 else None
            found.append(Outcome(Lengths(8, TOKENS), at, Reply(at, tokens[-1], tokens, TOKENS, 8, error)))
        return found


def searched(queue: Queue, *objectives: str, start: float = 1.0) -> tuple[float, slo.Search]:
    search = slo.Search([slo.Objective.parse(text) for text in objectives], queue.send, lambda line: None)
    return asyncio.run(search.run(start, 0.5 / (TOKENS * GAP))), search


@pytest.mark.parametrize("slots", [1, 7])
@pytest.mark.parametrize("start", [0.3, 40.0, 5000.0])
@pytest.mark.parametrize("objective", ["ttft:p99:500ms", "e2e:p50:2s", "tpot:p99:25ms", "itl:p90:25ms"])
def test_the_capacity_is_found(slots: int, start: float, objective: str) -> None:
    queue = Queue(slots)
    rate, search = searched(queue, objective, start=start)
    assert rate == pytest.approx(queue.capacity, rel=0.05)
    assert len(search.probes) < 40


def test_arrivals_at_random_leave_room() -> None:
    queue = Queue(7, is_even=False)
    rate, search = searched(queue, "ttft:p99:200ms", "e2e:p90:1s", start=2.0)
    assert 0.6 * queue.capacity < rate < 1.05 * queue.capacity
    *_, last = search.probes
    assert (rate, "") == (last.rate, last.missed)
    assert any(not probe.missed for probe in search.probes[:-1] if probe.rate >= rate)  # it was tried again


def test_the_strictest_objective_decides() -> None:
    queue = Queue(4)
    with pytest.raises(BenchError, match=r"not even 2.27 requests/s kept .*tpot:p50:10ms \(tpot p50 20 ms\)"):
        searched(queue, "ttft:p99:500ms", "tpot:p50:10ms")


def test_failures_are_misses_beyond_the_percentile() -> None:
    assert searched(Queue(4, fails_every=20), "ttft:p90:500ms")[0] == pytest.approx(Queue(4).capacity, rel=0.05)
    with pytest.raises(BenchError, match="requests failed"):
        searched(Queue(4, fails_every=20), "ttft:p99:500ms")


def test_a_time_that_no_answer_has_is_not_kept() -> None:
    one_token = [Outcome(Lengths(8, 1), 0.0, Reply(0.0, 0.1, [0.1], 1, 8)) for _ in range(20)]
    assert "no answer has a tpot" == slo.judged(1.0, one_token, [slo.Objective.parse("tpot:p90:9s")]).missed


def test_a_server_without_end_is_told_from_one_that_was_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(slo, "MOST_REQUESTS", 2000)
    with pytest.raises(BenchError, match=r"still kept ttft:p99:500ms, and twice .* than 2000 requests a probe"):
        searched(Queue(10**6), "ttft:p99:500ms", start=3.0)


def test_probes_are_as_long_as_an_overload_needs() -> None:
    async def send(rate: float, count: int) -> Sequence[Outcome]:
        return []

    def seconds(*objectives: str, given: float | None = None) -> float:
        found = [slo.Objective.parse(text) for text in objectives]
        return slo.Search(found, send, lambda line: None, given).probe_seconds

    assert 20.0 == seconds("ttft:p99:500ms", "tpot:p99:9s")
    assert 80.0 == seconds("ttft:p99:500ms", "e2e:p50:2s")
    assert 10.0 == seconds("ttft:p99:1ms")
    assert 3.0 == seconds("ttft:p99:500ms", given=3.0)


@pytest.mark.parametrize("percentile, requests", [("p50", 20), ("p99", 100), ("p99.9", 1000)])
def test_a_percentile_needs_requests(percentile: str, requests: int) -> None:
    objective = slo.Objective.parse(f"ttft:{percentile}:1ms")
    assert requests == slo.Search([objective], Queue(1).send, lambda line: None).least_requests


@pytest.mark.parametrize(
    "text",
    [
        *("ttft", "ttft:p99", "ttft:99:5ms", "ttft:p0:5ms", "ttft:p100:5ms", "x:p9:5ms", "ttft:p99:0ms"),
        *("ttft:p99:-1ms", "ttft:p99:nanms", "ttft:p99:infs", "ttft:pnan:1s"),
    ],
)
def test_what_is_no_objective_is_refused(text: str) -> None:
    with pytest.raises(argparse.ArgumentTypeError, match=f"^{text} is no objective: write one of ttft, tpot, itl"):
        slo.Objective.parse(text)


def test_bounds_have_units() -> None:
    assert ["e2e:p50:1500ms", "itl:p99.9:20ms", "ttft:p90:7ms"] == [
        str(slo.Objective.parse(text)) for text in ("e2e:p50:1.5s", "itl:p99.9:20ms", "ttft:p90:7")
    ]


def test_a_search_over_http(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Four slots of 200 ms and more: 20 requests a second at most. How near it comes needs a quiet machine."""
    monkeypatch.setattr(slo, "LEAST_REQUESTS", 8)
    monkeypatch.setattr(slo, "PRECISION", 0.9)
    grid = ["--input-length", "3", "--output-length", "5", "--slo", "ttft:p90:400ms", "e2e:p90:900ms"]
    grid += ["--output", str(tmp_path)]
    with mock_server(slots=4, ttft_ms=100, gap_ms=25) as url:
        assert 0 == main(
            ["serving", "--url", url, *grid, "--probe-seconds", "1", "--slo-start-rate", "10", "--burstiness", "0"]
        )
    *text, last = capsys.readouterr().out.splitlines()
    result = json.loads(last)
    [found] = result["slo_searches"]
    assert 0 < found["requests_per_second"] < 2 * 20
    assert [(row["request_rate"], row["burstiness"]) for row in result["rows"]] == [(found["requests_per_second"], 0.0)]
    assert {True, False} == {probe["held"] for probe in found["probes"]}
    assert {"client", "server_timeline", "began_unix_s"} <= result["rows"][0].keys()
    assert len((tmp_path / "requests.jsonl").read_text().splitlines()) == result["rows"][0]["requests"]
    assert text[0].startswith("## Highest rate with ttft:p90:400ms and e2e:p90:900ms, 3 in, 5 out: ")


@pytest.mark.parametrize(
    "flags, said",
    [
        (["--slo", "ttft:p9:1s", "--concurrency", "2"], "--slo chooses the load: leave out --concurrency, or --slo"),
        (["--probe-seconds", "2"], "--probe-seconds is for a search: give --slo too, or leave it out"),
    ],
)
def test_half_a_search_is_refused(flags: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert 1 == main(["serving", "--url", "http://127.0.0.1:1", *flags])
    assert said in capsys.readouterr().err
