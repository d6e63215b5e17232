# mypy: disable-error-code="import-untyped, import-not-found, no-untyped-def, untyped-decorator"
"""What stands around products with quantised weights: inputs are rounded or put in order, integer sums are finished.

Rounding is that of `server/quantisation/rounding.py` to the last bit: a token's largest magnitude (of all its inputs,
or of each group) divided by the largest code is the scale, and what is divided by it goes to the nearest code, ties to
even. Divisions are rounded as IEEE 754 wants; Triton's own are not. One launch reads the inputs, finds the scale and
writes the codes in the places of the weight. Where inputs are divided among ranks, the largest magnitudes are a launch
of their own, since all ranks must agree on them before anything is rounded.

`finish_integers` follows a product of int8 by torch's operator, which leaves int32; our own kernel (`packed.py`) does
the same in its epilogue.

Shapes: T rows, D input features, F output features, G groups of inputs, E experts.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from server.backends.cuda.fused import activation_constants
from server.backends.cuda.kernels.linear import Epilogue
from server.quantisation.rounding import MOST, TINY
from server.quantisation.stored import RoundedInputs

TILE = 2048  # places that a program of a whole row looks at together
GATHERED_TILE = 1024


def largest_magnitudes(x: Tensor, size: int, lead: int, first_group: int, groups: int, local_groups: int) -> Tensor:
    """[T, groups] float32, 0 where this rank has none: its own begin at first_group.

    x: [T, D]; size: places of a group; lead: places before the first input; local_groups: how many this rank has.
    """
    found = x.new_zeros(len(x), groups, dtype=torch.float32)
    if len(x):
        _largest[(len(x), local_groups)](
            x, found, x.stride(0), x.shape[1], lead, size, groups, first_group, TILE=_tile(size), num_warps=_warps(size)
        )
    return found


def round_inputs(
    x: Tensor, inputs: RoundedInputs, places: int, size: int, lead: int, largest: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """x [T, D] → codes [T, places], 0 beside the inputs, and their scales [T, groups] float32.

    size: places of a group; largest: [T, groups] of all ranks, contiguous; None: found here.
    """
    groups = triton.cdiv(places, size)
    codes = torch.empty(len(x), places, dtype=inputs.dtype, device=x.device)
    scale = torch.empty(len(x), groups, dtype=torch.float32, device=x.device)
    if len(x):
        _round[(len(x), groups)](
            x,
            largest,
            inputs.scale,
            inputs.zero,
            inputs.most,
            codes,
            scale,
            x.stride(0),
            x.shape[1],
            places,
            lead,
            size,
            groups,
            0 if largest is None else largest.stride(0),
            MOST=MOST[inputs.dtype],
            TINY=TINY,
            TILE=_tile(size),
            num_warps=_warps(size),
            enable_fp_fusion=False,
        )
    return codes, scale


def gather_inputs(x: Tensor, order: Tensor, ends: Tensor | None = None) -> Tensor:
    """x [T, D] → [T, places]: at each place the input that `order` names, 0 where it names none (-1).

    order: [places] int32, or [E, places] with ends [E], as those of `GroupedLinear`.
    """
    places = order.shape[-1]
    out = x.new_empty(len(x), places)
    if len(x):
        experts = 0 if ends is None else len(ends)
        grid = (len(x), triton.cdiv(places, GATHERED_TILE))
        _gather[grid](
            x,
            order,
            ends,
            out,
            x.stride(0),
            places,
            EXPERTS=experts,
            EXPERTS_PAD=triton.next_power_of_2(max(experts, 1)),
            TILE=GATHERED_TILE,
        )
    return out


def finish_integers(
    sums: Tensor,
    scale: Tensor,
    input_scale: Tensor,
    offset: Tensor | None,
    epilogue: Epilogue,
    dtype: torch.dtype,
    *,
    is_gated: bool,
) -> Tensor:
    """sums [T, F] int32 ([T, 2 F] where gated) → (sums - offset) * input_scale * scale and the epilogue, in `dtype`.

    scale: [F]; input_scale: [T, 1] float32; offset: [F] int32.
    """
    features = sums.shape[1] // (2 if is_gated else 1)
    out = torch.empty(len(sums), features, dtype=dtype, device=sums.device)
    _finish_integers[(len(sums), triton.cdiv(features, GATHERED_TILE))](
        sums,
        scale,
        input_scale,
        offset,
        epilogue.bias,
        epilogue.residual,
        out,
        features,
        IS_GATED=is_gated,
        **activation_constants(epilogue.activation),
        TILE=GATHERED_TILE,
        enable_fp_fusion=False,
    )
    return out


def _tile(size: int) -> int:
    return min(triton.next_power_of_2(size), TILE)


def _warps(size: int) -> int:
    return 1 if size <= 256 else 8


@triton.jit
def _largest_of(x, inputs, lead, first, size, TILE: tl.constexpr):
    """The largest magnitude of a row's inputs at the places first … first + size - 1."""
    most = tl.zeros((TILE,), tl.float32)
    for start in range(0, size, TILE):
        within = start + tl.arange(0, TILE)
        across = first + within - lead
        given = (within < size) & (across >= 0) & (across < inputs)
        most = tl.maximum(most, tl.abs(tl.load(x + across, mask=given, other=0.0).to(tl.float32)))
    return tl.max(most, 0)


