"""Cost models: a data sheet costs what the roofline says, and a fit finds the model that made its measurements."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from benchmark import shapes
from benchmark.cost import Curve, Fitted, Roofline, StepWork, fit, read_latency
from benchmark.devices import DEVICES
from benchmark.report import BenchError
from benchmark.roofline import ServedModel, mean_context


def test_a_data_sheet_costs_what_the_roofline_says() -> None:
    work = ServedModel(shapes.shape("bloomz-7b1-mt"), "float16")
    ceilings = DEVICES["a100-40g"].dense_ceilings("float16", 2)
    cost = Roofline.of(work, ceilings, efficiency=0.5, overhead_s=0.001)
    decode = StepWork(decoding=32, context=32 * 150, sampled=32)
    assert work.decode(32, 150).floor_ms(ceilings) / 500 + 0.001 == pytest.approx(cost.seconds(decode))
    prefill = StepWork(prompt_tokens=3200, prompt_pairs=32 * 100**2 / 2, sampled=32)
    assert work.prefill(32, 100).floor_ms(ceilings) / 500 + 0.001 == pytest.approx(cost.seconds(prefill))
    assert 0 == cost.seconds(StepWork())


def test_a_mixed_step_reads_the_weights_once() -> None:
    work = ServedModel(shapes.shape("bloomz-7b1-mt"), "float16")
    cost = Roofline.of(work, DEVICES["h200"].dense_ceilings("float16", 1), 1.0, 0.0)
    few, decode = StepWork(prompt_tokens=8, prompt_pairs=32), StepWork(decoding=8, context=800, sampled=8)
    mixed = StepWork(prompt_tokens=8, prompt_pairs=32, decoding=8, context=800, sampled=8)
    weights = cost.weight_bytes / cost.bytes_per_second
    assert cost.seconds(few) + cost.seconds(decode) - weights == pytest.approx(cost.seconds(mixed))


def latency_result(sequence_length: int, **overrides: Any) -> dict[str, Any]:
    """What `latency` would have measured of KNOWN, with 101 generated tokens."""
    context = mean_context(sequence_length, 101)
    sizes = (1, 2, 4, 8, 16, 32)
    prefill = [StepWork(size * sequence_length, size * sequence_length**2 / 2) for size in sizes]
    decode = [StepWork(decoding=size, context=int(size * context)) for size in sizes]
    rows = [
        {"step": step, "batch_size": size, "p50_ms": 1000 * KNOWN.seconds(work), "tokens_per_sample": tokens}
        for step, works in (("prefill", prefill), ("decode_token", decode))
        for size, work in zip(sizes, works, strict=True)
        for tokens in [work.prompt_tokens or size]
    ]
    arguments = {"sequence_length": sequence_length, "decode_length": 101}
    about = {"model": "known", "device": "cpu", "dtype": "float32", "num_shard": 1, "quantize": None}
    return {"command": "latency", "rows": rows, "arguments": arguments} | about | overrides


# A curved decode time, a straight prefill time, and prices of what prompts and decoding sequences look at.
KNOWN = Fitted(
    base_ms=20.0,
    prefill_ms=Curve((0, 1000), (20.0, 320.0)),
    pair_ms=0.0004,
    decode_ms=Curve((0, 8, 32), (20.0, 28.0, 44.0)),
    context_ms=0.002,
)


@pytest.mark.parametrize(
    "work",
    [
        StepWork(prompt_tokens=150, prompt_pairs=150**2 / 2),
        StepWork(prompt_tokens=150, prompt_pairs=150**2 / 2 + 150 * 600, prompt_read=600),
        StepWork(decoding=5, context=900),
        StepWork(decoding=32, context=32 * 700),
        StepWork(decoding=40, context=40),
        StepWork(prompt_tokens=64, prompt_pairs=64**2 / 2, decoding=12, context=12 * 200),
    ],
)
def test_a_fit_to_two_contexts_finds_the_model_again(work: StepWork) -> None:
    # The intercept is that of a line through a curve, so that only a mixed step is off, by that much.
    found = fit([latency_result(100), latency_result(400)])
    assert KNOWN.pair_ms == pytest.approx(found.pair_ms, rel=0.01)
    assert KNOWN.context_ms == pytest.approx(found.context_ms, rel=0.01)
    assert KNOWN.base_ms == pytest.approx(found.base_ms, rel=0.1)
    assert KNOWN.seconds(work) == pytest.approx(found.seconds(work), rel=0.02)


def test_a_fit_to_one_context_is_right_there() -> None:
    found = fit([latency_result(100)])
    assert 0 == found.context_ms
    work = StepWork(decoding=8, context=int(8 * mean_context(100, 101)))
    assert KNOWN.seconds(work) == pytest.approx(found.seconds(work), rel=0.001)


def test_a_fit_adds_the_overhead_to_every_step_that_computes() -> None:
    plain, slower = (fit([latency_result(100)], overhead_s) for overhead_s in (0.0, 0.003))
    assert 0.003 == pytest.approx(slower.seconds(StepWork(decoding=3)) - plain.seconds(StepWork(decoding=3)))
    assert 0 == slower.seconds(StepWork())


def test_curves_go_on_beyond_their_points() -> None:
    curve = Curve((0, 2, 4), (1.0, 2.0, 6.0))
    assert [1.0, 1.5, 2.0, 4.0, 6.0, 10.0] == [curve(x) for x in (0, 1, 2, 3, 4, 6)]


def test_one_batch_size_is_not_enough() -> None:
    result = latency_result(100)
    result["rows"] = [row for row in result["rows"] if row["batch_size"] == 1]
    with pytest.raises(BenchError, match="one batch size was measured: measure several"):
        fit([result])


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("{", "is no result of this benchmark"),
        ("[]", "is no result of this benchmark"),
        (json.dumps({"command": "serving", "rows": []}), "is an incomplete result, or one of `serving`"),
        (json.dumps({"command": "latency", "rows": [{"step": "prefill"}]}), "is an incomplete result"),
    ],
)
def test_what_is_no_latency_result_is_said(text: str, sentence: str, tmp_path: Path) -> None:
    path = tmp_path / "result.json"
    path.write_text(text)
    with pytest.raises(BenchError, match=sentence):
        read_latency(path)
