"""Operators of torch that captured steps repeat by a kernel: bit for bit what torch makes of the same numbers."""

from __future__ import annotations

import ctypes
import gc
import weakref
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from server.backends.cpu.elementwise import MOST_ELEMENTS
from server.backends.cpu.graph import CaptureError, CpuGraph
from server.backends.cpu.kernels import Kernels
from server.backends.cpu.memory import Pool

Compute = Callable[[Tensor, Tensor], Tensor]
FLOATS = [torch.float32, torch.bfloat16]
SHAPES = [
    ((3, 40), (3, 40)),
    ((3, 40), (3, 1)),
    ((3, 1), (1, 7)),
    ((2, 3, 4, 40), (40,)),
    ((40,), ()),
    ((5, 33), (5, 33)),
]


def random(shape: tuple[int, ...], dtype: torch.dtype, seed: int) -> Tensor:
    numbers = torch.randn(shape, generator=torch.Generator().manual_seed(seed)) * 1000
    return numbers.to(dtype)


def captured(kernels: Kernels, compute: Compute, x: Tensor, y: Tensor) -> tuple[list[Tensor], int]:
    """What the computation gives at once, and of two further inputs; and how many steps are not kernels."""
    with torch.inference_mode():
        x, y = x.clone(), y.clone()
        with CpuGraph(kernels, Pool()) as graph:
            out = compute(x, y)
        found = [out.clone()]
        for seed in (7, 8):
            x.copy_(random(tuple(x.shape), torch.float32, seed))
            y.copy_(random(tuple(y.shape), torch.float32, seed + 2))
            graph.replay()
            found.append(out.clone())
        return found, sum(not hasattr(step, "_names") for step in graph._steps)


def expected(compute: Compute, x: Tensor, y: Tensor) -> list[Tensor]:
    with torch.inference_mode():
        found = [compute(x.clone(), y.clone()).clone()]
        for seed in (7, 8):
            again = (random(tuple(t.shape), torch.float32, seed + 2 * i).to(t.dtype) for i, t in enumerate((x, y)))
            found.append(compute(*again).clone())
        return found


def check_same(kernels: Kernels, compute: Compute, x: Tensor, y: Tensor, others: int = 0) -> None:
    found, count = captured(kernels, compute, x, y)
    for a, b in zip(expected(compute, x, y), found, strict=True):
        assert a.dtype == b.dtype and torch.equal(a, b)
    assert others == count


@pytest.mark.parametrize("dtype", [*FLOATS, torch.int64])
@pytest.mark.parametrize(("first", "second"), SHAPES)
@pytest.mark.parametrize("operator", [torch.add, torch.sub, torch.mul])
def test_two_tensors(
    kernels: Kernels,
    dtype: torch.dtype,
    first: tuple[int, ...],
    second: tuple[int, ...],
    operator: Compute,
) -> None:
    x, y = random(first, dtype, 1), random(second, dtype, 2)
    check_same(kernels, operator, x, y)
    check_same(kernels, operator, y, x)


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("number", [0.1, -3, 1.0, 1e-30, 1e30, float("inf")])
def test_numbers(kernels: Kernels, dtype: torch.dtype, number: float) -> None:
    x, y = random((3, 70), dtype, 1), random((3, 70), dtype, 2)
    check_same(kernels, lambda x, y: x * number + y, x, y)
    near = x / 1000  # where a number's own digits show in a sum
    others = 2 if dtype == torch.bfloat16 else 0  # torch rounds what it adds to bfloat16, and does so itself
    check_same(kernels, lambda x, y: (x + number) * (y - number), near, y, others)


@pytest.mark.parametrize("dtype", FLOATS)
def test_what_is_changed_in_place(kernels: Kernels, dtype: torch.dtype) -> None:
    def compute(x: Tensor, y: Tensor) -> Tensor:
        heads = x.clone()
        heads[:, :2] *= y
        heads[:, -1:] = heads[:, :1] * 2.5
        heads[:, 1:2].add_(y)
        return heads

    check_same(kernels, compute, random((3, 4, 40), dtype, 1), random((3, 1, 1), dtype, 2))


def test_parts_of_one_memory(kernels: Kernels) -> None:
    check_same(kernels, lambda x, y: x[0].add_(x[2]), random((3, 40), torch.int64, 1), random((1,), torch.int64, 2))
    check_same(kernels, lambda x, y: x[:, 20:].mul_(x[:, 20:]), *(random((3, 40), torch.float32, n) for n in (1, 2)))


@pytest.mark.parametrize("dtype", [*FLOATS, torch.int64])
def test_what_is_put_in_order_and_side_by_side(kernels: Kernels, dtype: torch.dtype) -> None:
    x, y = random((3, 4, 40), dtype, 1), random((3, 2, 40), dtype, 2)
    check_same(kernels, lambda x, y: torch.cat([x[:, 1:3], y, x[:, :0]], dim=1), x, y)
    check_same(kernels, lambda x, y: torch.cat([x.flatten(1), y.flatten(1)], dim=-1), x, y)
    check_same(kernels, lambda x, y: x.transpose(0, 2).contiguous(), x, y)
    check_same(kernels, lambda x, y: x[:, 1:3].flatten(1), x, y)
    check_same(kernels, lambda x, y: x.transpose(0, 1).reshape(2, -1), x, y)


