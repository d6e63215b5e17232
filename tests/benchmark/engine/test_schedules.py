"""Schedules of `offline`: the same tokens by each, rows that add up, and a model of costs that plans as the router."""

from __future__ import annotations

import asyncio
import json
import math
import random
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoConfig

from benchmark.__main__ import main
from benchmark.commands import offline as command
from benchmark.cost.devices import DEVICES
from benchmark.cost.roofline import Piece, ServedModel
from benchmark.cost.shapes import from_config
from benchmark.cost.step_times import StepWork
from benchmark.engine import jobs, schedules
from benchmark.engine.generation import Prompt, StepRecord, TimedShards, generate
from benchmark.engine.jobs import Streamed, cost_of, percent, shares_of, sizes_of
from benchmark.engine.schedules import (
    CONTINUOUS,
    DIAGONAL,
    ROW,
    SCHEDULES,
    ZIG_ZAG,
    Phases,
    Policy,
    StreamedCost,
    largest_gang,
    planned,
    predicted,
)
from server.offload.cost import Rates, Sizes, Span
from server.offload.share import Share
from tests.benchmark.commands.test_offline import WORK, words
from tests.benchmark.mixtral import MIXTRAL
from tests.router.fake_shards import FakeShardedClient

SHAPE: dict[str, Any] = {
    "model_type": "opt", "torch_dtype": "bfloat16", "activation_function": "relu", "do_layer_norm_before": True,
    "enable_bias": True, "ffn_dim": 256, "hidden_size": 64, "max_position_embeddings": 256, "num_attention_heads": 4,
    "num_hidden_layers": 4, "pad_token_id": 1, "tie_word_embeddings": True, "vocab_size": 256,
    "word_embed_proj_dim": 64,
}  # fmt: skip


def drawn(count: int = 13) -> list[Prompt]:
    draw = random.Random(2)
    return [
        Prompt([draw.randrange(256) for _ in range(draw.randint(1, 30))], draw.randint(1, 12)) for _ in range(count)
    ]


def limits_for(policy: Policy, prompts: list[Prompt], prefill_tokens: int = 64) -> Any:
    return policy.limits(prompts, block_size=16, vocab_size=256, prefill_tokens=prefill_tokens)


def ran(policy: Policy, prompts: list[Prompt]) -> tuple[list[list[int]], list[StepRecord], FakeShardedClient]:
    most = policy.at_once(prompts, 16)
    fake = FakeShardedClient(
        max_batch_total_tokens=4096,
        max_batch_size=most,
        max_batch_prefill_tokens=None if policy.schedule == DIAGONAL else 64,
        lends_blocks=policy.schedule == DIAGONAL,
    )
    timed = TimedShards(fake, WORK)
    if policy.schedule == DIAGONAL:
        tokens = asyncio.run(schedules.generate_diagonally(timed, policy.plan(prompts, 16), prompts, 16, 256))
    else:
        tokens = asyncio.run(generate(timed, words(), limits_for(policy, prompts), prompts, gang=policy.gang))
    assert set() == fake.live_ids
    return tokens, timed.records, fake


@pytest.mark.parametrize("num_gpu_batches", [1, 3])
def test_the_tokens_are_the_same_by_each_schedule(num_gpu_batches: int) -> None:
    prompts = drawn()
    alone = [ran(Policy(ROW, 1, 1), [prompt])[0][0] for prompt in prompts]
    assert [prompt.max_new_tokens for prompt in prompts] == [len(tokens) for tokens in alone]
    for name in SCHEDULES:
        assert alone == ran(Policy(name, num_gpu_batches, 2), prompts)[0], name


