"""`plan`: what fits, and the published tables as physics would have them."""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from benchmark.__main__ import main
from benchmark.commands import plan
from benchmark.cost import devices, shapes
from benchmark.cost.devices import DEVICES, known
from benchmark.cost.roofline import ServedModel
from tests.running import ROOT

STEP_OF_MANY = ("Decode (token)", 32)


def planned(capsys: pytest.CaptureFixture[str], *flags: str) -> tuple[list[str], dict[str, Any]]:
    assert 0 == main(["plan", *flags])
    *lines, last = capsys.readouterr().out.splitlines()
    return lines, json.loads(last)


def test_bloomz_on_a100s_as_worked_out_by_hand(capsys: pytest.CaptureFixture[str]) -> None:
    lines, result = planned(capsys, "--model-id", "bloomz-7b1-mt", "--device", "a100-40g", "--num-shard", "2", "8")
    floors = {(row["num_shard"], row["step"], row["batch_size"]): row["floor_ms"] for row in result["rows"]}
    assert 4.57 == pytest.approx(floors[2, "Decode (token)", 1], rel=0.02)
    assert 1.33 == pytest.approx(floors[8, "Decode (token)", 32], rel=0.02)
    assert 62.1 == pytest.approx(floors[2, "Prefill", 32], rel=0.02)
    assert 99 * floors[2, "Decode (token)", 4] == pytest.approx(floors[2, "Decode (total)", 4])
    assert any("| Decode (token) | 1          | 4.57 ms   | bandwidth  |" in line for line in lines)
    assert "# Tensor Parallel (TP) - 2 shards" in lines


def test_weights_and_cache_share_the_memory(capsys: pytest.CaptureFixture[str]) -> None:
    _, result = planned(capsys, "--model-id", "bloomz-7b1-mt", "--device", "h200", "--num-shard", "1")
    (capacity,) = result["capacity"]
    assert 14.14e9 == pytest.approx(capacity["weight_bytes_per_shard"], rel=1e-3)
    assert 265_000 == pytest.approx(capacity["kv_tokens"], rel=0.05)
    assert capacity["kv_tokens"] == capacity["max_batch_total_tokens"]
    more = ("--model-id", "bloomz-7b1-mt", "--device", "h200", "--num-shard", "1", "--max-total-tokens", "2048")
    _, limited = planned(capsys, *more)
    assert 128 * 2048 == limited["capacity"][0]["max_batch_total_tokens"]  # more could never be used


@pytest.mark.parametrize("kind", ["int8", "fp8_e4m3", "fp8_e5m2"])
def test_a_cache_in_bytes_holds_twice_the_tokens(kind: str, capsys: pytest.CaptureFixture[str]) -> None:
    flags = ["--model-id", "bloomz-7b1-mt", "--device", "a100-40g", "--num-shard", "1"]
    fits, step = [], []
    for more in ([], ["--kv-cache-dtype", kind]):
        lines, result = planned(capsys, *flags, *more)
        fits.append(result["capacity"][0]["kv_tokens"])
        step.append(next(r["floor_ms"] for r in result["rows"] if (r["step"], r["batch_size"]) == STEP_OF_MANY))
    assert 1.9 * fits[0] <= fits[1] <= 2.001 * fits[0]
    assert step[1] < step[0]
    assert any(line.startswith("| KV cache dtype") and kind in line for line in lines)


def test_key_value_heads_are_copied_when_there_are_more_shards() -> None:
    work = ServedModel(shapes.shape("chatglm3-6b"), "float16")  # two key-value heads
    args = argparse.Namespace(max_batch_prefill_tokens=4096, max_concurrent_requests=128, max_total_tokens=2048)
    per_token = [devices.capacity(work, DEVICES["l4"], n, args).kv_bytes_per_token_per_shard for n in (1, 2, 4, 8)]
    assert [28_672, 14_336, 14_336, 14_336] == per_token


def test_adapters_take_of_what_the_kv_cache_has() -> None:
    work = ServedModel(shapes.shape("chatglm3-6b"), "float16")
    args = argparse.Namespace(max_batch_prefill_tokens=4096, max_concurrent_requests=128, max_total_tokens=2048)
    without, beside = (devices.capacity(work, DEVICES["l4"], 1, args, taken) for taken in (0, 1e9))
    missing = (without.kv_tokens - beside.kv_tokens) * without.kv_bytes_per_token_per_shard
    assert missing == pytest.approx(1e9, abs=2 * 16 * without.kv_bytes_per_token_per_shard)
    full = devices.capacity(work, DEVICES["l4"], 1, args, 1e12)
    assert full.problem is not None and "1000.00 GB for adapters" in full.problem and full.kv_tokens == 0


