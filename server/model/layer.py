"""One layer of a model: attention or what stands in its place, the mlp, norms and residual additions, and their wiring.

Which norms there are and how all is wired is the spec's `residual`: a function of `WIRINGS` for each kind. What a layer
adds last may wait for the next layer's first norm, so that one kernel does both (`Stream`).

Shapes: T tokens in the step, D model width, N local heads, K local kv heads, H head dim, B blocks, P tokens per block,
W elements that a token's key or value takes in the cache.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor

from server.arch.spec import Activation, ArchSpec, KvHeads, LayerSpec, QueryScale, Residual, Rope
from server.backends.protocol import Attention, Norm, Rotation, StepMeta, Summand
from server.backends.reference.attention import rotate
from server.layers.linear import Branch, ColumnLinear, Matrix, Projection, RowLinear
from server.layers.mlp import DenseMlp, MoeMlp
from server.layers.per_layer import PerLayerBlock
from server.layers.qk_norm import QkNorm
from server.ranks.collectives import Shard
from server.stepping.cache import Kept, KvAndState


@dataclass(frozen=True)
class LayerStep:
    """What every layer is told about the step it is in."""

    meta: StepMeta
    rotations: Mapping[Rope, Rotation]
    cross: StepMeta | None = None  # the same tokens, attending to the encoder's output
    query_scales: Mapping[QueryScale, Tensor] = field(default_factory=dict)  # [T, 1, 1] each
    per_layer: Tensor | None = None  # [T, layers, d] what this stage's layers and later ones are given beside the rest
    ring: StepMeta | None = None  # where windowed layers have the same tokens; None: where the others have them

    def of(self, layer: LayerSpec) -> StepMeta:
        """Where a layer has the step's tokens."""
        return self.ring if layer.window and self.ring is not None else self.meta


class Mixer(Protocol):
    """What tells a token of those before it: attention, or a recurrence (`recurrent.py`)."""

    @property
    def out(self) -> Projection:
        """The projection that ends it."""

    @property
    def matrices(self) -> list[Matrix]:
        """Its weights but for norms and biases."""

    def __call__(self, x: Tensor, kv: Any, step: LayerStep) -> Tensor:
        """x [T, D] → what `out` is for; kv: what the layer keeps of all sequences, which is read and written."""


@dataclass(frozen=True)
class AttentionBlock:
    """Projections around attention."""

    qkv: ColumnLinear  # rows [q | k | v] of this rank's heads
    gate: ColumnLinear | None  # rows of this rank's heads; the sigmoid of what it gives multiplies what is attended
    out: RowLinear
    qk_norm: QkNorm | None
    v_norm: Norm | None
    attention: Attention
    spec: ArchSpec
    layer: LayerSpec

    @property
    def matrices(self) -> list[Matrix]:
        return [self.qkv.weight, *([self.gate.weight] if self.gate else []), self.out.weight]

    def __call__(self, x: Tensor, kv: Tensor, step: LayerStep) -> Tensor:
        """x [T, D] → attended values [T, N * H], not yet projected; writes keys and values into kv [2, B, K, P, W]."""
        kv_heads, position = kv.shape[2], self.layer.position
        heads = self._heads(x, kv_heads)
        rotation = step.rotations[position] if isinstance(position, Rope) else None
        if self.spec.late_qk_norm and rotation is not None:
            heads = torch.cat([rotate(rotation, heads[:, :-kv_heads]), heads[:, -kv_heads:]], dim=1)
            rotation = None
        if self.qk_norm is not None:
            heads = self.qk_norm(heads, kv_heads)
        if self.v_norm is not None:
            heads[:, -kv_heads:] = self.v_norm(heads[:, -kv_heads:])
        if self.spec.qkv_clip:
            heads = heads.clamp(-self.spec.qkv_clip, self.spec.qkv_clip)
        if self.layer.query_scale is not None:
            heads[:, : -2 * kv_heads] *= step.query_scales[self.layer.query_scale]
        meta = step.of(self.layer)
        attended = self.attention.self_attend(heads, kv, rotation, meta, self.layer.window).flatten(1)
        if self.gate is not None:
            attended = attended * self.gate(x, Activation.SIGMOID)
        return attended if self.spec.attended_scale == 1.0 else attended * self.spec.attended_scale

    def _heads(self, x: Tensor, kv_heads: int) -> Tensor:
        """x [T, D] → its queries, keys and values [T, N + 2K, H]."""
        heads = self.qkv(x).view(len(x), -1, self.kv_heads.dim)
        return torch.cat([heads, heads[:, -kv_heads:]], dim=1) if self.layer.keys_are_values else heads

    @property
    def kv_heads(self) -> KvHeads:
        """What it attends to, on all ranks."""
        return self.spec.kv_heads(self.layer)


