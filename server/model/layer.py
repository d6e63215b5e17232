"""One layer of a model: attention, the mlp, and how they are wired with norms and residual additions.

Which norms there are and how all is wired is the spec's `residual`: a function of `WIRINGS` for each kind.

Shapes: T tokens in the step, D model width, N local heads, K local kv heads, H head dim, B blocks, P tokens per block.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from server.arch.spec import ArchSpec, LayerSpec, Residual, Rope
from server.backends.protocol import Attention, Norm, Rotation, StepMeta, split_heads
from server.distributed import Shard
from server.layers.linear import Branch, ColumnLinear, RowLinear
from server.layers.mlp import DenseMlp, MoeMlp


@dataclass(frozen=True)
class LayerStep:
    """What every layer is told about the step it is in."""

    meta: StepMeta
    rotations: Mapping[Rope, Rotation]
    cross: StepMeta | None = None  # the same tokens, attending to the encoder's output


@dataclass(frozen=True)
class AttentionBlock:
    """Projections around attention."""

    qkv: ColumnLinear  # rows [q | k | v] of this rank's heads
    out: RowLinear
    q_norm: Norm | None
    k_norm: Norm | None
    attention: Attention
    spec: ArchSpec
    layer: LayerSpec

    @property
    def nbytes(self) -> int:
        return self.qkv.weight.nbytes + self.out.weight.nbytes

    def __call__(self, x: Tensor, kv: Tensor, step: LayerStep) -> Tensor:
        """x [T, D] → attended values [T, N * H], not yet projected; writes keys and values into kv [2, B, K, P, H]."""
        heads = self._heads(x)
        if self.q_norm is not None and self.k_norm is not None:
            q, k, v = split_heads(heads, kv_heads=kv.shape[2])
            heads = torch.cat([self.q_norm(q), self.k_norm(k), v], dim=1)
        position = self.layer.position
        rotation = step.rotations[position] if isinstance(position, Rope) else None
        return self.attention.self_attend(heads, kv, rotation, step.meta, self.layer.window).flatten(1)

    def _heads(self, x: Tensor) -> Tensor:
        """x [T, D] → its queries, keys and values [T, N + 2K, H]."""
        qkv = self.qkv(x)
        if self.spec.qkv_clip:
            qkv = qkv.clamp(-self.spec.qkv_clip, self.spec.qkv_clip)
        return qkv.view(len(qkv), -1, self.spec.head_dim)


@dataclass(frozen=True)
class CrossBlock:
    """Projections around attention to an encoder's output."""

    q: ColumnLinear
    kv: ColumnLinear  # rows [k | v] of this rank's heads
    out: RowLinear
    attention: Attention
    spec: ArchSpec

    @property
    def nbytes(self) -> int:
        return self.q.weight.nbytes + self.kv.weight.nbytes + self.out.weight.nbytes

    def remember(self, encoded: Tensor, kv: Tensor, meta: StepMeta) -> None:
        """Write the keys and values of an encoder's output [T, D] into kv [2, B, K, P, H]."""
        k, v = self.kv(encoded).view(len(encoded), -1, self.spec.head_dim).chunk(2, dim=1)
        self.attention.write(kv, k, v, meta)

    def __call__(self, x: Tensor, kv: Tensor, step: LayerStep) -> Tensor:
        """x [T, D] → attended values [T, N * H], not yet projected."""
        assert step.cross is not None, "every sequence of an encoder-decoder has an encoder's output"
        q = self.q(x).view(len(x), -1, self.spec.head_dim)
        return self.attention.attend(q, kv, step.cross, window=0).flatten(1)