def test_copies_are_counted() -> None:
    """ChatGLM3 on eight shards: two key-value heads of 128 numbers, 28 layers of width 4096, in two bytes each."""
    shape = shapes.shape("chatglm3-6b")
    keys_and_values = 28 * 2 * 4096 * 128 * 2 * 6 // 8  # a shard has one head, of which a quarter is its share
    norms = (28 * 2 + 1) * 4096 * 2 * 7 // 8
    assert keys_and_values + norms == shape.copied_bytes("float16", None, 8)
    assert (28 * 2 + 1) * 4096 * 2 // 2 == shape.copied_bytes("float16", None, 2)
    assert 0 == shape.copied_bytes("float16", None, 1)


# A sum of bloomz-7b1-mt over eight H200s, in ms: 5 µs, and of each token 7/8 of its 4096 numbers of 2 bytes there and
# back at 450 GB/s. Candidates: 12 bytes of each sequence to seven others.
SUM, SUM_TOKEN, CANDIDATES = 0.005, 2 * 7 / 8 * 4096 * 2 / 450e9 * 1000, 7 * 12 / 450e9 * 1000


def test_sums_over_shards_take_time(capsys: pytest.CaptureFixture[str]) -> None:
    """BLOOM-7B has 62 exchanges a step: two of each of 30 layers, one of the table of words, one of candidates."""
    _, result = planned(capsys, "--model-id", "bloomz-7b1-mt", "--device", "h200", "--num-shard", "1", "8", "-b", "32")
    found = {(row["num_shard"], row["step"]): row for row in result["rows"]}
    expected = 62 * SUM + 32 * (61 * SUM_TOKEN + CANDIDATES)
    row = found[8, "Decode (token)"]
    assert expected == pytest.approx(row["all_reduce_ms"])
    assert 99 * expected == pytest.approx(found[8, "Decode (total)"]["all_reduce_ms"])
    assert 62 * SUM + 3200 * 61 * SUM_TOKEN + 32 * CANDIDATES == pytest.approx(found[8, "Prefill"]["all_reduce_ms"])
    assert 0 == found[1, "Decode (token)"]["all_reduce_ms"]
    assert 32_000 / (row["floor_ms"] + expected) == pytest.approx(row["tokens_per_second"])
    assert row["floor_ms"] / 0.6 + expected == pytest.approx(row["expected_ms"])


def test_a_decode_step_has_one_prediction(capsys: pytest.CaptureFixture[str]) -> None:
    """32 sequences of BLOOM-7B on an H200: 14.142 GB of weights and 32 x 150 x 491,520 bytes of keys and values at 60 %
    of 4.8 TB/s, and half a millisecond: by `plan`, and by `simulate` for the step in the middle of a run."""
    expected = (14.142e9 + 32 * 150 * 491_520) / (0.6 * 4.8e12) * 1000 + 0.5
    assert 6.23 == pytest.approx(expected, rel=1e-3)
    same = ["--device", "h200", "--num-shard", "1", "--overhead-ms", "0.5"]
    _, result = planned(capsys, "--model-id", "bloomz-7b1-mt", *same, "-b", "32")
    (by_plan,) = [row["expected_ms"] for row in result["rows"] if row["step"] == "Decode (token)"]
    assert expected == pytest.approx(by_plan, rel=1e-3)
    load = ["--concurrency", "32", "--num-requests", "32", "--input-length", "100", "--output-length", "100"]
    assert 0 == main(["simulate", "--shape", "bloomz-7b1-mt", *same, *load])
    (row,) = json.loads(capsys.readouterr().out.splitlines()[-1])["rows"]
    assert expected == pytest.approx(row["inter_token_ms"]["p50"], rel=2e-3)  # of a context near 150


