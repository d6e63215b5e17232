"""Scales of channels that move from a matrix's inputs into what makes them, so that the model computes the same.

Inputs that matter are made larger before the matrix is rounded, and what stands before it is divided by as much: a
norm, or the rows of a matrix whose outputs reach the inputs linearly (values through attention, and what a gate
multiplies). Where a norm's output is the residual stream too, or an activation stands between that is not linear,
nothing can move; nor where several heads share their values.

AWQ (Lin et al. 2023, arXiv 2306.00978) chooses scales that lessen the error. As in the paper, they are powers of the
inputs' mean magnitudes, of which the best is searched, here with and without the matrices' own magnitudes as a divisor.
What is measured is the square error of the outputs, tr(E H Eᵀ), as for GPTQ (`gptq.py`), so that no inputs need to be
kept.

SmoothQuant (Xiao et al. 2022, arXiv 2211.10438) chooses those that move a part of the inputs' range into the weights:
where inputs are rounded to 8 bits too, one channel that is much larger than the others takes the codes of all. As in
the paper, only norms are divided by them.

Shapes: F output features, D input features of the matrices.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from server.arch.spec import ArchSpec, Gated, LayerNormSpec, LayerSpec, Moe, Residual, RmsNormSpec
from server.checkpoint.weights import Weights, head_ranges
from server.quantize.calibration import Inputs
from server.quantize.edited_checkpoint import EditedCheckpoint, FinishedFormat
from server.quantize.grids import plain
from server.quantize.plan import MatrixSet
from server.quantize.recipe import Recipe

LEAST_SCALE = 1e-5
LEAST_AWQ_SCALE = 1e-4
POWERS = 20  # that AWQ tries, to 1

# Wiring -> norms whose output goes into matrices alone -> the places of these.
NORMS: Mapping[Residual, Mapping[str, tuple[str, ...]]] = {
    Residual.PRE: {"attention_norm": ("qkv",), "mlp_norm": ("up",)},
    Residual.SANDWICH: {"attention_norm": ("qkv",), "mlp_norm": ("up",)},
    Residual.PARALLEL_TWO_NORMS: {"attention_norm": ("qkv",), "mlp_norm": ("up",)},
    Residual.PARALLEL_ONE_NORM: {"attention_norm": ("qkv", "up")},
}
# What reads the same inputs beside the matrices of a place, where a layer has it.
READERS: Mapping[str, tuple[str, ...]] = {
    "qkv": ("attention_gate", "delta_b", "delta_a", "delta_ba"),
    "up": ("router", "shared_router", "shared_gate", "shared_up"),
}


@dataclass(frozen=True)
class Origin:
    """What makes the inputs of matrices, and can be divided by scales [D]."""

    places: tuple[str, ...]  # of the matrices
    vectors: tuple[str, ...] = ()  # tensors of which `rows` are divided
    offset: float = 0.0  # by which the stored vectors are smaller than what they stand for
    matrix: str | None = None  # a quantised layer of which `rows` are divided
    rows: Tensor | None = None  # [D] int64; None: all
    readers: tuple[str, ...] = ()  # dense matrices that read the same inputs, and are multiplied


def origin_of(weights: Weights, spec: ArchSpec, index: int, matrices: MatrixSet) -> Origin | None:
    """Where the inputs of a layer's matrices come from; None where nothing can be divided there."""
    of_layer, layer = weights.of_layer(index), spec.layers[index]
    match matrices.place:
        case "qkv" | "up":
            return _norm(of_layer, spec, matrices.place)
        case "q_b":
            return Origin(("q_b",), (f"{of_layer.name_of('q_a_norm')}.weight",))
        case "attention_out":
            return _values(of_layer, spec, layer)
        case "down":
            return _gated(of_layer, spec, index, matrices.expert)
    return None  # a gate or a norm of each head stands before a recurrence's last matrix