@dataclass(frozen=True)
class QueryBlock:
    """Projections around attention to the keys and values that an earlier layer keeps."""

    q: ColumnLinear  # rows of this rank's heads
    out: RowLinear
    q_norm: Norm | None
    attention: Attention
    spec: ArchSpec
    layer: LayerSpec

    @property
    def matrices(self) -> list[Matrix]:
        return [self.q.weight, self.out.weight]

    def __call__(self, x: Tensor, kv: Tensor, step: LayerStep) -> Tensor:
        """x [T, D] → attended values [T, N * H], not yet projected; kv [2, B, K, P, W] is the earlier layer's."""
        q = self.q(x).view(len(x), -1, self.spec.kv_heads(self.layer).dim)
        if self.q_norm is not None:
            q = self.q_norm(q)
        rotation = step.rotations[self.layer.position] if isinstance(self.layer.position, Rope) else None
        meta = step.of(self.layer)
        return self.attention.attend_rotated(q, kv, rotation, meta, self.layer.window).flatten(1)


@dataclass(frozen=True)
class JointProjection:
    """The projections of several branches, whose inputs stand side by side, as one. See `linear.Projection`."""

    parts: tuple[RowLinear, ...]
    widths: tuple[int, ...]
    bias: None = None

    def __call__(self, x: Tensor, base: Tensor | None = None, *, with_bias: bool = False) -> Tensor:
        """base + this rank's part of all of them."""
        first, *others = zip(self.parts, x.split(self.widths, dim=1), strict=True)
        total = first[0](first[1].contiguous(), base)
        for part, piece in others:
            total = part(piece.contiguous(), total)
        return total


@dataclass(frozen=True)
class BesideBlock:
    """Attention beside a recurrence, which read the same, and whose outputs are added. See `Mixer`."""

    attention: AttentionBlock
    recurrence: Mixer
    out: JointProjection

    @property
    def matrices(self) -> list[Matrix]:
        return [*self.attention.matrices, *self.recurrence.matrices]

    def __call__(self, x: Tensor, kv: KvAndState, step: LayerStep) -> Tensor:
        """x [T, D] → [attended | read], not yet projected; keys, values and states are written."""
        return torch.cat([self.attention(x, kv.kv, step), self.recurrence(x, kv.state, step)], dim=1)


@dataclass(frozen=True)
class CrossBlock:
    """Projections around attention to an encoder's output."""

    q: ColumnLinear
    kv: ColumnLinear  # rows [k | v] of this rank's heads
    out: RowLinear
    attention: Attention
    spec: ArchSpec

    @property
    def matrices(self) -> list[Matrix]:
        return [self.q.weight, self.kv.weight, self.out.weight]

    def remember(self, encoded: Tensor, kv: Tensor, meta: StepMeta) -> None:
        """Write the keys and values of an encoder's output [T, D] into kv [2, B, K, P, W]."""
        k, v = self.kv(encoded).view(len(encoded), -1, self.spec.head_dim).chunk(2, dim=1)
        self.attention.write(kv, k, v, meta)

    def __call__(self, x: Tensor, kv: Tensor, step: LayerStep) -> Tensor:
        """x [T, D] → attended values [T, N * H], not yet projected."""
        assert step.cross is not None, "every sequence of an encoder-decoder has an encoder's output"
        q = self.q(x).view(len(x), -1, self.spec.head_dim)
        return self.attention.attend(q, kv, step.cross, window=0).flatten(1)


@dataclass(frozen=True)
class Stream:
    """The residual stream between two norms: x [T, D], and what waits to be added to it."""

    x: Tensor
    pending: Summand | None = None

    @property
    def total(self) -> Tensor:
        """The whole stream [T, D]."""
        return self.x if self.pending is None else self.pending.onto(self.x)

    def normed(self, norm: Norm) -> tuple[Tensor, Tensor]:
        """The whole stream [T, D], and that normalised."""
        return (self.x, norm(self.x)) if self.pending is None else norm.add(self.x, self.pending)


