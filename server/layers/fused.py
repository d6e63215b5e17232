# mypy: disable-error-code="import-untyped, import-not-found, no-untyped-def, untyped-decorator"
"""What stands between the matrix products of a layer on an NVIDIA GPU, each in one Triton kernel.

Separate operators would read and write a step's activations once each, and a decode would wait longer for their
launches than for their work. Each of these does what `norm.py`, `position.py` or `mlp.py` do in several:

* `FusedNorm`: residual addition, then LayerNorm (Ba et al. 2016, arXiv 1607.06450) or RMSNorm (Zhang and Sennrich 2019,
  arXiv 1910.07467);
* `rotate_and_store`: rotation of queries and keys (Su et al. 2021, arXiv 2104.09864), then keys and values into the
  cache;
* `FusedGate`: activation times gate (Shazeer 2020, arXiv 2002.05202).

All compute in float32 and round once, to the dtype of their inputs. Left out: norms of a sum's summand (SANDWICH), more
than one summand, and an activation without a gate, which is one operator already.

Importing this module imports Triton, which a CPU server neither has nor needs. Not yet run on a GPU: the tests run the
kernels in Triton's interpreter and compile them for compute capability 9.0.

Shapes: T tokens, D model width, F local width of the mlp, N local heads, K local kv heads, H head dim, B blocks,
P tokens per block.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from server.layers.position import Rotation
from server.model.spec import Activation

# Elements of a program's tile: 8 to 16 for each thread of 4 warps.
TILE_ELEMENTS = 1024
# Elements of a row for each warp of a program that owns the whole row: 16 a thread.
ROW_ELEMENTS_PER_WARP = 512


class FusedNorm:
    """LayerNorm (`is_centred`) or RMSNorm over the last dimension, alone or behind a residual addition."""

    def __init__(self, weight: Tensor, bias: Tensor | None, eps: float, *, is_centred: bool):
        self._weight = weight
        self._bias = bias
        self._eps = eps
        self._is_centred = is_centred

    def __call__(self, x: Tensor) -> Tensor:
        """x [..., D] → normalised [..., D]."""
        rows = x.reshape(-1, x.shape[-1])
        return self._launch(rows, None, None, None).view(x.shape)

    def add(self, x: Tensor, summand: Tensor, bias: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """x [T, D] and a layer's summand [T, D], with its bias [D] if it has one → their sum and the sum normalised."""
        total = torch.empty_like(x)
        return total, self._launch(x, summand, bias, total)

    def _launch(self, x: Tensor, summand: Tensor | None, summand_bias: Tensor | None, total: Tensor | None) -> Tensor:
        assert x.is_contiguous() and (summand is None or summand.is_contiguous())
        normed = torch.empty_like(x)
        padded = triton.next_power_of_2(x.shape[1])
        _add_norm[(len(x),)](
            x,
            summand,
            summand_bias,
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


@triton.jit
def _add_norm(
    x,
    summand,
    summand_bias,
    weight,
    bias,
    total,
    normed,
    EPS: tl.constexpr,
    IS_CENTRED: tl.constexpr,
    SIZE: tl.constexpr,
    PADDED: tl.constexpr,
):
    """One row."""
    features = tl.arange(0, PADDED)
    real = features < SIZE
    offsets = tl.program_id(0).to(tl.int64) * SIZE + features
    value = tl.load(x + offsets, mask=real, other=0.0).to(tl.float32)
    if summand is not None:
        value += tl.load(summand + offsets, mask=real, other=0.0).to(tl.float32)
        if summand_bias is not None:
            value += tl.load(summand_bias + features, mask=real, other=0.0).to(tl.float32)
        # What is normalised is the sum as the next layer will see it.
        rounded = value.to(total.dtype.element_ty)
        tl.store(total + offsets, rounded, mask=real)
        value = rounded.to(tl.float32)
    if IS_CENTRED:
        value = tl.where(real, value - tl.sum(value, axis=0) / SIZE, 0.0)
    value *= tl.rsqrt(tl.sum(value * value, axis=0) / SIZE + EPS)
    value *= tl.load(weight + features, mask=real, other=0.0).to(tl.float32)
    if bias is not None:
        value += tl.load(bias + features, mask=real, other=0.0).to(tl.float32)
    tl.store(normed + offsets, value.to(normed.dtype.element_ty), mask=real)


def rotate_and_store(q: Tensor, k: Tensor, v: Tensor, rotation: Rotation, kv: Tensor, slots: Tensor) -> Tensor:
    """Rotate q [T, N, H], which is returned, and k [T, K, H], which goes to kv [2, B, K, P, H] at `slots` [T] with v.

    A slot is block * P + offset; below 0 it is nowhere: the padding of a captured batch.
    """
    tokens, heads, head_dim = q.shape
    kv_heads, block_size = k.shape[1], kv.shape[3]
    half = rotation.cos.shape[-1]
    assert kv.is_contiguous() and rotation.cos.is_contiguous() and rotation.sin.is_contiguous()
    assert all(t.stride()[1:] == (head_dim, 1) for t in (q, k, v))
    turned = q.new_empty(q.shape)
    half_pad = triton.next_power_of_2(half)
    tile = min(triton.next_power_of_2(heads), max(TILE_ELEMENTS // half_pad, 1))
    _rotate_and_store[(tokens, triton.cdiv(heads, tile) + triton.cdiv(kv_heads, tile))](
        q,
        k,
        v,
        rotation.cos,
        rotation.sin,
        slots,
        turned,
        kv[0],
        kv[1],
        q.stride(0),
        k.stride(0),
        v.stride(0),
        HEADS=heads,
        KV_HEADS=kv_heads,
        HEAD_DIM=head_dim,
        HEAD_PAD=triton.next_power_of_2(head_dim),
        BLOCK_SIZE=block_size,
        HALF=half,
        HALF_PAD=half_pad,
        IS_INTERLEAVED=rotation.interleaved,
        TILE=tile,
    )
    return turned


@triton.jit
def _rotate(
    source,
    target,
    heads,
    kept,
    source_stride: tl.constexpr,
    target_stride: tl.constexpr,
    cos,
    sin,
    HEAD_DIM: tl.constexpr,
    HEAD_PAD: tl.constexpr,
    HALF: tl.constexpr,
    HALF_PAD: tl.constexpr,
    IS_INTERLEAVED: tl.constexpr,
):
    """Rotate the heads [TILE, 1] that are `kept` from source to target; features behind the rotated are copied."""
    pairs = tl.arange(0, HALF_PAD)[None, :]
    first = 2 * pairs if IS_INTERLEAVED else pairs
    second = first + 1 if IS_INTERLEAVED else first + HALF
    loaded = kept & (pairs < HALF)
    a = tl.load(source + heads * source_stride + first, mask=loaded, other=0.0).to(tl.float32)
    b = tl.load(source + heads * source_stride + second, mask=loaded, other=0.0).to(tl.float32)
    c = tl.load(cos + pairs, mask=pairs < HALF, other=0.0)
    s = tl.load(sin + pairs, mask=pairs < HALF, other=0.0)
    dtype = target.dtype.element_ty
    tl.store(target + heads * target_stride + first, (a * c - b * s).to(dtype), mask=loaded)
    tl.store(target + heads * target_stride + second, (b * c + a * s).to(dtype), mask=loaded)
    if 2 * HALF < HEAD_DIM:
        features = tl.arange(0, HEAD_PAD)[None, :]
        copied = kept & (features >= 2 * HALF) & (features < HEAD_DIM)
        rest = tl.load(source + heads * source_stride + features, mask=copied)
        tl.store(target + heads * target_stride + features, rest, mask=copied)


@triton.jit
def _rotate_and_store(
    q,
    k,
    v,
    cos,
    sin,
    slots,
    turned,
    k_cache,
    v_cache,
    q_stride,
    k_stride,
    v_stride,
    HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    HEAD_PAD: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    HALF: tl.constexpr,
    HALF_PAD: tl.constexpr,
    IS_INTERLEAVED: tl.constexpr,
    TILE: tl.constexpr,
):
    """TILE heads of one token: first come the programs of the queries, then those of keys and values."""
    token, part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    members = tl.arange(0, TILE)[:, None]
    cos += token * HALF
    sin += token * HALF
    if part < tl.cdiv(HEADS, TILE):
        heads = part * TILE + members
        _rotate(
            q + token * q_stride,
            turned + token * HEADS * HEAD_DIM,
            heads,
            heads < HEADS,
            HEAD_DIM,
            HEAD_DIM,
            cos,
            sin,
            HEAD_DIM,
            HEAD_PAD,
            HALF,
            HALF_PAD,
            IS_INTERLEAVED,
        )
    else:
        heads = (part - tl.cdiv(HEADS, TILE)) * TILE + members
        slot = tl.load(slots + token).to(tl.int64)
        kept = (heads < KV_HEADS) & (slot >= 0)
        place = (slot // BLOCK_SIZE * KV_HEADS * BLOCK_SIZE + slot % BLOCK_SIZE) * HEAD_DIM
        _rotate(
            k + token * k_stride,
            k_cache + place,
            heads,
            kept,
            HEAD_DIM,
            BLOCK_SIZE * HEAD_DIM,
            cos,
            sin,
            HEAD_DIM,
            HEAD_PAD,
            HALF,
            HALF_PAD,
            IS_INTERLEAVED,
        )
        features = tl.arange(0, HEAD_PAD)[None, :]
        copied = kept & (features < HEAD_DIM)
        value = tl.load(v + token * v_stride + heads * HEAD_DIM + features, mask=copied)
        tl.store(v_cache + place + heads * BLOCK_SIZE * HEAD_DIM + features, value, mask=copied)


@triton.jit
def _relu(x):
    return tl.maximum(x, 0.0)


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


ACTIVATIONS = {
    Activation.GELU: _gelu,
    Activation.GELU_TANH: _gelu_tanh,
    Activation.RELU: _relu,
    Activation.SILU: _silu,
}


class FusedGate:
    """activation(gate) * up, of the output [gate | up] of one matrix product."""

    def __init__(self, activation: Activation):
        self._activation = ACTIVATIONS[activation]

    def __call__(self, gate_up: Tensor) -> Tensor:
        """[T, 2 F] → [T, F]."""
        assert gate_up.is_contiguous()
        tokens, width = gate_up.shape[0], gate_up.shape[1] // 2
        out = gate_up.new_empty(tokens, width)
        grid = (tokens, triton.cdiv(width, TILE_ELEMENTS))
        _gate[grid](gate_up, out, WIDTH=width, TILE=TILE_ELEMENTS, ACTIVATION=self._activation)
        return out


@triton.jit
def _gate(gate_up, out, WIDTH: tl.constexpr, TILE: tl.constexpr, ACTIVATION: tl.constexpr):
    """One tile of one row."""
    token = tl.program_id(0).to(tl.int64)
    features = tl.program_id(1) * TILE + tl.arange(0, TILE)
    real = features < WIDTH
    source = gate_up + token * (2 * WIDTH) + features
    gate = tl.load(source, mask=real, other=0.0).to(tl.float32)
    up = tl.load(source + WIDTH, mask=real, other=0.0).to(tl.float32)
    tl.store(out + token * WIDTH + features, (ACTIVATION(gate) * up).to(out.dtype.element_ty), mask=real)