@pytest.mark.parametrize("name", [ROW, ZIG_ZAG, CONTINUOUS])
def test_who_is_computed_with_whom(name: str) -> None:
    """Sequences of one token and of ten in turn: only continuous admission fills the places of those that end."""
    prompts = [Prompt([5] * 4, 1 if number % 2 else 10) for number in range(8)]
    _, records, fake = ran(Policy(name, 2, 2), prompts)
    entering = [sorted(new.id for new in request.add) for request in fake.requests if request.add]
    if name == CONTINUOUS:
        assert [[1, 2, 3, 4], [5, 6], [7], [8]] == entering
        assert max(record.decoding for record in records) == 4
    else:
        assert [[1, 2, 3, 4], [5, 6, 7, 8]] == entering
        first_of_second = next(i for i, request in enumerate(fake.requests) if 5 in [new.id for new in request.add])
        assert {1, 2, 3, 4} <= {id for request in fake.requests[: first_of_second + 1] for id in request.retire}
        assert max(record.decoding for record in records) == 2


def test_prompts_that_enter_together_are_one_step() -> None:
    prompts = [Prompt([5] * length, 1) for length in (10, 20, 30, 40, 50)]
    assert 50 == largest_gang(prompts, [Policy(ROW, 1, 1)], 16)
    assert 70 == largest_gang(prompts, [Policy(ROW, 1, 1), Policy(ZIG_ZAG, 2, 1)], 16)
    assert 0 == largest_gang(prompts, [Policy(CONTINUOUS, 2, 1)], 16)
    longer = [replace(prompt, max_new_tokens=4) for prompt in prompts]  # each has a step to itself
    assert 50 == largest_gang(longer, [Policy(DIAGONAL, 2, 1)], 16)


def test_what_an_encoder_reads_has_blocks_of_its_own() -> None:
    prompts = [Prompt([5] * 37, 9), Prompt([5], 40)]
    policy = Policy(ZIG_ZAG, 3, 2)
    assert (6 * 3, 6 * 4) == tuple(policy.kv_blocks(prompts, 16, is_encoded=encoded) for encoded in (False, True))


def test_auto_tries_no_blocks_of_more_prompts_than_there_are() -> None:
    assert [[1], [1, 2, 3], [1, 2, 4], [1, 2, 4, 8, 16, 32, 64]] == [jobs.powers(n) for n in (1, 3, 4, 99)]


def test_row_has_no_blocks_and_appears_once() -> None:
    found = schedules.policies([ROW, ZIG_ZAG], [4, 8], 2)
    assert [Policy(ROW, 1, 2), Policy(ZIG_ZAG, 4, 2), Policy(ZIG_ZAG, 8, 2)] == found
    assert [2, 8, 16] == [policy.block for policy in found]


@pytest.mark.parametrize("name", SCHEDULES)
def test_the_plan_has_the_steps_that_are_taken(name: str) -> None:
    prompts, policy = drawn(), Policy(name, 2, 2)
    works = planned(policy, prompts, limits_for(policy, prompts))
    taken = [record for record in ran(policy, prompts)[1] if record.prompt_tokens or record.decoding]
    assert [(r.prompt_tokens, r.decoding, r.generated_tokens) for r in taken] == [
        (work.prompt_tokens, work.decoding, work.sampled) for work in works
    ]


def record(at: float, seconds: float, prompt_tokens: int, decoding: int, firsts: int) -> StepRecord:
    return StepRecord(at, prompt_tokens, None, at + seconds, decoding + firsts, decoding)


def test_a_step_that_does_both_is_divided() -> None:
    """Prompts alone take 5 s, decodes 1 s; a step with both of 3 s is 1 s of decode and 2 s of prefill."""
    records = [record(0, 5, 40, 0, 4), record(5, 1, 0, 4, 0), record(6, 3, 10, 3, 1), record(9, 1, 0, 4, 0)]
    phases = Phases.of(records, 10.5)
    assert Phases(7.0, 50, 3.0, 11, 10.5, 16) == phases
    row = phases.row()
    assert 11 / 3 == row["decode_tokens_per_second"] and 16 / 10.5 == row["total_tokens_per_second"]
    assert 50 / 7 == row["prefill_tokens_per_second"]


