"""Recurrent layers, in attention's place or beside it: projections around a recurrence, and a rank's part of them.

A sequence's state is a row of the layer's cache [rows, W] float32, W being `Recurrence.state_size`. Of a gated delta
rule, heads are divided over the ranks by those of keys, each with the heads of values that share it; of a short
convolution, channels; of Mamba-2, heads, each with the keys and queries of its group.

Shapes: T tokens in the step, D model width, C local channels, N local heads, K heads of keys of all ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from server.arch.recurrences import GatedDelta, GateNorm, Mamba2, Recurrence, ShortConv
from server.arch.spec import ArchSpec
from server.backends.protocol import (
    Backend,
    ConvRule,
    DeltaRule,
    DeltaWeights,
    LinearFormat,
    MambaRule,
    MambaWeights,
    ShortConvWeights,
    StepMeta,
)
from server.checkpoint.formats.protocol import Ranges
from server.checkpoint.weights import Weights, merged
from server.layers.linear import ColumnLinear, Matrix, RowLinear, load_column, load_dense, load_linear, load_row
from server.model.layer import LayerStep, Mixer
from server.ranks.collectives import Shard


def advanced(rule: Callable[..., Tensor], inputs: tuple[Tensor, ...], state: Tensor, meta: StepMeta) -> Tensor:
    """What a rule makes of the step's tokens, from `inputs` [T, …]; states [rows, W] advance, some from earlier on."""
    rewind = meta.rewind
    if rewind is None:
        return rule(*inputs, state, meta)
    if rewind.restored is None:
        _copy(state, rewind.kept)
        return rule(*inputs, state, meta)
    made = []
    for rows, (tokens, where) in zip((rewind.restored, rewind.kept), rewind.parts, strict=True):
        _copy(state, rows)
        made.append((tokens, rule(*(x.index_select(0, tokens) for x in inputs), state, where)))
    out = made[0][1].new_empty(len(inputs[0]), made[0][1].shape[1])
    for tokens, part in made:
        out.index_copy_(0, tokens, part)
    return out


def _copy(state: Tensor, rows: tuple[Tensor, Tensor] | None) -> None:
    """Copy states between rows (to, from), if any."""
    if rows is not None:
        to, source = rows
        state.index_copy_(0, to, state.index_select(0, source))


@dataclass(frozen=True)
class DeltaBlock:
    """Projections around a gated delta rule. See `layer.Mixer`."""

    qkvz: ColumnLinear  # rows [queries | keys | values | gates] of this rank's heads
    ba: LinearFormat  # rows [what corrects | what fades] of this rank's heads
    out: RowLinear
    rule: DeltaRule

    @property
    def matrices(self) -> list[Matrix]:
        return [self.qkvz.weight, self.ba, self.out.weight]

    def __call__(self, x: Tensor, kv: Tensor, step: LayerStep) -> Tensor:
        """x [T, D] → what its heads read [T, N * value_dim], not yet projected; states in `kv` [rows, W] advance."""
        return advanced(self.rule, (self.qkvz(x), self.ba(x, None)), kv, step.meta)


def load_delta(weights: Weights, spec: ArchSpec, kind: GatedDelta, backend: Backend) -> DeltaBlock:
    """This rank's part of one recurrent layer."""
    heads = range(*weights.shard.range(kind.num_heads))
    values = [(heads.start * kind.value_dim, heads.stop * kind.value_dim)]
    inner = kind.num_heads * kind.value_dim
    channels = _channels(kind, range(*weights.shard.range(kind.num_key_heads)), heads)
    exact = replace(weights, dtype=torch.float32)  # near 0 the checkpoint's dtype may have no room for the logarithm
    parts = [(heads.start, heads.stop)]
    rule = DeltaWeights(
        kind=kind.part(weights.shard.world_size),
        conv=exact.filters("delta_conv", (kind.channels, kind.conv), channels),
        decay=exact.vector("delta", kind.num_heads, suffix="A_log", ranges=parts).exp(),
        step_bias=exact.vector("delta", kind.num_heads, suffix="dt_bias", ranges=parts),
        norm=exact.vector("delta_norm", kind.value_dim),
        eps=spec.norm.eps,
    )
    is_grouped = weights.has("delta_qkvz")
    load = _load_grouped if is_grouped else _load_split
    qkvz, ba = load(weights, spec, kind, backend, channels, values, heads)
    out = load_row(weights, "delta_out", (spec.hidden_size, inner), backend.linear, bias=False)
    return DeltaBlock(qkvz, ba, out, backend.gated_delta(rule))


