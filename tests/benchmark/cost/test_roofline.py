"""Floors against worked examples, and that the measured ceilings are sane."""

from __future__ import annotations

from itertools import combinations, product
from statistics import fmean
from types import SimpleNamespace

import pytest
import torch
from transformers import MixtralConfig, MixtralForCausalLM

from benchmark.cost import shapes
from benchmark.cost.devices import DEVICES, Probe, _large_product, describe, gpu_read_bytes
from benchmark.cost.roofline import BytesAndFlops, Ceilings, Piece, ServedModel, mean_context
from benchmark.cost.step_times import Roofline, StepWork
from benchmark.engine import shards
from benchmark.result import BenchError
from server.backends import cpu
from server.backends.cpu.build import BuildError
from tests.benchmark.mixtral import MIXTRAL, SMALL_MIXTRAL

BLOOMZ = ServedModel(shapes.shape("bloomz-7b1-mt"), "float16")
TOLERANCE = 0.02

# bloomz-7b1-mt, 100 tokens in, 100 out: ms by (device, shards), for each batch size.
DECODE = {
    ("a100-40g", 2): {1: 4.57, 2: 4.59, 4: 4.64, 8: 4.74, 16: 4.93, 32: 5.30},
    ("a100-40g", 4): {1: 2.28, 2: 2.30, 4: 2.32, 8: 2.37, 16: 2.46, 32: 2.65},
    ("a100-40g", 8): {1: 1.14, 2: 1.15, 4: 1.16, 8: 1.18, 16: 1.23, 32: 1.33},
    ("h200", 1): {1: 2.96, 2: 2.98, 4: 3.01, 8: 3.07, 16: 3.19, 32: 3.44},
}
PREFILL = {
    ("a100-40g", 2): {1: 4.55, 4: 7.76, 8: 15.5, 16: 31.0, 32: 62.1},
    ("a100-40g", 4): {1: 2.27, 4: 3.88, 8: 7.8, 16: 15.5, 32: 31.0},
    ("a100-40g", 8): {1: 1.14, 4: 1.94, 8: 3.9, 16: 7.8, 32: 15.5},
    ("h200", 1): {1: 2.96, 4: 4.9, 8: 9.8, 16: 19.6, 32: 39.1},
}


@pytest.mark.parametrize(("device", "num_shard"), DECODE)
def test_floors_are_those_worked_out_by_hand(device: str, num_shard: int) -> None:
    ceilings = DEVICES[device].dense_ceilings("float16", num_shard)
    decode = {n: BLOOMZ.decode(n, mean_context(100, 100)).floor_ms(ceilings) for n in DECODE[device, num_shard]}
    prefill = {n: BLOOMZ.prefill(n, 100).floor_ms(ceilings) for n in PREFILL[device, num_shard]}
    assert pytest.approx(DECODE[device, num_shard], rel=TOLERANCE) == decode
    assert pytest.approx(PREFILL[device, num_shard], rel=TOLERANCE) == prefill


@pytest.mark.parametrize(("device", "expected"), [("a100-40g", 7.69), ("h200", 2.49)])
def test_a_single_stream_of_chatglm3_reads_its_weights(device: str, expected: float) -> None:
    demand = ServedModel(shapes.shape("chatglm3-6b"), "float16").decode(1, 150)
    assert expected == pytest.approx(demand.floor_ms(DEVICES[device].dense_ceilings("float16", 1)), rel=TOLERANCE)


def test_opt_prefill_and_decode_on_an_a6000() -> None:
    work = ServedModel(shapes.shape("opt-1.3b"), "float16")
    a6000 = DEVICES["a6000"].dense_ceilings("float16", 1)
    prefill, decode = work.prefill(256, 512), work.decode(256, mean_context(512, 32))
    assert 2050 == pytest.approx(prefill.floor_ms(a6000), rel=0.05)  # worked out without attention
    assert 38.0 == pytest.approx(decode.floor_ms(a6000), rel=TOLERANCE)


