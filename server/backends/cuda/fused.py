# mypy: disable-error-code="import-untyped, import-not-found, no-untyped-def, untyped-decorator"
"""What stands between the matrix products of a layer on an NVIDIA GPU, each in one Triton kernel.

Separate operators would read and write a step's activations once each, and a decode would wait longer for their
launches than for their work. Each of these does what the reference backend does in several:

* `FusedNorm`: residual addition of all that a layer adds, normalised itself where the model wants that, then LayerNorm
  (Ba et al. 2016, arXiv 1607.06450) or RMSNorm (Zhang and Sennrich 2019, arXiv 1910.07467); and the norms of all heads'
  queries and keys at once;
* `fused_gate`: activation times gate (Shazeer 2020, arXiv 2002.05202).

Both compute in float32 and round once, to the dtype of their inputs. Left out: an activation without a gate, which is
one operator already, and rotations, which are done on the way into the cache (`kernels/rotate.py`).

Importing this module imports Triton, which a CPU server neither has nor needs. Not yet run on a GPU: the tests run the
kernels in Triton's interpreter and compile them for compute capability 9.0.

Shapes: T tokens, D model width, F local width of the mlp, N local heads, K local kv heads, H head dim.
"""

from __future__ import annotations

from typing import Any, TypeGuard

import torch
import triton
import triton.language as tl
from torch import Tensor

from server.arch.spec import Activation
from server.backends.protocol import Norm, Summand

# Elements of a program's tile: 8 to 16 for each thread of 4 warps.
TILE_ELEMENTS = 1024
# Elements of a row for each warp of a program that owns the whole row: 16 a thread.
ROW_ELEMENTS_PER_WARP = 512


