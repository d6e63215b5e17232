"""Linear layers of quantised weights by compiled kernels: whatever codes there are, expanded where they are used.

A stretch of a panel becomes the words of a dense one in the cache (`expand` in `linear.cpp`), and is multiplied as
that is: results are bit for bit those of the dense layer with the same numbers in the same dtype. Memory holds 4 or 8
bits of each weight. It is the slower form, for what `codes.py` leaves out: tables of levels (NF4, FP4), float8, and
float32.

Where a checkpoint wants inputs rounded too, they are rounded before and computed with in the model's dtype. bfloat16
holds every number of float8 and int8; its rounding of their scale is finer than theirs.

Shapes: T tokens, D input features, F output features, G groups of inputs.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence

import torch
from torch import Tensor

from server.backends.cpu.kernels import Kernels
from server.backends.cpu.layers import LINE, PANEL_ROWS, PanelFormat, WeightFields, address_of
from server.backends.cpu.memory import Arena
from server.backends.protocol import Maximum
from server.backends.reference.quantised import InputRounding
from server.quantisation.stored import QuantisedWeight


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
        codes = weight.codes.contiguous().view(torch.uint8)
        scale, zero = weight.scale.contiguous(), None if weight.zero is None else weight.zero.contiguous()
        kernels.pack_levels(
            self.address,
            codes.data_ptr(),
            scale.data_ptr(),
            address_of(zero),
            torch.get_num_threads(),
        )

    @property
    def rounds_inputs(self) -> bool:
        """Whether inputs are rounded before."""
        return self._rounding is not None

    @property
    def nbytes(self) -> int:
        return self._panels.nbytes + self._groups.nbytes + self._values.nbytes

    def _read_by_kernel(self, x: Tensor) -> tuple[Tensor, Sequence[Tensor | None]]:
        return super()._read_by_kernel(x if self._rounding is None else self._rounding.nearest(x))


def _values_of_codes(weight: QuantisedWeight) -> tuple[Tensor, int]:
    """What each code stands for before its zero and scale, [16] or [256] float32, and the bits of a stored code."""
    bits = 4 if weight.bits <= 4 and weight.codes.dtype == torch.uint8 else 8
    values = torch.zeros(1 << bits)
    if weight.levels is not None:
        values[: len(weight.levels)] = weight.levels
    else:
        values[:] = torch.arange(1 << bits, dtype=torch.uint8).view(weight.codes.dtype).float()
    return values.nan_to_num(0.0), bits