# Gemma 3's 27B: 62 layers, of which each sixth sees all and the others 1024 tokens; 16 key-value heads of 128.
GEMMA = {
    "model_type": "gemma3_text", "vocab_size": 262_208, "hidden_size": 5376, "intermediate_size": 21_504,
    "num_hidden_layers": 62, "num_attention_heads": 32, "num_key_value_heads": 16, "head_dim": 128,
    "sliding_window": 1024, "sliding_window_pattern": 6, "rms_norm_eps": 1e-6, "rope_theta": 1e6,
    "rope_local_base_freq": 10_000, "query_pre_attn_scalar": 168, "hidden_activation": "gelu_pytorch_tanh",
    "max_position_embeddings": 131_072, "tie_word_embeddings": True,
}  # fmt: skip


def test_a_layer_with_a_window_reads_no_more_than_that() -> None:
    """Gemma-3-27B in bfloat16 on two H200s, 8 sequences in a context of 32,384 tokens: 54.0 GB of weights; 10 layers
    with keys and values of all of it, and 52 of 1024 tokens."""
    served = ServedModel(shapes.from_config(GEMMA), "bfloat16", ranks=2)
    of_a_layer = 5376 * 128 * (32 + 2 * 16) + 32 * 128 * 5376 + 3 * 5376 * 21_504
    weights, token = 2 * (62 * of_a_layer + 262_208 * 5376), 2 * 16 * 128 * 2  # of one layer
    seen = 8 * token * (10 * 32_384 + 52 * 1024)
    floor = served.decode(8, 32_384).floor_ms(DEVICES["h200"].ceilings(served))
    assert 8.20 == pytest.approx((weights + seen) / 9.6e9, abs=0.01)
    assert (weights + seen) / 9.6e9 == pytest.approx(floor, rel=1e-4)
    assert 19.33 == pytest.approx((weights + 8 * token * 62 * 32_384) / 9.6e9, abs=0.01)  # as if all saw all
    needed = served.decode(1, 32_384)
    assert 4 * 32 * 128 * (10 * 32_384 + 52 * 1024) == needed.num_flops - served.decode(1, 0).num_flops
    cost = Roofline.of(served, DEVICES["h200"].ceilings(served), 1.0, 0.0)
    assert floor == pytest.approx(1000 * cost.seconds(StepWork(decoding=8, context=8 * 32_384, sampled=8)))


def test_pieces_of_a_prompt_see_a_window_behind_them() -> None:
    """Counted key by key: token i sees min(i, window) tokens, of which half a token's worth is taken for its own."""
    for window in (0, 1, 5, 16, 40):
        sees = [min(i, window) if window else i for i in range(1, 31)]
        for done, length in ((0, 30), (0, 4), (7, 13), (20, 10)):
            piece = Piece(done, length, 3)
            assert 3 * sum(sees[done : done + length]) == pytest.approx(piece.pairs(window), abs=3 * length / 2)
            assert 3 * (sees[done] - 1) == piece.read(window)
        assert [sees[done] for done in range(30)] == [Piece(done).pairs(window) for done in range(30)]


def test_the_mean_of_decode_steps_is_that_of_each_by_itself() -> None:
    """Contexts of 961 to 1087 tokens, of which layers with a window of 1024 see no more than that."""
    served = ServedModel(shapes.from_config(GEMMA), "bfloat16")
    each = [served.decode(3, 960 + step) for step in range(1, 128)]
    mean = served.mean_decode(3, 960, 128)
    assert fmean(one.num_bytes for one in each) == pytest.approx(mean.num_bytes, rel=1e-12)
    assert fmean(one.num_flops for one in each) == pytest.approx(mean.num_flops, rel=1e-12)
    assert mean.num_bytes < served.decode(3, mean_context(960, 128)).num_bytes


