"""Linear layers, experts and norms on a CPU: by compiled kernels, or dense layers by oneDNN's where none were compiled.

A weight is stored once, in the kernels' own order (see `linear.cpp`), and serves one token as well as a prompt's
thousands. A result is bit for bit the same whatever else is in the step. What follows a product (bias, activation,
gate, residual) is done while its results are in registers. A mixture's experts are one call: the kernel reads where
each expert's tokens end, so that nothing is decided in Python and a decode step can be captured.

Shapes: T tokens, D input features, F output features, E experts.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from server.arch.spec import Activation
from server.backends.cpu.kernels import Function, Kernels
from server.backends.cpu.memory import Arena
from server.backends.protocol import Norm, Summand
from server.backends.reference.linear import StockFormat

# `Activation` of functions.h.
ACTIVATIONS: dict[Activation | None, int] = {
    None: 0,
    Activation.GELU: 1,
    Activation.GELU_TANH: 2,
    Activation.RELU: 3,
    Activation.SILU: 4,
    Activation.CLAMPED_SWIGLU: 5,
    Activation.RELU_SQUARED: 6,
    Activation.SIGMOID: 7,
}
LINE = 64  # bytes of a cache's line, of which a panel of codes has whole ones
PANEL_ROWS = 32  # rows of the weight that are stored together; the last panel is filled up with zeros


class Changes(NamedTuple):
    """What adapters make of a product."""

    table: int  # address of the layer's changes, by the rows in which adapters are (`Change` of adapters.h)
    rows: Tensor  # [T] int64, contiguous: the row of each token's adapter, 0 where it has none


class ExpertChanges(NamedTuple):
    """The same of the product of each expert with its tokens."""

    table: int  # [experts][num_rows]
    num_rows: int
    rows: Tensor


class PanelFormat:
    """A weight [F, D] that only the kernels can read; the original is not kept.

    is_gated: the weight is [gate | up], [2 F, D], and what comes out is activation(gate) * up, [T, F].
    """

    _weight: ctypes.Structure
    _panels: Tensor  # [N] uint8

    def __init__(self, kernels: Kernels, arena: Arena, weight: Tensor, *, is_gated: bool = False):
        rows, inputs = weight.shape
        weight = weight.contiguous()
        outputs = rows // 2 if is_gated else rows
        panel_outputs = PANEL_ROWS // 2 if is_gated else PANEL_ROWS
        row_bytes = -(-inputs * weight.itemsize // 4) * 4
        self._panels = arena.take(-(-outputs // panel_outputs) * PANEL_ROWS * row_bytes)
        self._weight = WeightFields(outputs, is_gated, self._panels.data_ptr(), inputs)
        self.address = ctypes.addressof(self._weight)  # of what the kernels know of this weight
        self.inputs, self.outputs = inputs, outputs
        self._linear = kernels.linear[weight.dtype]
        self._linear_to_f32 = kernels.linear_to_f32[weight.dtype]
        self.dtype = weight.dtype
        self._unpack = kernels.unpack[weight.dtype]
        self.grouped = kernels.grouped[weight.dtype]  # the kernel of experts in this format
        kernels.pack[weight.dtype](self.address, weight.data_ptr(), inputs, torch.get_num_threads())

    @property
    def nbytes(self) -> int:
        return self._panels.nbytes

    @property
    def is_gated(self) -> bool:
        """Whether the weight is [gate | up]."""
        return bool(self._weight.is_gated)

    @property
    def num_panels(self) -> int:
        """Of the weight."""
        return -(-self.outputs // (PANEL_ROWS // 2 if self.is_gated else PANEL_ROWS))

    @property
    def memory(self) -> Sequence[Tensor]:
        return [self._panels]

    def moved(self) -> None:
        self._weight.panels = self._panels.data_ptr()

    def __call__(
        self,
        x: Tensor,
        bias: Tensor | None,
        activation: Activation | None = None,
        residual: Tensor | None = None,
        changes: Changes | None = None,
    ) -> Tensor:
        """x [T, D] → activation(x @ weightᵀ + bias) + residual, [T, F], in x's dtype. residual: [T, F], contiguous."""
        out = x.new_empty(x.shape[0], self.outputs)
        return self._apply(self._linear, x, bias, activation, residual, out, changes)

    def finest(self, x: Tensor, bias: Tensor | None, changes: Changes | None = None) -> Tensor:
        """x [T, D] → x @ weightᵀ + bias, [T, F] float32, not rounded to x's dtype on the way."""
        out = torch.empty(x.shape[0], self.outputs, dtype=torch.float32)
        return self._apply(self._linear_to_f32, x, bias, None, None, out, changes)

    def _apply(
        self,
        function: Function,
        x: Tensor,
        bias: Tensor | None,
        activation: Activation | None,
        residual: Tensor | None,
        out: Tensor,
        changes: Changes | None,
    ) -> Tensor:
        x = x if x.is_contiguous() else x.contiguous()
        read, beside = self._read_by_kernel(x)
        function(
            self.address,
            read.data_ptr(),
            out.shape[0],
            *(address_of(tensor) for tensor in beside),
            address_of(bias),
            address_of(residual),
            out.data_ptr(),
            ACTIVATIONS[activation],
            *((None, None, None) if changes is None else (changes.table, changes.rows.data_ptr(), x.data_ptr())),
            _threads(),
        )
        return out

    def _read_by_kernel(self, x: Tensor) -> tuple[Tensor, Sequence[Tensor | None]]:
        """What the kernel reads of x [T, D], which is contiguous, and what it is told beside that."""
        return x, ()

    def rows(self, ids: Tensor) -> Tensor:
        """Rows ids [T] int64 of the weight, [T, D]: what an embedding does that shares the head's weight."""
        out = torch.empty(len(ids), self.inputs, dtype=self.dtype)
        self._unpack(self.address, ids.data_ptr(), len(ids), out.data_ptr(), _threads())
        return out


