"""Quantised linear layers on an NVIDIA GPU: one kernel for all of them, and torch's operators where these are good.

Weights whose inputs are taken as they are (GPTQ, AWQ, int4, NF4 and FP4, int8) are unpacked in the kernel
(`kernels/packed.py`). For thousands of rows, of which each tile would unpack the weight again, it is widened as a whole
before a product in 16 bits: for 4 bits that moves 4.5 bytes a weight, in the time of 750 rows' arithmetic on an H200,
while the kernel's product takes 1.6 to 1.8 times as long as cuBLAS's (both are estimates).

Where inputs are rounded too (W8A8 in int8 and float8), one launch rounds them (`kernels/around.py`), and the product of
codes is the kernel's, or `torch._int_mm`'s or `torch._scaled_mm`'s: torch's is the usual way where it was measured to
reach enough of its limit, and one of those that are timed before captures (both in `choice.py`). What no kernel
multiplies is left to the reference's operators (`packing.why_not_packed`).

`torch._weight_int4pack_mm` is no way: it wants scales and zero points in bfloat16, which those of checkpoints in
float16 do not fit into, and the weight in a packing of its own. `lockstep-bench products` times it beside ours.

Nothing here asks the host for values but while a weight is stored. Not yet run on a GPU.

Shapes: T rows, D input features, F output features, E experts.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from copy import copy
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from server.arch.spec import Activation
from server.backends.cuda.choice import Alternatives
from server.backends.cuda.kernels.around import finish_integers, gather_inputs, largest_magnitudes, round_inputs
from server.backends.cuda.kernels.linear import Epilogue, Tiling
from server.backends.cuda.kernels.packed import multiply_packed, packed_tilings, widened
from server.backends.cuda.linear import Products, named, names_of
from server.backends.cuda.packing import PackedWeight, pack, stacked_weights
from server.backends.protocol import GroupedLinear, Maximum
from server.backends.reference.linear import Gate, activated
from server.quantisation.stored import QuantisedWeight, RoundedInputs

# Rows above which a gate is an operator of its own: the kernel's tiles have no room for both halves of so many.
MOST_GATED_ROWS = 256
# `torch._int_mm` wants more rows than this, and features in such units; so does `torch._scaled_mm`.
LEAST_ROWS, UNIT = 17, 16
# Rows up to which the ways to compute are timed.
MOST_MEASURED_ROWS = 256
# Rows above which a weight is widened as a whole: more than any captured step has, whose graph would keep it.
MOST_UNPACKED_ROWS = 1024

# Inputs as the product takes them, and their scales.
Taken = tuple[Tensor, Tensor | None]
# Taken inputs, what follows, and the dtype of the result.
Way = Callable[[Taken, Epilogue, torch.dtype], Tensor]


class Inputs:
    """Brings the inputs of one product into the form that its weight wants."""

    def __init__(self, packed: PackedWeight, weight: QuantisedWeight, maximum: Maximum | None):
        self._packed = packed
        self._rounding = weight.inputs
        self._size = packed.part * packed.input_parts or packed.places
        whole = weight.num_inputs or weight.shape[1]
        self._maximum = maximum if whole > weight.shape[1] and weight.inputs and weight.inputs.scale is None else None
        is_grouped = packed.input_parts > 0
        self.is_rounded = weight.inputs is not None
        # Whether scales are those of the checkpoint: then experts have scales of their own.
        self.is_fixed = weight.inputs is not None and weight.inputs.scale is not None
        self._groups = -(-whole // self._size) if is_grouped else 1  # of the whole layer
        self._first_group = weight.first_input // self._size if is_grouped else 0
        self._local_groups = -(-packed.places // self._size) if is_grouped else 1

    def __call__(self, x: Tensor, ends: Tensor | None = None) -> Taken:
        """x [T, D] → as the weight's places have it, and the scales of its codes."""
        packed = self._packed
        x = x if x.stride(1) == 1 else x.contiguous()
        if self._rounding is None:
            return (x if packed.order is None else gather_inputs(x, packed.order, ends)), None
        largest = None
        if self._maximum is not None:
            largest = self._maximum(self._largest(x))[:, self._first_group :]
        return self._rounded(x, self._rounding, largest)

    def without_ranks(self, x: Tensor) -> Taken:
        """The same of numbers that no other rank has, for a trial."""
        return self(x) if self._rounding is None else self._rounded(x, self._rounding, None)

    def of_all(self, experts: PackedWeight) -> Inputs:
        """Those of all experts, which are laid out like these, each perhaps in an order of its own."""
        inputs = copy(self)
        inputs._packed = experts
        return inputs

    def _largest(self, x: Tensor) -> Tensor:
        local = min(self._local_groups, self._groups - self._first_group)
        return largest_magnitudes(x, self._size, self._packed.lead, self._first_group, self._groups, local)

    def _rounded(self, x: Tensor, rounding: RoundedInputs, largest: Tensor | None) -> Taken:
        return round_inputs(x, rounding, self._packed.places, self._size, self._packed.lead, largest)


