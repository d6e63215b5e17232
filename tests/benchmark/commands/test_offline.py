"""`offline`: its figures agree with one another, with floors from the steps that were really taken."""

from __future__ import annotations

import argparse
import asyncio
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import WhitespaceSplit

from benchmark.__main__ import main
from benchmark.commands import offline
from benchmark.cost import shapes
from benchmark.cost.roofline import BytesAndFlops, Ceilings, ServedModel
from benchmark.engine.generation import Prompt, StepRecord, TimedShards, generate, load_tokenizer, read_prompts
from benchmark.result import BenchError
from router.scheduling.limits import Limits
from router.text.tokenizer import ModelTokenizer
from tests.router.fake_shards import FakeShardedClient

WORK = ServedModel(shapes.shape("bloom-560m"), "bfloat16")


def words(size: int = 256) -> ModelTokenizer:
    tokenizer = Tokenizer(WordLevel({f"t{id}": id for id in range(size)}, unk_token="t0"))
    tokenizer.pre_tokenizer = WhitespaceSplit()
    return ModelTokenizer.of(tokenizer, frozenset())


def limits_of(fake: FakeShardedClient, max_batch_size: int | None = None) -> Limits:
    return Limits(
        max_input_length=512,
        max_total_tokens=512,
        max_batch_total_tokens=fake.max_batch_total_tokens,
        max_batch_prefill_tokens=64,
        block_size=fake.block_size,
        num_blocks=fake.num_blocks,
        max_concurrent_requests=64,
        max_batch_size=max_batch_size,
        waiting_served_ratio=0.3,
        max_waiting_tokens=20,
        max_best_of=1,
        max_stop_sequences=0,
        max_top_n_tokens=0,
        vocab_size=fake.vocab_size,
    )


def generated(prompts: list[Prompt], max_batch_size: int | None = None) -> TimedShards:
    fake = FakeShardedClient(max_batch_prefill_tokens=64, max_batch_size=max_batch_size)
    timed = TimedShards(fake, WORK)
    asyncio.run(offline.generate(timed, words(), limits_of(fake, max_batch_size), prompts))
    assert set() == fake.live_ids
    return timed


PROMPTS = [Prompt([7] * length, new) for length, new in ((5, 9), (100, 3), (30, 1), (64, 20), (1, 2))]


@pytest.mark.parametrize("max_batch_size", [None, 2])
def test_every_token_is_counted_once(max_batch_size: int | None) -> None:
    timed = generated(PROMPTS, max_batch_size)
    assert sum(len(p.token_ids) for p in PROMPTS) == sum(record.prompt_tokens for record in timed.records)
    assert sum(p.max_new_tokens for p in PROMPTS) == sum(record.generated_tokens for record in timed.records)


def test_what_a_run_needs_is_what_its_steps_need() -> None:
    """One sequence of 100 tokens in chunks of 64 and 36, then decode steps that attend to 101, 102, …"""
    needed = [record.needed for record in generated([Prompt([3] * 100, 4)]).records if record.needed]
    shape, key, token = WORK.shape, 4 * 24 * 16 * 64, 2 * 24 * 16 * 64 * 2  # operations for a key, bytes of a token
    head = 2 * shape.head_parameters  # bytes, which no step reads that samples nothing
    steps = [  # tokens, keys that they look at, tokens that are read, sequences that get one
        (64, 64**2 / 2, 0, 0), (36, 36 * 64 + 36**2 / 2, 64, 1), (1, 101, 100, 1), (1, 102, 101, 1), (1, 103, 102, 1),
    ]  # fmt: skip
    expected = [
        BytesAndFlops(
            WORK.step_weight_bytes() - (sampled == 0) * head + token * (read + tokens),
            2 * shape.step_parameters * tokens + key * keys + 2 * shape.head_parameters * sampled,
        )
        for tokens, keys, read, sampled in steps
    ]
    assert expected == needed


