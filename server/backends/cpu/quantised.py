"""Linear layers of quantised weights by compiled kernels.

`CodeFormat`: 4 and 8 bits, computed in integers (`codes.cpp`). The inputs of a product are rounded to 8 bits too. Where
a checkpoint wants that, it is done as it says, with one scale for each token. Where it leaves inputs as they are, as
formats of 4 bits do, each block of at most 128 inputs of a token has a scale of its own; `arranged` says which. That is
only done to bfloat16: float32 is for comparisons. A result is bit for bit the same whatever else is in the step.

float4 (E2M1) with 32 inputs to a scale, as MXFP4 has, is such a format: twice its levels are integers.

`LevelFormat`: what is left, which is other tables of levels (NF4, FP4), float8, zeros that are no codes, inputs whose
rounding has a zero of its own, and float32. A stretch of a panel becomes the words of a dense one in the cache
(`expand` in `linear.cpp`), and is multiplied as that is: results are bit for bit those of the dense layer with the same
numbers in the same dtype. It is the slower form. Where a checkpoint wants inputs rounded too, they are rounded before
and computed with in the model's dtype. bfloat16 holds every number of float8 and int8; its rounding of their scale is
finer than theirs.

Shapes: T tokens, D input features, F output features, S slots, B blocks of slots, G groups of inputs.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from server.backends.cpu.kernels import Kernels
from server.backends.cpu.layers import LINE, PANEL_ROWS, PanelFormat, WeightFields, address_of
from server.backends.cpu.memory import Arena
from server.backends.protocol import Maximum
from server.backends.reference.quantised import InputRounding
from server.quantisation.packing import WORD_BITS, PackedCodes
from server.quantisation.rounding import (
    BITS,
    INT4_GROUP,
    MOST_CODE,
    SHRINKS,
    TINY,
    float4_levels,
    in_16_bits,
    scale_of,
)
from server.quantisation.sizes import BLOCKS, slots_of
from server.quantisation.stored import QuantisedWeight, contiguous_groups

FLOAT32_LEAST = 2.0**-126  # what is smaller counts as 0 among scales that are powers of 2
RAISED = 12  # of codes.h


class _CodeWeight(ctypes.Structure):
    """`CodeWeight` of codes.cpp."""

    _fields_ = (
        ("outputs", ctypes.c_long),
        ("is_gated", ctypes.c_long),
        ("panels", ctypes.c_void_p),
        ("order", ctypes.c_void_p),
        ("fixed", ctypes.c_void_p),
        ("inputs", ctypes.c_long),
        ("slots", ctypes.c_long),
        ("bits", ctypes.c_long),
        ("is_float4", ctypes.c_long),
        ("block", ctypes.c_long),
        ("is_by_token", ctypes.c_long),
        ("scale_bytes", ctypes.c_long),
        ("zero", ctypes.c_long),
    )


class _PackedWords(ctypes.Structure):
    """`PackedCodes` of codes.cpp."""

    _fields_ = (
        ("words", ctypes.c_void_p),
        ("places", ctypes.c_void_p),
        ("row_words", ctypes.c_long),
        ("bits", ctypes.c_long),
        ("along_outputs", ctypes.c_long),
        ("first", ctypes.c_long),
        ("rows", ctypes.c_long),
    )


@dataclass(frozen=True)
class Arranged:
    """A weight in the order in which its products are summed.

    bits: of a code, 4 or 8; slots: S; scale [F, B] float32; zero [F, B] float32, integers. order [S] int32: the input
    of each slot, -1 where there is none; None: the inputs in their order, then none. block: slots that share scales.
    is_by_token: whether all blocks of a token's inputs share their scale.
    """

    weight: QuantisedWeight
    bits: int
    slots: int
    scale: Tensor
    zero: Tensor
    order: Tensor | None
    block: int
    is_by_token: bool

    @property
    def codes(self) -> Tensor:
        """[F, S] uint8, contiguous."""
        codes = self.weight.codes.view(torch.uint8) ^ 128 if _raise(self.weight) else self.weight.codes
        if self.order is not None:
            codes = F.pad(codes, (0, 1))[:, self.order]  # slot -1 is the column of zeros
        return F.pad(codes, (0, self.slots - codes.shape[1])).contiguous()


def takes(weight: QuantisedWeight, dtype: torch.dtype, *, rounds_inputs: bool = True) -> bool:
    """Whether the kernels can compute with this weight. rounds_inputs: also where the checkpoint leaves them alone."""
    if weight.held.dtype not in (torch.uint8, torch.int8):
        return False
    if weight.levels is not None and not (_is_float4(weight) and int(weight.groups.bincount().max()) == BLOCKS[-1]):
        return False
    if weight.zero is not None and not _are_codes(weight.zero + _raise(weight)):
        return False
    inputs = weight.inputs
    if inputs is None:
        return rounds_inputs and dtype == torch.bfloat16
    return inputs.dtype == torch.int8 and not inputs.group and inputs.zero is None and inputs.most is None


def arranged(weight: QuantisedWeight) -> Arranged:
    """Where codes go, and scales, in slots: inputs by groups, each filled up to whole blocks."""
    width = weight.shape[1]
    raised = _raise(weight)
    bits = 4 if raised == 0 and weight.bits <= 4 else 8
    by_token = weight.inputs is not None
    if by_token and bits == 8 and weight.scale.shape[1] == 1:
        order, of_block, block = torch.arange(width), torch.zeros(1, dtype=torch.int64), -(-width // 4) * 4
        order = F.pad(order, (0, block - width), value=-1)
    else:
        order, of_block, block = _slots(weight.groups)
    zero = torch.zeros_like(weight.scale) if weight.zero is None else weight.zero
    scale = weight.scale
    if weight.levels is not None:
        scale, raised = scale / 2, RAISED  # twice what codes stand for, raised, is multiplied
    is_plain = torch.equal(order[:width], torch.arange(width)) and bool((order[width:] < 0).all())
    return Arranged(
        weight=weight,
        bits=bits,
        slots=len(order),
        scale=scale[:, of_block].contiguous(),
        zero=(zero[:, of_block] + raised).contiguous(),
        order=None if is_plain else order.int(),
        block=block,
        is_by_token=by_token,
    )


def _slots(groups: Tensor) -> tuple[Tensor, Tensor, int]:
    """The input of each slot [S], -1 where there is none; the group of each block [B]; the slots of a block."""
    counts = torch.bincount(groups)
    block, slots = slots_of(counts.tolist())
    blocks = -(-counts // block)
    of_block = torch.repeat_interleave(torch.arange(len(counts)), blocks)
    order = torch.full((slots,), -1, dtype=torch.int64)
    begin = (blocks * block).cumsum(0) - blocks * block
    by_group = torch.argsort(groups, stable=True)
    within = torch.arange(len(groups)) - (counts.cumsum(0) - counts)[groups[by_group]]
    order[begin[groups[by_group]] + within] = by_group
    return order, of_block, block


def _raise(weight: QuantisedWeight) -> int:
    """What makes codes unsigned."""
    return 128 if weight.held.dtype == torch.int8 else 0


def _is_float4(weight: QuantisedWeight) -> bool:
    """Whether the levels are those of float4, and no zero is taken from them."""
    levels = weight.levels
    return levels is not None and weight.zero is None and torch.equal(levels, float4_levels().to(levels.device))


def _stored_scales(scale: Tensor) -> Tensor:
    """The same as a kernel reads them: exponents where all are powers of 2, or float16 if that holds them all."""
    fraction, exponent = torch.frexp(scale)
    exponents = torch.where(scale < FLOAT32_LEAST, 0, exponent + 126)
    if bool(((fraction == 0.5) | (exponents == 0)).all()) and not bool((scale < 0).any()):
        return exponents.to(torch.uint8)
    return scale.half() if torch.equal(scale.half().float(), scale) else scale


def _are_codes(zero: Tensor) -> bool:
    return bool(((zero == zero.round()) & (zero >= 0) & (zero <= 255)).all())


class CodeFormat(PanelFormat):
    """A quantised weight [F, D] that only the kernels can read.

    dtype: of the inputs. is_gated: the weight is [gate | up], [2 F, D]. maximum: over all ranks, where the inputs are
    divided among them and each token has one scale.
    """

    def __init__(
        self,
        kernels: Kernels,
        arena: Arena,
        weight: QuantisedWeight,
        dtype: torch.dtype,
        *,
        is_gated: bool = False,
        maximum: Maximum | None = None,
    ):
        rows, inputs = weight.shape
        self.dtype, self.inputs, self.outputs = dtype, inputs, rows // 2 if is_gated else rows
        laid = arranged(weight)
        scales = _stored_scales(laid.scale)
        first = int(laid.zero[0, 0])
        zeros = None if bool((laid.zero == first).all()) else laid.zero.to(torch.uint8)
        self._order = laid.order
        self._fixed = None if weight.inputs is None else weight.inputs.scale
        slots, blocks = laid.slots, laid.scale.shape[1]
        block_bytes = PANEL_ROWS * (laid.block * laid.bits // 8 + scales.itemsize + (zeros is not None))
        panel_rows = PANEL_ROWS // 2 if is_gated else PANEL_ROWS
        self._panels = arena.take(-(-self.outputs // panel_rows) * (-(-blocks * block_bytes // LINE) * LINE))
        self._weight = _CodeWeight(
            self.outputs,
            is_gated,
            self._panels.data_ptr(),
            None if laid.order is None else laid.order.data_ptr(),
            None if self._fixed is None else self._fixed.data_ptr(),
            inputs,
            slots,
            laid.bits,
            weight.levels is not None,
            laid.block,
            laid.is_by_token,
            scales.itemsize,
            first if zeros is None else -1,
        )
        self.address = ctypes.addressof(self._weight)  # of what the kernels know of this weight
        is_part = bool(weight.num_inputs) and weight.num_inputs > inputs
        self.maximum = maximum if is_part and laid.is_by_token and self._fixed is None else None
        self._linear = kernels.linear_codes[dtype]
        self._linear_to_f32 = kernels.linear_codes_to_f32[dtype]
        self._unpack = kernels.unpack_codes[dtype]
        self.grouped = kernels.grouped_codes[dtype]
        self._pack_codes(kernels, laid)
        kernels.pack_scales(self.address, scales.data_ptr(), address_of(zeros), torch.get_num_threads())

    def _pack_codes(self, kernels: Kernels, laid: Arranged) -> None:
        held, threads = laid.weight.held, torch.get_num_threads()
        if not isinstance(held, PackedCodes):
            codes = laid.codes
            kernels.pack_codes(self.address, codes.data_ptr(), threads)
            return
        per_word = WORD_BITS // held.bits
        places = torch.tensor(held.places or range(per_word), dtype=torch.int32)
        first = 0  # row of the part
        for part in held.parts:
            words = part.contiguous()
            rows = words.shape[1] * (1 if held.places is None else per_word)
            packed = _PackedWords(
                words.data_ptr(), places.data_ptr(), words.shape[1], held.bits, held.places is not None, first, rows
            )
            kernels.pack_words(self.address, ctypes.addressof(packed), threads)
            first += rows

    @property
    def nbytes(self) -> int:
        return self._panels.nbytes + (0 if self._order is None else self._order.nbytes)

    def _read_by_kernel(self, x: Tensor) -> tuple[Tensor, Sequence[Tensor | None]]:
        if self.maximum is None:
            return x, [None]
        return x, [scale_of(self.maximum(x.float().abs().amax(dim=1, keepdim=True)), torch.int8)]


class _Levels(ctypes.Structure):
    """`Levels` of linear.cpp."""

    _fields_ = (
        ("values", ctypes.c_void_p),
        ("groups", ctypes.c_void_p),
        ("num_groups", ctypes.c_long),
        ("bits", ctypes.c_long),
        ("has_zeros", ctypes.c_long),
    )


class LevelFormat(PanelFormat):
    """A quantised weight [F, D] that only the kernels can read.

    dtype: of the inputs. is_gated: the weight is [gate | up], [2 F, D]. maximum: over all ranks, where the inputs are
    divided among them.
    """

    def __init__(
        self,
        kernels: Kernels,
        arena: Arena,
        weight: QuantisedWeight,
        dtype: torch.dtype,
        *,
        is_gated: bool = False,
        maximum: Maximum | None = None,
    ):
        rows, inputs = weight.shape
        self.dtype, self.inputs, self.outputs = dtype, inputs, rows // 2 if is_gated else rows
        self._values, bits = _values_of_codes(weight)
        self._groups = weight.groups.short()
        assert weight.scale.shape[1] < 1 << 15, "groups have at least 8 inputs each, and a row less than 2^18"
        num_groups, has_zeros = weight.scale.shape[1], weight.zero is not None
        self._levels = _Levels(self._values.data_ptr(), self._groups.data_ptr(), num_groups, bits, has_zeros)
        panel_bytes = PANEL_ROWS * (-(-inputs * bits // 8) + 4 * num_groups * (1 + has_zeros))
        panel_rows = PANEL_ROWS // 2 if is_gated else PANEL_ROWS
        self._panels = arena.take(-(-self.outputs // panel_rows) * (-(-panel_bytes // LINE) * LINE))
        self._weight = WeightFields(
            self.outputs, is_gated, self._panels.data_ptr(), inputs, ctypes.addressof(self._levels)
        )
        self.address = ctypes.addressof(self._weight)  # of what the kernels know of this weight
        self._rounding = None if weight.inputs is None else InputRounding(weight, weight.inputs, maximum)
        self._linear = kernels.linear[dtype]
        self._linear_to_f32 = kernels.linear_to_f32[dtype]
        self._unpack = kernels.unpack_levels[dtype]
        self.grouped = kernels.grouped[dtype]
        codes = weight.codes.contiguous().view(torch.uint8)
        scale, zero = weight.scale.contiguous(), None if weight.zero is None else weight.zero.contiguous()
        kernels.pack_levels(self.address, codes.data_ptr(), scale.data_ptr(), address_of(zero), torch.get_num_threads())

    @property
    def rounds_inputs(self) -> bool:
        """Whether inputs are rounded before."""
        return self._rounding is not None

    @property
    def nbytes(self) -> int:
        return self._panels.nbytes + self._groups.nbytes + self._values.nbytes

    def _read_by_kernel(self, x: Tensor) -> tuple[Tensor, Sequence[Tensor | None]]:
        return (x if self._rounding is None else self._rounding.nearest(x).contiguous()), ()


class _Int4(ctypes.Structure):
    """`Int4` of rounding.cpp."""

    _fields_ = (
        ("inputs", ctypes.c_long),
        ("count", ctypes.c_long),
        ("shrunk", ctypes.c_void_p),
        ("steps", ctypes.c_void_p),
        ("least", ctypes.c_float),
        ("most", ctypes.c_float),
    )


def int4_groups(kernels: Kernels, weight: Tensor) -> QuantisedWeight:
    """See `rounding.int4_groups`."""
    weight = weight.float().contiguous()
    rows, inputs = weight.shape
    groups = contiguous_groups(INT4_GROUP, inputs)
    codes = torch.empty(rows, inputs, dtype=torch.uint8)
    scale, zero = torch.empty(2, rows, int(groups[-1]) + 1)
    shrunk, steps = torch.tensor(SHRINKS), torch.tensor([shrink / MOST_CODE for shrink in SHRINKS])
    how = _Int4(inputs, len(SHRINKS), shrunk.data_ptr(), steps.data_ptr(), TINY, MOST_CODE)
    found = (tensor.data_ptr() for tensor in (codes, scale, zero))
    kernels.round_int4(ctypes.addressof(how), weight.data_ptr(), rows, *found, torch.get_num_threads())
    return QuantisedWeight(codes, BITS, in_16_bits(scale), groups, zero=zero)


def _values_of_codes(weight: QuantisedWeight) -> tuple[Tensor, int]:
    """What each code stands for before its zero and scale, [16] or [256] float32, and the bits of a stored code."""
    bits = 4 if weight.bits <= 4 and weight.codes.dtype == torch.uint8 else 8
    values = torch.zeros(1 << bits)
    if weight.levels is not None:
        values[: len(weight.levels)] = weight.levels
    else:
        values[:] = torch.arange(1 << bits, dtype=torch.uint8).view(weight.codes.dtype).float()
    return values.nan_to_num(0.0), bits