class CudaQuantised:
    """A `LinearFormat`: a quantised weight of which `why_not_packed` says nothing.

    dtype: of the inputs; maximum: over all ranks, where these are divided among them and rounded.
    """

    def __init__(
        self,
        weight: QuantisedWeight,
        dtype: torch.dtype,
        *,
        is_gated: bool = False,
        gate: Gate,
        products: Products,
        maximum: Maximum | None = None,
    ):
        self.packed = pack(weight, dtype)
        self.inputs = Inputs(self.packed, weight, maximum)
        self._dtype = dtype if weight.inputs is None else self.packed.codes.dtype  # that are multiplied
        self._is_gated = is_gated
        self._gate = gate
        self._products = products
        self.operator = _operator_of(weight, self.packed, dtype)
        self.moved()

    @property
    def nbytes(self) -> int:
        """Memory that it takes."""
        return self.packed.nbytes

    @property
    def memory(self) -> Sequence[Tensor]:
        return self.packed.memory

    def moved(self) -> None:
        if self.operator is not None:
            self._rows = self.packed.codes.transpose(0, 1).flatten(1)  # [F, places], as they lie
            self._row_scale = self.packed.scale.float()  # [1, F]

    def __call__(
        self, x: Tensor, bias: Tensor | None, activation: Activation | None = None, residual: Tensor | None = None
    ) -> Tensor:
        """x [T, D] → activation(x @ weightᵀ + bias) + residual, [T, F], in x's dtype."""
        epilogue, taken = Epilogue(bias, activation, residual), self.inputs(x)
        rows = 1 << max(len(x) - 1, 0).bit_length()  # the next power of two, which decides alone: see `choice.py`
        ways = self.ways(rows)
        if len(ways) == 1 or rows > MOST_MEASURED_ROWS:
            return ways[0](taken, epilogue, x.dtype)
        packed = self.packed
        has = bias is not None, activation, residual is not None, packed.zero is not None, packed.levels is not None
        layout = packed.bits, packed.part, packed.group_parts, packed.input_parts
        key = ("quantised", *packed.codes.shape, *layout, taken[0].dtype, x.dtype, self._is_gated, rows, has)
        trials, asked = partial(self._trials, ways, rows, x, epilogue), partial(self._asked, ways, rows, has)
        return ways[self._products.chooser.choose(key, trials, asked)](taken, epilogue, x.dtype)

    def finest(self, x: Tensor, bias: Tensor | None) -> Tensor:
        """x [T, D] → x @ weightᵀ + bias in a way that depends on nothing but shapes; of a gated weight [gate | up].

        In float32; of so many rows that it would take as long to store, in x's dtype.
        """
        dtype = torch.float32 if len(x) <= MOST_MEASURED_ROWS else x.dtype
        return self._multiplied(self.inputs(x), Epilogue(bias), dtype)

    def ways(self, rows: int) -> Sequence[Way]:
        """What computes up to so many rows, a power of two: the usual way first."""
        packed = self.packed
        if rows > MOST_UNPACKED_ROWS and self._widens:
            return [self.by_widening]
        kernels: list[Way] = [partial(self.by_kernel, tiling=tiling) for tiling in self.tilings(rows)]
        if self.operator is None or rows < LEAST_ROWS:
            return kernels
        features = packed.codes.shape[1]
        is_good = self._products.shares.is_good(self.operator, features, packed.num_inputs, rows)
        return [self.by_torch, *kernels] if is_good else [*kernels, self.by_torch]

    def _asked(self, ways: Sequence[Way], rows: int, has: Sequence[object]) -> Alternatives:
        packed = self.packed
        shape, kind = (packed.codes.shape[1], packed.num_inputs), f"{packed.bits} bits"
        return Alternatives(named(shape, kind, rows, has[:3]), names_of(ways, f"torch.{self.operator}"), packed.nbytes)

    def tilings(self, rows: int) -> list[Tiling]:
        """Those of the kernel for so many rows, the usual one first."""
        is_gated = self._is_gated and rows <= MOST_GATED_ROWS
        has_levels = self.packed.levels is not None
        return list(packed_tilings(rows, self.packed.step, self._dtype, is_gated=is_gated, has_levels=has_levels))

    def by_kernel(
        self, taken: Taken, epilogue: Epilogue, dtype: torch.dtype, *, tiling: Tiling | None = None
    ) -> Tensor:
        if not (self._is_gated and len(taken[0]) > MOST_GATED_ROWS):
            return self._multiplied(taken, epilogue, dtype, tiling=tiling, is_gated=self._is_gated)
        return self._gated(self._multiplied(taken, Epilogue(epilogue.bias), dtype, tiling=tiling), epilogue)

    def _multiplied(
        self,
        taken: Taken,
        epilogue: Epilogue,
        dtype: torch.dtype,
        *,
        tiling: Tiling | None = None,
        is_gated: bool = False,
    ) -> Tensor:
        x, scale = taken
        return multiply_packed(
            x,
            self.packed,
            epilogue,
            self._products.workspace(x.device),
            is_gated=is_gated,
            dtype=dtype,
            input_scale=scale,
            tiling=tiling,
        )

    @property
    def _widens(self) -> bool:
        """Whether a product of many rows is one in 16 bits: float32, with which one compares, is summed in one way."""
        return not self.inputs.is_rounded and self._dtype != torch.float32

    def by_widening(self, taken: Taken, epilogue: Epilogue, dtype: torch.dtype) -> Tensor:
        """The product with the weight as numbers, for as long as it takes."""
        packed, (x, _) = self.packed, taken
        weight = widened(packed, x.dtype)
        if x.shape[1] != packed.places:
            weight = weight[:, packed.lead : packed.lead + packed.num_inputs]
        return self._gated(F.linear(x, weight, epilogue.bias).to(dtype), epilogue)

    def by_torch(self, taken: Taken, epilogue: Epilogue, dtype: torch.dtype) -> Tensor:
        """The product by torch's operator, where there is one."""
        codes, scale = taken
        assert scale is not None
        if codes.dtype == torch.int8:
            sums = torch._int_mm(codes, self._rows.t())
            packed, gated = self.packed, self._is_gated
            return finish_integers(sums, packed.scale, scale, packed.offset, epilogue, dtype, is_gated=gated)
        y = torch._scaled_mm(codes, self._rows.t(), scale, self._row_scale, epilogue.bias, out_dtype=dtype)
        return self._gated(y, epilogue)

    def _gated(self, y: Tensor, epilogue: Epilogue) -> Tensor:
        """What follows a product with its bias, in operators of their own."""
        y = activated(y, epilogue.activation, self._gate if self._is_gated else None)
        return y if epilogue.residual is None else y + epilogue.residual

    def _trials(self, ways: Sequence[Way], rows: int, x: Tensor, like: Epilogue) -> list[Callable[[], Tensor]]:
        """Each way with `rows` rows of noise, rounded beforehand: all ways take the same."""
        noise = torch.randn(rows, x.shape[1], device=x.device).to(x.dtype)
        residual = None if like.residual is None else noise.new_zeros(rows, like.residual.shape[1])
        epilogue, taken = Epilogue(like.bias, like.activation, residual), self.inputs.without_ranks(noise)
        return [partial(way, taken, epilogue, x.dtype) for way in ways]


