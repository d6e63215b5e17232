"""What is sent and when: lengths, prompts, arrivals. Plain numbers and a tokenizer that one can check by eye."""

from __future__ import annotations

import asyncio
from itertools import pairwise
from pathlib import Path
from random import Random
from statistics import fmean, median, pstdev

import pytest

from benchmark.result import BenchError
from benchmark.serving.datasets import Lengths
from benchmark.serving.outcomes import Load
from benchmark.serving.workload import (
    LONGEST,
    WORDS,
    arrival_times,
    draw_lengths,
    exact_prompt,
    local_token_ends,
    mean_lengths,
    read_lengths,
)
from tests.benchmark.mock_server import word_ends
from tests.running import ROOT

MEAN = Lengths(100, 40)


def test_one_seed_gives_one_workload() -> None:
    assert draw_lengths("lognormal", MEAN, 50, Random(1)) == draw_lengths("lognormal", MEAN, 50, Random(1))


def test_fixed_lengths_are_the_cells_own() -> None:
    assert [MEAN] * 3 == draw_lengths("fixed", MEAN, 3, Random(0))


@pytest.mark.parametrize("kind", ["uniform", "lognormal"])
def test_drawn_lengths_have_the_cells_mean_and_a_known_longest(kind: str) -> None:
    drawn = draw_lengths(kind, MEAN, 5000, Random(0))
    assert pytest.approx(100, rel=0.03) == fmean(one.input_length for one in drawn)
    assert pytest.approx(40, rel=0.03) == fmean(one.output_length for one in drawn)
    assert all(1 <= one.input_length <= LONGEST[kind] * 100 for one in drawn)
    assert len({one.input_length for one in drawn}) > 50


def test_log_normal_lengths_have_a_long_tail() -> None:
    drawn = sorted(one.input_length for one in draw_lengths("lognormal", MEAN, 5000, Random(0)))
    assert median(drawn) < 92
    assert drawn[4500] > 1.8 * median(drawn)


def test_a_length_of_one_stays_possible() -> None:
    for kind in ("fixed", "uniform", "lognormal"):
        assert all(one.output_length >= 1 for one in draw_lengths(kind, Lengths(1, 1), 100, Random(0)))


def test_lengths_come_from_a_file(tmp_path: Path) -> None:
    path = tmp_path / "lengths.jsonl"
    path.write_text('{"input_length": 10, "output_length": 4}\n\n{"input_length": 30, "output_length": 8}\n')
    assert [Lengths(10, 4), Lengths(30, 8)] == read_lengths(path)
    assert Lengths(20, 6) == mean_lengths(read_lengths(path))


@pytest.mark.parametrize(
    "text", ["", "not json", '{"input_length": 3}', '{"input_length": 0, "output_length": 1}', "[1, 2]"]
)
def test_a_file_without_lengths_says_what_it_should_look_like(tmp_path: Path, text: str) -> None:
    path = tmp_path / "lengths.jsonl"
    path.write_text(text)
    with pytest.raises(BenchError, match='"input_length": 128'):
        read_lengths(path)


@pytest.mark.parametrize("num_tokens", [1, 2, 17, 128, 1000])
def test_prompts_have_exactly_the_asked_tokens_of_a_real_tokenizer(num_tokens: int) -> None:
    ends = local_token_ends(ROOT / "server" / "demo")
    prompt = asyncio.run(exact_prompt(num_tokens, ends, Random(num_tokens)))
    assert num_tokens == len(asyncio.run(ends(prompt)))


def test_special_tokens_count() -> None:
    async def ends(text: str) -> list[int]:
        return [0, *word_ends(text), 0]

    assert 5 - 2 == len(asyncio.run(exact_prompt(5, ends, Random(0))).split())


def test_prompts_differ_from_each_other() -> None:
    async def ends(text: str) -> list[int]:
        return word_ends(text)

    random = Random(0)
    prompts = [asyncio.run(exact_prompt(20, ends, random)) for _ in range(10)]
    assert 10 == len(set(prompts))
    assert set(" ".join(prompts).split()) <= set(WORDS)


def test_an_impossible_length_is_refused() -> None:
    async def ends(text: str) -> list[int]:
        return [0, 0, *word_ends(text)]

    with pytest.raises(BenchError, match="use another --input-length"):
        asyncio.run(exact_prompt(1, ends, Random(0)))


def test_a_folder_without_tokenizer_is_refused(tmp_path: Path) -> None:
    with pytest.raises(BenchError, match="give --tokenizer the folder"):
        local_token_ends(tmp_path)


# ------------------------------------------------------------------------------------------------------------- arrivals


def gaps(load: Load) -> list[float]:
    return [after - before for before, after in pairwise(arrival_times(load, 20_000, None, Random(1)))]


@pytest.mark.parametrize("burstiness", [0.0, 0.5, 1.0, 2.0])
def test_gaps_have_their_mean_and_their_deviation(burstiness: float) -> None:
    found = gaps(Load(request_rate=20.0, burstiness=burstiness))
    assert pytest.approx(1 / 20, rel=0.05) == fmean(found)
    assert pytest.approx(burstiness, rel=0.05, abs=1e-9) == pstdev(found) / fmean(found)


def test_a_ramp_goes_from_one_rate_to_the_other() -> None:
    load = Load(request_rate=55.0, ramp=(10.0, 100.0), burstiness=0.0)
    times = arrival_times(load, None, 100.0, Random(0))
    in_seconds = [sum(second <= at < second + 10 for at in times) for second in (0, 45, 90)]
    assert [145, 550, 955] == pytest.approx(in_seconds, abs=2)  # 10 s around rates of 14.5, 55 and 95.5
    assert 5500 == pytest.approx(len(times), abs=1)


def test_a_ramp_may_fall_and_then_stays() -> None:
    load = Load(request_rate=6.0, ramp=(10.0, 2.0), burstiness=0.0)
    times = arrival_times(load, 70, 1000.0, Random(0))
    assert 70 == len(times) and times == sorted(times)
    short = arrival_times(load, 60, None, Random(0))
    assert pytest.approx(10.0) == short[-1]  # 60 at 6 a second on average


def test_a_duration_and_a_number_end_what_comes_first() -> None:
    load = Load(request_rate=10.0, burstiness=0.0)
    assert (19, 5) == tuple(len(arrival_times(load, count, 2.0, Random(0))) for count in (None, 5))


def test_a_load_says_what_it_is() -> None:
    assert "4 concurrent" == str(Load(concurrency=4))
    assert "5 requests/s" == str(Load(request_rate=5.0))
    assert "1 to 9 requests/s, constant gaps, 8 at once" == str(
        Load(request_rate=5.0, ramp=(1.0, 9.0), burstiness=0.0, max_concurrency=8)
    )
