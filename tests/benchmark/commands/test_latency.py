"""`latency`: steps against the strict fake, tables against published ones, and the whole command on real shards."""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import pty
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from transformers.utils import logging

from benchmark import launch
from benchmark.__main__ import main
from benchmark.commands import latency
from benchmark.cost import shapes
from benchmark.cost.roofline import Ceilings, ServedModel
from benchmark.engine import shards
from benchmark.engine.shards import FIRST_ID, STEPS, THROUGHPUT_STEPS, StepDriver, Times, random_prompts
from benchmark.result import BenchError, SampleSummary
from router.scheduling.request import Sampling
from router.shards.client import OperatorTime, ShardError
from tests.router.fake_shards import FakeShardedClient
from tests.running import ROOT


class ManualTime:
    """A clock that only sleeping moves."""

    def __init__(self) -> None:
        self.now = 100.0

    def clock(self) -> float:
        return self.now

    async def sleep(self, seconds: float) -> None:
        self.now += seconds


def arguments(*extra: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    latency.add_arguments(parser)
    return parser.parse_args(extra)


def run_steps(fake: FakeShardedClient, batch_size: int, length: int, decode_length: int, runs: int = 1) -> list[Times]:
    clock = fake.clock
    driver = StepDriver(fake, fake.block_size, fake.num_blocks, clock=clock)
    prompts = random_prompts(batch_size, length, fake.vocab_size, seed=0)

    async def story() -> list[Times]:
        return [await driver.run(prompts, decode_length, [Sampling()] * batch_size) for _ in range(runs)]

    return asyncio.run(story())


# ------------------------------------------------------------------------------------------------------- the steps


def test_one_prefill_step_then_decode_steps_then_nothing_is_left() -> None:
    fake = FakeShardedClient()
    run_steps(fake, batch_size=3, length=20, decode_length=5, runs=2)
    first, *decodes, last = fake.requests[:6]
    assert [20, 20, 20] == list(first.chunk_tokens) and 3 == len(first.add)
    assert [(True, 0)] * 4 == [(request.decode, len(request.chunk_ids)) for request in decodes]
    assert [sequence.id for sequence in first.add] == list(last.retire)
    assert all(sequence.id >= FIRST_ID for sequence in first.add)
    assert set() == fake.live_ids
    assert 12 == len(fake.requests)


def test_times_are_those_of_the_steps() -> None:
    time = ManualTime()
    fake = FakeShardedClient(step_delay_s=0.5, clock=time.clock, sleep=time.sleep)
    (times,) = run_steps(fake, batch_size=2, length=8, decode_length=10)
    assert (0.5, 4.5) == (pytest.approx(times.prefill), pytest.approx(times.decode))
    assert [0.5] * 9 == pytest.approx(list(times.intervals))


def test_like_tgi_one_step_is_under_way_and_its_text_is_part_of_its_time() -> None:
    """Steps of 0.5 s, and text of 2 tokens that takes 0.25 s each: 1 s for each of a prefill and nine decodes."""
    time, texts = ManualTime(), list[list[int]]()

    def slowly(prompt: Sequence[int]) -> Callable[[int], str]:
        tokens = list[int]()
        texts.append(tokens)

        def push(token_id: int) -> str:
            time.now += 0.25
            tokens.append(token_id)
            return ""

        return push

    fake = FakeShardedClient(step_delay_s=0.5, clock=time.clock, sleep=time.sleep)
    driver = StepDriver(fake, fake.block_size, fake.num_blocks, clock=time.clock, detokenise=slowly)
    times = asyncio.run(driver.run(random_prompts(2, 8, fake.vocab_size, seed=0), 10, [Sampling()] * 2))
    assert (1.0, 9.0) == (pytest.approx(times.prefill), pytest.approx(times.decode))
    assert [10, 10] == [len(tokens) for tokens in texts]


@pytest.mark.parametrize("next_token", [lambda *_: 5, lambda *_: 7], ids=["all right", "all wrong"])
def test_steps_check_guesses_for_every_sequence(next_token: Callable[..., int]) -> None:
    """By the strict fake's rules, whatever comes of the guesses; all blocks are free afterwards."""
    time = ManualTime()
    fake = FakeShardedClient(step_delay_s=0.5, clock=time.clock, sleep=time.sleep, next_token=next_token)
    driver = StepDriver(fake, fake.block_size, fake.num_blocks, clock=time.clock)
    prompts = random_prompts(3, 8, fake.vocab_size, seed=0)
    found = {n: asyncio.run(driver.check_guesses(prompts, 12, [Sampling()] * 3, [5] * n)) for n in (0, 2)}
    assert {0.5} == {*found[0], *found[2]}
    assert (11, 3 if next_token() == 5 else 9) == (len(found[0]), len(found[2]))
    assert {3} == {len(request.drafts) for request in fake.requests if request.drafts}
    assert set() == fake.live_ids


def test_what_guesses_cost_is_told_beside_plain_steps() -> None:
    rows = [
        {"guesses": 0, "batch_size": 8, "p50_ms": 2.0, "ratio": 1.0},
        {"guesses": 4, "batch_size": 8, "p50_ms": 3.0, "ratio": 1.5},
    ]
    assert [["0", "8", "2.00 ms", "1.00"], ["4", "8", "3.00 ms", "1.50"]] == [
        [cell.strip() for cell in line.strip("|").split("|")] for line in latency.guess_table(rows).splitlines()[2:]
    ]
    assert "" == latency.guess_table([])


def test_a_failed_step_ends_the_run_with_its_sentence() -> None:
    with pytest.raises(BenchError, match="a step failed on the shards: out of memory"):
        run_steps(FakeShardedClient(failing_steps={3: "out of memory"}), 1, 8, 10)


def test_a_lost_shard_ends_the_run() -> None:
    fake = FakeShardedClient()
    fake.die("gone")
    with pytest.raises(ShardError, match="gone"):
        run_steps(fake, 1, 8, 4)


def test_a_batch_that_the_cache_cannot_hold_is_refused_with_one_that_it_can() -> None:
    driver = StepDriver(FakeShardedClient(), block_size=16, num_blocks=10)
    driver.check(2, 72, 8)
    with pytest.raises(BenchError, match=r"--batch-size 4 .* 320 tokens, but the shards have 160: .* at most 2"):
        driver.check(4, 72, 8)


def test_prompts_are_the_same_everywhere() -> None:
    assert random_prompts(2, 3, 1000, seed=1) == random_prompts(2, 3, 1000, seed=1)
    assert random_prompts(1, 3, 1000, seed=1) != random_prompts(1, 3, 1000, seed=2)


# ------------------------------------------------------------------------------------------------- rows and tables

ARGUMENTS = """\
| Parameter          | Value                 |
|--------------------|-----------------------|
| Model              | bigscience/mt0-xxl-mt |
| Sequence Length    | 100                   |
| Decode Length      | 100                   |
| N Runs             | 10                    |
| Warmups            | 1                     |
| Temperature        | None                  |
| Top K              | None                  |
| Top P              | None                  |
| Typical P          | None                  |
| Repetition Penalty | None                  |
| Watermark          | false                 |
| Do Sample          | false                 |"""

LATENCY = """\
| Step           | Batch Size | Average    | Lowest     | Highest    | p50        | p90        | p99        |
|----------------|------------|------------|------------|------------|------------|------------|------------|
| Prefill        | 1          | 65.65 ms   | 62.84 ms   | 76.21 ms   | 64.65 ms   | 76.21 ms   | 76.21 ms   |
|                | 2          | 67.76 ms   | 65.88 ms   | 70.41 ms   | 67.63 ms   | 70.41 ms   | 70.41 ms   |
| Decode (token) | 1          | 43.46 ms   | 43.03 ms   | 44.75 ms   | 43.37 ms   | 43.03 ms   | 43.03 ms   |
|                | 2          | 44.91 ms   | 44.33 ms   | 45.67 ms   | 45.22 ms   | 44.73 ms   | 44.73 ms   |
| Decode (total) | 1          | 4302.14 ms | 4260.36 ms | 4430.01 ms | 4293.85 ms | 4260.36 ms | 4260.36 ms |
|                | 2          | 4445.96 ms | 4388.19 ms | 4521.91 ms | 4477.18 ms | 4427.93 ms | 4427.93 ms |"""

THROUGHPUT = """\
| Step    | Batch Size | Average            | Lowest             | Highest            |
|---------|------------|--------------------|--------------------|--------------------|
| Prefill | 1          | 15.28 tokens/secs  | 13.12 tokens/secs  | 15.91 tokens/secs  |
|         | 2          | 29.52 tokens/secs  | 28.40 tokens/secs  | 30.36 tokens/secs  |
| Decode  | 1          | 23.01 tokens/secs  | 22.35 tokens/secs  | 23.24 tokens/secs  |
|         | 32         | 500.37 tokens/secs | 492.55 tokens/secs | 505.14 tokens/secs |"""


def published_rows(markdown: str) -> list[list[str]]:
    """Cells below the headers, with the blanks of merged cells filled in."""
    rows: list[list[str]] = []
    for line in markdown.splitlines()[2:]:
        name, *cells = [cell.strip() for cell in line.strip("|").split("|")]
        rows.append([name or rows[-1][0], *cells])
    return rows


def test_the_arguments_table_is_that_of_tgi() -> None:
    assert ARGUMENTS == latency.arguments_table(arguments(), "bigscience/mt0-xxl-mt")


def test_the_latency_table_is_that_of_tgi() -> None:
    names = {shown: step for step, shown in STEPS.items()}
    keys = ("mean_ms", "min_ms", "max_ms", "p50_ms", "p90_ms", "p99_ms")
    rows = [
        {"step": names[step], "batch_size": int(size)}
        | {key: float(cell.split()[0]) for key, cell in zip(keys, cells, strict=True)}
        for step, size, *cells in published_rows(LATENCY)
    ]
    assert LATENCY == latency.latency_table(rows)


def samples_for(mean: float, low: float, high: float, tokens: int) -> list[float]:
    """Ten samples, in ms, whose rates have this mean, lowest and highest."""
    rates = [low, high, *[(10 * mean - low - high) / 8] * 8]
    return [1000 * tokens / rate for rate in rates]


def test_the_throughput_table_is_that_of_tgi() -> None:
    names = {shown: step for step, shown in THROUGHPUT_STEPS.items()}
    rows: list[dict[str, Any]] = []
    for step, size, *cells in published_rows(THROUGHPUT):
        mean, low, high = (float(cell.split()[0]) for cell in cells)
        samples = samples_for(mean, low, high, int(size))
        rows.append(
            {"step": names[step], "batch_size": int(size), "samples_ms": samples, "tokens_per_sample": int(size)}
        )
    assert THROUGHPUT == latency.throughput_table(rows)


def point(*ceilings: Ceilings) -> latency.Point:
    runs = [Times(0.2 + n / 100, 0.9 + n / 10, [0.1] * 9, 0.1, 0.8) for n in range(3)]
    return latency.Point(4, sequence_length=50, decode_length=10, runs=runs, ceilings=list(ceilings))


def test_rows_follow_the_formulas() -> None:
    rows = {row["step"]: row for row in latency.rows([point()], None)}
    assert [200.0, 210.0, 220.0] == pytest.approx(rows["prefill"]["samples_ms"])
    assert [100.0, 1000 / 9, 1100 / 9] == pytest.approx(rows["decode_token"]["samples_ms"], rel=1e-5)
    assert 4 * 50 * (1 / 0.2 + 1 / 0.21 + 1 / 0.22) / 3 == pytest.approx(rows["prefill"]["tokens_per_second"])
    rate = 4 * 9 * (1 / 0.9 + 1 / 1.0 + 1 / 1.1) / 3
    assert rate == pytest.approx(rows["decode_total"]["tokens_per_second"])
    assert rate == pytest.approx(rows["decode_token"]["tokens_per_second"])
    assert rows["prefill"]["floor_ms"] is None and rows["prefill"]["percent_of_limit"] is None
    assert "" == latency.floor_table(list(rows.values()))


def test_each_run_is_held_against_the_ceilings_beside_it() -> None:
    work = ServedModel(shapes.shape("bloom-560m"), "bfloat16")
    speeds = [Ceilings(50e9, 1e12), Ceilings(30e9, 1e12), Ceilings(40e9, 1e12)]
    rows = latency.rows([point(*speeds)], work)
    token, total = (row for row in rows if row["step"].startswith("decode"))
    assert 9 * token["floor_ms"] == pytest.approx(total["floor_ms"])
    floors = [work.decode(4, 55).floor_ms(speed) for speed in speeds]
    assert token["floor_ms"] == pytest.approx(floors[2])
    percents = [100 * f / t for f, t in zip(floors, token["samples_ms"], strict=True)]
    assert token["percent_of_limit"] == pytest.approx(sorted(percents)[1])
    assert [50e9, 30e9, 40e9] == [ceilings["bytes_per_second"] for ceilings in token["ceilings"]]
    assert f"| Decode (token) | 4          | 111.11 ms  | {token['floor_ms']:.2f} ms" in latency.floor_table(rows)


def test_the_median_of_an_even_number_is_between_the_two() -> None:
    work = ServedModel(shapes.shape("bloom-560m"), "bfloat16")
    speeds = [Ceilings(10e9, 1e12), Ceilings(20e9, 1e12)]
    two = latency.Point(4, 50, 10, [Times(0.2, 0.9, [0.1] * 9, 0.1, 0.8)] * 2, speeds)
    token = next(row for row in latency.rows([two], work) if row["step"] == "decode_token")
    slow, fast = (work.decode(4, 55).floor_ms(speed) for speed in speeds)
    assert (slow + fast) / 2 == pytest.approx(token["floor_ms"])
    assert (slow + fast) / 2 == pytest.approx(token["percent_of_limit"])  # of steps of 100 ms


def test_sampling_is_neutral_unless_asked_for() -> None:
    assert Sampling(seed=3) == latency.sampling_of(arguments(), 3)
    assert latency.sampling_of(arguments("--top-k", "5"), 0).do_sample
    assert not latency.sampling_of(arguments("--repetition-penalty", "1.2"), 0).do_sample
    assert latency.sampling_of(arguments("--do-sample"), 0).do_sample


def test_a_profile_divides_a_step_between_operators_host_and_wire() -> None:
    operators = [OperatorTime(f"op{n}", calls=8, self_ns=(20 - n) * 1_000_000) for n in range(14)]
    rows = shards.Profile("decode", 2, steps=4, step_ms=60.0, computed_ms=55.0, operators=operators).rows()
    assert ["op0", "op11", "2 others", "host: the shard around them", "wire: request, reply, waiting"] == [
        rows[i]["where"] for i in (0, -4, -3, -2, -1)
    ]
    assert 60.0 == pytest.approx(sum(row["ms_per_step"] for row in rows))
    assert (5.0, 2.0) == (rows[0]["ms_per_step"], rows[0]["calls_per_step"])
    assert 5.0 == rows[-1]["ms_per_step"]


# ----------------------------------------------------------------------------------------------------- real shards


def check(result: dict[str, Any], batch_sizes: Sequence[int], num_shard: int) -> None:
    """What every latency result must hold."""
    assert ("latency", num_shard) == (result["command"], result["num_shard"])
    assert [(step, size) for step in STEPS for size in batch_sizes] == [
        (row["step"], row["batch_size"]) for row in result["rows"]
    ]
    for row in result["rows"]:
        assert row["min_ms"] <= row["p50_ms"] <= row["p90_ms"] <= row["p99_ms"] <= row["max_ms"]
        assert SampleSummary.of(row["samples_ms"]).mean == row["mean_ms"]
        assert 0 < row["percent_of_limit"] < 105


def test_two_shards_of_our_own(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    flags = ["-b", "1", "-b", "3", "-s", "9", "-d", "5", "-r", "3", "--num-shard", "2", "--device", "cpu"]
    assert 0 == main(["latency", *flags, "--output", str(tmp_path)])
    shown = capfd.readouterr()
    result = json.loads(shown.out.splitlines()[-1])
    check(result, (1, 3), num_shard=2)
    assert result == json.loads((tmp_path / "result.json").read_text())
    assert all(head in shown.out for head in ("| Parameter ", "| p99 ", " tokens/secs |", "| % of limit (measured) |"))
    told = shown.err.splitlines()
    assert "starting a server, which loads or makes the weights of server/demo" == told[0]
    assert told[1].startswith("the server is ready after ") and "batch size 3: prefill" in shown.err


def test_a_profile_names_operators_and_leaves_traces(
    server: launch.Server, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    flags = ["-b", "2", "-s", "9", "-d", "5", "-r", "1", "--profile", "--like-tgi", "--model-id", str(launch.DEMO)]
    flags += ["--speculate", "2"]
    flags += ["--shard-uds-path", server.sockets[0].removesuffix("-0")]
    assert 0 == main(["latency", *flags, "--output", str(tmp_path)])
    rows = json.loads((tmp_path / "result.json").read_text())["profile"]
    assert {"prefill", "decode"} == {row["phase"] for row in rows}
    assert any("linear" in row["where"] or "addmm" in row["where"] or "mm" in row["where"] for row in rows)
    assert all(0 <= row["percent"] <= 100.1 for row in rows)
    out = capfd.readouterr().out
    assert "| Guesses | Batch Size |" in out
    assert "| Where " in out and "one request under way, whose tokens are made text" in out
    trace = json.loads((tmp_path / "trace-decode-2.json").read_text())
    assert any(event.get("name", "").startswith("aten::") for event in trace["traceEvents"])


def test_transformers_generates_beside_us(server: launch.Server, capfd: pytest.CaptureFixture[str]) -> None:
    flags = ["-b", "1", "3", "-s", "9", "-d", "5", "-r", "2", "--beside-transformers", "--model-id", str(launch.DEMO)]
    flags += ["--shard-uds-path", server.sockets[0].removesuffix("-0")]
    logging.enable_progress_bar()  # as in a process that has loaded nothing yet
    assert 0 == main(["latency", *flags])
    shown, told = capfd.readouterr()
    assert "Loading weights" not in told and "it/s" not in told  # a bar of that library's, amid the tables
    result = json.loads(shown.splitlines()[-1])
    ours = {(row["step"], row["batch_size"]): row["p50_ms"] for row in result["rows"]}
    for row in result["transformers"]:
        assert row["ours_ms"] == ours[row["step"], row["batch_size"]]
        assert row["times_as_fast"] == pytest.approx(row["theirs_ms"] / row["ours_ms"])
    assert {(step, size) for step in tuple(STEPS)[:2] for size in (1, 3)} == {
        (row["step"], row["batch_size"]) for row in result["transformers"]
    }
    assert "| transformers, p50 |" in shown


@pytest.mark.parametrize("flag", ["--beside-transformers", "--like-tgi"])
def test_what_needs_the_model_says_so(server: launch.Server, flag: str, capsys: pytest.CaptureFixture[str]) -> None:
    prefix = server.sockets[0].removesuffix("-0")
    assert 1 == main(["latency", "-b", "1", "-s", "9", "-d", "5", "--shard-uds-path", prefix, flag])
    assert f"{flag} needs the model" in capsys.readouterr().err


@pytest.fixture(scope="module")
def server() -> Iterator[launch.Server]:
    flags = ["--model-id", str(launch.DEMO), "--device", "cpu", "--max-batch-total-tokens", "512"]
    limits = ["--max-total-tokens", "256", "--max-input-length", "128"]
    with launch.running_server([*flags, *limits]) as server:
        yield server


def test_attaching_on_a_terminal_shows_bars(server: launch.Server) -> None:
    prefix = server.sockets[0].removesuffix("-0")
    flags = ["-b", "2", "-s", "9", "-d", "5", "-r", "3", "--top-p", "0.9", "--shard-uds-path", prefix]
    command = [sys.executable, "-m", "benchmark", "latency", *flags, "--model-id", str(launch.DEMO)]
    terminal, child_side = pty.openpty()
    process = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=child_side, text=True)
    os.close(child_side)
    try:
        output, _ = process.communicate(timeout=120)
    finally:
        process.kill()
    view = os.read(terminal, 1 << 16).decode()
    os.close(terminal)
    assert 0 == process.returncode
    check(json.loads(output.splitlines()[-1]), (2,), num_shard=1)
    assert "batch size 2: prefill " in view and "of 1: batch size 2" in view and "\x1b[" in view


def test_a_cache_that_is_too_small_is_refused(server: launch.Server, capsys: pytest.CaptureFixture[str]) -> None:
    prefix = server.sockets[0].removesuffix("-0")
    assert 1 == main(["latency", "-b", "9", "--shard-uds-path", prefix])
    assert "error: --batch-size 9 with 200 tokens each needs a KV cache of" in capsys.readouterr().err


def test_rows_are_kept_when_the_server_dies(
    server: launch.Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The last test with this server: its shard is killed before the second batch size."""
    measure_point = latency._measure_point

    async def kill_then_measure(args: Any, info: Any, driver: Any, point: latency.Point, *rest: Any) -> None:
        if point.batch_size == 2:
            for pid in server.shard_pids():
                os.kill(pid, signal.SIGKILL)
        await measure_point(args, info, driver, point, *rest)

    monkeypatch.setattr(latency, "_measure_point", kill_then_measure)
    args = arguments("-b", "1", "2", "-s", "9", "-d", "5", "-r", "2", "--output", str(tmp_path))
    target = shards.MeasuredShards(server.sockets, "demo", shapes.shape(str(launch.DEMO)), None, server)
    with pytest.raises(BenchError, match="the server ended: shard 0 stopped: killed by signal 9"):
        asyncio.run(latency._measure(args, target))
    kept = json.loads((tmp_path / "result.json").read_text())
    assert kept == json.loads(capsys.readouterr().out.splitlines()[-1])
    assert [(step, 1) for step in STEPS] == [(row["step"], row["batch_size"]) for row in kept["rows"]]
    assert "killed by signal 9" in kept["failure"]