def test_a_run_without_a_decode_alone_and_one_without_decodes_add_up() -> None:
    both = Phases.of([record(0, 5, 40, 0, 4), record(5, 2, 10, 4, 1)], 7.0)
    assert (5.0, 2.0, 4) == (both.prefill_s, both.decode_s, both.decode_tokens)
    assert Phases.of([record(0, 5, 40, 0, 4)], 5.0).row()["decode_tokens_per_second"] is None


def test_what_is_cut_goes_on_as_it_did() -> None:
    cut = Phases(2.0, 100, 3.0, 30, 5.5, 40)  # ten sequences of 4 tokens
    assert Phases(2.0, 100, 15.0, 150, 17.5, 160) == cut.projected(4, 16)


SIZES = Sizes(layers=1e9, num_layers=10, head=1e7, kv_per_token=1e5)
RATES = Rates(1e9, [(1, 1e-10), (64, 1e-10), (1024, 1.6e-9)])


def rate_of(policy: Policy, prompts: list[Prompt], share: float) -> float:
    cost = cost_of(SIZES, RATES, (1 - share) * SIZES.layers)
    phases = predicted(planned(policy, prompts, limits_for(policy, prompts, 512)), StreamedCost(cost))
    return phases.decode_tokens / phases.decode_s


def test_the_model_says_what_blocks_are_good_for() -> None:
    equal = [Prompt([1] * 8, 16) for _ in range(64)]
    row, zig_zag, continuous = (
        rate_of(Policy(name, n, 2), equal, 0.0) for name, n in ((ROW, 1), (ZIG_ZAG, 8), (CONTINUOUS, 8))
    )
    assert 8.0 == pytest.approx(zig_zag / row)
    assert 1.0 == pytest.approx(continuous / zig_zag, rel=0.05)
    draw = random.Random(0)
    mixed = [Prompt([1] * 8, draw.randint(4, 32)) for _ in range(64)]
    assert rate_of(Policy(CONTINUOUS, 8, 2), mixed, 0.0) > 1.15 * rate_of(Policy(ZIG_ZAG, 8, 2), mixed, 0.0)


@pytest.mark.parametrize(("tokens", "milliseconds"), [(1, 5.3), (32, 19.4), (1024, 26.4), (4096, 106)])
def test_a_mixture_is_priced_by_the_experts_of_a_step(tokens: int, milliseconds: float) -> None:
    """Mixtral-8x7B in bfloat16 on an H200: of its 93 GB one token reads 25, and 32 tokens nearly all; many are bound
    by products, with 2 of 8 experts each, 25.7 GFLOP a token at 989 TFLOP/s."""
    served, ceilings = ServedModel(from_config(MIXTRAL), "bfloat16"), DEVICES["h200"].dense_ceilings("bfloat16", 1)
    ridge = round(ceilings.flops_per_second / ceilings.bytes_per_second)  # tokens that take as long as reading
    rates = Rates(math.inf, [(1, 1 / ceilings.bytes_per_second), (ridge, 1 / ceilings.bytes_per_second)])
    cost = cost_of(sizes_of(served), rates, 0.0)
    seconds = cost.seconds(tokens=tokens, sampled=tokens, kv_bytes=0)
    assert milliseconds == pytest.approx(1000 * seconds, rel=0.01)
    assert seconds >= served.step([Piece(0, 1, tokens)], sampled=tokens).floor_ms(ceilings) / 1000 * 0.99


def test_windowed_layers_look_at_their_window_alone() -> None:
    sizes = replace(SIZES, windows={0: 0.25 * SIZES.kv_per_token, 100: 0.75 * SIZES.kv_per_token})
    work = StepWork(prompt_tokens=50, prompt_pairs=5000, prompt_read=400, decoding=4, context=4000, sampled=4)
    seconds = [
        StreamedCost(cost_of(one, RATES, 0.0)).seconds(work) - StreamedCost(cost_of(one, RATES, 0.0)).seconds(none)
        for one in (SIZES, sizes)
        for none in [work._replace(prompt_read=0, context=0)]
    ]
    per_token = SIZES.kv_per_token / RATES.memory
    assert [4400 * per_token, (0.25 * 4400 + 0.75 * (99 + 400)) * per_token] == pytest.approx(seconds)