def test_an_encoder_s_sums_are_of_its_prompt_and_a_decoder_s_of_its_token(capsys: pytest.CaptureFixture[str]) -> None:
    """mt0-xxl on two H200s: 24 layers of an encoder with two sums of 100 tokens each, and 24 of a decoder with three of
    one token; of each token 4096 numbers of 2 bytes there and back, half of them, at 450 GB/s."""
    flags = ["--model-id", "mt0-xxl-mt", "--device", "h200", "--dtype", "float16", "--num-shard", "2", "-b", "1", "32"]
    _, result = planned(capsys, *flags)
    found = {(row["step"], row["batch_size"]): row["all_reduce_ms"] for row in result["rows"]}
    token, candidates = 4096 * 2 / 450e9 * 1000, 12 / 450e9 * 1000
    for batch, of_layers in ((1, 0.69), (32, 3.44)):
        layers = (48 + 72) * 0.005 + (48 * 100 + 72) * batch * token
        assert of_layers == pytest.approx(layers, abs=0.005)
        words = 2 * 0.005 + (100 + 1) * batch * token  # of the prompt, and of the token that a generation starts from
        chosen = 0.005 + batch * candidates
        assert layers + words + chosen == pytest.approx(found["Prefill", batch])
        decode = 72 * 0.005 + 72 * batch * token + 0.005 + batch * token + chosen
        assert decode == pytest.approx(found["Decode (token)", batch])


def test_sums_are_those_of_all_micro_batches(capsys: pytest.CaptureFixture[str]) -> None:
    """BLOOM-7B as two stages of two H200s, 18 layers and 12 with the head: of 32 sequences eight at a time go through
    the slower one, the first, four times; a batch of one goes once through both."""
    flags = ["--model-id", "bloomz-7b1-mt", "--device", "h200", "--num-shard", "2", "-b", "1", "32"]
    _, result = planned(capsys, *flags, "--pipeline-parallel", "2", "--micro-batches", "4")
    found = {row["batch_size"]: row for row in result["rows"] if row["step"] == "Decode (token)"}
    token, candidates = 4096 * 2 / 450e9 * 1000, 12 / 450e9 * 1000
    assert 18 * 0.4027 > 12 * 0.4027 + 2.0552  # GB of weights
    assert 4 * (2 * 18 + 1) * (0.005 + 8 * token) == pytest.approx(found[32]["all_reduce_ms"])
    alone = (2 * 30 + 1) * (0.005 + token) + 0.005 + candidates
    assert alone == pytest.approx(found[1]["all_reduce_ms"])


@pytest.mark.parametrize(
    ("name", "device"),
    [
        ("NVIDIA H200", "h200"), ("NVIDIA H100 80GB HBM3", "h100"), ("NVIDIA A100-SXM4-80GB", "a100-80g"),
        ("NVIDIA A100-PCIE-40GB", "a100-40g"), ("NVIDIA RTX A6000", "a6000"), ("NVIDIA L4", "l4"),
        ("NVIDIA L40S", None), ("NVIDIA H100 PCIe", None), ("NVIDIA H100 80GB HBM3 MIG 1g.10gb", None), ("cpu", None),
        ("NVIDIA H200 NVL", None), ("NVIDIA H100 NVL", None),
    ],
)  # fmt: skip
def test_a_driver_s_name_is_that_of_a_data_sheet(name: str, device: str | None) -> None:
    assert (None if device is None else DEVICES[device]) == known(name)


def test_what_fits_is_the_capacity_and_not_the_usual_load(capsys: pytest.CaptureFixture[str]) -> None:
    """256 sequences of 1040 tokens: more than 128 x 2048, and less than what the memory holds."""
    lines, result = planned(
        capsys, "--model-id", "tinyllama-1.1b", "--device", "h200", "--num-shard", "1", "-b", "256", "100000",
        "-s", "1000", "-d", "35",
    )  # fmt: skip
    (capacity,) = result["capacity"]
    assert capacity["max_batch_total_tokens"] < 256 * 1040 < capacity["kv_tokens"] < 100_000 * 1040
    assert [True, False] == [row["fits"] for row in result["rows"] if row["step"] == "Prefill"]
    assert any("| 100000     | does not fit |" in line for line in lines)
    assert any("Expected: 60 % of the limits and 0 ms a step" in line and "assumption" in line for line in lines)