def _norm(weights: Weights, spec: ArchSpec, place: str) -> Origin | None:
    fed = NORMS.get(spec.residual, {})
    role = next((role for role, places in fed.items() if place == places[0]), None)
    if role is None:
        return None
    name = weights.name_of(role)
    has_bias = isinstance(spec.norm, LayerNormSpec) and spec.norm.bias
    readers = [reader for place in fed[role] for reader in READERS[place] if weights.holds(reader)]
    return Origin(
        fed[role],
        (f"{name}.weight", f"{name}.bias") if has_bias else (f"{name}.weight",),
        offset=1.0 if isinstance(spec.norm, RmsNormSpec) and spec.norm.unit_offset else 0.0,
        readers=tuple(f"{weights.name_of(reader)}.weight" for reader in readers),
    )


def _values(weights: Weights, spec: ArchSpec, layer: LayerSpec) -> Origin | None:
    heads = spec.kv_heads(layer)
    if spec.num_heads != heads.count or spec.qkv_clip or spec.v_norm or layer.keys_are_values or layer.latent:
        return None
    width = heads.count * heads.dim
    if weights.has("qkv"):
        layout = weights.names.qkv_layout
        ranges = head_ranges(layout, spec.num_heads, heads.count, heads.dim, range(0), range(heads.count))
        name = weights.name_of("qkv")
        rows = torch.cat([torch.arange(*bounds) for bounds in ranges])[width:]  # k, and then v
    else:
        name, rows = weights.name_of("v"), torch.arange(width)
    return Origin(("attention_out",), (f"{name}.bias",) if spec.qkv_bias else (), matrix=name, rows=rows)


def _gated(weights: Weights, spec: ArchSpec, index: int, expert: int) -> Origin | None:
    mlp = spec.layers[index].mlp
    if isinstance(mlp, Moe):
        if not mlp.gated:
            return None
        return Origin(("down",), matrix=weights.name_of("expert_up", expert), rows=torch.arange(mlp.width))
    if not isinstance(mlp, Gated):
        return None
    is_fused = weights.has("mlp_gate_up")
    name = weights.name_of("mlp_gate_up" if is_fused else "mlp_up")
    rows = torch.arange(mlp.width) + (mlp.width if is_fused else 0)
    return Origin(("down",), (f"{name}.bias",) if spec.mlp_bias else (), matrix=name, rows=rows)


def awq(matrices: Sequence[tuple[Tensor, Inputs]], recipe: Recipe, scale_dtype: torch.dtype) -> Tensor:
    """[D] what the inputs of all matrices [F, D] are divided by, and these multiplied; ones where nothing is better."""
    best = torch.ones(matrices[0][0].shape[1], device=matrices[0][0].device)
    least = _cost(matrices, best, recipe, scale_dtype)
    for scale in _candidates(matrices):
        cost = _cost(matrices, scale, recipe, scale_dtype)
        if cost < least:
            best, least = scale, cost
    return best


def _candidates(matrices: Sequence[tuple[Tensor, Inputs]]) -> Iterator[Tensor]:
    count = sum(inputs.count for _, inputs in matrices)
    sizes = torch.stack([inputs.magnitudes for _, inputs in matrices]).sum(0) / max(count, 1)
    widths = torch.stack([weight.abs().mean(0) for weight, _ in matrices]).mean(0)
    sizes, widths = sizes.clamp(min=LEAST_AWQ_SCALE), widths.clamp(min=LEAST_AWQ_SCALE)
    for step in range(1, POWERS + 1):
        power = step / POWERS
        for scale in (sizes**power, sizes**power / widths ** (1 - power)):
            yield (scale / (scale.amax() * scale.amin()).sqrt()).clamp(min=LEAST_AWQ_SCALE)