@dataclass(frozen=True)
class Layer:
    """One layer of a decoder or an encoder."""

    attention: Mixer | None
    cross: CrossBlock | None  # of an encoder-decoder's decoder
    mlp: DenseMlp | MoeMlp | None
    norms: Mapping[str, Norm]
    shard: Shard
    wiring: Callable[[Layer, Stream, Kept, LayerStep], Stream]
    per_layer: PerLayerBlock | None = None
    scale: Tensor | None = None  # [] by which the residual stream is multiplied behind it

    @property
    def matrices(self) -> list[Matrix]:
        """Its weights but for norms and biases."""
        parts = [self.attention, self.cross, self.mlp, self.per_layer]
        return [matrix for part in parts if part is not None for matrix in part.matrices]

    @property
    def nbytes(self) -> int:
        """Memory of its matrices."""
        return sum(matrix.nbytes for matrix in self.matrices)

    def __call__(self, stream: Stream, kv: Kept, step: LayerStep) -> Stream:
        """The residual stream behind the layer; keys and values are written into kv [2, B, K, P, W]."""
        stream = self.wiring(self, stream, kv, step)
        if self.per_layer is not None:
            assert step.per_layer is not None, "the first stage makes the inputs of all layers"
            x = stream.total
            stream = Stream(x + self.per_layer(x, step.per_layer))
        return stream if self.scale is None else Stream(stream.total * self.scale)

    def remember(self, encoded: Tensor, kv: Tensor, meta: StepMeta) -> None:
        """Write what attention to an encoder's output [T, D] reads of it into kv [2, B, K, P, W]."""
        assert self.cross is not None, "each layer of the decoder attends to the encoder's output"
        self.cross.remember(encoded, kv, meta)

    def attend(self, x: Tensor, kv: Kept, step: LayerStep) -> Branch:
        """What attention, or what stands in its place, adds for input x."""
        assert self.attention is not None
        return Branch(self.attention.out, self.attention(x, kv, step))

    def feed(self, x: Tensor) -> Branch:
        """What the mlp adds for input x."""
        assert self.mlp is not None
        return self.mlp.branch(x)

    def attend_to_encoder(self, x: Tensor, kv: Kept, step: LayerStep) -> Branch:
        """What attention to the encoder's output adds for input x."""
        assert self.cross is not None and isinstance(kv, Tensor)
        return Branch(self.cross.out, self.cross(x, kv, step))

    def add(self, base: Tensor, *branches: Branch, norm: Norm | None = None) -> Stream:
        """base + the branches, summed over all ranks for the price of one reduction.

        norm: what normalises the branches' sum before it is added.
        """
        is_alone = self.shard.world_size == 1
        if is_alone and norm is None and not self._norms_absorb_addition:
            for branch in branches:
                base = branch.onto(base, with_bias=True)
            return Stream(base)
        if is_alone:
            deltas = tuple(branch.onto(None, with_bias=False) for branch in branches)
        else:
            deltas = (self.shard.all_reduce(_sum_of(branches)),)
        # What belongs to the whole is added after the reduction: before it, every rank would add it once.
        biases = tuple(branch.projection.bias for branch in branches if branch.projection.bias is not None)
        return Stream(base, Summand(deltas, biases, norm))

    def whole(self, part: Tensor) -> Tensor:
        """The sum of all ranks' parts."""
        return part if self.shard.world_size == 1 else self.shard.all_reduce(part)

    @property
    def _norms_absorb_addition(self) -> bool:
        return all(norm.absorbs_addition for norm in self.norms.values())


def _sum_of(branches: Sequence[Branch]) -> Tensor:
    """This rank's part of all branches."""
    total = branches[0].onto(None, with_bias=False)
    for branch in branches[1:]:
        total = branch.onto(total, with_bias=False)
    return total


def _pre(layer: Layer, stream: Stream, kv: Kept, step: LayerStep) -> Stream:
    x, normed = stream.normed(layer.norms["attention_norm"])
    x, normed = layer.add(x, layer.attend(normed, kv, step)).normed(layer.norms["mlp_norm"])
    return layer.add(x, layer.feed(normed))


def _pre_cross(layer: Layer, stream: Stream, kv: Kept, step: LayerStep) -> Stream:
    x, normed = stream.normed(layer.norms["attention_norm"])
    x, normed = layer.add(x, layer.attend(normed, kv, step)).normed(layer.norms["cross_norm"])
    x, normed = layer.add(x, layer.attend_to_encoder(normed, kv, step)).normed(layer.norms["mlp_norm"])
    return layer.add(x, layer.feed(normed))


