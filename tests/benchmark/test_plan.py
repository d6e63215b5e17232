"""`plan`: what fits, and the published tables as physics would have them."""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from benchmark import plan, shapes
from benchmark.__main__ import main
from benchmark.roofline import ServedModel

ROOT = Path(__file__).parents[2]


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
    assert "| Decode (token) | 1          | 4.57 ms   | bandwidth  |" in lines
    assert "# Tensor Parallel (TP) - 2 shards" in lines


def test_weights_and_cache_share_the_memory(capsys: pytest.CaptureFixture[str]) -> None:
    _, result = planned(capsys, "--model-id", "bloomz-7b1-mt", "--device", "h200", "--num-shard", "1")
    (capacity,) = result["capacity"]
    assert 14.14e9 == pytest.approx(capacity["weight_bytes_per_shard"], rel=1e-3)
    assert 265_000 == pytest.approx(capacity["kv_tokens"], rel=0.05)
    assert 128 * 2048 == capacity["max_batch_total_tokens"]  # more could never be used under the default limits


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
    per_token = [plan.capacity(work, plan.DEVICES["l4"], n, args).kv_bytes_per_token_per_shard for n in (1, 2, 4, 8)]
    assert [28_672, 14_336, 14_336, 14_336] == per_token


def test_a_batch_that_does_not_fit_is_marked(capsys: pytest.CaptureFixture[str]) -> None:
    flags = ["--model-id", "baichuan2-13b", "--device", "a100-40g", "--num-shard", "1", "-b", "1", "512"]
    lines, result = planned(capsys, *flags)
    assert [True, False] == [row["fits"] for row in result["rows"][:2]]
    assert any("| 512        | does not fit |" in line for line in lines)


def test_what_cannot_be_split_or_held_says_why(capsys: pytest.CaptureFixture[str]) -> None:
    lines, result = planned(capsys, "--model-id", "baichuan2-13b", "--device", "l4", "--num-shard", "1", "2", "3")
    assert {2} == {row["num_shard"] for row in result["rows"]}
    assert any("leave no room for a KV cache" in line for line in lines)
    assert any("which --num-shard 3 does not divide" in line for line in lines)


def test_nothing_that_fits_is_an_error(capsys: pytest.CaptureFixture[str]) -> None:
    assert 1 == main(["plan", "--model-id", "baichuan2-13b", "--device", "l4", "--num-shard", "1"])
    assert capsys.readouterr().err.startswith("error: baichuan2-13b on l4: 27.79 GB of weights")


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