class KernelNorm(Norm):
    """LayerNorm (`is_centred`) or RMSNorm over the last dimension, alone or behind a residual addition."""

    def __init__(self, kernels: Kernels, weight: Tensor, bias: Tensor | None, eps: float, *, is_centred: bool):
        self._norm, self._norm_heads = kernels.norm, kernels.norm_heads
        self._weight = weight.float().contiguous()
        self._bias = None if bias is None else bias.float().contiguous()
        self._parameters = _Norm(self._weight.data_ptr(), address_of(self._bias), len(weight), eps, is_centred)
        self._at = ctypes.addressof(self._parameters)

    def __call__(self, x: Tensor) -> Tensor:
        """x [..., D] → normalised [..., D]."""
        x = x if x.is_contiguous() else x.contiguous()
        out = torch.empty_like(x)
        tokens = x.numel() // self._parameters.width
        self._norm[x.dtype](self._at, x.data_ptr(), None, None, None, None, out.data_ptr(), tokens, _threads())
        return out

    def add(self, x: Tensor, summand: Summand) -> tuple[Tensor, Tensor]:
        own = summand.norm
        if len(summand.deltas) > 1 or len(summand.biases) > 1 or not isinstance(own, KernelNorm | None):
            return super().add(x, summand)
        (delta,), bias = summand.deltas, next(iter(summand.biases), None)
        assert x.is_contiguous() and delta.is_contiguous()
        total, out = torch.empty_like(x), torch.empty_like(x)
        self._norm[x.dtype](
            self._at,
            x.data_ptr(),
            None if own is None else own._at,
            delta.data_ptr(),
            address_of(bias),
            total.data_ptr(),
            out.data_ptr(),
            x.shape[0],
            _threads(),
        )
        return total, out

    def normalise_heads(self, key_norm: Norm, heads: Tensor, kv_heads: int) -> Tensor:
        if not isinstance(key_norm, KernelNorm):
            return super().normalise_heads(key_norm, heads, kv_heads)
        heads = heads if heads.is_contiguous() else heads.contiguous()
        tokens, count, _ = heads.shape
        queries = count - 2 * kv_heads
        normalise = self._norm_heads[heads.dtype]
        normalise(self._at, key_norm._at, heads.data_ptr(), tokens, queries, kv_heads, _threads())
        return heads


