"""Floors against worked examples, and that the measured ceilings are sane."""

from __future__ import annotations

import pytest

from benchmark import shapes
from benchmark.plan import DEVICES
from benchmark.roofline import BytesAndFlops, Ceilings, Probe, ServedModel, describe, mean_context

BLOOMZ = ServedModel(shapes.shape("bloomz-7b1-mt"), "float16")
TOLERANCE = 0.02

# bloomz-7b1-mt, 100 tokens in, 100 out: ms by (device, shards), for each batch size.
DECODE = {
    ("a100-40g", 2): {1: 4.57, 2: 4.59, 4: 4.64, 8: 4.74, 16: 4.93, 32: 5.30},
    ("a100-40g", 4): {1: 2.28, 2: 2.30, 4: 2.32, 8: 2.37, 16: 2.46, 32: 2.65},
    ("a100-40g", 8): {1: 1.14, 2: 1.15, 4: 1.16, 8: 1.18, 16: 1.23, 32: 1.33},
    ("h200", 1): {1: 3.31, 2: 3.32, 4: 3.36, 8: 3.43, 16: 3.56, 32: 3.84},
}
PREFILL = {
    ("a100-40g", 2): {1: 4.55, 4: 7.76, 8: 15.5, 16: 31.0, 32: 62.1},
    ("a100-40g", 4): {1: 2.27, 4: 3.88, 8: 7.8, 16: 15.5, 32: 31.0},
    ("a100-40g", 8): {1: 1.14, 4: 1.94, 8: 3.9, 16: 7.8, 32: 15.5},
    ("h200", 1): {1: 3.3, 4: 6.1, 8: 12.3, 16: 24.5, 32: 49.0},
}


def cases(floors: dict[tuple[str, int], dict[int, float]]) -> list[tuple[str, int, int, float]]:
    return [(device, n, batch, ms) for (device, n), row in floors.items() for batch, ms in row.items()]


@pytest.mark.parametrize(("device", "num_shard", "batch_size", "expected"), cases(DECODE))
def test_decode_floors_are_those_worked_out_by_hand(
    device: str, num_shard: int, batch_size: int, expected: float
) -> None:
    demand = BLOOMZ.decode(batch_size, mean_context(100, 100))
    floor = demand.floor_ms(DEVICES[device].ceilings("float16", num_shard))
    assert expected == pytest.approx(floor, rel=TOLERANCE)


@pytest.mark.parametrize(("device", "num_shard", "batch_size", "expected"), cases(PREFILL))
def test_prefill_floors_are_those_worked_out_by_hand(
    device: str, num_shard: int, batch_size: int, expected: float
) -> None:
    demand = BLOOMZ.prefill(batch_size, 100)
    floor = demand.floor_ms(DEVICES[device].ceilings("float16", num_shard))
    assert expected == pytest.approx(floor, rel=TOLERANCE)


@pytest.mark.parametrize(("device", "expected"), [("a100-40g", 7.69), ("h200", 2.78)])
def test_a_single_stream_of_chatglm3_reads_its_weights(device: str, expected: float) -> None:
    demand = ServedModel(shapes.shape("chatglm3-6b"), "float16").decode(1, 150)
    assert expected == pytest.approx(demand.floor_ms(DEVICES[device].ceilings("float16", 1)), rel=TOLERANCE)


def test_opt_prefill_and_decode_on_an_a6000() -> None:
    work = ServedModel(shapes.shape("opt-1.3b"), "float16")
    a6000 = DEVICES["a6000"].ceilings("float16", 1)
    prefill, decode = work.prefill(256, 512), work.decode(256, mean_context(512, 32))
    assert 2050 == pytest.approx(prefill.floor_ms(a6000), rel=0.05)  # worked out without attention
    assert 38.0 == pytest.approx(decode.floor_ms(a6000), rel=TOLERANCE)


def test_the_embedding_table_is_not_read_but_the_head_is() -> None:
    assert 14.14e9 == pytest.approx(BLOOMZ.step_weight_bytes, rel=1e-3)
    untied = ServedModel(shapes.shape("mistral-7b"), "float16")
    assert 2 * (6.979e9 + 0.131e9) == pytest.approx(untied.step_weight_bytes, rel=1e-3)


def test_a_mixed_step_is_the_sum_of_its_parts_but_reads_weights_once() -> None:
    prefill, decode = BLOOMZ.prefill(1, 100), BLOOMZ.decode(4, 50)
    mixed = BLOOMZ.step(tokens=104, attended=100**2 / 2 + 4 * 50, kv_read=4 * 49, sampled=5)
    assert mixed.num_flops == prefill.num_flops + decode.num_flops
    assert mixed.num_bytes == prefill.num_bytes + decode.num_bytes - BLOOMZ.step_weight_bytes


def test_the_slower_of_moving_and_computing_is_the_floor() -> None:
    ceilings = Ceilings(bytes_per_second=100.0, flops_per_second=10.0, num_devices=2)
    assert 500.0 == BytesAndFlops(num_bytes=100, num_flops=1).floor_ms(ceilings)
    assert 5000.0 == BytesAndFlops(num_bytes=100, num_flops=100).floor_ms(ceilings)
    assert "bandwidth" == BytesAndFlops(100, 1).bound_by(ceilings)
    assert "arithmetic" == BytesAndFlops(100, 100).bound_by(ceilings)


def test_mean_context_is_the_mean_over_decode_steps() -> None:
    contexts = [100 + step for step in range(1, 100)]  # after each of the 99 steps
    assert sum(contexts) / len(contexts) == mean_context(100, 100)


def test_a_probe_knows_the_best_that_it_has_seen() -> None:
    probe = Probe("cpu", "float32", threads=1, num_devices=1, step_weight_bytes=2**20)
    first, second = probe.measure(), probe.measure()
    assert min(first.bytes_per_second, second.bytes_per_second) > 1e8
    assert min(first.flops_per_second, second.flops_per_second) > 1e9
    assert probe.best == first.best_of(second)
    assert "2 measurements" in describe(probe.seen) and "GB/s" in describe(probe.seen)