class FusedNorm(Norm):
    """LayerNorm (`is_centred`) or RMSNorm over the last dimension, alone or behind a residual addition."""

    absorbs_addition = True

    def __init__(self, weight: Tensor, bias: Tensor | None, eps: float, *, is_centred: bool):
        self._weight = weight
        self._bias = bias
        self._eps = eps
        self._is_centred = is_centred

    def __call__(self, x: Tensor) -> Tensor:
        """x [..., D] → normalised [..., D]."""
        rows = x.reshape(-1, x.shape[-1]).contiguous()
        return self._launch(rows, None, None).view(x.shape)

    def add(self, x: Tensor, summand: Summand) -> tuple[Tensor, Tensor]:
        total = torch.empty_like(x)
        return total, self._launch(x, summand, total)

    def _launch(self, x: Tensor, summand: Summand | None, total: Tensor | None) -> Tensor:
        deltas, biases, own_norm = (summand.deltas, summand.biases, summand.norm) if summand else ((), (), None)
        assert all(t.is_contiguous() for t in (x, *deltas)) and len(deltas) <= 2 and len(biases) <= 2
        assert own_norm is None or self._is_like(own_norm)
        normed = torch.empty_like(x)
        padded = triton.next_power_of_2(x.shape[1])
        _add_norm[(len(x),)](
            x,
            *_two(deltas),
            *_two(biases),
            *((None, None) if own_norm is None else (own_norm._weight, own_norm._bias)),
            self._weight,
            self._bias,
            total,
            normed,
            EPS=self._eps,
            IS_CENTRED=self._is_centred,
            SIZE=x.shape[1],
            PADDED=padded,
            num_warps=min(max(padded // ROW_ELEMENTS_PER_WARP, 1), 16),
        )
        return normed

    def normalise_heads(self, key_norm: Norm, heads: Tensor, kv_heads: int) -> Tensor:
        assert self._is_like(key_norm) and heads.is_contiguous()
        tokens, count, head_dim = heads.shape
        padded = triton.next_power_of_2(head_dim)
        tile = max(TILE_ELEMENTS // padded, 1)
        queries = count - 2 * kv_heads
        _norm_heads[(tokens, triton.cdiv(queries, tile) + triton.cdiv(kv_heads, tile))](
            heads,
            self._weight,
            self._bias,
            key_norm._weight,
            key_norm._bias,
            EPS=self._eps,
            IS_CENTRED=self._is_centred,
            HEADS=queries,
            KV_HEADS=kv_heads,
            SIZE=head_dim,
            PADDED=padded,
            TILE=tile,
        )
        return heads

    def _is_like(self, other: Norm) -> TypeGuard[FusedNorm]:
        """Whether the other norm differs by its weights alone, as all norms of a model do."""
        return isinstance(other, FusedNorm) and (self._eps, self._is_centred) == (other._eps, other._is_centred)


def _two(tensors: tuple[Tensor, ...]) -> tuple[Tensor | None, Tensor | None]:
    """The first two of them, or as many as there are."""
    first, second = (*tensors, None, None)[:2]
    return first, second


@triton.jit
def _normalise(
    value,
    features,
    real,
    weight,
    bias,
    EPS: tl.constexpr,
    IS_CENTRED: tl.constexpr,
    SIZE: tl.constexpr,
    AXIS: tl.constexpr,
):
    """Normalised along AXIS, where `features` are the first SIZE, which are `real`; the others are 0."""
    if IS_CENTRED:
        value = tl.where(real, value - tl.sum(value, axis=AXIS, keep_dims=True) / SIZE, 0.0)
    value *= tl.rsqrt(tl.sum(value * value, axis=AXIS, keep_dims=True) / SIZE + EPS)
    value *= tl.load(weight + features, mask=features < SIZE, other=0.0).to(tl.float32)
    if bias is not None:
        value += tl.load(bias + features, mask=features < SIZE, other=0.0).to(tl.float32)
    return value


@triton.jit
def _add_norm(
    x,
    delta_1,
    delta_2,
    bias_1,
    bias_2,
    delta_weight,
    delta_bias,
    weight,
    bias,
    total,
    normed,
    EPS: tl.constexpr,
    IS_CENTRED: tl.constexpr,
    SIZE: tl.constexpr,
    PADDED: tl.constexpr,
):
    """One row: x + what there is of deltas and biases, their sum normalised first where it has a weight."""
    features = tl.arange(0, PADDED)
    real = features < SIZE
    offsets = tl.program_id(0).to(tl.int64) * SIZE + features
    value = tl.load(x + offsets, mask=real, other=0.0).to(tl.float32)
    if delta_1 is not None:
        summand = tl.load(delta_1 + offsets, mask=real, other=0.0).to(tl.float32)
        if delta_2 is not None:
            summand += tl.load(delta_2 + offsets, mask=real, other=0.0).to(tl.float32)
        if bias_1 is not None:
            summand += tl.load(bias_1 + features, mask=real, other=0.0).to(tl.float32)
        if bias_2 is not None:
            summand += tl.load(bias_2 + features, mask=real, other=0.0).to(tl.float32)
        if delta_weight is not None:
            summand = _normalise(summand, features, real, delta_weight, delta_bias, EPS, IS_CENTRED, SIZE, 0)
        # What is normalised is the sum as the next layer will see it.
        rounded = (value + summand).to(total.dtype.element_ty)
        tl.store(total + offsets, rounded, mask=real)
        value = rounded.to(tl.float32)
    value = _normalise(value, features, real, weight, bias, EPS, IS_CENTRED, SIZE, 0)
    tl.store(normed + offsets, value.to(normed.dtype.element_ty), mask=real)


@triton.jit
def _norm_heads(
    heads,
    query_weight,
    query_bias,
    key_weight,
    key_bias,
    EPS: tl.constexpr,
    IS_CENTRED: tl.constexpr,
    HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    SIZE: tl.constexpr,
    PADDED: tl.constexpr,
    TILE: tl.constexpr,
):
    """TILE heads of one token, in place: first come the programs of the queries, then those of the keys."""
    token, part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    key_part = part - tl.cdiv(HEADS, TILE)
    is_query = key_part < 0
    first = tl.where(is_query, part * TILE, HEADS + key_part * TILE)
    members = first + tl.arange(0, TILE)[:, None]
    features = tl.arange(0, PADDED)[None, :]
    real = (members < tl.where(is_query, HEADS, HEADS + KV_HEADS)) & (features < SIZE)
    place = heads + token * (HEADS + 2 * KV_HEADS) * SIZE + members * SIZE + features
    value = tl.load(place, mask=real, other=0.0).to(tl.float32)
    if is_query:
        value = _normalise(value, features, real, query_weight, query_bias, EPS, IS_CENTRED, SIZE, 1)
    else:
        value = _normalise(value, features, real, key_weight, key_bias, EPS, IS_CENTRED, SIZE, 1)
    tl.store(place, value.to(heads.dtype.element_ty), mask=real)


@triton.jit
def _relu(x):
    return tl.maximum(x, 0.0)


@triton.jit
def _relu_squared(x):
    x = tl.maximum(x, 0.0)
    return x * x


@triton.jit
def _silu(x):
    return x * tl.sigmoid(x)


@triton.jit
def _gelu(x):
    return 0.5 * x * (1 + tl.erf(x * 0.7071067811865476))  # 1 / sqrt(2)


@triton.jit
def _gelu_tanh(x):
    # 0.5 (1 + tanh(y)) is sigmoid(2 y); 1.5957691216057308 is 2 sqrt(2 / pi).
    return x * tl.sigmoid(1.5957691216057308 * (x + 0.044715 * x * x * x))


@triton.jit
def _clamped_swish(x):
    x = tl.minimum(x, 7.0)
    return x * tl.sigmoid(1.702 * x)


@triton.jit
def _clamped_up(x):
    return tl.minimum(tl.maximum(x, -7.0), 7.0) + 1.0


@triton.jit
def _same(x):
    return x


ACTIVATIONS = {
    Activation.GELU: _gelu,
    Activation.GELU_TANH: _gelu_tanh,
    Activation.RELU: _relu,
    Activation.RELU_SQUARED: _relu_squared,
    Activation.SIGMOID: tl.sigmoid,
    Activation.SILU: _silu,
    Activation.CLAMPED_SWIGLU: _clamped_swish,
}


def activation_constants(activation: Activation | None) -> dict[str, Any]:
    """What a kernel is compiled for: the function of a gate, or of all outputs, and that of the other half."""
    other_half = _clamped_up if activation is Activation.CLAMPED_SWIGLU else _same
    return {"ACTIVATION": None if activation is None else ACTIVATIONS[activation], "UP": other_half}


def fused_gate(activation: Activation, gate_up: Tensor) -> Tensor:
    """gate_up [T, 2 F], as [gate | up] → activation(gate) * up, [T, F]."""
    assert gate_up.is_contiguous()
    tokens, width = gate_up.shape[0], gate_up.shape[1] // 2
    out = gate_up.new_empty(tokens, width)
    grid = (tokens, triton.cdiv(width, TILE_ELEMENTS))
    _gate[grid](gate_up, out, WIDTH=width, TILE=TILE_ELEMENTS, **activation_constants(activation))
    return out


@triton.jit
def _gate(gate_up, out, WIDTH: tl.constexpr, TILE: tl.constexpr, ACTIVATION: tl.constexpr, UP: tl.constexpr):
    """One tile of one row."""
    token = tl.program_id(0).to(tl.int64)
    features = tl.program_id(1) * TILE + tl.arange(0, TILE)
    real = features < WIDTH
    source = gate_up + token * (2 * WIDTH) + features
    gate = tl.load(source, mask=real, other=0.0).to(tl.float32)
    up = tl.load(source + WIDTH, mask=real, other=0.0).to(tl.float32)
    tl.store(out + token * WIDTH + features, (ACTIVATION(gate) * UP(up)).to(out.dtype.element_ty), mask=real)
