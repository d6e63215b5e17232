"""Operators of torch that a captured step repeats by a kernel (`elementwise.cpp`), bit for bit: copies, sums, products.

A model's step has a few such between the kernels, for what only some families do: a gate, a scale, heads put side by
side. What is not known here, or large enough to be worth torch's threads, is left to torch, as is what it refuses or
where its result would not be contiguous.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

from server.backends.cpu.kernels import Kernels
from server.backends.cpu.memory import Pool

DIMS, MOST_ELEMENTS = 4, 1 << 15
aten = torch.ops.aten
# `Kind` of elementwise.cpp.
COPY, ADD, SUBTRACT, MULTIPLY = range(4)
ARITHMETIC = {aten.add: ADD, aten.sub: SUBTRACT, aten.mul: MULTIPLY}
CHANGES = {aten.copy_: COPY, aten.add_: ADD, aten.sub_: SUBTRACT, aten.mul_: MULTIPLY}  # in place
COPIES = {aten.contiguous, aten.clone, aten.reshape, aten.flatten, aten.to}  # in the order of elements


class _Elementwise(ctypes.Structure):
    """`Elementwise` of elementwise.cpp."""

    _fields_ = (
        ("kind", ctypes.c_long),
        *((name, ctypes.c_long * DIMS) for name in ("shape", "out", "a", "b")),
        ("number", ctypes.c_double),
    )


class Elementwise:
    """Computes operators by kernels, whose calls a recorder is told of. Results lie in the pool."""

    def __init__(self, kernels: Kernels, pool: Pool):
        self._kernels = kernels.elementwise
        self._pool = pool
        self.kept: list[object] = []  # what the recorded calls point to

    def change(self, func: Any, args: Sequence[Any]) -> Tensor | None:
        """What an operator makes of its first argument, in place; None: it is not known here, and nothing was done."""
        packet, target = func.overloadpacket, args[0]
        if packet not in CHANGES or len(args) != 2 or _is_spread(target) or _overlaps(target, args[1]):
            return None
        kind = CHANGES[packet]
        if kind == COPY:
            return self._call(COPY, target, args[1], None) if self._can(target, args[1]) else None
        if self._can(target, target) and _combine(kind, target, args[1]):
            return self._call(kind, target, target, args[1])
        return None

    def result(self, func: Any, args: Sequence[Any], made: Any) -> Tensor | None:
        """The same numbers as `made`, which torch has made of the arguments; None: the operator is not known here."""
        packet = func.overloadpacket
        if not isinstance(made, Tensor) or not made.is_contiguous():
            return None
        if packet in COPIES and self._can(made, args[0]):
            out = self._pool.empty(made.shape, made.dtype)
            self._call(COPY, out.view(args[0].shape), args[0], None)
            return out
        if packet is aten.cat and all(self._can(made, part) for part in args[0]):
            return self._joined(args[0], args[1] if len(args) > 1 else 0, made)
        kind = ARITHMETIC.get(packet)
        if kind is None or len(args) != 2 or not self._can(made, args[0]) or not _combine(kind, *args):
            return None
        return self._call(kind, self._pool.empty(made.shape, made.dtype), *args)

    def _can(self, out: Tensor, a: Any) -> bool:
        """Whether there is a kernel that makes `out` of elements of `a`."""
        known = isinstance(a, Tensor) and (a.dtype, out.dtype) in self._kernels and 0 < out.numel() <= MOST_ELEMENTS
        return known and max(a.dim(), out.dim()) <= DIMS and not a.is_neg()

    def _joined(self, parts: Sequence[Tensor], dim: int, made: Tensor) -> Tensor | None:
        if any(part.dim() != made.dim() or part.dtype != made.dtype for part in parts):
            return None
        out = self._pool.empty(made.shape, made.dtype)
        ends = list(accumulate(part.shape[dim] for part in parts))
        for part, end in zip(parts, ends, strict=True):
            if part.numel():
                self._call(COPY, out.narrow(dim, end - part.shape[dim], part.shape[dim]), part, None)
        return out

    def _call(self, kind: int, out: Tensor, a: Tensor, b: Tensor | float | None) -> Tensor:
        """Compute `out` from a and b, which have its shape or are spread over it."""
        second = b.expand_as(out) if isinstance(b, Tensor) else None
        first = a.expand_as(out)
        shape = (*[1] * (DIMS - out.dim()), *out.shape)
        strides = (_strides(tensor) for tensor in (out, first, out if second is None else second))
        how = _Elementwise(kind, _longs(shape), *strides, 0.0 if b is None or second is not None else b)
        others = (tensor for tensor in (out, a, b) if isinstance(tensor, Tensor) and not self._pool.has(tensor))
        self.kept += [how, *others]
        at = None if second is None else second.data_ptr()
        self._kernels[a.dtype, out.dtype](ctypes.addressof(how), first.data_ptr(), at, out.data_ptr())
        return out


def _combine(kind: int, a: Tensor, b: Any) -> bool:
    """Whether torch computes in the dtype of `a`, or with a number as the kernel has it."""
    if isinstance(b, Tensor):
        return a.dtype == b.dtype and b.dim() <= DIMS and not b.is_neg()
    if isinstance(b, bool) or (a.dtype == torch.bfloat16 and kind != MULTIPLY):  # torch rounds what it adds
        return False
    if isinstance(b, int):
        return abs(b) < 2**53  # which a kernel is told as a float
    return isinstance(b, float) and a.dtype != torch.int64


def _is_spread(target: Tensor) -> bool:
    """Whether several of its elements are one."""
    return any(stride == 0 and size > 1 for stride, size in zip(target.stride(), target.shape, strict=True))


def _overlaps(target: Tensor, source: Any) -> bool:
    """Whether elements of the source may change before they are read."""
    if not isinstance(source, Tensor):
        return False
    (first, end), (other, other_end) = _span(target), _span(source)
    is_same = first == other and (target.shape, target.stride()) == (source.shape, source.stride())
    return not is_same and first < other_end and other < end


def _span(tensor: Tensor) -> tuple[int, int]:
    """The addresses of its first element, and behind its last."""
    last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return tensor.data_ptr(), tensor.data_ptr() + (last + 1) * tensor.itemsize


def _strides(tensor: Tensor) -> Any:
    return _longs((*[0] * (DIMS - tensor.dim()), *tensor.stride()))


def _longs(numbers: Sequence[int]) -> Any:
    return (ctypes.c_long * DIMS)(*numbers)