def test_the_model_says_what_the_diagonal_order_is_good_for() -> None:
    """All of 1 GB streams at 1 GB/s, so that any step takes a second. 16 tokens in and 112 out, batches of 2.

    By zig-zag with n = 8, 16 sequences get 112 tokens each in 112 s. As much memory has room for 12 batches in the
    diagonal order, which give 24 tokens in each second.
    """
    prompts = [Prompt([1] * 16, 112) for _ in range(2 * 36)]
    plan, cost = Policy(DIAGONAL, 8, 2).plan(prompts, 16), StreamedCost(cost_of(SIZES, RATES, SIZES.layers))
    assert 24.0 == pytest.approx(plan.level_rate([cost.seconds(step.work) for step in plan.steps]))
    works = planned(Policy(ZIG_ZAG, 8, 2), prompts[:16], limits_for(Policy(ZIG_ZAG, 8, 2), prompts[:16], 512))
    phases = predicted(works, cost)
    assert (16 * 112, 112.0) == (phases.total_tokens, pytest.approx(phases.total_s))


def test_the_search_tries_what_fits_and_takes_the_best() -> None:
    prompts = [Prompt([1] * 8, 16) for _ in range(32)]
    candidates = {}
    for policy in schedules.policies(SCHEDULES, [1, 2, 4, 8, 16], 2):
        limits = limits_for(policy, prompts)
        works = planned(policy, prompts, limits)
        candidates[policy] = (works, limits.max_batch_total_tokens * SIZES.kv_per_token)
    shares = [step / 10 for step in range(11)]

    def found_in(memory: float) -> schedules.Found | None:
        return schedules.search(
            candidates, lambda share: cost_of(SIZES, RATES, (1 - share) * SIZES.layers), memory, shares
        )

    whole, half = found_in(2e9), found_in(0.6e9)
    assert whole is not None and whole.resident == 1.0
    assert half is not None and half.resident < 1.0 and half.tried < whole.tried
    works, kv_bytes = candidates[half.policy]
    assert half.resident * 1e9 + SIZES.slots + kv_bytes <= 0.6e9
    assert found_in(0.1e9) is None


@pytest.mark.parametrize("num_layers", [1, 3, 6, 7, 24, 80])
def test_shares_are_whole_layers_as_flags_too(num_layers: int) -> None:
    shares = shares_of(num_layers)
    assert (0.0, 1.0) == (shares[0], shares[-1]) and len(shares) <= 33
    for share in shares[: 33 if num_layers <= 32 else 0]:
        taken, flag = 0, Share.parse(percent(share))
        for seen in range(1, num_layers + 1):
            taken += flag.admits(taken, 1, seen, num_layers)
        assert round(share * num_layers) == taken


def test_what_the_shards_tell_is_a_share_of_the_run() -> None:
    told = Streamed(8, 16, 0.5, [Span(0, 1.0, 2.0), Span(1, 2.0, 3.0)], [])
    assert 0.5 == told.busy(told.reads, 0.0, 4.0)
    assert told.busy(told.computed, 0.0, 4.0) is None


# ------------------------------------------------------------------------------------------------------ the command


def offline(shape: Path, *flags: str, expected: int = 0) -> None:
    """In bfloat16, or else a processor that computes float32 better would hold and stream twice as much."""
    arguments = ["offline", "--random-weights", str(shape), "--device", "cpu", "--dtype", "bfloat16"]
    assert expected == main(
        [*arguments, "--num-prompts", "12", "--input-length", "12", "--gpu-batch-size", "2", *flags]
    )


@pytest.fixture
def shape(tmp_path: Path) -> Path:
    path = tmp_path / "shape.json"
    path.write_text(json.dumps(SHAPE))
    return path