@triton.jit
def _largest(x, found, x_stride, inputs, lead, size, groups, first_group, TILE: tl.constexpr):
    """One group of one row."""
    row, group = tl.program_id(0).to(tl.int64), tl.program_id(1)
    largest = _largest_of(x + row * x_stride, inputs, lead, group * size, size, TILE)
    tl.store(found + row * groups + first_group + group, largest)


@triton.jit
def _round(
    x,
    largest,
    fixed_scale,
    fixed_zero,
    most_scale,
    codes,
    scale,
    x_stride,
    inputs,
    places,
    lead,
    size,
    groups,
    largest_stride,
    MOST: tl.constexpr,
    TINY: tl.constexpr,
    TILE: tl.constexpr,
):
    """One group of one row."""
    row, group = tl.program_id(0).to(tl.int64), tl.program_id(1)
    x += row * x_stride
    codes += row * places
    first = group * size
    if fixed_scale is not None:
        step = tl.load(fixed_scale)
    else:
        if largest is not None:
            magnitude = tl.load(largest + row * largest_stride + group)
        else:
            magnitude = _largest_of(x, inputs, lead, first, size, TILE)
        step = tl.div_rn(tl.maximum(magnitude, TINY), tl.full((), MOST, tl.float32))
        if most_scale is not None:
            step = tl.minimum(step, tl.load(most_scale))
    tl.store(scale + row * groups + group, step)
    inverse = tl.div_rn(tl.full((), 1.0, tl.float32), step)  # as in the reference: a division rounds otherwise
    for start in range(0, size, TILE):
        within = start + tl.arange(0, TILE)
        place = first + within
        across = place - lead
        given = (across >= 0) & (across < inputs)
        exact = tl.load(x + across, mask=given & (within < size), other=0.0).to(tl.float32)
        value = exact * inverse
        if fixed_zero is not None:
            value += tl.load(fixed_zero)
        if codes.dtype.element_ty == tl.int8:
            # 1.5 times 2^23, beside which a float has no places behind the point.
            value = tl.minimum(tl.maximum(value, -MOST - 1), MOST)
            value = (value + 12582912.0) - 12582912.0
        else:
            value = tl.minimum(tl.maximum(value, -MOST), MOST)
        value = tl.where(given, value, 0.0)
        if codes.dtype.element_ty == tl.int8:
            rounded = value.to(tl.int8)
        else:
            rounded = value.to(codes.dtype.element_ty, fp_downcast_rounding="rtne")
        tl.store(codes + place, rounded, mask=(within < size) & (place < places))


@triton.jit
def _gather(
    x, order, ends, out, x_stride, places, EXPERTS: tl.constexpr, EXPERTS_PAD: tl.constexpr, TILE: tl.constexpr
):
    """One tile of places of one row."""
    row, place = tl.program_id(0).to(tl.int64), tl.program_id(1) * TILE + tl.arange(0, TILE)
    if EXPERTS > 0:
        experts = tl.arange(0, EXPERTS_PAD)
        before = (tl.load(ends + experts, mask=experts < EXPERTS, other=0) <= row) & (experts < EXPERTS)
        expert = tl.minimum(tl.sum(before.to(tl.int32), 0), EXPERTS - 1)
        order += expert.to(tl.int64) * places
    real = place < places
    source = tl.load(order + place, mask=real, other=-1)
    value = tl.load(x + row * x_stride + source, mask=source >= 0, other=0.0)
    tl.store(out + row * places + place, value, mask=real)


@triton.jit
def _finish_integers(
    sums,
    scale,
    input_scale,
    offset,
    bias,
    residual,
    out,
    features,
    IS_GATED: tl.constexpr,
    ACTIVATION: tl.constexpr,
    UP: tl.constexpr,
    TILE: tl.constexpr,
):
    """One tile of one row: what follows the sums of a product of integers."""
    row, feature = tl.program_id(0).to(tl.int64), tl.program_id(1) * TILE + tl.arange(0, TILE)
    halves: tl.constexpr = 2 if IS_GATED else 1
    of_row = tl.load(input_scale + row)
    sums += row * features * halves
    real = feature < features
    y = _finished(sums, scale, offset, bias, of_row, feature, real)
    if ACTIVATION is not None:
        y = ACTIVATION(y)
    if IS_GATED:
        y *= UP(_finished(sums, scale, offset, bias, of_row, feature + features, real))
    place = row * features + feature
    if residual is not None:
        y += tl.load(residual + place, mask=real, other=0.0).to(tl.float32)
    tl.store(out + place, y.to(out.dtype.element_ty), mask=real)


@triton.jit
def _finished(sums, scale, offset, bias, of_row, feature, real):
    total = tl.load(sums + feature, mask=real, other=0)
    if offset is not None:
        total -= tl.load(offset + feature, mask=real, other=0)
    y = total.to(tl.float32) * of_row * tl.load(scale + feature, mask=real, other=0.0).to(tl.float32)
    if bias is not None:
        y += tl.load(bias + feature, mask=real, other=0.0).to(tl.float32)
    return y
