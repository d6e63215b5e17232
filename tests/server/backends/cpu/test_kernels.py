"""The compiled kernels against what they replace."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from server.arch.spec import Activation
from server.backends.cpu import Kernels
from server.backends.cpu.attention import rotate
from server.backends.cpu.elementwise import Elementwise
from server.backends.cpu.kernels import PEAKS
from server.backends.cpu.layers import KernelNorm, PanelFormat, kernel_gate
from server.backends.cpu.logits import KernelLogits
from server.backends.cpu.memory import PAGE_BYTES, SLAB_BYTES, Arena, Pool
from server.backends.protocol import Rotation, Summand
from server.backends.reference.attention import rotate as rotate_stock
from server.backends.reference.linear import ACTIVATIONS, LayerNorm, RmsNorm, stock_gate
from server.backends.reference.logits import exponential_noise
from tests.combinations import all_pairs, by_turns

EACH = (torch.float32, torch.bfloat16)
DTYPES = pytest.mark.parametrize("dtype", EACH, ids=str)
# Of the largest value: what rounding to a dtype may cost, once or twice.
ROUNDING = {torch.float32: 1e-5, torch.bfloat16: 1e-2}


@pytest.fixture(params=[1, 2, 3], ids="{} threads".format)
def threads(request: pytest.FixtureRequest) -> Iterator[int]:
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield request.param
    torch.set_num_threads(before)


def random(*size: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensor:
    return torch.randn(*size, generator=torch.Generator().manual_seed(seed)).to(dtype)


def assert_near(expected: Tensor, actual: Tensor) -> None:
    bound = ROUNDING[actual.dtype] * float(expected.abs().max().clamp(min=1))
    torch.testing.assert_close(actual.double(), expected.double(), atol=bound, rtol=0)


# -------------------------------------------------------------------------------------------------------------- memory


def test_pieces_of_an_arena_are_apart_and_zeroed() -> None:
    arena = Arena()
    pieces = [arena.take(size) for size in (1, 100, SLAB_BYTES + 1, 64)]
    assert [1, 100, SLAB_BYTES + 1, 64] == [len(piece) for piece in pieces]
    for value, piece in enumerate(pieces, start=1):
        assert not piece.any()
        assert 0 == piece.data_ptr() % 64
        piece.fill_(value)
    assert [1, 2, 3, 4] == [int(piece.amin()) for piece in pieces]
    assert 0 == pieces[0].data_ptr() % PAGE_BYTES


# -------------------------------------------------------------------------------------------------------------- linear


@pytest.mark.parametrize(
    ("dtype", "tokens", "size"),
    all_pairs(EACH, (1, 2, 6, 12, 13, 25, 40, 200, 400), ((64, 32), (7, 5), (300, 100), (1024, 33), (515, 64))),
)
def test_a_linear_layer_equals_torchs(kernels: Kernels, dtype: torch.dtype, tokens: int, size: tuple[int, int]) -> None:
    inputs, outputs = size
    weight, bias = random(outputs, inputs, dtype=dtype), random(outputs, dtype=dtype, seed=1)
    x = random(tokens, inputs, dtype=dtype, seed=2)
    expected = F.linear(x.double(), weight.double(), bias.double())
    layer = PanelFormat(kernels, Arena(), weight)
    assert_near(expected, layer(x, bias))
    assert_near(expected, layer.finest(x, bias))
    assert torch.float32 == layer.finest(x, bias).dtype


@pytest.mark.parametrize(("dtype", "activation", "is_gated"), all_pairs(EACH, [None, *Activation], (False, True)))
def test_what_follows_a_product_is_done_with_it(
    kernels: Kernels, dtype: torch.dtype, activation: Activation | None, is_gated: bool
) -> None:
    outputs = 40
    weight, bias = random(outputs * (1 + is_gated), 64, dtype=dtype), random(outputs * (1 + is_gated), dtype=dtype)
    x, residual = random(5, 64, dtype=dtype, seed=1) / 4, random(5, outputs, dtype=dtype, seed=2)
    y = F.linear(x.double(), weight.double(), bias.double())
    if is_gated:
        y = stock_gate(activation, y) if activation else y[:, :outputs] * y[:, outputs:]
    elif activation:
        y = ACTIVATIONS[activation](y)
    expected = y + residual.double()
    layer = PanelFormat(kernels, Arena(), weight, is_gated=is_gated)
    assert_near(expected, layer(x, bias, activation, residual))


@DTYPES
def test_a_tokens_outputs_do_not_depend_on_its_batch(kernels: Kernels, dtype: torch.dtype, threads: int) -> None:
    layer = PanelFormat(kernels, Arena(), random(96, 700, dtype=dtype))
    x = random(250, 700, dtype=dtype, seed=1)
    together = layer(x, None)
    for count in (1, 4, 12, 17, 60):
        assert torch.equal(together[:count], layer(x[:count], None))
    assert torch.equal(together[-1:], layer(x[-1:], None))


@DTYPES
def test_rows_of_a_packed_weight_are_what_they_were(kernels: Kernels, dtype: torch.dtype) -> None:
    weight, ids = random(70, 33, dtype=dtype), torch.tensor([0, 69, 31, 32, 32])
    assert torch.equal(weight[ids], PanelFormat(kernels, Arena(), weight).rows(ids))


def test_inputs_in_columns_are_read_as_rows(kernels: Kernels) -> None:
    weight, x = random(32, 48).t(), random(32, 5, seed=1)
    assert_near(x.t().double() @ weight.t().double(), PanelFormat(kernels, Arena(), weight)(x.t(), None))


# ---------------------------------------------------------------------------------------------- norms, gates, rotations


@pytest.mark.parametrize(("dtype", "width", "is_centred"), all_pairs(EACH, (64, 100, 7), (True, False)))
def test_norms_equal_torchs_alone_and_behind_a_sum(
    kernels: Kernels, dtype: torch.dtype, width: int, is_centred: bool, threads: int
) -> None:
    weight, bias = random(width, dtype=dtype), random(width, dtype=dtype, seed=1) if is_centred else None
    expected = LayerNorm(weight, bias, 1e-5) if is_centred else RmsNorm(weight, 1e-5)
    norm = KernelNorm(kernels, weight, bias, 1e-5, is_centred=is_centred)
    x, summand = random(2, 700, width, dtype=dtype, seed=2)
    assert_near(expected(x), norm(x))
    assert_near(expected(x.view(70, 10, width)), norm(x.view(70, 10, width)))
    total, normed = norm.add(x, Summand((summand,), (weight,)))
    assert_near(x.double() + summand.double() + weight.double(), total)
    assert_near(expected(total), normed)
    assert torch.equal(x + summand, norm.add(x, Summand((summand,)))[0])


@pytest.mark.parametrize(("dtype", "width", "is_centred"), all_pairs(EACH, (64, 100, 7), (True, False)))
def test_a_sum_that_is_normalised_before_it_is_added(
    kernels: Kernels, dtype: torch.dtype, width: int, is_centred: bool, threads: int
) -> None:
    weights, bias = random(3, width, dtype=dtype), random(width, dtype=dtype, seed=1)
    norms = [KernelNorm(kernels, weight, None, 1e-5, is_centred=is_centred) for weight in weights[:2]]
    stock = [
        LayerNorm(weight, torch.zeros_like(weight), 1e-5) if is_centred else RmsNorm(weight, 1e-5)
        for weight in weights[:2].float()
    ]
    x, delta = random(2, 70, width, dtype=dtype, seed=2)
    for biases in ((), (bias,)):
        waiting = sum((part.float() for part in biases), start=delta.float())
        total, normed = norms[0].add(x, Summand((delta,), biases, norms[1]))
        assert_near(x.double() + stock[1](waiting.to(dtype).float()).double(), total)
        # As by itself, bit for bit: which way is taken may hang on other tokens of a step (`AdaptedNorm`).
        assert torch.equal(Summand((delta,), biases, norms[1]).onto(x), total) and torch.equal(norms[0](total), normed)
        assert_near(stock[0](total.float()), normed)


@pytest.mark.parametrize("dtype", EACH)
def test_copies_sums_and_products_equal_torchs(kernels: Kernels, dtype: torch.dtype, threads: int) -> None:
    x, y, aten = random(3, 70, dtype=dtype), random(3, 1, dtype=dtype, seed=1), torch.ops.aten
    compute = Elementwise(kernels, Pool())
    for func, args in (
        *((func, [x, y]) for func in (aten.add.Tensor, aten.sub.Tensor, aten.mul.Tensor)),
        (aten.mul.Tensor, [x, 0.1]),
        (aten.to.dtype, [x, torch.float32 if dtype == torch.bfloat16 else torch.bfloat16]),
        (aten.cat.default, [[x, y], 1]),
        (aten.clone.default, [x[:, 3:]]),
    ):
        expected = func(*args)
        found = compute.result(func, args, expected)
        assert found is not None and found.dtype == expected.dtype and torch.equal(expected, found)


@pytest.mark.parametrize(("dtype", "width", "is_centred"), all_pairs(EACH, (64, 100, 7), (True, False)))
def test_queries_and_keys_are_normalised_where_they_are(
    kernels: Kernels, dtype: torch.dtype, width: int, is_centred: bool, threads: int
) -> None:
    heads, weights = random(70, 10, width, dtype=dtype), random(2, width, dtype=dtype, seed=1)
    of_queries, of_keys = (KernelNorm(kernels, weight, None, 1e-5, is_centred=is_centred) for weight in weights)
    expected = torch.cat([of_queries(heads[:, :6]), of_keys(heads[:, 6:8]), heads[:, 8:]], dim=1)
    of_a_wider_row = torch.cat([heads, heads], dim=1)[:, :10]
    for given in (of_a_wider_row, heads):
        assert torch.equal(expected, of_queries.normalise_heads(of_keys, given, kv_heads=2))
    assert torch.equal(expected, heads), "what is contiguous is changed in place"


@pytest.mark.parametrize(("dtype", "activation"), by_turns(EACH, Activation))
def test_a_gate_equals_torchs(kernels: Kernels, dtype: torch.dtype, activation: Activation) -> None:
    gate_up = random(6, 2 * 50, dtype=dtype)
    assert_near(stock_gate(activation, gate_up.double()), kernel_gate(kernels, activation, gate_up))


@pytest.mark.parametrize(("dtype", "interleaved", "half"), all_pairs(EACH, (False, True), (32, 20, 3)))
def test_rotations_in_place_leave_other_heads_and_features_alone(
    kernels: Kernels, dtype: torch.dtype, interleaved: bool, half: int
) -> None:
    heads, angles = random(9, 6, 64, dtype=dtype), random(9, 1, half, seed=1)
    rotation = Rotation(angles.cos(), angles.sin(), interleaved)
    expected = torch.cat([rotate_stock(rotation, heads[:, :4]), heads[:, 4:]], dim=1)
    rotate(kernels, rotation, heads[:, :4])
    assert_near(expected.double(), heads)
    assert torch.equal(expected[:, 4:], heads[:, 4:])
    assert torch.equal(expected[..., 2 * half :], heads[..., 2 * half :])


# -------------------------------------------------------------------------------------------------------------- logits


@pytest.mark.parametrize(("rows", "vocab_size"), [(1, 103), (3, 20000), (2, 8193), (2, 7)])
def test_a_summary_of_logits_equals_torchs(kernels: Kernels, rows: int, vocab_size: int, threads: int) -> None:
    logits = random(rows, vocab_size) * 3
    logits[0, : vocab_size // 2] = float("-inf")
    before = logits.clone()
    summary = KernelLogits(kernels).summarise(logits, 3)
    best = logits.topk(3)
    assert torch.equal(before, logits)
    assert torch.equal(best.values, summary.top_logits)
    assert torch.equal(best.indices, summary.top_ids)
    assert_near(logits.double().logsumexp(dim=-1, keepdim=True), summary.log_totals)


def test_of_equally_likely_tokens_the_first_is_best(kernels: Kernels) -> None:
    logits = torch.zeros(1, 20000)
    logits[0, [17, 9000, 9001]] = 1.0
    assert [[17, 9000, 9001, 0]] == KernelLogits(kernels).summarise(logits, 4).top_ids.tolist()


@pytest.mark.parametrize("kept", [20000, 50])
def test_a_race_is_won_by_the_token_that_sampling_would_draw(kernels: Kernels, kept: int, threads: int) -> None:
    logits = random(5, 20000)
    logits[:, kept:] = float("-inf")
    low, high = torch.randint(0, 2**32, (2, 5, 1), generator=torch.Generator().manual_seed(0))
    positions = torch.tensor([0, 1, 77, 5000, 2**20])
    expected = (logits - exponential_noise(low, high, positions, torch.arange(20000)).log()).argmax(dim=-1)
    assert torch.equal(expected, KernelLogits(kernels).race(logits, low, high, positions))


def test_who_alone_is_left_wins_whatever_the_noise(kernels: Kernels) -> None:
    low, high, positions = (torch.tensor([[75007466]]), torch.tensor([[0]]), torch.tensor([20]))
    logits = torch.full((1, 2048), float("-inf"))
    logits[0, 2] = 1.5
    assert [2] == KernelLogits(kernels).race(logits, low, high, positions).tolist()


# ------------------------------------------------------------------------------------------------------------- threads


def test_callers_on_several_threads_do_not_disturb_each_other(kernels: Kernels) -> None:
    layer = PanelFormat(kernels, Arena(), random(512, 256))
    inputs = [random(30, 256, seed=seed) for seed in range(8)]
    expected = [layer(x, None) for x in inputs]
    with ThreadPoolExecutor(4) as pool:
        for _ in range(10):
            assert all(map(torch.equal, expected, pool.map(partial(layer, bias=None), inputs)))


@pytest.mark.parametrize("kind", PEAKS)
def test_products_in_registers_are_counted_on_every_thread(kernels: Kernels, kind: str) -> None:
    """Every thread does its own units, whoever is late, and a unit is 4096 rounds or a 16th of them, of some sums."""

    def operations(units: int, threads: int) -> int:
        found = (ctypes.c_int64 * 2)()
        kernels._peaks[kind](units, ctypes.addressof(found), threads)
        assert found[1] > 0
        return found[0]

    one = operations(1, 1)
    assert one > 0 and one % (2 * 4096) == 0
    assert 2 * one == operations(2, 1) and 6 * one == operations(2, 3)
    assert kernels.operations_per_second(kind, 1, 2) > 0