def kernel_gate(kernels: Kernels, activation: Activation, gate_up: Tensor) -> Tensor:
    """activation(gate) * up, of the output [gate | up] of one matrix product: [T, 2 F] → [T, F]."""
    gate_up = gate_up if gate_up.is_contiguous() else gate_up.contiguous()
    tokens, width = gate_up.shape[0], gate_up.shape[1] // 2
    out = gate_up.new_empty(tokens, width)
    gate = kernels.gate[gate_up.dtype]
    gate(gate_up.data_ptr(), out.data_ptr(), tokens, width, ACTIVATIONS[activation], _threads())
    return out


# Tokens that the layout is chosen for: a decode batch. The choice makes no difference that could be measured.
TYPICAL_TOKENS = 32


class OneDnnFormat(StockFormat):
    """A weight [F, D] in the order in which oneDNN's kernels read it; the original is not kept.

    `F.linear` lets oneDNN rearrange a bfloat16 weight at every call, which costs more than the product itself when
    there are few tokens: at 1 to 32 tokens the packed weight is 1.4 to 2.6 times as fast, and never slower up to 3,200.
    """

    def __init__(self, weight: Tensor, *, is_gated: bool = False):
        super().__init__(is_gated=is_gated)
        self.nbytes = weight.nbytes
        self._packed = torch.ops.mkldnn._reorder_linear_weight(weight, TYPICAL_TOKENS)

    def product(self, x: Tensor, bias: Tensor | None) -> Tensor:
        product: Tensor = torch.ops.mkldnn._linear_pointwise(x, self._packed, bias, "none", [], "")
        return product


def onednn_packs(dtype: torch.dtype) -> bool:
    """Whether this build of torch packs weights of `dtype` on this processor.

    That is the check which the operator itself makes. It heeds what ONEDNN_MAX_CPU_ISA leaves of the processor: with
    AVX2 alone there is nothing for bfloat16.
    """
    if dtype != torch.bfloat16 or not torch.backends.mkldnn.is_available():
        return False
    return bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())


class WeightFields(ctypes.Structure):
    """`Weight` of linear.cpp."""

    _fields_ = (
        ("outputs", ctypes.c_long),
        ("is_gated", ctypes.c_long),
        ("panels", ctypes.c_void_p),
        ("inputs", ctypes.c_long),
        ("levels", ctypes.c_void_p),
    )


class _Norm(ctypes.Structure):
    """`Norm` of rows.cpp."""

    _fields_ = (
        ("weight", ctypes.c_void_p),
        ("bias", ctypes.c_void_p),
        ("width", ctypes.c_long),
        ("eps", ctypes.c_float),
        ("is_centred", ctypes.c_int),
    )


def address_of(tensor: Tensor | None) -> int | None:
    return None if tensor is None else tensor.data_ptr()


def _threads() -> int:
    return torch.get_num_threads()


class KernelExperts:
    """A `GroupedLinear` of panels that are all of one format."""

    def __init__(self, experts: Sequence[PanelFormat]):
        self.experts = experts
        self._table = (ctypes.c_void_p * len(experts))(*(expert.address for expert in experts))
        self._outputs = experts[0].outputs

    @property
    def nbytes(self) -> int:
        return sum(expert.nbytes for expert in self.experts)

    @property
    def memory(self) -> Sequence[Tensor]:
        return [tensor for expert in self.experts for tensor in expert.memory]

    def moved(self) -> None:
        for expert in self.experts:
            expert.moved()

    def __call__(
        self,
        x: Tensor,
        ends: Tensor,
        activation: Activation | None = None,
        bias: Tensor | None = None,
        changes: ExpertChanges | None = None,
    ) -> Tensor:
        """See `GroupedLinear`."""
        x = x if x.is_contiguous() else x.contiguous()
        out = x.new_empty(x.shape[0], self._outputs)
        self.experts[0].grouped(
            ctypes.addressof(self._table),
            len(self.experts),
            ends.data_ptr(),
            x.data_ptr(),
            address_of(bias),
            out.data_ptr(),
            ACTIVATIONS[activation],
            *((None, 0, None) if changes is None else (changes.table, changes.num_rows, changes.rows.data_ptr())),
            torch.get_num_threads(),
        )
        return out
