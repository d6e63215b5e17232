"""What a decoder looks like: a frozen description without behaviour.

A family (see `families/`) turns a checkpoint's `config.json` into an `ArchSpec`; `transformer.py` builds the one
decoder from it. Families differ here by values and variants, never by code. Nothing in this module knows about tensors
or files; `validate` is pure arithmetic, so an impossible split is refused before a byte of weights is read.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

SHARD_COUNTS = (1, 2, 4, 8)


class Residual(Enum):
    """Where a layer's two residual connections start.

    PRE:          x + attention(norm(x)), then x + mlp(norm(x))
    PRE_NORMED:   n = norm(x); n + attention(n), then likewise for the mlp (BLOOM's
                  `apply_residual_connection_post_layernorm`)
    """

    PRE = "pre"
    PRE_NORMED = "pre_normed"


class Activation(Enum):
    """The function between the two matrices of an mlp."""

    GELU_TANH = "gelu_tanh"


@dataclass(frozen=True)
class LayerNorm:
    """Mean and variance normalisation with weight and bias (Ba et al. 2016, arXiv 1607.06450)."""

    eps: float


@dataclass(frozen=True)
class Alibi:
    """A bias on attention scores that falls linearly with distance (Press et al. 2021, arXiv 2108.12409)."""


@dataclass(frozen=True)
class Dense:
    """Two matrices with an activation between them: width → activation → model width."""

    width: int
    activation: Activation


@dataclass(frozen=True)
class ArchSpec:
    """One decoder. Sizes are those of the whole model, before it is split over ranks."""

    vocab_size: int
    hidden_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    norm: LayerNorm
    residual: Residual
    position: Alibi
    mlp: Dense
    linear_bias: bool  # whether the linear layers have a bias
    embed_norm: bool  # a norm between the embedding and the first layer
    tied_head: bool  # the output head is the embedding
    max_positions: int = 0  # longest sequence; 0: no limit of its own

    @property
    def scale(self) -> float:
        """What attention scores are multiplied by."""
        return self.head_dim**-0.5


def validate(spec: ArchSpec, world_size: int) -> None:
    """Raise ValueError with every reason why `spec` cannot be split over `world_size` ranks, and what can."""
    if problems := _split_problems(spec, world_size):
        possible = [str(n) for n in SHARD_COUNTS if not _split_problems(spec, n)]
        raise ValueError(f"{'; '.join(problems)}; use --num-shard {' or '.join(possible)}")


def _split_problems(spec: ArchSpec, world_size: int) -> list[str]:
    problems = []
    for size, what in ((spec.num_heads, "attention heads"), (spec.mlp.width, "mlp columns")):
        if size % world_size:
            problems.append(f"the model has {size} {what}, which --num-shard {world_size} does not divide")
    kv_heads = spec.num_kv_heads
    if kv_heads % world_size and world_size % kv_heads:
        problems.append(f"the model has {kv_heads} key-value heads, which do not fit --num-shard {world_size}")
    return problems