def _channels(kind: GatedDelta, key_heads: range, heads: range) -> Ranges:
    """Where queries, keys and values of these heads are among all channels."""
    keys = kind.num_key_heads * kind.key_dim
    first, last = key_heads.start * kind.key_dim, key_heads.stop * kind.key_dim
    value, end = heads.start * kind.value_dim, heads.stop * kind.value_dim
    return merged([(first, last), (keys + first, keys + last), (2 * keys + value, 2 * keys + end)])


def _load_split(
    weights: Weights,
    spec: ArchSpec,
    kind: GatedDelta,
    backend: Backend,
    channels: Ranges,
    values: Ranges,
    heads: range,
) -> tuple[ColumnLinear, LinearFormat]:
    """From one tensor for channels, one for gates, and two for what every head needs one number of."""
    hidden, inner = spec.hidden_size, kind.num_heads * kind.value_dim
    qkv = weights.piece("delta_qkv", (kind.channels, hidden), rows=channels)
    z = weights.piece("delta_z", (inner, hidden), rows=values)
    part = [(heads.start, heads.stop)]
    ba = [weights.piece(role, (kind.num_heads, hidden), rows=part) for role in ("delta_b", "delta_a")]
    qkvz = ColumnLinear(load_linear(weights, [qkv, z], backend.linear), None)
    return qkvz, load_dense(weights, ba, backend.linear)