def test_each_rank_reads_its_copy_of_a_key_value_head() -> None:
    """ChatGLM3 on eight H200s, with two key-value heads: each head's keys and values, together 28,672 bytes a token,
    and its matrices, 28 layers of 2 x 128 x 4096 numbers of two bytes, are read by four."""
    shape = shapes.shape("chatglm3-6b")
    one, eight = ServedModel(shape, "float16"), ServedModel(shape, "float16", ranks=8)
    matrices, tokens = 6 * 28 * 2 * 128 * 4096 * 2, 32 * 2000
    assert matrices + 3 * tokens * 28_672 == eight.decode(32, 2000).num_bytes - one.decode(32, 2000).num_bytes
    expected = (2 * (5.711e9 + 0.2663e9) + matrices + 4 * tokens * 28_672) / (8 * 4.8e12)
    sheet = DEVICES["h200"].ceilings(eight)
    assert expected == pytest.approx(eight.decode(32, 2000).floor_ms(sheet) / 1000, rel=2e-3)
    cost = Roofline.of(eight, sheet, 1.0)
    assert expected == pytest.approx(cost.seconds(StepWork(decoding=32, context=tokens, sampled=32)), rel=2e-3)


def test_the_embedding_table_is_not_read_but_the_head_is() -> None:
    assert 14.14e9 == pytest.approx(BLOOMZ.step_weight_bytes(), rel=1e-3)
    untied = ServedModel(shapes.shape("mistral-7b"), "float16")
    assert 2 * (6.979e9 + 0.131e9) == pytest.approx(untied.step_weight_bytes(), rel=1e-3)


@pytest.mark.parametrize("tokens", [1, 2, 3])
def test_a_step_reads_the_experts_that_any_of_its_tokens_goes_to(tokens: int) -> None:
    """Counted from a model's own parameters, with every way in which tokens can choose two experts of four."""
    model = MixtralForCausalLM(MixtralConfig(**SMALL_MIXTRAL))
    left_out = ("model.embed_tokens.weight", "model.norm.weight")  # some rows are read of the one, some KB of the other
    sizes = {name: parameter.numel() for name, parameter in model.named_parameters() if name not in left_out}
    assert len(sizes) == len(list(model.parameters())) - 2
    experts = sum(size for name, size in sizes.items() if ".experts." in name)
    choices = product(combinations(range(4), 2), repeat=tokens)
    distinct = fmean(len({expert for chosen in choice for expert in chosen}) for choice in choices)
    expected = 4 * (sum(sizes.values()) - experts + experts / 4 * distinct)  # float32
    served = ServedModel(shapes.from_config(SMALL_MIXTRAL), "float32")
    assert expected == pytest.approx(served.step_weight_bytes(tokens))
    kv = 2 * 2 * 2 * 8 * 4  # keys and values, layers, key-value heads, head size, float32
    assert expected + tokens * 5 * kv == pytest.approx(served.decode(tokens, 5).num_bytes)
    assert expected + tokens * kv == pytest.approx(served.prefill(1, tokens).num_bytes)


def test_a_batch_of_mixtral_reads_nearly_all_of_it() -> None:
    """32 tokens touch 7.999 of 8 experts: 46.6 billion parameters of 2 bytes, and not the 12.7 of one token."""
    served = ServedModel(shapes.from_config(MIXTRAL), "bfloat16")
    expert = 32 * 3 * 4096 * 14_336  # parameters of one expert in all layers
    rest = 2 * (1.6055e9 - 0.1311e9)  # attention, router, norms and head; without the embedding table
    assert rest + 2 * 7.999 * expert == pytest.approx(served.step_weight_bytes(32), rel=1e-4)
    assert rest + 2 * 2 * expert == pytest.approx(served.step_weight_bytes(1), rel=1e-3)
    floor = served.decode(32, 1).floor_ms(Ceilings(4.3e12, 790e12))
    assert 21.7 == pytest.approx(floor, rel=0.005)
    cost = Roofline.of(served, Ceilings(4.3e12, 790e12), efficiency=1.0, overhead_s=0.0)
    assert floor == pytest.approx(1000 * cost.seconds(StepWork(decoding=32, context=32, sampled=32)))