def _operator_of(weight: QuantisedWeight, packed: PackedWeight, dtype: torch.dtype) -> str | None:
    """Which of torch's operators multiplies such codes; None: none does."""
    if weight.inputs is None or packed.group_parts or packed.input_parts or packed.codes.shape[1] % UNIT:
        return None
    if weight.inputs.dtype == torch.int8:
        return "int_mm"
    # bfloat16 is the only result of scales by row.
    return "scaled_mm" if dtype == torch.bfloat16 and _reads_within_rows() else None


def _reads_within_rows() -> bool:
    """Whether `torch._scaled_mm` with scales by row is built so that it reads no further than there are rows.

    Before CUDA 12.9 it did where these are no multiple of 256 (github.com/pytorch/pytorch/issues/133334).
    """
    built = torch.version.cuda
    return built is None or tuple(map(int, built.split(".")[:2])) >= (12, 9)


class CudaGroupedQuantised:
    """A `GroupedLinear` of weights that are stored alike: one launch for all experts, which asks the host nothing."""

    def __init__(
        self, weights: PackedWeight, inputs: Inputs, *, is_gated: bool = False, gate: Gate, products: Products
    ):
        self._weights = weights
        self._inputs = inputs
        self._is_gated = is_gated
        self._gate = gate
        self._products = products

    @property
    def nbytes(self) -> int:
        """Memory that all experts' weights take."""
        return self._weights.nbytes

    @property
    def memory(self) -> Sequence[Tensor]:
        return self._weights.memory

    def moved(self) -> None:
        """Nothing but the tensors knows where they are."""

    def __call__(
        self, x: Tensor, ends: Tensor, activation: Activation | None = None, bias: Tensor | None = None
    ) -> Tensor:
        """x [T, D] → activation(x @ weightᵀ + bias) [T, F]; expert e owns the rows ends[e - 1] … ends[e] - 1."""
        taken, scale = self._inputs(x, ends)
        is_gated = self._is_gated and activation is not None and len(x) <= MOST_GATED_ROWS * len(ends)
        y = multiply_packed(
            taken,
            self._weights,
            Epilogue(bias, None if self._is_gated and not is_gated else activation),
            self._products.workspace(x.device),
            is_gated=is_gated,
            dtype=x.dtype,
            input_scale=scale,
            ends=ends,
        )
        return y if is_gated == self._is_gated else activated(y, activation, self._gate)


def grouped(
    experts: Sequence[CudaQuantised], *, is_gated: bool, gate: Gate, products: Products
) -> GroupedLinear | None:
    """All experts in one launch; None where they are not stored alike, or their inputs have fixed scales."""
    weights = None if experts[0].inputs.is_fixed else stacked_weights([expert.packed for expert in experts])
    if weights is None:
        return None
    return CudaGroupedQuantised(
        weights, experts[0].inputs.of_all(weights), is_gated=is_gated, gate=gate, products=products
    )
