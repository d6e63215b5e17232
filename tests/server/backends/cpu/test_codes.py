"""The compiled kernels of quantised weights: equal to their arithmetic in integers, whatever else is in the step."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from functools import partial

import pytest
import torch
from torch import Tensor

from server.arch import families
from server.arch.spec import Activation, ArchSpec
from server.backends.cpu import CpuBackend
from server.backends.cpu.kernels import Kernels
from server.backends.cpu.layers import KernelExperts
from server.backends.cpu.memory import Arena
from server.backends.cpu.quantised import Arranged, CodeFormat, arranged, int4_groups, takes
from server.backends.reference import ReferenceBackend
from server.backends.reference.linear import ACTIVATIONS, LoopedExperts
from server.backends.reference.quantised import QuantisedFormat
from server.quantisation import rounding, sizes
from server.quantisation.packing import WORD_BITS, PackedCodes, pack
from server.quantisation.rounding import float4_levels, float8_rows, int8_rows, int8_weights
from server.quantisation.sizes import Storage
from server.quantisation.stored import QuantisedWeight, RoundedInputs, contiguous_groups
from tests.combinations import all_pairs, by_turns
from tests.running import ROOT

BOTH = (torch.bfloat16, torch.float32)
TOKENS = (1, 2, 7, 8, 9, 16, 17, 33, 150)


def random(*size: int, seed: int = 0) -> Tensor:
    return torch.randn(*size, generator=torch.Generator().manual_seed(seed))


def grouped(
    rows: int, inputs: int, group: int, *, bits: int = 4, is_symmetric: bool = False, exact: bool = True
) -> QuantisedWeight:
    """A weight of random codes. exact: whether a float16 holds its scales."""
    source = torch.Generator().manual_seed(rows + inputs)
    groups = contiguous_groups(group, inputs)
    size = (rows, int(groups[-1]) + 1)
    scale = torch.rand(size, generator=source) * 0.01 + 1e-3
    zero = torch.randint(0, 1 << bits, size, generator=source).float()
    return QuantisedWeight(
        torch.randint(0, 1 << bits, (rows, inputs), dtype=torch.uint8, generator=source),
        bits,
        scale.half().float() if exact else scale,
        groups,
        zero=torch.full(size, 1.0 * (1 << bits - 1)) if is_symmetric else zero,
    )


def a_spec() -> ArchSpec:
    config = ROOT / "benchmark/cost/shapes/mistral-7b.json"
    return families.find(json.loads(config.read_text()))[1]


def float4(rows: int, inputs: int, *, in_powers: bool = True) -> QuantisedWeight:
    """Groups of 32 inputs with scales of any size. in_powers: whether these are powers of 2."""
    weight = replace(grouped(rows, inputs, 32), zero=None, levels=float4_levels())
    return replace(weight, scale=weight.scale.log2().floor().exp2()) if in_powers else weight


def out_of_order(weight: QuantisedWeight) -> QuantisedWeight:
    return replace(weight, groups=weight.groups[torch.randperm(len(weight.groups), generator=torch.manual_seed(0))])


def with_fixed_inputs(weight: QuantisedWeight) -> QuantisedWeight:
    return replace(weight, inputs=RoundedInputs(torch.int8, scale=torch.tensor(0.02)))


# Of 65 rows, the last panel of outputs has one.
BY_TOKEN = {
    "w8a8": int8_rows(random(65, 300)),
    "long": int8_rows(random(33, 4100)),
    "short": int8_rows(random(32, 3)),
    "fixed": with_fixed_inputs(int8_rows(random(65, 300))),
    "w4a8": replace(grouped(40, 256, 64), inputs=RoundedInputs(torch.int8)),
}
BY_BLOCK = {
    "int4": grouped(65, 512, 128),
    "symmetric": grouped(64, 512, 128, is_symmetric=True),
    "64": grouped(33, 384, 64),
    "32": grouped(97, 352, 32),
    "16": grouped(33, 96, 16),
    "whole row": grouped(33, 300, -1),
    "2 bits": grouped(33, 256, 64, bits=2),
    "8 bits": grouped(33, 256, 128, bits=8),
    "float4": float4(97, 352),
    "float4, other scales": float4(65, 256, in_powers=False),
    "float4, cut": float4(64, 512).columns(53, 331),
    "float32 scales": grouped(33, 256, 128, exact=False),
    "cut": grouped(64, 512, 128).columns(53, 331),
    "out of order": out_of_order(grouped(65, 512, 128)),
    "eetq": int8_weights(random(70, 300)),
}
CASES = {**BY_TOKEN, **BY_BLOCK}
Make = Callable[..., CodeFormat]


@pytest.fixture
def make(kernels: Kernels) -> Make:
    arena = Arena()

    def made(weight: QuantisedWeight, dtype: torch.dtype = torch.bfloat16, **how: object) -> CodeFormat:
        assert takes(weight, dtype)
        return CodeFormat(kernels, arena, weight, dtype, **how)  # type: ignore[arg-type]

    return made


def multiplied(laid: Arranged) -> Tensor:
    """What is multiplied of each slot, [F, S]: of float4 twice what its codes stand for, raised by 12."""
    levels = laid.weight.levels
    return laid.codes if levels is None else (2 * levels + 12)[laid.codes.long()]


def emulated(weight: QuantisedWeight, x: Tensor) -> Tensor:
    """The formula of codes.cpp: exact sums of blocks, which are scaled and added in float32. x [T, D] → [T, F]."""
    laid = arranged(weight)
    order = torch.arange(laid.codes.shape[1]) if laid.order is None else laid.order.long()
    padded = torch.nn.functional.pad(
        x.float(), (0, len(order))
    )  # slot -1 is a zero, and so is what is behind the inputs
    slots = padded[:, order].unflatten(1, (-1, laid.block))  # [T, B, block]
    if weight.inputs is not None and weight.inputs.scale is not None:
        scale = weight.inputs.scale.expand(slots.shape[:2])
    else:
        largest = slots.abs().amax(2)
        scale = (largest.amax(1, keepdim=True).expand_as(largest) if laid.is_by_token else largest).clamp(
            min=1e-12
        ) / 127
    inputs = (slots * (1 / scale)[..., None]).round().clamp(-128, 127).double()
    codes = multiplied(laid).double().unflatten(1, (-1, laid.block)) - laid.zero.double()[..., None]
    y = torch.zeros(len(x), weight.shape[0])
    for block in range(laid.scale.shape[1]):
        exact = inputs[:, block] @ codes[:, block].t()
        part = exact.float() * scale[:, block, None]
        y = (part.double() * laid.scale[:, block].double() + y.double()).float()  # rounded once, as a fused sum is
    return y


@pytest.mark.parametrize("weight", CASES.values(), ids=CASES.keys())
def test_slots_hold_the_weight(weight: QuantisedWeight) -> None:
    laid = arranged(weight)
    values = (multiplied(laid).float().unflatten(1, (-1, laid.block)) - laid.zero[..., None]) * laid.scale[..., None]
    values = values.flatten(1)
    if laid.order is None:
        assert torch.equal(weight.dequantised(), values[:, : weight.shape[1]])
        return
    there = laid.order >= 0
    assert sorted(laid.order[there].tolist()) == list(range(weight.shape[1]))
    assert torch.equal(weight.dequantised()[:, laid.order[there].long()], values[:, there])


@pytest.mark.parametrize("weight", CASES.values(), ids=CASES.keys())
def test_products_are_what_integers_say(make: Make, weight: QuantisedWeight) -> None:
    linear = make(weight)
    for tokens in TOKENS:
        x = random(tokens, weight.shape[1], seed=tokens).bfloat16()
        assert torch.equal(emulated(weight, x), linear.finest(x, None)), tokens


def still_packed(weight: QuantisedWeight, *, along_outputs: bool) -> QuantisedWeight:
    """The same in words: of outputs, which lie in them in some order, or of inputs."""
    if not along_outputs:
        return replace(weight, held=PackedCodes((pack(weight.codes.t(), weight.bits, dim=0),), weight.bits))
    per_word = WORD_BITS // weight.bits
    places = torch.randperm(per_word, generator=torch.manual_seed(0))
    in_order = weight.codes.t().unflatten(1, (-1, per_word))
    moved = torch.empty_like(in_order).index_copy_(2, places, in_order).flatten(1)
    return replace(weight, held=PackedCodes((pack(moved, weight.bits, dim=1),), weight.bits, tuple(places.tolist())))


PACKED = {
    "4 bits": grouped(112, 512, 128),  # the last panel has half its outputs
    "4 bits in a panel": grouped(8, 8, -1),
    "8 bits": grouped(36, 304, 16, bits=8),
    "2 bits": grouped(1040, 96, 32, bits=2),  # more panels than are filled together
    "many pieces": grouped(64, 1000, 40),  # and blocks that groups do not fill
    "out of order": out_of_order(grouped(72, 512, 128)),
    "rounded inputs": replace(grouped(40, 264, 264, bits=8), inputs=RoundedInputs(torch.int8)),
}


@pytest.mark.parametrize(("name", "along_outputs", "is_gated"), all_pairs(PACKED, (False, True), (False, True)))
def test_packed_codes_fill_the_same_panels(make: Make, name: str, along_outputs: bool, is_gated: bool) -> None:
    weight = PACKED[name]
    packed = still_packed(weight, along_outputs=along_outputs)
    assert torch.equal(weight.codes, packed.codes)
    (expected,), (found,) = (make(one, is_gated=is_gated).memory for one in (weight, packed))
    assert expected.any()
    assert torch.equal(expected, found)


# first: rows of the first part, within a vector of lanes, a panel, and beyond.
@pytest.mark.parametrize(("first", "along_outputs", "is_gated"), all_pairs((8, 40, 560), (False, True), (False, True)))
def test_parts_fill_the_panels_that_the_whole_fills(
    make: Make, first: int, along_outputs: bool, is_gated: bool
) -> None:
    weight = still_packed(grouped(1120, 96, 32), along_outputs=along_outputs)
    (words,) = weight.held.parts  # type: ignore[union-attr]
    outputs = words.shape[1] * first // 1120
    parts = replace(weight.held, parts=(words[:, :outputs], words[:, outputs:]))
    assert torch.equal(weight.codes, parts.unpacked())
    whole, found = (make(one, is_gated=is_gated).memory[0] for one in (weight, replace(weight, held=parts)))
    assert torch.equal(whole, found)


def test_words_in_any_strides_fill_the_same_panels(make: Make) -> None:
    weight = still_packed(grouped(64, 512, 128), along_outputs=False)
    words = weight.held.parts[0].t().contiguous().t()  # type: ignore[union-attr]
    strided = replace(weight, held=PackedCodes((words,), weight.bits))
    assert torch.equal(make(weight).memory[0], make(strided).memory[0])


@pytest.mark.parametrize(
    ("name", "dtype"), [("w8a8", torch.float32), *by_turns(("w8a8", "long", "short", "fixed"), BOTH)]
)
def test_rounded_inputs_are_as_the_reference_has_them(make: Make, name: str, dtype: torch.dtype) -> None:
    weight = BY_TOKEN[name]
    linear, reference = make(weight, dtype), QuantisedFormat(weight, None)
    for tokens in TOKENS:
        x = random(tokens, weight.shape[1], seed=tokens).to(dtype)
        assert torch.equal(reference.product(x, None), linear(x, None)), tokens


@pytest.mark.parametrize("weight", BY_BLOCK.values(), ids=BY_BLOCK.keys())
def test_inputs_rounded_by_blocks_cost_little(make: Make, weight: QuantisedWeight) -> None:
    x = random(40, weight.shape[1]).bfloat16()
    exact = x.float() @ weight.dequantised().t()
    assert (make(weight).finest(x, None) - exact).std() < 0.009 * exact.std()


@pytest.mark.parametrize(
    ("name", "activation", "is_gated"),
    all_pairs(("w8a8", "int4"), (None, Activation.SILU, Activation.GELU), (False, True)),
)
def test_what_follows_a_product_is_done_with_it(
    make: Make, name: str, activation: Activation | None, is_gated: bool
) -> None:
    weight = {"w8a8": int8_rows(random(70, 300)), "int4": grouped(70, 256, 128)}[name]
    dtype = torch.float32 if name == "w8a8" else torch.bfloat16
    outputs, bias = (35 if is_gated else 70), random(70, seed=1).to(dtype)
    activation = activation or (Activation.SILU if is_gated else None)
    for tokens in (3, 40):
        x, residual = random(tokens, weight.shape[1]).to(dtype), random(tokens, outputs, seed=2).to(dtype)
        y = emulated(weight, x) + bias.float()
        expected = y if activation is None else ACTIVATIONS[activation](y[:, :outputs] if is_gated else y)
        expected = (expected * y[:, outputs:] if is_gated else expected) + residual.float()
        found = make(weight, dtype, is_gated=is_gated)(x, bias, activation, residual)
        torch.testing.assert_close(found.float(), expected.to(dtype).float(), atol=1e-4, rtol=1e-2)


@pytest.mark.parametrize("name", ["w8a8", "long", "int4", "float4", "out of order"])
def test_a_tokens_outputs_depend_on_neither_its_batch_nor_threads(make: Make, name: str) -> None:
    weight, before = CASES[name], torch.get_num_threads()
    linear, x = make(weight), random(200, CASES[name].shape[1]).bfloat16()
    together = linear(x, None)
    for count in (1, 5, 12, 40):
        assert torch.equal(together[:count], linear(x[:count], None))
    torch.set_num_threads(3)
    assert torch.equal(together, linear(x, None))
    torch.set_num_threads(before)


def test_ranks_that_share_the_inputs_of_a_layer_round_them_alike(make: Make) -> None:
    weight, x = int8_rows(random(64, 256)), random(9, 256)
    largest = x.abs().amax(1, keepdim=True)
    parts = [
        make(weight.columns(*part), torch.float32, maximum=lambda _: largest).finest(x[:, slice(*part)], None)
        for part in ((0, 100), (100, 256))
    ]
    whole = make(weight, torch.float32).finest(x, None)
    torch.testing.assert_close(sum(parts), whole, atol=1e-5, rtol=1e-5)


def test_scales_too_small_for_an_exponent_count_as_0(make: Make) -> None:
    weight = float4(40, 64)
    weight.scale[:, 0] = 2.0**-126
    ids = torch.arange(40)
    expected = weight.dequantised()
    assert torch.equal(torch.cat([0 * expected[:, :32], expected[:, 32:]], dim=1).bfloat16(), make(weight).rows(ids))


@pytest.mark.parametrize("dtype", BOTH, ids=str)
def test_rows_are_what_codes_stand_for(make: Make, dtype: torch.dtype) -> None:
    weight, ids = int8_rows(random(100, 70)), torch.tensor([0, 99, 31, 32, 5])
    assert torch.equal(weight.dequantised()[ids].to(dtype), make(weight, dtype).rows(ids))


def test_rows_of_groups_out_of_order_are_in_the_order_of_the_inputs(make: Make) -> None:
    ids = torch.tensor([63, 3])
    for weight in (CASES["out of order"], CASES["float4, cut"]):
        assert torch.equal(weight.dequantised()[ids].bfloat16(), make(weight).rows(ids))


@pytest.mark.parametrize("name", ["w8a8", "fixed"])
def test_a_number_that_is_none_stays_none(make: Make, name: str) -> None:
    x = random(2, 300).bfloat16()
    x[1, 7] = float("nan")
    found = make(BY_TOKEN[name])(x, None)
    assert not found[0].isnan().any()
    assert found[1].isnan().all()


def test_four_bits_take_half_a_byte(make: Make) -> None:
    rows, inputs = 64, 512
    codes, scales, zeros = rows * inputs // 2, rows * inputs // 128 * 2, rows * inputs // 128
    assert codes + scales + zeros == make(grouped(rows, inputs, 128)).nbytes
    assert codes + scales == make(grouped(rows, inputs, 128, is_symmetric=True)).nbytes
    assert codes + rows * inputs // 32 == make(float4(rows, inputs)).nbytes


FOUR = Storage("four", bits=4, scale_bytes=2, zero_bytes=1)
COUNTED: dict[str, tuple[Storage, QuantisedWeight]] = {
    "groups of 128": (replace(FOUR, group=128), grouped(256, 1024, 128)),
    "groups of 256": (replace(FOUR, group=256), grouped(256, 1024, 256)),
    "groups of 16": (replace(FOUR, group=16), grouped(256, 1024, 16)),
    "groups of 48": (replace(FOUR, group=48), grouped(256, 1024, 48)),
    "a group of all": (FOUR, grouped(256, 1024, 1024)),
    "8 bits": (replace(FOUR, bits=8, group=64), grouped(256, 1024, 64, bits=8)),
    "4 bits by rounded inputs": (replace(FOUR, rounds_inputs=True),
                                 replace(grouped(256, 1024, 1024), inputs=RoundedInputs(torch.int8))),
    "float4": (sizes.READERS["mxfp4"]({}), float4(256, 1024)),
    "int8": (sizes.IN_FLIGHT["int8"], int8_rows(random(256, 1024))),
    "eetq": (sizes.IN_FLIGHT["eetq"], int8_weights(random(256, 1024))),
}  # fmt: skip


@pytest.mark.parametrize("name", COUNTED)
def test_plans_count_what_is_kept(name: str, make: Make) -> None:
    storage, weight = COUNTED[name]
    order = arranged(weight).order  # a few bytes for all rows together
    kept = make(weight).nbytes - (0 if order is None else order.nbytes)
    assert storage.weight_bytes(256, 1024) == pytest.approx(kept, rel=0.01)


def test_plans_count_what_ranks_keep_of_groups_that_are_scattered(make: Make) -> None:
    """A rank has a few inputs of each group, and room for whole blocks of 32 with a scale each."""
    storage, weight = replace(FOUR, group=128, is_scattered=True), out_of_order(grouped(512, 2048, 128))
    whole = storage.weight_bytes(512, 2048)
    for ranks, most in ((2, 1.5), (4, 1.8), (8, 2.4)):
        width = 2048 // ranks
        kept = [make(weight.columns(start, start + width)).nbytes for start in range(0, 2048, width)]
        assert storage.weight_bytes(512, 2048, ranks) == pytest.approx(sum(kept) / ranks, rel=0.06)
        assert whole / ranks < sum(kept) / ranks < most * whole / ranks


@pytest.mark.parametrize("name", ["w8a8", "int4"])
def test_experts_are_one_call(kernels: Kernels, name: str) -> None:
    backend = CpuBackend(kernels, torch.bfloat16)
    weights = {
        "w8a8": [int8_rows(random(64, 256, seed=seed)) for seed in range(4)],
        "int4": [grouped(64 + 2 * seed, 256, 128) for seed in (0, 0, 0, 0)],
    }[name]
    together = backend.grouped(iter(weights), 4, is_gated=True)
    assert isinstance(together, KernelExperts)
    one_by_one = LoopedExperts([backend.linear(weight, is_gated=True) for weight in weights])
    x, ends = random(20, 256).bfloat16(), torch.tensor([3, 3, 19, 20], dtype=torch.int32)
    assert torch.equal(one_by_one(x, ends, Activation.SILU), together(x, ends, Activation.SILU))


def test_experts_that_are_called_one_by_one_cannot_be_captured(kernels: Kernels) -> None:
    backend, spec = CpuBackend(kernels, torch.bfloat16), a_spec()
    backend.grouped(iter([int8_rows(random(64, 256))] * 2), 2)
    assert backend.why_not_captured(spec, "int8", 1) is None
    assert isinstance(backend.grouped(iter([float8_rows(random(64, 256))] * 2), 2), LoopedExperts)
    assert "experts in fp8 are called one by one" == backend.why_not_captured(spec, "fp8", 1)


# ------------------------------------------------------------------------------ rounding weights while they are loaded


@pytest.mark.parametrize("shape", [(300, 1024), (70, 1000), (5, 7), (64, 129)])
@pytest.mark.parametrize("kind", ["normal", "heavy", "bfloat16", "one sign", "tiny", "zeros"])
def test_weights_are_rounded_to_4_bits_as_the_reference_does(
    kernels: Kernels, shape: tuple[int, int], kind: str
) -> None:
    weight = random(*shape)
    if kind == "heavy":
        weight = weight**3
    elif kind == "one sign":
        weight = weight.abs() + 1
    elif kind == "tiny":
        weight *= 1e-7
    elif kind == "zeros":
        weight[::2, : shape[1] // 2] = 0
    weight = weight.bfloat16() if kind == "bfloat16" else weight
    expected, found = rounding.int4_groups(weight), int4_groups(kernels, weight)
    assert expected.zero is not None and found.zero is not None and torch.equal(expected.groups, found.groups)
    # Where two ranges are as good, or a weight is halfway between two codes, the other may be taken.
    scales_are_alike = (expected.scale / found.scale - 1).abs() < 1e-3  # of 16 bits; tiny ones have more
    alike = [expected.codes == found.codes, scales_are_alike, expected.zero == found.zero]
    assert all(same.float().mean() > 0.995 for same in alike)
    exact = weight.float()
    errors = [(quantised.dequantised().float() - exact).norm() for quantised in (expected, found)]
    torch.testing.assert_close(errors[0], errors[1], rtol=1e-5, atol=1e-12)
    assert torch.equal(found.codes, int4_groups(kernels, weight.repeat(2, 1)).codes[: shape[0]])


@pytest.mark.parametrize("number", [float("nan"), float("inf"), -float("inf")])
def test_what_is_no_number_stays_none_and_disturbs_no_other_group(kernels: Kernels, number: float) -> None:
    weight, whole = random(3, 300), random(3, 300)
    weight[1, 140] = number
    for make in (rounding.int4_groups, partial(int4_groups, kernels)):
        found, expected = make(weight).dequantised(), make(whole).dequantised()
        is_lost = torch.zeros(3, 300, dtype=torch.bool)
        is_lost[1, 128:256] = True
        assert found[is_lost].isnan().all() and torch.equal(expected[~is_lost], found[~is_lost])


def test_the_backend_rounds_by_the_kernel(kernels: Kernels) -> None:
    backend, weight = CpuBackend(kernels, torch.bfloat16), random(4, 256)
    made = backend.rounding(rounding.int4_groups)
    assert made is not rounding.int4_groups and torch.equal(int4_groups(kernels, weight).codes, made(weight).codes)
    assert backend.rounding(int8_rows) is int8_rows
    assert ReferenceBackend(backend.device).rounding(rounding.int4_groups) is rounding.int4_groups