def test_floats_of_another_size(kernels: Kernels) -> None:
    x, y = random((3, 40), torch.float32, 1), random((40, 3), torch.bfloat16, 2)
    check_same(kernels, lambda x, y: x.to(torch.bfloat16), x, y)
    check_same(kernels, lambda x, y: y[:, :2].float() * 2, x, y)


@pytest.mark.parametrize(
    "compute",
    [
        lambda x, y: torch.add(x, y, alpha=2),  # another operator
        lambda x, y: x * y.double(),  # of two dtypes
        lambda x, y: x * True,
        lambda x, y: x.repeat(MOST_ELEMENTS // x.numel() + 1, 1) * 2,  # large
        lambda x, y: x.view(1, 1, 1, 3, 40).transpose(3, 4) * y.t(),  # of many dimensions
        lambda x, y: torch.cat([x, y.double()]),
        lambda x, y: x.t() * 2,  # whose result is not in one run
        lambda x, y: x * (2**60 + 2**36 + 1),
        lambda x, y: x.mul_(x[:, :1].clone()[:, 0:1]).copy_(x.clone()).mul_(x[:, :1]),  # of what changes meanwhile
    ],
)
def test_what_is_not_known_is_left_to_torch(kernels: Kernels, compute: Compute) -> None:
    x, y = random((3, 40), torch.float32, 1), random((3, 40), torch.float32, 2)
    found, count = captured(kernels, compute, x, y)
    assert all(torch.equal(a, b) for a, b in zip(expected(compute, x, y), found, strict=True)) and count > 0


@pytest.mark.parametrize("dtype", FLOATS)
def test_what_is_no_number_and_what_has_no_elements(kernels: Kernels, dtype: torch.dtype) -> None:
    x = torch.tensor([[float("nan"), float("inf"), -0.0, 3e38]], dtype=dtype)
    y = torch.tensor([[1.0, -1.0, 1.0, 3e38]], dtype=dtype)
    with torch.inference_mode(), CpuGraph(kernels, Pool()):
        product, empty = x * y, x[:, :0] * 2
        joined = torch.cat([x[:0], product])
    assert torch.equal((x * y).view(torch.int8)[:, dtype.itemsize :], product.view(torch.int8)[:, dtype.itemsize :])
    assert product.isnan()[0, 0] and torch.equal(product[:, 1:], joined[:, 1:]) and (1, 0) == empty.shape


@pytest.mark.parametrize("dtype", [*FLOATS, torch.int64])
def test_copies_have_the_same_bits(kernels: Kernels, dtype: torch.dtype) -> None:
    bits = torch.arange(-(2**15), 2**15, dtype=torch.int16).view(16, -1)
    x = bits.view(dtype) if dtype == torch.bfloat16 else bits.int().mul(65_537).view(torch.float32)
    x = bits.long() if dtype == torch.int64 else x
    with torch.inference_mode(), CpuGraph(kernels, Pool()):
        copies = [part.flip(0).clone() if part.numel() > MOST_ELEMENTS else part.clone() for part in x.split(4)]
    assert torch.equal(x.view(torch.int16), torch.cat(copies).view(torch.int16))


def test_the_target_of_a_copy_stays(kernels: Kernels) -> None:
    freed: list[int] = []

    class Owner(ctypes.Array[ctypes.c_float]):
        _type_, _length_ = ctypes.c_float, 16

    def compute(x: Tensor) -> Tensor:
        owner = Owner()
        weakref.finalize(owner, freed.append, 1)
        target = torch.frombuffer(owner, dtype=torch.float32)
        target.copy_(x)
        return target * 2

    with torch.inference_mode():
        with CpuGraph(kernels, Pool()) as graph:
            compute(torch.ones(16))
        gc.collect()
        assert not freed
        graph.replay()
        del graph
        gc.collect()
    assert freed


def test_what_is_made_of_numbers_alone_is_not_to_be_changed(kernels: Kernels) -> None:
    with pytest.raises(CaptureError, match="changes what is the same each time"), torch.inference_mode():
        with CpuGraph(kernels, Pool()):
            torch.arange(3)[1:].add_(1)


@pytest.mark.parametrize(
    "change",
    [
        lambda x: x[:1].expand(3, 40).add_(1.0),
        lambda x: x[:1].expand(3, 40).copy_(x.clone()),
        lambda x: x[1:].mul_(x[:-1]),
    ],
)
def test_what_torch_refuses_is_refused(kernels: Kernels, change: Callable[[Tensor], Tensor]) -> None:
    with pytest.raises(RuntimeError, match=r"memory location|overlap"), torch.inference_mode():
        with CpuGraph(kernels, Pool()):
            change(random((3, 40), torch.float32, 1))


def test_large_integers_are_exact(kernels: Kernels) -> None:
    x = torch.tensor([[2**60 + 1, -(2**40) - 3]])
    with torch.inference_mode(), CpuGraph(kernels, Pool()):
        doubled, moved = x + x, x + (2**60 + 1)
    assert [2**61 + 2, -(2**41) - 6] == doubled[0].tolist() and [2**61 + 2, 2**60 - 2**40 - 2] == moved[0].tolist()
