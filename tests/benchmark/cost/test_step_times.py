"""Cost models: a data sheet costs what the roofline says, and a fit finds the model that made its measurements."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from benchmark.cost import shapes
from benchmark.cost.devices import DEVICES
from benchmark.cost.roofline import Piece, ServedModel, mean_context
from benchmark.cost.step_times import Curve, Fitted, Roofline, StepWork, fit, read_latency
from benchmark.result import BenchError

BLOOMZ = ServedModel(shapes.shape("bloomz-7b1-mt"), "float16")
# Its arithmetic by hand: parameters of the layers and of the head, of 2 bytes each; bytes of a token's keys and values;
# operations of a token looking at a key.
LAYERS, HEAD = BLOOMZ.shape.step_parameters, 250_880 * 4096
KV, KEY = 2 * 30 * 4096 * 2, 4 * 30 * 4096
H200_BYTES, H200_FLOPS = 4.8e12, 989e12


def roofline(efficiency: float, overhead_s: float = 0.0) -> Roofline:
    return Roofline.of(BLOOMZ, DEVICES["h200"].dense_ceilings("float16", 1), efficiency, overhead_s)


def test_where_reads_bound_every_operator_a_step_costs_its_floor() -> None:
    ceilings = DEVICES["a100-40g"].dense_ceilings("float16", 2)
    cost = Roofline.of(BLOOMZ, ceilings, efficiency=0.5, overhead_s=0.001)
    decode = StepWork(decoding=32, context=32 * 150, sampled=32)
    assert BLOOMZ.decode(32, 150).floor_ms(ceilings) / 500 + 0.001 == pytest.approx(cost.seconds(decode))
    assert 0 == cost.seconds(StepWork())


def test_prompts_cost_their_products_and_then_the_head_its_reads() -> None:
    prefill = StepWork(prompt_tokens=3200, prompt_pairs=32 * 100**2 / 2, sampled=32)
    products = 2 * LAYERS * 3200 / H200_FLOPS
    attention = max(KV * 3200 / H200_BYTES, KEY * 160_000 / H200_FLOPS)
    head = max(2 * HEAD / H200_BYTES, 2 * HEAD * 32 / H200_FLOPS)
    assert products + attention + head == pytest.approx(roofline(1.0).seconds(prefill))
    assert products + attention == pytest.approx(roofline(1.0).seconds(prefill._replace(sampled=0)))


def test_products_of_prompts_do_not_hide_what_decoding_reads() -> None:
    """512 prompt tokens beside 64 sequences of 555 keys, at 60 % of an H200: the layers' matrices, then attention."""
    mixed = StepWork(prompt_tokens=512, prompt_pairs=512**2 / 2, decoding=64, context=64 * 555, sampled=64)
    reads, flops = 0.6 * H200_BYTES, 0.6 * H200_FLOPS
    matrices = max(2 * LAYERS / reads, 2 * LAYERS * 576 / flops)
    of_prompts = max(KV * 512 / reads, KEY * 512**2 / 2 / flops)
    of_decodes = max(KV * 64 * 555 / reads, KEY * 64 * 555 / flops)
    head = max(2 * HEAD / reads, 2 * HEAD * 64 / flops)
    assert (11.73, 0.11, 6.06, 0.71) == tuple(
        pytest.approx(1000 * part, abs=0.006) for part in (matrices, of_prompts, of_decodes, head)
    )
    found = roofline(0.6, 0.0005).seconds(mixed)
    assert matrices + of_prompts + of_decodes + head + 0.0005 == pytest.approx(found)
    assert 19.1 == pytest.approx(1000 * found, abs=0.05)
    floor = BLOOMZ.step([Piece(0, 512), Piece(554, times=64)], sampled=64)
    hidden = floor.floor_ms(DEVICES["h200"].dense_ceilings("float16", 1)) / 0.6 + 0.5
    assert 12.6 == pytest.approx(hidden, abs=0.05)  # were all reads behind all products


def test_a_mixed_step_reads_the_weights_once() -> None:
    cost = roofline(1.0)
    few, decode = StepWork(prompt_tokens=8, prompt_pairs=32), StepWork(decoding=8, context=800, sampled=8)
    mixed = StepWork(prompt_tokens=8, prompt_pairs=32, decoding=8, context=800, sampled=8)
    weights = 2 * LAYERS / H200_BYTES
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


# Of sequences of 100 tokens in and 101 out: alone, with others, and both kinds of work in one step.
AT_100 = (
    StepWork(decoding=8, context=int(8 * mean_context(100, 101))),
    StepWork(prompt_tokens=400, prompt_pairs=4 * 100**2 / 2),
    StepWork(prompt_tokens=200, prompt_pairs=2 * 100**2 / 2, decoding=16, context=int(16 * mean_context(100, 101))),
)


@pytest.mark.parametrize("work", AT_100)
def test_fits_to_one_length_and_to_two_agree_on_it(work: StepWork) -> None:
    one, two = fit([latency_result(100)]), fit([latency_result(100), latency_result(400)])
    assert two.seconds(work) == pytest.approx(one.seconds(work), rel=0.001)
    assert one.base_ms == pytest.approx(two.base_ms, rel=0.001)


def test_a_fit_to_one_length_is_asked_for_no_other() -> None:
    one, two = fit([latency_result(100)]), fit([latency_result(100), latency_result(400)])
    one.check(100, 100)
    one.check(106, 90)
    for lengths in ((400, 101), (100, 300), (50, 200)):
        two.check(*lengths)
        with pytest.raises(BenchError, match="is of one --sequence-length, 100 tokens in and 101 out, and what"):
            one.check(*lengths)


def test_lengths_that_cannot_be_compared_are_refused() -> None:
    """Steps of 100, 200, … and of 300, 600, … prompt tokens: nothing says what a key costs, which is not 0."""
    with pytest.raises(BenchError, match="no two of its steps had equally many prompt tokens"):
        fit([latency_result(100), latency_result(300)])


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