def _load_grouped(
    weights: Weights,
    spec: ArchSpec,
    kind: GatedDelta,
    backend: Backend,
    channels: Ranges,
    values: Ranges,
    heads: range,
) -> tuple[ColumnLinear, LinearFormat]:
    """From tensors that have, head of keys by head of keys, [query | key | values | gates] and [b | a] of its heads."""
    share = kind.num_heads // kind.num_key_heads
    key_heads = range(heads.start // share, heads.stop // share)
    width = share * kind.value_dim
    sizes = [kind.key_dim, kind.key_dim, width, width]
    qkvz = load_column(
        weights,
        "delta_qkvz",
        (kind.num_key_heads * sum(sizes), spec.hidden_size),
        backend.linear,
        bias=False,
        ranges=_of_groups(key_heads, sizes),
    )
    groups = _of_groups(key_heads, [share, share])
    ba = weights.piece("delta_ba", (2 * kind.num_heads, spec.hidden_size), rows=groups)
    return qkvz, load_dense(weights, [ba], backend.linear)


def _of_groups(groups: range, sizes: list[int]) -> Ranges:
    """Rows of parts of these sizes, which stand group by group: the first part of all groups, then the second, …"""
    starts = [sum(sizes[:part]) for part in range(len(sizes))]
    return merged(
        [
            (group * sum(sizes) + start, group * sum(sizes) + start + size)
            for start, size in zip(starts, sizes, strict=True)
            for group in groups
        ]
    )


@dataclass(frozen=True)
class ShortConvBlock:
    """Projections around a short convolution. See `layer.Mixer`."""

    bcx: ColumnLinear  # rows [b | c | x] of this rank's channels
    out: RowLinear
    rule: ConvRule

    @property
    def matrices(self) -> list[Matrix]:
        return [self.bcx.weight, self.out.weight]

    def __call__(self, x: Tensor, kv: Tensor, step: LayerStep) -> Tensor:
        """x [T, D] → what comes out of its channels [T, C], not yet projected; states in `kv` [rows, W] advance."""
        return advanced(self.rule, (self.bcx(x),), kv, step.meta)


def load_short_conv(weights: Weights, spec: ArchSpec, kind: ShortConv, backend: Backend) -> ShortConvBlock:
    """This rank's part of one layer with a short convolution."""
    linears, channels = kind.linears(spec.hidden_size), kind.channels
    start, stop = weights.shard.range(channels)
    ranges = [(part * channels + start, part * channels + stop) for part in range(3)]
    bcx = load_column(weights, "conv_in", linears["conv_in"], backend.linear, bias=kind.bias, ranges=merged(ranges))
    exact = replace(weights, dtype=torch.float32)
    rule = ShortConvWeights(
        kind=kind.part(weights.shard.world_size),
        conv=exact.filters("short_conv", (channels, kind.conv), [(start, stop)]),
        bias=exact.bias("short_conv", channels, ranges=[(start, stop)]) if kind.bias else None,
    )
    out = load_row(weights, "conv_out", linears["conv_out"], backend.linear, bias=kind.bias)
    return ShortConvBlock(bcx, out, backend.short_conv(rule))


@dataclass(frozen=True)
class MambaBlock:
    """Projections around Mamba-2. See `layer.Mixer`."""

    zxbcdt: ColumnLinear  # rows [gates | values | keys | queries | steps] of this rank's heads
    out: RowLinear
    rule: MambaRule

    @property
    def matrices(self) -> list[Matrix]:
        return [self.zxbcdt.weight, self.out.weight]

    def __call__(self, x: Tensor, kv: Tensor, step: LayerStep) -> Tensor:
        """x [T, D] → what its heads read [T, N * P], not yet projected; states in `kv` [rows, W] advance."""
        return advanced(self.rule, (self.zxbcdt(x),), kv, step.meta)


def load_mamba(weights: Weights, spec: ArchSpec, kind: Mamba2, backend: Backend) -> MambaBlock:
    """This rank's part of one Mamba-2 layer."""
    linears, shard = kind.linears(spec.hidden_size), weights.shard
    heads = shard.range(kind.num_heads)
    inner = (heads[0] * kind.head_dim, heads[1] * kind.head_dim)
    channels = _channels_of_mamba(kind, shard)
    steps = kind.inner + kind.channels
    rows = [inner, *_moved(channels, kind.inner), *_moved([heads], steps)]
    zxbcdt = load_column(weights, "mamba_in", linears["mamba_in"], backend.linear, bias=kind.bias, ranges=merged(rows))
    out = load_row(weights, "mamba_out", linears["mamba_out"], backend.linear, bias=kind.bias)
    return MambaBlock(zxbcdt, out, backend.mamba(_mamba_weights(weights, kind, channels, heads, inner)))


def _mamba_weights(
    weights: Weights, kind: Mamba2, channels: Ranges, heads: tuple[int, int], inner: tuple[int, int]
) -> MambaWeights:
    exact, shard, part = replace(weights, dtype=torch.float32), weights.shard, kind.part(weights.shard.world_size)
    of_heads = partial(exact.vector, "mamba", kind.num_heads, ranges=[heads])
    conv = exact.filters("mamba_conv", (kind.channels, kind.conv), channels)
    of_channels = [part.inner, part.keys, part.keys]
    scales = torch.cat([conv.new_full((size,), by) for size, by in zip(of_channels, kind.scales[1:4], strict=True)])
    has_norm = kind.norm is not GateNorm.NONE
    norm = exact.vector("mamba_norm", kind.inner, ranges=[inner]) if has_norm else conv.new_ones(part.inner)
    return MambaWeights(
        kind=part,
        conv=conv * scales.unsqueeze(1),
        conv_bias=exact.bias("mamba_conv", kind.channels, ranges=channels) if kind.conv_bias else None,
        decay=of_heads(suffix="A_log").exp(),
        step_bias=of_heads(suffix="dt_bias"),
        skip=of_heads(suffix="D"),
        norm=norm * kind.out_scale,
        norm_size=kind.inner // kind.num_groups,
        sum_over_ranks=partial(_sum_of_groups, shard, kind.num_groups) if kind.num_groups < shard.world_size else None,
    )


def _channels_of_mamba(kind: Mamba2, shard: Shard) -> Ranges:
    """Where values, keys and queries of this rank's heads are among all channels."""
    part, d = kind.part(shard.world_size), kind.key_dim
    first = shard.rank * part.num_heads
    group = first // (kind.num_heads // kind.num_groups)
    keys = (group * d, (group + part.num_groups) * d)
    values = (first * kind.head_dim, (first + part.num_heads) * kind.head_dim)
    return merged([values, *_moved([keys], kind.inner), *_moved([keys], kind.inner + kind.keys)])


def _moved(ranges: Ranges, by: int) -> Ranges:
    return [(start + by, stop + by) for start, stop in ranges]


def _sum_of_groups(shard: Shard, num_groups: int, numbers: Tensor) -> Tensor:
    """Numbers [T, 1] of this rank's part of a group → their sum [T, 1] over the ranks that have some of it."""
    own = shard.rank * num_groups // shard.world_size
    every = numbers.new_zeros(len(numbers), num_groups)
    every[:, own : own + 1] = numbers
    return shard.all_reduce(every)[:, own : own + 1]


LOADERS: Mapping[type, Callable[[Weights, ArchSpec, Any, Backend], Mixer]] = {
    GatedDelta: load_delta,
    Mamba2: load_mamba,
    ShortConv: load_short_conv,
}


def load_recurrence(weights: Weights, spec: ArchSpec, kind: Recurrence, backend: Backend) -> Mixer:
    """This rank's part of one recurrent layer."""
    return LOADERS[type(kind)](weights, spec, kind, backend)