@dataclass(frozen=True)
class Layer:
    """One layer of a decoder or an encoder."""

    attention: AttentionBlock
    cross: CrossBlock | None  # of an encoder-decoder's decoder
    mlp: DenseMlp | MoeMlp
    norms: Mapping[str, Norm]
    shard: Shard
    wiring: Callable[[Layer, Tensor, Tensor, LayerStep], Tensor]

    @property
    def nbytes(self) -> int:
        """Memory of its matrices."""
        return self.attention.nbytes + self.mlp.nbytes + (self.cross.nbytes if self.cross else 0)

    def __call__(self, x: Tensor, kv: Tensor, step: LayerStep) -> Tensor:
        """x [T, D] → [T, D]."""
        return self.wiring(self, x, kv, step)

    def attend(self, x: Tensor, kv: Tensor, step: LayerStep) -> Branch:
        """What attention adds for input x."""
        return Branch(self.attention.out, self.attention(x, kv, step))

    def attend_to_encoder(self, x: Tensor, kv: Tensor, step: LayerStep) -> Branch:
        """What attention to the encoder's output adds for input x."""
        assert self.cross is not None
        return Branch(self.cross.out, self.cross(x, kv, step))

    def add(self, base: Tensor | None, *branches: Branch) -> Tensor:
        """base + the branches, summed over all ranks for the price of one reduction."""
        is_alone = self.shard.world_size == 1
        total = base if is_alone else None
        for branch in branches:
            total = branch.onto(total, with_bias=is_alone)
        assert total is not None
        if is_alone:
            return total
        total = self.shard.all_reduce(total)
        # What belongs to the whole is added after the reduction: before it, every rank would add it once.
        for whole in (base, *(branch.projection.bias for branch in branches)):
            if whole is not None:
                total = total + whole
        return total

    def add_and_norm(self, norm: Norm, base: Tensor, branch: Branch) -> tuple[Tensor, Tensor]:
        """base + the branch, summed over all ranks, and that normalised."""
        if self.shard.world_size == 1 and not norm.absorbs_addition:
            total = self.add(base, branch)
            return total, norm(total)
        return norm.add(base, self.shard.all_reduce(branch.onto(None, with_bias=False)), branch.projection.bias)


def _pre(layer: Layer, x: Tensor, kv: Tensor, step: LayerStep) -> Tensor:
    norms = layer.norms
    x, normed = layer.add_and_norm(norms["mlp_norm"], x, layer.attend(norms["attention_norm"](x), kv, step))
    return layer.add(x, layer.mlp.branch(normed))


def _pre_cross(layer: Layer, x: Tensor, kv: Tensor, step: LayerStep) -> Tensor:
    norms = layer.norms
    x, normed = layer.add_and_norm(norms["cross_norm"], x, layer.attend(norms["attention_norm"](x), kv, step))
    x, normed = layer.add_and_norm(norms["mlp_norm"], x, layer.attend_to_encoder(normed, kv, step))
    return layer.add(x, layer.mlp.branch(normed))


def _pre_normed(layer: Layer, x: Tensor, kv: Tensor, step: LayerStep) -> Tensor:
    normed = layer.norms["attention_norm"](x)
    normed = layer.norms["mlp_norm"](layer.add(normed, layer.attend(normed, kv, step)))
    return layer.add(normed, layer.mlp.branch(normed))


def _post(layer: Layer, x: Tensor, kv: Tensor, step: LayerStep) -> Tensor:
    x = layer.norms["attention_norm"](layer.add(x, layer.attend(x, kv, step)))
    return layer.norms["mlp_norm"](layer.add(x, layer.mlp.branch(x)))


def _sandwich(layer: Layer, x: Tensor, kv: Tensor, step: LayerStep) -> Tensor:
    norms = layer.norms
    x = x + norms["attention_post_norm"](layer.add(None, layer.attend(norms["attention_norm"](x), kv, step)))
    return x + norms["mlp_post_norm"](layer.add(None, layer.mlp.branch(norms["mlp_norm"](x))))


def _parallel_one_norm(layer: Layer, x: Tensor, kv: Tensor, step: LayerStep) -> Tensor:
    normed = layer.norms["attention_norm"](x)
    return layer.add(x, layer.attend(normed, kv, step), layer.mlp.branch(normed))


def _parallel_two_norms(layer: Layer, x: Tensor, kv: Tensor, step: LayerStep) -> Tensor:
    attention = layer.attend(layer.norms["attention_norm"](x), kv, step)
    return layer.add(x, attention, layer.mlp.branch(layer.norms["mlp_norm"](x)))


# How a layer is wired, and which norms that takes.
WIRINGS = {
    Residual.PRE: (_pre, ("attention_norm", "mlp_norm")),
    Residual.PRE_CROSS: (_pre_cross, ("attention_norm", "cross_norm", "mlp_norm")),
    Residual.PRE_NORMED: (_pre_normed, ("attention_norm", "mlp_norm")),
    Residual.POST: (_post, ("attention_norm", "mlp_norm")),
    Residual.SANDWICH: (_sandwich, ("attention_norm", "attention_post_norm", "mlp_norm", "mlp_post_norm")),
    Residual.PARALLEL_ONE_NORM: (_parallel_one_norm, ("attention_norm",)),
    Residual.PARALLEL_TWO_NORMS: (_parallel_two_norms, ("attention_norm", "mlp_norm")),
}