def _cost(matrices: Sequence[tuple[Tensor, Inputs]], scale: Tensor, recipe: Recipe, scale_dtype: torch.dtype) -> float:
    """The square error of all outputs, if inputs are divided by `scale`."""
    total = 0.0
    for weight, inputs in matrices:
        grid = plain(weight * scale, recipe, scale_dtype)
        error = grid.values(grid.codes(weight * scale)) / scale - weight
        total += float((error @ inputs.products).mul_(error).sum())
    return total


def smoothing(matrices: Sequence[tuple[Tensor, Inputs]], alpha: float) -> Tensor:
    """SmoothQuant's scales [D], which the inputs of all matrices [F, D] are divided by, and these multiplied.

    They are max|x|^alpha / max|w|^(1 - alpha), over all of these.
    """
    largest_input = torch.stack([inputs.largest for _, inputs in matrices]).amax(0)
    largest_weight = torch.stack([weight.abs().amax(0) for weight, _ in matrices]).amax(0)
    scale = largest_input.clamp(min=LEAST_SCALE) ** alpha / largest_weight.clamp(min=LEAST_SCALE) ** (1 - alpha)
    return scale.clamp(min=LEAST_SCALE)


def within(origin: Origin, scale: Tensor, checkpoint: EditedCheckpoint, finished: FinishedFormat) -> Tensor:
    """Scales [D], each as near to what it was as lets `divide` write what it changes: float16 holds 6e-5 to 65504.

    A number that became infinite would end the model, and one that became 0 its channel. Scales of 1 change nothing,
    so that there always is one.
    """
    least, most = torch.zeros_like(scale), torch.full_like(scale, math.inf)
    for name in origin.vectors:
        stored = checkpoint.whole(name)
        exact = stored.float() + origin.offset
        rows = torch.arange(len(exact)) if origin.rows is None else origin.rows
        low, high = _room(exact[rows][:, None].to(scale.device), stored.dtype)
        least, most = least.maximum(low), most.minimum(high)
    for name in origin.readers:
        stored = checkpoint.whole(name)
        low, high = _room(stored.float().t().to(scale.device), stored.dtype)
        least, most = least.maximum(1 / high), most.minimum(1 / low)  # these are multiplied
    if origin.matrix is not None and origin.rows is not None:
        numbers = finished.weights[origin.matrix].scale
        low, high = _room(numbers[origin.rows.to(numbers.device)].to(scale.device), finished.scale_dtype)
        least, most = least.maximum(low), most.minimum(high)
    return scale.clamp(least, most)


def _room(numbers: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """By what each row of numbers [D, n] is divided at least and at most to fit in a dtype; [D] both.

    A number that is smaller than the least normal one before is too small to matter.
    """
    limits = torch.finfo(dtype)
    sizes = numbers.abs()
    counted = torch.where(sizes >= limits.smallest_normal, sizes, math.inf)
    return (sizes.amax(1) / limits.max).clamp(max=1.0), (counted.amin(1) / limits.smallest_normal).clamp(min=1.0)


def divide(origin: Origin, scale: Tensor, checkpoint: EditedCheckpoint, finished: FinishedFormat) -> None:
    """Divide what makes the inputs by scales [D], and multiply the dense matrices that read them."""
    for name in origin.vectors:
        # Only the weight of a norm is stored as a distance from 1; a norm that is has no bias.
        stored = checkpoint.whole(name)
        exact = stored.float() + origin.offset
        rows = torch.arange(len(exact)) if origin.rows is None else origin.rows
        exact[rows] /= scale.to(exact.device)
        checkpoint.changed[name] = (exact - origin.offset).to(stored.dtype)
    for name in origin.readers:
        stored = checkpoint.whole(name)
        checkpoint.changed[name] = (stored.float() * scale.to(stored.device)).to(stored.dtype)
    if origin.matrix is not None and origin.rows is not None:
        weight = finished.weights[origin.matrix]
        divided, dtype = weight.scale.clone(), finished.scale_dtype
        divided[origin.rows.to(divided.device)] /= scale[:, None]
        finished.weights[origin.matrix] = replace(weight, scale=divided.to(dtype).float())