@pytest.fixture
def generated(monkeypatch: pytest.MonkeyPatch) -> list[list[list[int]]]:
    """The tokens of every run of the command, by prompt."""
    found: list[list[list[int]]] = []

    def noting(function: Any) -> Any:
        async def noted(*args: Any) -> Any:
            found.append(await function(*args))
            return found[-1]

        return noted

    monkeypatch.setattr(command, "generate", noting(command.generate))
    monkeypatch.setattr(schedules, "generate_diagonally", noting(schedules.generate_diagonally))
    return found


@pytest.mark.rest
def test_schedules_on_weights_that_stream(
    tmp_path: Path,
    shape: Path,
    generated: list[list[list[int]]],
    capfd: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("server.offload.auto.rates_of", lambda *args, **_: replace(RATES, link=args[2]))
    flags = ["--schedule", *SCHEDULES, "--num-gpu-batches", "3", "--output-length", "12"]
    flags += ["--shortest-output-length", "2", "--weights-on-device", "0%", "--offload-dir", str(tmp_path)]
    offline(shape, *flags, "--output", str(tmp_path / "out"))
    *lines, last = capfd.readouterr().out.splitlines()
    result = json.loads(last)
    rows = result["rows"]
    assert [("row", 1), *((name, 3) for name in ("zig-zag", "diagonal", "continuous"))] == [
        (row["schedule"], row["num_gpu_batches"]) for row in rows
    ]
    total = result["work"]["max_new_tokens"]
    _, first, *others = generated  # behind the one before what is measured
    assert 3 == len(others) and all(first == tokens for tokens in others)
    for row in rows:
        assert (12 * 12, total - 12, total) == (row["prefill_tokens"], row["decode_tokens"], row["total_tokens"])
        assert row["prefill_latency_s"] + row["decode_latency_s"] <= row["total_latency_s"] * (1 + 1e-9)
        assert row["predicted_decode_tokens_per_second"] > 0 and row["projected"] is False
        assert 0 < row["link_busy"] <= 1 and 0 < row["layers_busy"] <= 1
        levels = [row["level_tokens_per_second"], row["predicted_level_tokens_per_second"]]
        assert all(levels) if row["schedule"] == "diagonal" else levels == [None, None]
        assert row["streamed_bytes"] > 0 == row["streamed_bytes"] % (row["streamed_bytes_per_step"] // 4)
    cells = [[cell.strip() for cell in line.split("|")[1:-1]] for line in lines]
    assert ["Schedule", "n", "Batch size", "Sequences", "Prefill token/s", "Decode token/s"] == cells[0][:6]
    assert ["row", "1", "2", "2", f"{rows[0]['prefill_tokens_per_second']:.3f}"] == cells[2][:5]
    assert ["no"] == cells[2][-3:-2]
    model = f"{rows[0]['model_size_bytes'] / 2**30:.3f}"
    assert ["row, n = 1", model, "0.000", "0.000", "–"] == next(one for one in cells if one[:1] == ["row, n = 1"])[:5]
    assert any("4 of 4 layers" in note for note in result["notes"])


def test_an_encoder_s_prompts_are_computed_together_and_one_before_what_is_measured(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    ran: list[int] = []
    generate = command.generate

    async def counted(timed: Any, tokenizer: Any, limits: Any, prompts: Sequence[Prompt], *rest: Any) -> Any:
        ran.append(len(prompts))
        return await generate(timed, tokenizer, limits, prompts, *rest)

    monkeypatch.setattr(command, "generate", counted)
    shape = tmp_path / "t5.json"
    config = AutoConfig.for_model("t5", d_model=32, d_kv=8, num_heads=4, d_ff=32, num_layers=1, vocab_size=256)
    shape.write_text(json.dumps(config.to_dict() | {"torch_dtype": "float32", "decoder_start_token_id": 0}))
    flags = ["--schedule", "row", "zig-zag", "--num-gpu-batches", "2", "--input-length", "37", "--output-length", "9"]
    offline(shape, *flags)
    rows = json.loads(capfd.readouterr().out.splitlines()[-1])["rows"]
    assert [12 * 37] * 2 == [row["prefill_tokens"] for row in rows]
    assert [12 * 9] * 2 == [row["total_tokens"] for row in rows]
    assert [1, 12, 12] == ran
    assert all(row["predicted_total_tokens_per_second"] is None for row in rows)


@pytest.mark.rest
def test_auto_chooses_says_why_and_runs_it(
    tmp_path: Path, shape: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("server.offload.auto.rates_of", lambda *args, **_: replace(RATES, link=args[2]))
    flags = ["--schedule", "auto", "--num-gpu-batches", "1", "2", "--output-length", "6", "--cut-output-length", "3"]
    offline(shape, *flags, "--offload-dir", str(tmp_path), "--offload-memory", "500MB")
    out, errors = capfd.readouterr()
    assert any(f"auto: {name}, " in errors for name in ("row", "zig-zag", "continuous"))  # lengths are cut
    assert " GB of embedding and head: predicted " in errors
    assert "auto: " in errors and "100 % of the layers on the device, of " in errors and "predicted" in errors
    result = json.loads(out.splitlines()[-1])
    (row,) = result["rows"]
    assert row["projected"] is True and 0 == row["streamed_bytes"] and row["link_busy"] is None
    assert 12 * 6 == row["total_tokens"]


@pytest.mark.parametrize(
    ("flags", "sentence"),
    [
        (["--num-gpu-batches", "2"], "--num-gpu-batches is for schedules: give --schedule too"),
        (["--schedule", "auto", "row"], "--schedule auto is one of the others that is chosen"),
        (["--schedule", "row", "--max-batch-size", "4"], "--max-batch-size and --max-batch-total-tokens follow from"),
        (["--schedule", "zig-zag", "--num-gpu-batches", "8"], "is 16 sequences, and there are 12 prompts"),
        (
            ["--schedule", "zig-zag", "--num-gpu-batches", "3", "--max-batch-prefill-tokens", "71"],
            "--max-batch-prefill-tokens is 71, and the prompts of a block, which are computed together, have 72 tokens",
        ),
        (["--schedule", "row", "--cut-output-length", "100"], "--cut-output-length is 100: it extrapolates outputs"),
        (
            ["--schedule", "diagonal", "--cut-output-length", "3"],
            "--cut-output-length extrapolates steps that go on alike",
        ),
        (
            ["--schedule", "diagonal", "--stop-at-eos"],
            "--schedule diagonal divides memory by the lengths of outputs, and",
        ),
        (["--schedule", "row", "--shortest-output-length", "101"], "--shortest-output-length is 101: it is for synth"),
        (["--schedule", "row", "--offload-memory", "2GB"], "--offload-memory is what --schedule auto may fill"),
        (["--schedule", "auto", "--offload-memory", "40%"], "--offload-memory is 40%: give a size such as 6GB"),
        (["--schedule", "auto", "--offload-memory", "0.1MB"], "nothing fits into 0.00 GB beside what must stay, and"),
        (["--schedule", "auto", "--offload-memory", "0.1MB"], "without --offload-dir: give --offload-memory 1MB"),
        (["--schedule", "row", "--weights-on-device", "150%"], "--weights-on-device is 150%: a share is at most 100%"),
        (
            ["--schedule", "auto", "--weights-on-device", "much"],
            "--weights-on-device is much: give a share such as 40%",
        ),
        (["--schedule", "row", "--offload-dir", "/nowhere"], "--offload-dir /nowhere: no file can be made there"),
    ],
)
def test_what_cannot_be_is_refused(
    shape: Path, flags: list[str], sentence: str, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("server.offload.auto.rates_of", lambda *args, **_: replace(RATES, link=args[2]))
    offline(shape, *flags, expected=1)
    assert sentence in capfd.readouterr().err
