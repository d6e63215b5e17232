"""What `simulate` is asked about fleets: whole runs at a small scale, and each refusal with its remedy."""

from __future__ import annotations

import json
from argparse import Namespace
from pathlib import Path
from typing import Any

import pytest

from benchmark.__main__ import main
from benchmark.cost.step_times import Fixed
from benchmark.fleet import traffic
from benchmark.fleet.fleet import ReplicaModel, pools_of
from benchmark.fleet.traffic import Request
from tests.router.doubles import make_limits

SMALL = ("--step-ms", "10", "--token-us", "20", "--num-requests", "60", "--request-rate", "20")
H200 = ("--shape", "bloomz-7b1-mt", "--device", "h200")


def rows(capsys: pytest.CaptureFixture[str], *flags: object) -> list[dict[str, Any]]:
    assert 0 == main(["simulate", *map(str, flags)])
    found: list[dict[str, Any]] = json.loads(capsys.readouterr().out.splitlines()[-1])["rows"]
    return found


def refusal(capsys: pytest.CaptureFixture[str], *flags: object) -> str:
    assert 1 == main(["simulate", *map(str, flags)])
    return capsys.readouterr().err


def test_prefixes_are_found_and_can_be_turned_off(capsys: pytest.CaptureFixture[str]) -> None:
    shared = (*SMALL, "--prefix-length", 80, "--replicas", 2, "--dispatch", "prefix-affine")
    on, off = rows(capsys, *shared), rows(capsys, *shared, "--no-prefix-cache")
    assert (0.8 * 59 / 60, 0.0) == tuple(pytest.approx(row[0]["fleet"]["prefix_hit_share"]) for row in (on, off))


# 300 requests a second of 10 tokens out in steps of 10 ms, 8 at once: a replica answers 80 at most, four 320.
SHORT = ("--step-ms", 10, "--token-us", 20, "--input-length", 20, "--output-length", 10, "--max-batch-size", 8)
LOAD = (*SHORT, "--request-rate", 300, "--ttft-objective", 60)


@pytest.mark.parametrize("most", [5, 64])
def test_the_fewest_replicas_do_not_depend_on_how_many_there_may_be(
    most: int, capsys: pytest.CaptureFixture[str]
) -> None:
    (row,) = rows(capsys, *LOAD, "--price-per-hour", 2, "--fewest-replicas", most)
    assert (5, "steady", 0) == (row["settings"]["replicas"], row["queue"], row["refused"])
    assert row["ttft_ms"]["p99"] <= 60
    assert ["1", "2", "4", "5", "6", "8"] == list(row["tried"])
    assert ["", "", ""] == list(row["tried"].values())[3:]
    assert "a request was refused" == row["tried"]["2"] and row["tried"]["4"].startswith("TTFT p99 ")
    assert row["fleet"]["price"] == pytest.approx(2 * row["fleet"]["replica_hours"])


def test_too_few_replicas_are_refused_with_the_reason(capsys: pytest.CaptureFixture[str]) -> None:
    sentence = refusal(capsys, *LOAD, "--fewest-replicas", 2)
    assert "a fleet of 2 does not keep TTFT p99 <= 60 ms: a request was refused; raise --fewest-replicas or" in sentence


def test_requests_that_do_not_tell_are_no_answer(capsys: pytest.CaptureFixture[str]) -> None:
    """A smaller fleet that is not shown to keep up is not shown to be too small."""
    load = (*SHORT, "--request-rate", 74, "--ttft-objective", 60_000, "--max-concurrent-requests", 100_000)
    sentence = refusal(capsys, *load, "--fewest-replicas", 4, "--num-requests", 2000)
    assert "of 1 replicas, 2000 requests are too few to tell whether the queue grows" in sentence
    assert "leave --num-requests out, or raise it" in sentence


def test_overload_is_no_capacity_where_nothing_is_refused_and_no_objective_missed(
    capsys: pytest.CaptureFixture[str],
) -> None:
    """100 a second for a replica of 80 that may queue without end, with first tokens that may take a minute."""
    patient = (*SHORT, "--request-rate", 100, "--ttft-objective", 60_000, "--max-concurrent-requests", 100_000)
    assert "a fleet of 1 does not keep TTFT p99 <= 60000 ms: the queue grows, from " in refusal(
        capsys, *patient, "--fewest-replicas", 1
    )
    (row,) = rows(capsys, *patient, "--fewest-replicas", 4)
    assert 2 == row["settings"]["replicas"]


@pytest.mark.parametrize("most", [8, 9])
def test_each_fleet_is_divided_by_the_share_and_not_by_how_another_was(most: int) -> None:
    args = Namespace(prefill_share=0.3, fewest_replicas=most, price_per_hour=0.0)
    replica = ReplicaModel(Fixed(0.01), "null", "cpu", "float32", 1, None, "", lambda config: 0)
    pools = pools_of(args, replica, make_limits(), 8)
    assert [2, 6] == [pool.num_replicas for pool in pools]  # 2.4 of 8, where 8 of 3 + 6 were 2.7


def test_prompts_apart_from_answers(capsys: pytest.CaptureFixture[str]) -> None:
    load = (*H200, "--request-rate", 20, "--num-requests", 40, "--input-length", 1000, "--output-length", 10)
    (row,) = rows(capsys, *load, "--replicas", 4, "--prefill-share", 0.5)
    assert 40 * 1000 * 491520 / 1e9 == pytest.approx(row["fleet"]["transferred_gb"])
    assert "leaves none to decode" in refusal(capsys, *load, "--prefill-share", 0.5)


@pytest.mark.parametrize(
    ("flags", "sentence"),
    [
        (("--prefix-length", 200), "--prefix-length is 200 but --input-length is 100: a prompt contains its prefix"),
        (
            ("--fewest-replicas", 4, "--ttft-objective", 9),
            "--num-requests is 60, and fewer than 2000 do not tell whether a fleet keeps up: leave it out",
        ),
        (
            ("--fewest-replicas", 4, "--ttft-objective", 9, "--num-requests", 2000, "--sweep", "replicas=1,2"),
            "--fewest-replicas looks for one number of replicas: leave out --sweep replicas",
        ),
        (("--fewest-replicas", 4), "--fewest-replicas needs --ttft-objective, --tpot-objective or both"),
        (("--device", "h200"), "--step-ms says how long steps take: leave out --device"),
    ],
)
def test_what_contradicts_itself_is_refused(
    capsys: pytest.CaptureFixture[str], flags: tuple[object, ...], sentence: str
) -> None:
    assert sentence in refusal(capsys, *SMALL, *flags)


def test_a_mooncake_trace_is_read_in_the_order_of_arrival(tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    later = '{"timestamp": 1500, "input_length": 513, "output_length": 5, "hash_ids": [4, 9]}'
    path.write_text(later + '\n\n{"timestamp": 0, "input_length": 30, "output_length": 2, "hash_ids": []}\n')
    assert [Request(0.0, 30, 2, 2), Request(1.5, 513, 5, 5, (4, 9), 512)] == traffic.read_trace(path)