def test_a_mixed_step_is_the_sum_of_its_parts_but_reads_weights_once() -> None:
    prefill, decode = BLOOMZ.prefill(1, 100), BLOOMZ.decode(4, 50)
    mixed = BLOOMZ.step([Piece(0, 100), Piece(49, 1, 4)], sampled=5)
    assert mixed.num_flops == prefill.num_flops + decode.num_flops
    assert mixed.num_bytes == prefill.num_bytes + decode.num_bytes - BLOOMZ.step_weight_bytes(104)


def test_a_chunk_that_samples_nothing_reads_no_head() -> None:
    """Of bloomz-7b1-mt the head is 2.06 GB, so that an H200 needs 2.52 ms for 16 tokens of a prompt, and not 2.95."""
    chunk, last = (BLOOMZ.step([Piece(0, 16)], sampled=sampled) for sampled in (0, 1))
    assert 2 * 250_880 * 4096 == last.num_bytes - chunk.num_bytes
    ceilings = DEVICES["h200"].dense_ceilings("float16", 1)
    assert [2.52, 2.95] == pytest.approx([step.floor_ms(ceilings) for step in (chunk, last)], abs=0.005)
    cost, work = Roofline.of(BLOOMZ, ceilings, efficiency=1.0), StepWork(prompt_tokens=16, prompt_pairs=128)
    assert chunk.floor_ms(ceilings) == pytest.approx(1000 * cost.seconds(work), rel=1e-3)


def test_the_slower_of_moving_and_computing_is_the_floor() -> None:
    ceilings = Ceilings(bytes_per_second=100.0, flops_per_second=10.0, num_devices=2)
    assert 500.0 == BytesAndFlops(num_bytes=100, num_flops=1).floor_ms(ceilings)
    assert 5000.0 == BytesAndFlops(num_bytes=100, num_flops=100).floor_ms(ceilings)
    assert "bandwidth" == BytesAndFlops(100, 1).bound_by(ceilings)
    assert "arithmetic" == BytesAndFlops(100, 100).bound_by(ceilings)


def test_operations_in_8_bits_have_a_rate_of_their_own() -> None:
    mixed = BytesAndFlops(num_bytes=0, num_flops=100, num_ops_8=60)
    assert 7000.0 == mixed.floor_ms(Ceilings(1.0, 10.0, ops_8_per_second=20.0))
    assert 10_000.0 == mixed.floor_ms(Ceilings(1.0, 10.0)) == mixed.floor_ms(Ceilings(1.0, 10.0, 1, 5.0))
    assert BytesAndFlops(0, 300, 180) == mixed.plus(mixed).plus(mixed) == mixed.times(3)


# Which of layers and head are computed in 8 bits, and in which: on a CPU, and on a GPU.
FORMATS_IN_8_BITS = [
    ("int8", (1, 1, "int8"), (1, 1, "int8")), ("int4", (1, 1, "int4"), (0, 1, "int8")),
    ("fp8", (0, 0, ""), (1, 0, "float8")), ("eetq", (1, 0, "int8"), (0, 0, "")),
    ("bitsandbytes-nf4", (0, 0, ""), (0, 0, "")), (None, (0, 0, ""), (0, 0, "")),
]  # fmt: skip


@pytest.mark.parametrize("on_cpu", [True, False])
def test_what_is_in_8_bits_is_known(on_cpu: bool) -> None:
    shape = shapes.shape("mistral-7b")
    for quantize, *expected in FORMATS_IN_8_BITS:
        layers, head, kind = expected[0 if on_cpu else 1]
        served = ServedModel(shape, "bfloat16", quantize, on_cpu=on_cpu)
        step = served.step([Piece(0, 3)], sampled=2)
        linear = shape.layer_parameters - 64 * 4096  # without the norms
        assert 6 * linear * layers + 4 * shape.head_parameters * head == step.num_ops_8, quantize
        assert kind == served.product_kind
    assert "" == ServedModel(shape, "float32", "eetq", on_cpu=True).product_kind  # who computes in float32 compares