def test_captured_steps_have_their_room(capsys: pytest.CaptureFixture[str]) -> None:
    """Beside weights and cache there is room for the context, and for three captures of BLOOM's 250,880 logits."""
    flags = ["--model-id", "bloomz-7b1-mt", "--device", "a100-40g", "--num-shard", "1"]
    for requests in (128, 256):
        _, result = planned(capsys, *flags, "--max-concurrent-requests", str(requests))
        (capacity,) = result["capacity"]
        taken = capacity["weight_bytes_per_shard"] + capacity["kv_tokens"] * capacity["kv_bytes_per_token_per_shard"]
        assert 42.3e9 - taken > 2e9 + 3 * requests * 250_880 * 12


def test_a_sequence_longer_than_the_model_s_is_told(capsys: pytest.CaptureFixture[str]) -> None:
    flags = ["--model-id", "opt-1.3b", "--device", "l4", "--num-shard", "1", "-b", "1"]
    for length, is_told in ((1948, False), (1949, True)):
        lines, _ = planned(capsys, *flags, "-s", str(length), "-d", "100")
        assert is_told == any("make 2049 tokens, and the model's longest sequence is 2048" in line for line in lines)


def test_what_cannot_be_split_or_held_says_why(capsys: pytest.CaptureFixture[str]) -> None:
    lines, result = planned(capsys, "--model-id", "baichuan2-13b", "--device", "l4", "--num-shard", "1", "2", "3")
    assert {2} == {row["num_shard"] for row in result["rows"]}
    assert any("leave no room for a KV cache" in line for line in lines)
    assert any("which --num-shard 3 does not divide" in line for line in lines)


def test_nothing_that_fits_is_an_error(capsys: pytest.CaptureFixture[str]) -> None:
    assert 1 == main(["plan", "--model-id", "baichuan2-13b", "--device", "l4", "--num-shard", "1"])
    assert capsys.readouterr().err.startswith("error: baichuan2-13b on l4: 27.79 GB of weights")