def test_tokens_over_latency_is_throughput() -> None:
    records = [
        StepRecord(0.0, 50, BytesAndFlops(100, 0), answered_at=2.0, generated_tokens=1),
        StepRecord(1.0, 0, BytesAndFlops(50, 0), answered_at=3.0, generated_tokens=1),  # waited for the first until 2.0
        StepRecord(5.0, 0, BytesAndFlops(50, 0), answered_at=6.0, generated_tokens=1),
    ]
    prefill, decode, total = offline.rows(records, 6.0, Ceilings(100.0, 100.0))
    assert (50, 2.0, 25.0) == (prefill["tokens"], prefill["latency_s"], prefill["tokens_per_second"])
    assert (2, 2.0, 1.0) == (decode["tokens"], decode["latency_s"], decode["tokens_per_second"])
    assert (3, 6.0, 0.5) == (total["tokens"], total["latency_s"], total["tokens_per_second"])
    assert [1.0, 1.0, 2.0] == [row["floor_s"] for row in (prefill, decode, total)]
    assert 50.0 == decode["percent_of_limit"]
    for row in (prefill, decode, total):
        sampled = row["samples"]["tokens_per_second"]
        assert row["tokens_per_second"] == pytest.approx(sum(sampled) / len(sampled))


def read(path: Path) -> list[Prompt]:
    return read_prompts(argparse.Namespace(prompts=path, output_length=10), words())


def test_prompts_are_text_or_ids(tmp_path: Path) -> None:
    path = tmp_path / "prompts.jsonl"
    path.write_text('{"prompt": "t4 t9"}\n\n{"token_ids": [1, 2, 3], "max_new_tokens": 5}\n')
    assert [Prompt([4, 9], 10), Prompt([1, 2, 3], 5)] == read(path)


@pytest.mark.parametrize(
    ("line", "problem"),
    [
        ("{", "line 1: "),
        ("[]", 'line 1: not an object with "prompt" or "token_ids"'),
        ('{"prompt": 7}', "line 1: "),
        ('{"prompt": ""}', "line 1: token ids must be"),
        ('{"token_ids": [999]}', "line 1: token ids must be a list of whole numbers below 256"),
        ('{"prompt": "t1", "max_new_tokens": 0}', "line 1: max_new_tokens is 0"),
        ("", "has no prompts"),
    ],
)
def test_a_wrong_prompt_is_refused_with_its_line(tmp_path: Path, line: str, problem: str) -> None:
    path = tmp_path / "prompts.jsonl"
    path.write_text(line)
    with pytest.raises(BenchError, match=problem):
        read(path)


def test_a_missing_file_and_a_missing_model_are_named(tmp_path: Path) -> None:
    with pytest.raises(BenchError, match="cannot read --prompts"):
        read(tmp_path / "nowhere")
    with pytest.raises(BenchError, match=r"has no tokenizer\.json"):
        load_tokenizer(str(tmp_path), with_eos=False)


def test_the_embedded_model(tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    ran = []

    async def noting(
        timed: TimedShards, tokenizer: ModelTokenizer, limits: Limits, prompts: Sequence[Prompt], *rest: Any
    ) -> Any:
        ran.append((len(prompts), [prompt.max_new_tokens for prompt in prompts]))
        return await generate(timed, tokenizer, limits, prompts, *rest)

    monkeypatch.setattr(offline, "generate", noting)
    flags = ["--num-prompts", "6", "--input-length", "20", "--output-length", "8", "--device", "cpu"]
    assert 0 == main(["offline", *flags, "--max-batch-size", "4", "--output", str(tmp_path)])
    *lines, last = capfd.readouterr().out.splitlines()
    result = json.loads(last)
    prefill, decode, total = result["rows"]
    assert (120, 6 * 8) == (prefill["tokens"], total["tokens"])
    assert 0 < decode["tokens"] < total["tokens"]
    assert prefill["latency_s"] + decode["latency_s"] <= total["latency_s"]
    for row in result["rows"]:
        assert row["tokens"] / row["latency_s"] == pytest.approx(row["tokens_per_second"])
        assert 0 < row["percent_of_limit"] < 105
    assert 100 * 2**20 < result["peak_host_memory_bytes"] < 10 * 2**30
    assert 14_680_064 == result["model_size_bytes"]
    assert 2 == len(result["ceilings"]) and all(seen["bytes_per_second"] > 0 for seen in result["ceilings"])
    assert [(1, [2]), (6, [8] * 6)] == ran  # one that is not recorded, then all of them
    cells = [[cell.strip() for cell in line.split("|")[1:-1]] for line in lines]
    assert ["Step", "Tokens", "Latency s", "Token/s", "Floor s", "% of limit (measured)"] == cells[0]
    shown = [[row["step"], str(row["tokens"]), f"{row['latency_s']:.3f}"] for row in result["rows"]]
    assert shown == [line[:3] for line in cells[2:5]]
    assert ["GB", "Model", "Cache", "Hidden (p)", "Peak GPU memory", "Peak host memory"] == cells[6]
    assert ["all", "0.014"] == cells[8][:2]