def test_a_device_without_float8_multiplies_it_in_16_bits() -> None:
    shape = shapes.shape("mistral-7b")
    floors = {
        (device, quantize): ServedModel(shape, "bfloat16", quantize)
        .prefill(32, 100)
        .floor_ms(DEVICES[device].ceilings(ServedModel(shape, "bfloat16", quantize)))
        for device in ("a100-80g", "h100")
        for quantize in (None, "fp8", "int8", "int4")
    }
    assert floors["a100-80g", "fp8"] == floors["a100-80g", None]
    assert floors["a100-80g", "int8"] < 0.6 * floors["a100-80g", None]
    assert floors["h100", "fp8"] < 0.6 * floors["h100", None]
    assert 0.95 * floors["h100", None] < floors["h100", "int4"]  # weights alone: but for the head, in 16 bits


def test_mean_context_is_the_mean_over_decode_steps() -> None:
    contexts = [100 + step for step in range(1, 100)]  # after each of the 99 steps
    assert sum(contexts) / len(contexts) == mean_context(100, 100)


def test_a_probe_knows_the_best_that_it_has_seen() -> None:
    probe = Probe("cpu", "float32", threads=1, num_devices=1, step_weight_bytes=2**20)
    first, second = probe.measure(), probe.measure()
    assert min(first.bytes_per_second, second.bytes_per_second) > 1e8
    assert min(first.flops_per_second, second.flops_per_second) > 1e9
    assert probe.best == first.best_of(second)
    assert 0 == probe.best.ops_8_per_second
    in_8_bits = Probe("cpu", "float32", threads=1, num_devices=1, step_weight_bytes=2**20, product_kind="int8")
    assert in_8_bits.measure().ops_8_per_second > 1e9
    small = (16, 32, 32)  # a probe measures float8 on GPUs alone, but this operator computes here too
    product = _large_product("float8", torch.device("cpu"), small)
    assert 2 * 16 * 32 * 32 == product.num_flops
    assert (16, 32) == product.run().shape
    assert "TOP/s" in describe(in_8_bits.seen) and "TOP/s" not in describe(probe.seen)
    assert "2 measurements" in describe(probe.seen) and "GB/s" in describe(probe.seen)


def test_without_compiled_loops_there_are_no_ceilings_and_it_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    def load() -> None:
        raise BuildError("no C++ compiler was found (g++, c++): install g++")

    monkeypatch.setattr(cpu, "load", load)
    with pytest.raises(
        BenchError, match=r"measured by compiled loops, and there are none: no C.. compiler .*install g"
    ):
        Probe("cpu", "bfloat16", threads=1, num_devices=1, step_weight_bytes=2**20)
    info = SimpleNamespace(device="cpu", dtype="bfloat16", quantize=None, kv_cache_dtype=None, world_size=1, threads=1)
    target = shards.MeasuredShards([], "bloom-560m", shapes.shape("bloom-560m"))
    floors = shards.floors_of(target, info)  # type: ignore[arg-type]
    assert floors.gauge is None and "install g++" in floors.missing


def test_a_gpu_is_held_against_its_data_sheet() -> None:
    """Two H100s, whose shards are not probed: 3.35 TB/s and 989 TFLOP/s each."""
    info = SimpleNamespace(
        device="NVIDIA H100 80GB HBM3", dtype="bfloat16", quantize=None, kv_cache_dtype=None, world_size=2, threads=1
    )
    floors = shards.floors_of(shards.MeasuredShards([], "x", shapes.shape("bloom-560m")), info)  # type: ignore[arg-type]
    assert floors.gauge is not None and floors.gauge.measure() == Ceilings(3.35e12, 989e12, 2, 0.0, "data sheet")
    assert "by its data sheet: reads 3350.0 GB/s" in describe(floors.gauge.seen)


def test_a_probe_beside_a_full_cache_takes_a_quarter_of_what_is_left() -> None:
    gib = 2**30
    assert 2 * gib == gpu_read_bytes(free=100 * gib)
    assert gib // 2 == gpu_read_bytes(free=2 * gib)
    assert gib // 4 == gpu_read_bytes(free=0)  # less would be read from the L2 cache
