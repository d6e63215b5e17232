# mypy: disable-error-code="import-untyped, import-not-found, no-untyped-def, untyped-decorator"
"""What stands between the matrix products of a layer on an NVIDIA GPU, each in one Triton kernel.

Separate operators would read and write a step's activations once each, and a decode would wait longer for their
launches than for their work. Each of these does what the reference backend does in several:

* `FusedNorm`: residual addition, then LayerNorm (Ba et al. 2016, arXiv 1607.06450) or RMSNorm (Zhang and Sennrich 2019,
  arXiv 1910.07467);
* `fused_gate`: activation times gate (Shazeer 2020, arXiv 2002.05202).

Both compute in float32 and round once, to the dtype of their inputs. Left out: norms of a sum's delta (SANDWICH),
more than one delta, an activation without a gate, which is one operator already, and rotations, which are done on the
way into the cache (`kernels/rotate.py`).

Importing this module imports Triton, which a CPU server neither has nor needs. Not yet run on a GPU: the tests run the
kernels in Triton's interpreter and compile them for compute capability 9.0.

Shapes: T tokens, D model width, F local width of the mlp.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from server.arch.spec import Activation
from server.backends.protocol import Norm

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
        rows = x.reshape(-1, x.shape[-1])
        return self._launch(rows, None, None, None).view(x.shape)

    def add(self, x: Tensor, delta: Tensor, bias: Tensor | None = None) -> tuple[Tensor, Tensor]:
        total = torch.empty_like(x)
        return total, self._launch(x, delta, bias, total)

    def _launch(self, x: Tensor, delta: Tensor | None, delta_bias: Tensor | None, total: Tensor | None) -> Tensor:
        assert x.is_contiguous() and (delta is None or delta.is_contiguous())
        normed = torch.empty_like(x)
        padded = triton.next_power_of_2(x.shape[1])
        _add_norm[(len(x),)](
            x,
            delta,
            delta_bias,
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
    delta,
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
    """One row."""
    features = tl.arange(0, PADDED)
    real = features < SIZE
    offsets = tl.program_id(0).to(tl.int64) * SIZE + features
    value = tl.load(x + offsets, mask=real, other=0.0).to(tl.float32)
    if delta is not None:
        value += tl.load(delta + offsets, mask=real, other=0.0).to(tl.float32)
        if delta_bias is not None:
            value += tl.load(delta_bias + features, mask=real, other=0.0).to(tl.float32)
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


def fused_gate(activation: Activation, gate_up: Tensor) -> Tensor:
    """gate_up [T, 2 F], as [gate | up] → activation(gate) * up, [T, F]."""
    assert gate_up.is_contiguous()
    tokens, width = gate_up.shape[0], gate_up.shape[1] // 2
    out = gate_up.new_empty(tokens, width)
    grid = (tokens, triton.cdiv(width, TILE_ELEMENTS))
    _gate[grid](gate_up, out, WIDTH=width, TILE=TILE_ELEMENTS, ACTIVATION=ACTIVATIONS[activation])
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