@pytest.mark.parametrize(
    ("good", "expected"), [({"float32"}, "float32"), ({"float32", "bfloat16"}, "bfloat16"), ({"float16"}, "float16")]
)
def test_this_machine_computes_in_what_a_server_would(
    good: set[str], expected: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(plan, "good_dtypes", lambda kernels: good)
    monkeypatch.setattr(plan, "_is_cpu", lambda: True)
    shape = shapes.shape("bloom-560m")
    assert ("float16", expected) == (plan._default_dtype(shape, "h200"), plan._default_dtype(shape, "this"))


def test_this_machine_is_measured(capsys: pytest.CaptureFixture[str]) -> None:
    lines, result = planned(capsys, "--model-id", "bloom-560m", "--num-shard", "1", "--dtype", "float32", "-b", "1")
    assert all(row["floor_ms"] > 0 for row in result["rows"])
    assert any("Ceilings of the device" in line for line in lines)


def test_a_data_sheet_needs_no_torch() -> None:
    code = (
        "import sys; from benchmark.__main__ import main;"
        "main(['plan', '--model-id', 'mistral-7b', '--device', 'h100']); print('torch' in sys.modules)"
    )
    shown = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    assert "False" == shown.splitlines()[-1]


def test_a_quantised_config_is_planned_as_it_is_stored(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    gptq = {"quant_method": "gptq", "bits": 4, "group_size": 128, "desc_act": False}
    config = dict(shapes.find("baichuan2-13b").config) | {"quantization_config": gptq}
    (tmp_path / "config.json").write_text(json.dumps(config))
    flags = ("--model-id", str(tmp_path), "--device", "l4", "--num-shard", "1", "-b", "1")
    lines, result = planned(capsys, *flags)
    assert any("gptq, 4 bits, groups of 128" in line for line in lines)
    (capacity,) = result["capacity"]
    assert (0.5 + 3 / 128) * 12.61e9 + 2 * 2 * 0.6436e9 == pytest.approx(capacity["weight_bytes_per_shard"], rel=2e-3)
    assert capacity["kv_tokens"] > 0  # which has no room beside 16-bit weights
    assert 1 == main(["plan", *flags, "--quantize", "int8"])
    assert "is quantised already, as gptq, 4 bits, groups of 128: leave it out" in capsys.readouterr().err


def test_a_split_of_groups_in_activation_order_takes_more(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Ranks hold parts of all groups of `down_proj` and `o_proj`, filled up; of other layers their share."""
    weights = {}
    for is_ordered in (False, True):
        gptq = {"quant_method": "gptq", "bits": 4, "group_size": 128, "desc_act": is_ordered}
        config = dict(shapes.find("mistral-7b").config) | {"quantization_config": gptq}
        (tmp_path / "config.json").write_text(json.dumps(config))
        _, result = planned(capsys, "--model-id", str(tmp_path), "--device", "h100", "--num-shard", "1", "8", "-b", "1")
        weights[is_ordered] = [found["weight_bytes_per_shard"] for found in result["capacity"]]
    assert weights[False][0] == weights[True][0]
    divided = 32 * (4096 * 4096 + 4096 * 14_336)  # weights of these layers
    twice_the_codes = divided / 8 / 2 * 1.0
    more = weights[True][1] - weights[False][1]
    assert twice_the_codes < more < 1.5 * twice_the_codes


def test_products_in_8_bits_are_faster_where_the_device_has_them(capsys: pytest.CaptureFixture[str]) -> None:
    flags = ("--model-id", "mistral-7b", "--device", "h100", "--num-shard", "1", "-b", "32", "-s", "1000")
    dense, int8, nf4 = (
        {row["step"]: row["floor_ms"] for row in planned(capsys, *flags, *more)[1]["rows"]}["Prefill"]
        for more in ((), ("--quantize", "int8"), ("--quantize", "bitsandbytes-nf4"))
    )
    assert dense == nf4
    assert 989 / 1979 == pytest.approx(int8 / dense, rel=0.02)  # but for attention


# ---------------------------------------------------------------------------------------------------- pipeline stages


def test_stages_are_those_of_the_server_and_make_a_whole() -> None:
    """BLOOM-560m in two: its head costs as much as twenty layers, and the table of words is in both stages."""
    for name in shapes.names():
        whole = shapes.shape(name)
        parts = whole.stages(2)
        words = whole.spec.vocab_size * (whole.spec.embed_dim or whole.spec.hidden_size)
        copies = words * whole.spec.tied_head
        if whole.spec.encoder is None:
            assert whole.total_parameters + copies == sum(part.total_parameters for part in parts)
        assert whole.head_parameters == parts[1].head_parameters and 0 == parts[0].head_parameters
        assert whole.spec.num_layers == sum(part.spec.num_layers for part in parts)
        for kind, dtype in ((None, "float16"), ("int4", "float16"), ("int8", "float32")):
            if whole.stored is None or kind is None:
                assert whole.step_weight_bytes(dtype, kind, 4) == sum(
                    p.step_weight_bytes(dtype, kind, 4) for p in parts
                )
        assert whole.kv_bytes_per_token("float16") == sum(part.kv_bytes_per_token("float16") for part in parts)
        assert whole.encode_parameters == sum(part.encode_parameters for part in parts)
    assert [22, 2] == [part.spec.num_layers for part in shapes.shape("bloom-560m").stages(2)]


def test_a_pipeline_as_worked_out_by_hand(capsys: pytest.CaptureFixture[str]) -> None:
    """BLOOM-7B on two H200s: halves of 7.07 GB of weights at 4.8 TB/s, four batches in turn, and links of 3 ms."""
    flags = "--model-id bloomz-7b1-mt --device h200 --num-shard 1 -b 1 32 -s 1 -d 2".split()
    one = {(r["step"], r["batch_size"]): r for r in planned(capsys, *flags)[1]["rows"]}
    stages = [*flags, "--pipeline-parallel", "2", "--micro-batches", "4"]
    near = {(r["step"], r["batch_size"]): r for r in planned(capsys, *stages)[1]["rows"]}
    lines, result = planned(capsys, *stages, "--link-ms", "3")
    far = {(r["step"], r["batch_size"]): r for r in result["rows"]}
    alone, many = ("Decode (token)", 1), ("Decode (token)", 32)
    assert one[alone]["floor_ms"] == pytest.approx(near[alone]["floor_ms"])  # one after the other
    assert 4 * one[alone]["floor_ms"] / 2 == pytest.approx(near[many]["floor_ms"], rel=0.03)  # four times one half
    assert near[many]["floor_ms"] == far[many]["floor_ms"]
    assert 6 == far[alone]["links_ms"] == pytest.approx(far[alone]["expected_ms"] - near[alone]["expected_ms"])
    round_ms = 6 + near[many]["floor_ms"] / 4 * 2  # longer than four times a stage
    assert 32_000 / round_ms == pytest.approx(far[many]["tokens_per_second"], rel=0.03)
    assert any("Links take 3 ms in each direction" in line for line in lines)
    assert any("| Decode (token) | 1 " in line and "| 6.00 ms" in line for line in lines)


def test_links_carry_activations(capsys: pytest.CaptureFixture[str]) -> None:
    """A prompt of 1000 tokens of BLOOM-7B is 1000 x 4096 x 2 bytes: 65.5 ms at 1 Gbit/s. A step's token is 8 bytes."""
    flags = ["--model-id", "bloomz-7b1-mt", "--device", "h200", "--num-shard", "1", "-b", "1", "-s", "1000"]
    _, result = planned(capsys, *flags, "--pipeline-parallel", "2", "--link-gbit", "1")
    found = {row["step"]: row["links_ms"] for row in result["rows"]}
    assert 65.536 == pytest.approx(found["Prefill"], rel=1e-3)
    assert (4096 * 2 + 8) * 8 / 1e6 == pytest.approx(found["Decode (token)"])


def test_the_stage_with_the_least_room_counts(capsys: pytest.CaptureFixture[str]) -> None:
    flags = ["--model-id", "bloomz-7b1-mt", "--device", "l4", "--num-shard", "1", "2"]
    _, result = planned(capsys, *flags, "--pipeline-parallel", "2")
    whole, parts = shapes.shape("bloomz-7b1-mt"), shapes.shape("bloomz-7b1-mt").stages(2)
    heaviest = max(part.weight_bytes("float16") for part in parts)
    assert heaviest == result["capacity"][0]["weight_bytes_per_shard"] < 0.7 * whole.weight_bytes("float16")
    # mT0's first stage has the encoder, most of the bytes; where there is room, a later one has the fewest tokens.
    flags = ["--model-id", "mt0-xxl-mt", "--device", "h200", "--num-shard", "1", "2", "--pipeline-parallel", "4"]
    one, two = planned(capsys, *flags)[1]["capacity"]
    assert one["weight_bytes_per_shard"] == pytest.approx(2 * two["weight_bytes_per_shard"], rel=0.01)


@pytest.mark.parametrize(
    ("flags", "why"),
    [
        (["--link-ms", "1"], "--link-ms says something of pipeline stages, and --pipeline-parallel is 1: raise it"),
        (["--pipeline-parallel", "31"], "--pipeline-parallel is 31, but the model has 30 layers"),
        (["--pipeline-parallel", "2", "--micro-batches", "17"], "--micro-batches is 17, and a server has 16 at most"),
    ],
)
def test_pipelines_that_cannot_be(flags: list[str], why: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert 1 == main(["plan", "--model-id", "bloomz-7b1-mt", "--device", "h200", *flags])
    assert why in capsys.readouterr().err


def test_a_measured_model_tells_what_its_stages_take(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """Steps of 20 ms over two stages: one sequence waits for both and the links, many for the slower one."""
    rows = [
        {"step": step, "batch_size": batch, "p50_ms": ms, "tokens_per_sample": tokens}
        for batch in (1, 16)
        for step, ms, tokens in (("prefill", 30.0, batch * 10), ("decode_token", 20.0, batch))
    ]
    measured = {
        "command": "latency", "model": "folder/bloom-560m", "dtype": "float16", "num_shard": 1, "quantize": "dense",
        "arguments": {"sequence_length": 10, "decode_length": 10}, "rows": rows,
    }  # fmt: skip
    path = tmp_path / "result.json"
    path.write_text(json.dumps(measured))
    flags = "--model-id bloom-560m --device h200 --num-shard 1 -b 1 16 -s 10 -d 10".split()
    stages = ["--pipeline-parallel", "2", "--link-ms", "3", "--cost", str(path)]
    lines, result = planned(capsys, *flags, *stages)
    found = {(r["step"], r["batch_size"]): r["expected_ms"] for r in result["rows"]}
    assert 26 == pytest.approx(found["Decode (token)", 1]) and 36 == pytest.approx(found["Prefill", 1])
    assert 20 < found["Decode (token)", 16] < 27  # two lanes: twice the slower half, or the round
    assert any("as measured (--cost)" in line for line in lines)
    for wrong in (["--dtype", "float32"], ["--model-id", "opt-1.3b"], ["--num-shard", "2"], ["--quantize", "int8"]):
        assert 1 == main(["plan", *flags, *stages, *wrong])
        assert "--cost has a result with" in capsys.readouterr().err