def _pre_normed(layer: Layer, stream: Stream, kv: Kept, step: LayerStep) -> Stream:
    _, normed = stream.normed(layer.norms["attention_norm"])
    _, normed = layer.add(normed, layer.attend(normed, kv, step)).normed(layer.norms["mlp_norm"])
    return layer.add(normed, layer.feed(normed))


def _post(layer: Layer, stream: Stream, kv: Kept, step: LayerStep) -> Stream:
    x = stream.total
    _, x = layer.add(x, layer.attend(x, kv, step)).normed(layer.norms["attention_norm"])
    _, x = layer.add(x, layer.feed(x)).normed(layer.norms["mlp_norm"])
    return Stream(x)


def _sandwich(layer: Layer, stream: Stream, kv: Kept, step: LayerStep) -> Stream:
    norms = layer.norms
    x, normed = stream.normed(norms["attention_norm"])
    attended = layer.add(x, layer.attend(normed, kv, step), norm=norms["attention_post_norm"])
    x, normed = attended.normed(norms["mlp_norm"])
    return layer.add(x, layer.feed(normed), norm=norms["mlp_post_norm"])


def _sandwich_mixed(layer: Layer, stream: Stream, kv: Kept, step: LayerStep) -> Stream:
    norms, mlp = layer.norms, layer.mlp
    assert isinstance(mlp, MoeMlp) and mlp.shared is not None
    x, normed = stream.normed(norms["attention_norm"])
    attended = layer.add(x, layer.attend(normed, kv, step), norm=norms["attention_post_norm"])
    x, normed = attended.normed(norms["mlp_norm"])
    shared = layer.whole(mlp.shared.branch(normed).onto(None, with_bias=False))
    routed = layer.whole(mlp.routed(norms["expert_norm"](x), x))
    parts = (norms["shared_post_norm"](shared), norms["expert_post_norm"](routed))
    return Stream(x, Summand(parts, norm=norms["mlp_post_norm"]))


def _output_normed(layer: Layer, stream: Stream, kv: Kept, step: LayerStep) -> Stream:
    x = stream.total
    x = layer.add(x, layer.attend(x, kv, step), norm=layer.norms["attention_post_norm"]).total
    return layer.add(x, layer.feed(x), norm=layer.norms["mlp_post_norm"])


def _parallel_one_norm(layer: Layer, stream: Stream, kv: Kept, step: LayerStep) -> Stream:
    x, normed = stream.normed(layer.norms["attention_norm"])
    return layer.add(x, layer.attend(normed, kv, step), layer.feed(normed))


def _parallel_two_norms(layer: Layer, stream: Stream, kv: Kept, step: LayerStep) -> Stream:
    x, normed = stream.normed(layer.norms["attention_norm"])
    return layer.add(x, layer.attend(normed, kv, step), layer.feed(layer.norms["mlp_norm"](x)))


def _one_branch(layer: Layer, stream: Stream, kv: Kept, step: LayerStep) -> Stream:
    x, normed = stream.normed(layer.norms["attention_norm"])
    return layer.add(x, layer.feed(normed) if layer.attention is None else layer.attend(normed, kv, step))


# How a layer is wired, and which norms that takes.
WIRINGS = {
    Residual.PRE: (_pre, ("attention_norm", "mlp_norm")),
    Residual.PRE_CROSS: (_pre_cross, ("attention_norm", "cross_norm", "mlp_norm")),
    Residual.PRE_NORMED: (_pre_normed, ("attention_norm", "mlp_norm")),
    Residual.POST: (_post, ("attention_norm", "mlp_norm")),
    Residual.SANDWICH: (_sandwich, ("attention_norm", "attention_post_norm", "mlp_norm", "mlp_post_norm")),
    Residual.SANDWICH_MIXED: (
        _sandwich_mixed,
        (
            "attention_norm",
            "attention_post_norm",
            "mlp_norm",
            "shared_post_norm",
            "expert_norm",
            "expert_post_norm",
            "mlp_post_norm",
        ),
    ),
    Residual.OUTPUT_NORMED: (_output_normed, ("attention_post_norm", "mlp_post_norm")),
    Residual.PARALLEL_ONE_NORM: (_parallel_one_norm, ("attention_norm",)),
    Residual.PARALLEL_TWO_NORMS: (_parallel_two_norms, ("attention_norm", "mlp_norm")),
    Residual.ONE_BRANCH: (_one_branch, ("attention_norm",)),
}
