# mypy: disable-error-code="import-untyped, import-not-found, no-untyped-def, untyped-decorator"
"""Matrix products with weights in few bits: codes are unpacked in registers, and the weight is read as it is stored.

A step of a program reads a run of bytes of each of its features, all of which lie behind each other in memory, and
multiplies as many parts of the inputs as a byte has codes. Codes less their zero point are small integers, exact in
every dtype that the matrix units take; the scale of their group is applied to the sum of their products, not to each
(Marlin, Frantar et al. 2024, arXiv 2408.11743, scales weights instead). Where the inputs are in 8 bits too, the sums of
int8 are exact, those of float8 in float32, and both scales are applied in the order of the reference
(`server/backends/reference/quantised.py`).

Few rows are computed as in `linear.py`, whose split sums, experts and epilogue these are; many in larger tiles, each of
which unpacks its part of the weight for itself. For thousands that would be done dozens of times over: there `widened`
writes the weight as numbers, for a product of 16 bits. How codes lie in memory is `server/backends/cuda/packing.py`'s
business.

Shapes: T rows, D input features, F output features, E experts, S steps, G groups of inputs.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from server.backends.cuda.fused import activation_constants
from server.backends.cuda.kernels.linear import (
    Epilogue,
    Tiling,
    Workspace,
    biased,
    choose_splits,
    expert_rows,
    merged,
    rows_at_once,
)
from server.backends.cuda.packing import PackedWeight

MAX_TILE_ROWS, MAX_GATED_ROWS = 128, 64
WIDE_STEP = 128  # inputs; more are wide
WIDENED_FEATURES = 32  # that a program writes, of one step
MOST_FEW_ROWS: tl.constexpr = tl.constexpr(16)


def packed_tilings(
    rows: int, step: int, dtype: torch.dtype, *, is_gated: bool, has_levels: bool = False
) -> tuple[Tiling, ...]:
    """What there is to choose from for products of up to `rows` rows; the first one where nothing was measured.

    step: inputs of a step of the weight; dtype: in which the matrix units multiply; has_levels: whether codes are
    looked up, which takes registers.
    """
    padded = min(max(triton.next_power_of_2(rows), 8), MAX_GATED_ROWS if is_gated else MAX_TILE_ROWS)
    if dtype == torch.float32:
        return (Tiling(min(padded, 32), 32, step, 2, 4, 2),)
    if padded == 8 and not (is_gated or has_levels):
        # So wide that what is done once for all features, such as loads of rows, is little beside unpacking.
        return Tiling(8, 128, step, 4, 4, 3), Tiling(8, 64, step, 5, 4, 3), Tiling(8, 32, step, 5, 4, 4)
    if padded <= 16:
        return Tiling(padded, 64, step, 5, 4, 3), Tiling(padded, 32, step, 5, 4, 4)
    # Inputs of a step of 2 bits are twice as many: more stages than that would not fit into 99 KiB of shared memory.
    fewer = step > WIDE_STEP
    if padded <= 64:
        return Tiling(padded, 64, step, 4 - fewer, 4, 2), Tiling(padded, 32, step, 4 - fewer, 4, 2)
    return (Tiling(padded, 64, step, 3 - fewer, 4, 2),)


def multiply_packed(
    x: Tensor,
    packed: PackedWeight,
    epilogue: Epilogue,
    workspace: Workspace,
    *,
    is_gated: bool,
    dtype: torch.dtype | None = None,
    input_scale: Tensor | None = None,
    ends: Tensor | None = None,
    tiling: Tiling | None = None,
) -> Tensor:
    """x [T, D] → x @ weightᵀ and its epilogue, [T, F] in `dtype`, x's unless given.

    x: as it is, or laid out in the weight's places, [T, places]; or its codes in int8 or float8, laid out so, with
    their input_scale [T, groups of inputs] float32. With ends [E], as those of `GroupedLinear`, the weight is that of
    all experts, and so is its bias, and there is no residual.
    """
    rows, _ = x.shape
    outputs = packed.codes.shape[-2]
    features = outputs // 2 if is_gated else outputs
    steps = packed.codes.shape[-3]
    assert x.stride(1) == 1 and (epilogue.residual is None or epilogue.residual.is_contiguous())
    out = x.new_empty(rows, features, dtype=dtype or x.dtype)
    if rows == 0:
        return out
    experts = 0 if ends is None else len(ends)
    tiling = tiling or _usual(packed, rows_at_once(rows, experts), x.dtype, is_gated=is_gated)
    row_tiles = triton.cdiv(rows, tiling.rows) if ends is None else min(experts, rows) + rows // tiling.rows
    tiles = triton.cdiv(features, tiling.features)
    splits = choose_splits(row_tiles * tiles, steps, tiling.resident * workspace.processors)
    assert splits == 1 or row_tiles * tiles * splits * tiling.parts(is_gated=is_gated) <= workspace.parts.numel()
    _multiply_packed[(row_tiles, tiles * splits)](
        x,
        packed.codes,
        packed.scale,
        packed.zero,
        packed.levels,
        packed.offset,
        input_scale,
        epilogue.bias,
        epilogue.residual,
        out,
        ends,
        workspace.parts,
        workspace.counters,
        rows,
        x.stride(0),
        features,
        packed.num_inputs,
        packed.lead,
        steps,
        packed.codes.stride(0) if experts else 0,
        packed.codes.stride(-3),
        packed.codes.stride(-2),
        packed.scale.shape[-2] * outputs,
        0 if input_scale is None else input_scale.shape[1],
        ROWS=tiling.rows,
        FEATURES=tiling.features,
        PIECE=packed.codes.shape[-1],
        PART=packed.part,
        PARTS=packed.parts,
        SUM_PARTS=packed.sum_parts,
        BITS=packed.bits,
        GROUP_PARTS=packed.group_parts,
        INPUT_PARTS=packed.input_parts,
        SPLITS=splits,
        IS_WHOLE=x.shape[1] == packed.places,
        EXPERTS=experts,
        EXPERTS_PAD=triton.next_power_of_2(max(experts, 1)),
        IS_GATED=is_gated,
        ZERO=packed.fixed_zero,
        **activation_constants(epilogue.activation),
        num_warps=tiling.warps,
        num_stages=tiling.stages,
        enable_fp_fusion=input_scale is None,  # the reference rounds each product and each sum
    )
    return out


def widened(packed: PackedWeight, dtype: torch.dtype) -> Tensor:
    """The weight [F, places] as numbers of `dtype`, for inputs that are laid out in its places and not rounded."""
    steps, outputs, piece = packed.codes.shape
    out = torch.empty(outputs, packed.places, dtype=dtype, device=packed.codes.device)
    _widen[(steps, triton.cdiv(outputs, WIDENED_FEATURES))](
        packed.codes,
        packed.scale,
        packed.zero,
        packed.levels,
        out,
        outputs,
        packed.codes.stride(0),
        packed.codes.stride(1),
        packed.places,
        FEATURES=WIDENED_FEATURES,
        PIECE=piece,
        PART=packed.part,
        PARTS=packed.parts,
        BITS=packed.bits,
        GROUP_PARTS=packed.group_parts,
        ZERO=packed.fixed_zero,
    )
    return out


def _usual(packed: PackedWeight, rows: int, dtype: torch.dtype, *, is_gated: bool) -> Tiling:
    has_levels = packed.levels is not None
    return packed_tilings(rows, packed.step, dtype, is_gated=is_gated, has_levels=has_levels)[0]


@triton.jit(do_not_specialize=["rows"])
def _multiply_packed(
    x,
    codes,
    scale,
    zero,
    levels,
    offset,
    input_scale,
    bias,
    residual,
    out,
    ends,
    parts,
    counters,
    rows,
    x_stride,
    features,
    inputs,
    lead,
    steps,
    expert_stride,
    step_stride,
    feature_stride,
    expert_scales,
    input_groups,
    ROWS: tl.constexpr,
    FEATURES: tl.constexpr,
    PIECE: tl.constexpr,
    PART: tl.constexpr,
    PARTS: tl.constexpr,
    SUM_PARTS: tl.constexpr,
    BITS: tl.constexpr,
    GROUP_PARTS: tl.constexpr,
    INPUT_PARTS: tl.constexpr,
    SPLITS: tl.constexpr,
    IS_WHOLE: tl.constexpr,
    EXPERTS: tl.constexpr,
    EXPERTS_PAD: tl.constexpr,
    IS_GATED: tl.constexpr,
    ZERO: tl.constexpr,
    ACTIVATION: tl.constexpr,
    UP: tl.constexpr,
):
    """One tile of features of one tile of rows, or one split's part of it."""
    row_tile, tile, split = tl.program_id(0), tl.program_id(1) // SPLITS, tl.program_id(1) % SPLITS
    first, stop = row_tile * ROWS, rows
    halves: tl.constexpr = 2 if IS_GATED else 1
    if EXPERTS > 0:
        first, stop, expert = expert_rows(ends, row_tile, rows, ROWS, EXPERTS, EXPERTS_PAD)
        if first >= stop:
            return
        codes += expert.to(tl.int64) * expert_stride
        scale += expert.to(tl.int64) * expert_scales
        if zero is not None:
            zero += expert.to(tl.int64) * expert_scales
        if bias is not None:
            bias += expert * features * halves
    row = first + tl.arange(0, ROWS)
    feature = tile * FEATURES + tl.arange(0, FEATURES)
    kept = row < stop
    real = feature < features
    outputs = features * halves
    # Offsets within a tile fit into 32 bits, those of tiles may not.
    x += first.to(tl.int64) * x_stride
    codes += tile.to(tl.int64) * FEATURES * feature_stride
    near = tl.arange(0, FEATURES)[:, None] * feature_stride + tl.arange(0, PIECE)[None, :]
    up_codes = codes + tl.cast(features, tl.int64) * feature_stride
    near_row = tl.arange(0, ROWS)[None, :] * x_stride

    # Scales of one group, and of inputs that share one too, are applied to the whole sum.
    IS_ONE: tl.constexpr = GROUP_PARTS == 0 and INPUT_PARTS == 0
    # Zero points of few rows are taken from the sum, as often as the sum of the inputs: the matrix units make it. They
    # are cheaper to take from the codes of many.
    HAS_SUMS: tl.constexpr = zero is not None and (ROWS <= MOST_FEW_ROWS or zero.dtype.element_ty == tl.float32)
    HAS_ZERO: tl.constexpr = zero is not None and not HAS_SUMS
    IS_AHEAD: tl.constexpr = GROUP_PARTS > 0 and SUM_PARTS == PARTS and ROWS <= MOST_FEW_ROWS
    total_type: tl.constexpr = tl.int32 if x.dtype.element_ty == tl.int8 else tl.float32
    y = tl.zeros((FEATURES, ROWS), total_type if IS_ONE else tl.float32)
    up = tl.zeros((FEATURES, ROWS), total_type if IS_ONE else tl.float32)
    per_split = tl.cdiv(steps, SPLITS)
    last = tl.minimum((split + 1) * per_split, steps)
    where, present = feature, real
    if GROUP_PARTS > 0:
        where += split * per_split * PARTS // GROUP_PARTS * outputs
        present &= split * per_split < steps  # the last split may be left without a step
    # Too few bytes to be loaded ahead by the pipeline: each step loads those of the next.
    next_scale, next_zero = _of_features(scale, zero, where, present)
    next_up_scale, next_up_zero = next_scale, next_zero
    if IS_GATED:
        next_up_scale, next_up_zero = _of_features(scale, zero, where + features, present)
    for step in range(split * per_split, last):
        place = tl.cast(step, tl.int64) * step_stride
        raw = tl.load(codes + place + near, mask=real[:, None], other=0.0)
        if IS_GATED:
            up_raw = tl.load(up_codes + place + near, mask=real[:, None], other=0.0)
        for sum_of in tl.static_range(PARTS // SUM_PARTS):
            first_part = step * PARTS + sum_of * SUM_PARTS
            if IS_AHEAD:
                of_scale, of_zero = next_scale, next_zero
                up_scale, up_zero = next_up_scale, next_up_zero
                where = (first_part + PARTS) // GROUP_PARTS * outputs + feature
                has_next = real & (step + 1 < last)
                next_scale, next_zero = _of_features(scale, zero, where, has_next)
                if IS_GATED:
                    next_up_scale, next_up_zero = _of_features(scale, zero, where + features, has_next)
            elif GROUP_PARTS > 0:
                where = first_part // GROUP_PARTS * outputs + feature
                of_scale, of_zero = _of_features(scale, zero, where, real)
                up_scale, up_zero = of_scale, of_zero
                if IS_GATED:
                    up_scale, up_zero = _of_features(scale, zero, where + features, real)
            else:
                of_scale, of_zero = next_scale, next_zero
                up_scale, up_zero = next_up_scale, next_up_zero
            if IS_ONE:
                sums, up_sums = y, up
            else:
                sums = tl.zeros((FEATURES, ROWS), total_type)
                up_sums = tl.zeros((FEATURES, ROWS), total_type)
            of_inputs = tl.zeros((FEATURES, ROWS), tl.float32)
            for within in tl.static_range(SUM_PARTS):
                across = (first_part + within) * PART + tl.arange(0, PART)[:, None]
                given = kept[None, :]
                if not IS_WHOLE:
                    across -= lead
                    given = given & (across >= 0) & (across < inputs)
                columns = tl.load(x + near_row + across, mask=given, other=0.0)
                part = sum_of * SUM_PARTS + within
                left = numbers(raw, of_zero, levels, part, BITS, PART // 2, HAS_ZERO, ZERO, columns.dtype)
                sums = plus_product(left, columns, sums, PART)
                if HAS_SUMS:
                    units = ones(FEATURES, PART // 2, BITS, columns.dtype)
                    of_inputs = tl.dot(units, columns, of_inputs, input_precision="ieee")
                if IS_GATED:
                    left = numbers(up_raw, up_zero, levels, part, BITS, PART // 2, HAS_ZERO, ZERO, columns.dtype)
                    up_sums = plus_product(left, columns, up_sums, PART)
            if IS_ONE:
                y, up = sums, up_sums
            else:
                of_rows = _of_rows(input_scale, row, kept, input_groups, first_part, INPUT_PARTS)
                if HAS_SUMS:
                    sums -= of_inputs * of_zero[:, None].to(tl.float32)
                    up_sums -= of_inputs * up_zero[:, None].to(tl.float32)
                y += _scaled(sums.to(tl.float32), of_rows, of_scale)
                if IS_GATED:
                    up += _scaled(up_sums.to(tl.float32), of_rows, up_scale)

    if SPLITS > 1:
        place = tile * tl.num_programs(0) + row_tile
        size: tl.constexpr = FEATURES * ROWS * halves
        within = tl.arange(0, ROWS)[None, :] * FEATURES + tl.arange(0, FEATURES)[:, None]
        parts += place.to(tl.int64) * (SPLITS * size) + within
        tl.store(parts + split * size, y.to(tl.float32, bitcast=True), mask=kept[None, :], cache_modifier=".cg")
        if IS_GATED:
            beside = parts + split * size + FEATURES * ROWS
            tl.store(beside, up.to(tl.float32, bitcast=True), mask=kept[None, :], cache_modifier=".cg")
        tl.debug_barrier()  # all of this program's parts are stored before it counts itself
        if tl.atomic_add(counters + place, 1, sem="acq_rel") < SPLITS - 1:
            return
        tl.debug_barrier()
        tl.store(counters + place, 0)
        y = merged(parts, kept[None, :], size, SPLITS, y)
        if IS_GATED:
            up = merged(parts + FEATURES * ROWS, kept[None, :], size, SPLITS, up)

    if IS_ONE:
        of_rows = _of_rows(input_scale, row, kept, input_groups, 0, 0)
        y = _scaled(_less(y, offset, feature, real), of_rows, next_scale)
        if IS_GATED:
            up = _scaled(_less(up, offset, feature + features, real), of_rows, next_up_scale)
    y = biased(y, bias, feature[:, None], real[:, None])
    if ACTIVATION is not None:
        y = ACTIVATION(y)
    if IS_GATED:
        y *= UP(biased(up, bias, feature[:, None] + features, real[:, None]))
    place = row[None, :].to(tl.int64) * features + feature[:, None]
    wanted = kept[None, :] & real[:, None]
    if residual is not None:
        y += tl.load(residual + place, mask=wanted, other=0.0).to(tl.float32)
    tl.store(out + place, y.to(out.dtype.element_ty), mask=wanted)


@triton.jit
def _widen(
    codes,
    scale,
    zero,
    levels,
    out,
    outputs,
    step_stride,
    feature_stride,
    places,
    FEATURES: tl.constexpr,
    PIECE: tl.constexpr,
    PART: tl.constexpr,
    PARTS: tl.constexpr,
    BITS: tl.constexpr,
    GROUP_PARTS: tl.constexpr,
    ZERO: tl.constexpr,
):
    """Some features of one step."""
    step = tl.program_id(0)
    feature = tl.program_id(1) * FEATURES + tl.arange(0, FEATURES)
    real = feature < outputs
    row = feature[:, None].to(tl.int64)
    place = tl.cast(step, tl.int64) * step_stride + row * feature_stride + tl.arange(0, PIECE)[None, :]
    raw = tl.load(codes + place, mask=real[:, None], other=0)
    for part in tl.static_range(PARTS):
        at = step * PARTS + part
        where = feature
        if GROUP_PARTS > 0:
            where += at // GROUP_PARTS * outputs
        scales, zeros = _of_features(scale, zero, where, real)
        value = numbers(raw, zeros, levels, part, BITS, PART // 2, False, ZERO, out.dtype.element_ty).to(tl.float32)
        if zero is not None:
            value -= zeros.to(tl.float32)[:, None]
        target = out + row * places + at * PART + tl.arange(0, PART)[None, :]
        tl.store(target, (value * scales[:, None]).to(out.dtype.element_ty), mask=real[:, None])


@triton.jit
def _of_features(scale, zero, where, real):
    """[FEATURES]: the scale of each feature in one group in float32, and its zero point, or the scale again."""
    scales = tl.load(scale + where, mask=real, other=0.0).to(tl.float32)
    zeros = scales
    if zero is not None:
        zeros = tl.load(zero + where, mask=real, other=0)
    return scales, zeros


@triton.jit
def _of_rows(input_scale, row, kept, input_groups, part, INPUT_PARTS: tl.constexpr):
    """[1, ROWS]: the scale of each row's inputs in this part; None where they have none."""
    scales = None
    if input_scale is not None:
        group = 0
        if INPUT_PARTS > 0:
            group = part // INPUT_PARTS
        scales = tl.load(input_scale + row * input_groups + group, mask=kept, other=0.0)[None, :]
    return scales


@triton.jit
def _scaled(y, of_rows, of_features):
    """Sums of products in float32 times the scales, that of the inputs first."""
    if of_rows is not None:
        y = y * of_rows
    return y * of_features[:, None]


@triton.jit
def _less(total, offset, feature, real):
    """Sums of integers less what the inputs' zero point adds to them, in float32."""
    if offset is not None:
        total -= tl.load(offset + feature, mask=real, other=0)[:, None]
    return total.to(tl.float32)


@triton.jit
def numbers(
    raw,
    zeros,
    levels,
    NUMBER: tl.constexpr,
    BITS: tl.constexpr,
    WORDS: tl.constexpr,
    HAS_ZERO: tl.constexpr,
    ZERO: tl.constexpr,
    dtype: tl.constexpr,
):
    """[FEATURES, PART]: what the codes of a part stand for but for their scale, as the matrix units take it.

    A word has two codes of each part, 16 bits apart. Put behind the bits of a number of which they are the last places
    (128 in bfloat16, 1024 in float16), they are that number plus the code, which costs no conversion.
    """
    HAS_BASE: tl.constexpr = BITS < 8 and dtype.primitive_bitwidth == 16 and levels is None
    BASE: tl.constexpr = (128 if dtype == tl.bfloat16 else 1024) if HAS_BASE else 0
    codes = raw
    if BITS < 8:
        pairs = (raw >> (NUMBER * BITS)) & (((1 << BITS) - 1) * 0x10001)
        if HAS_BASE:
            pairs = pairs | (0x43004300 if dtype == tl.bfloat16 else 0x64006400)
        codes = tl.join(pairs.to(tl.int16), (pairs >> 16).to(tl.int16)).reshape(raw.shape[0], 2 * WORDS)
    if HAS_BASE:
        value = codes.to(dtype, bitcast=True)
    elif levels is not None:
        # Not loaded by their codes: then the pipeline would load nothing ahead.
        table = tl.load(levels + tl.arange(0, 1 << BITS))[None, :]
        value = tl.gather(tl.broadcast_to(table, (raw.shape[0], 1 << BITS)), codes.to(tl.int32), axis=1)
    else:
        value = codes.to(dtype)
    if HAS_ZERO:
        value -= (zeros.to(tl.float32) + BASE).to(dtype)[:, None]
    elif ZERO + BASE != 0:
        value -= ZERO + BASE
    return value


@triton.jit
def ones(FEATURES: tl.constexpr, WORDS: tl.constexpr, BITS: tl.constexpr, dtype: tl.constexpr):
    """[FEATURES, PART], made of words as codes are: otherwise both products want the inputs in different layouts."""
    if BITS < 8 and dtype.primitive_bitwidth == 16:
        pairs = tl.full((FEATURES, WORDS), 0x3F803F80 if dtype == tl.bfloat16 else 0x3C003C00, tl.int32)
        both = tl.join(pairs.to(tl.int16), (pairs >> 16).to(tl.int16)).reshape(FEATURES, 2 * WORDS)
        return both.to(dtype, bitcast=True)
    else:
        return tl.full((FEATURES, 2 * WORDS), 1.0, dtype)


@triton.jit
def plus_product(left, columns, sums, IMPRECISE: tl.constexpr):
    """sums + left @ columns: of integers exactly, of float8 with at most IMPRECISE sums in the matrix units' own."""
    if left.dtype == tl.float8e4nv:
        return tl.dot(left, columns, sums, max_num_imprecise_acc=IMPRECISE)
    else:
        return tl.dot(left, columns, sums, input_precision="ieee", out_dtype=sums.dtype)
