"""Attention by compiled kernels that read the cache's blocks in place.

Inside each block of the cache the order of the elements is the kernels' own (see `attention.cpp`), and so are the bits
of int8: what this backend writes, only it reads. A result is bit for bit the same whatever else is in the step, and
however a prompt is cut into chunks. What the kernels cannot read (`can_read`) goes to stock operators.

Shapes: T tokens, S sequences, N local heads, K local kv heads, H head dim, B blocks, P tokens per block,
r rotated features of a head.
"""

from __future__ import annotations

import ctypes
from collections.abc import Mapping

import torch
from torch import Tensor

from server.backends.cpu.kernels import Kernels
from server.backends.protocol import Rotation, Scores, StepMeta, split_heads
from server.backends.reference.attention import BatchedAttention, StoringAttention
from server.quantisation.kv import AS_COMPUTED, Float8E4M3, Float8E5M2, Int8, KvFormat


class _Scores(ctypes.Structure):
    """`Scores` of attention.cpp."""

    _fields_ = (
        ("scale", ctypes.c_float),
        ("cap", ctypes.c_float),
        ("slopes", ctypes.c_void_p),
        ("bias", ctypes.c_void_p),
        ("reach", ctypes.c_long),
        ("sinks", ctypes.c_void_p),
        ("chunk", ctypes.c_long),
    )


class _Cache(ctypes.Structure):
    """`Cache` of codes.h."""

    _fields_ = (("kind", ctypes.c_int), ("key_scale", ctypes.c_float), ("value_scale", ctypes.c_float))


# `Kind` of codes.h.
KINDS: Mapping[str, int] = {AS_COMPUTED.name: 0, Int8.name: 1, Float8E4M3.name: 2, Float8E5M2.name: 3}


class KernelAttention(StoringAttention):
    """Softmax attention over the paged cache, with biases, sinks, windows, capped scores and shared kv heads."""

    def __init__(self, kernels: Kernels, scores: Scores, cache: KvFormat = AS_COMPUTED):
        self._kernels = kernels
        self._stock = BatchedAttention(scores, cache)
        self._rank = scores.rank
        self._cache = _Cache(KINDS[cache.name], *cache.scales)
        self._cache_at = ctypes.addressof(self._cache)
        self._slopes = torch.tensor(scores.slopes)
        self._bias = torch.empty(0, 1) if scores.bias is None else scores.bias.float().contiguous()
        self._sinks = torch.empty(0) if scores.sinks is None else scores.sinks.float().contiguous()
        self._scores = _Scores(
            scores.scale,
            scores.cap,
            self._slopes.data_ptr() if scores.slopes else None,
            None if scores.bias is None else self._bias.data_ptr(),
            self._bias.shape[1] // 2,
            None if scores.sinks is None else self._sinks.data_ptr(),
            scores.chunk,
        )
        self._scores_at = ctypes.addressof(self._scores)

    def write(self, kv: Tensor, k: Tensor, v: Tensor, meta: StepMeta) -> None:
        if not can_read(k.dtype, k.shape[2]):
            return self._stock.write(kv, k, v, meta)
        self._write(kv, _with_whole_heads(k), _with_whole_heads(v), meta)

    def _write(self, kv: Tensor, k: Tensor, v: Tensor | None, meta: StepMeta) -> None:
        blocks, kv_heads, head_dim = kv.shape[1], kv.shape[2], k.shape[2]
        self._kernels.write[k.dtype](
            self._cache_at,
            kv.data_ptr(),
            blocks,
            k.data_ptr(),
            None if v is None else v.data_ptr(),
            k.stride(0),
            0 if v is None else v.stride(0),
            meta.slots.data_ptr(),
            len(k),
            kv_heads,
            head_dim,
            torch.get_num_threads(),
        )

    def rotate_and_write(self, heads: Tensor, kv: Tensor, rotation: Rotation | None, meta: StepMeta) -> Tensor:
        kv_heads = kv.shape[2]
        if self._rank:
            return self._rotate_and_write_keys(heads, kv, rotation, meta)
        if rotation is not None:
            rotate(self._kernels, rotation, heads[:, :-kv_heads])
        q, k, v = split_heads(heads, kv_heads)
        self.write(kv, k, v, meta)
        return q

    def _rotate_and_write_keys(self, heads: Tensor, kv: Tensor, rotation: Rotation | None, meta: StepMeta) -> Tensor:
        """Of heads [T, N + K, H], whose keys have their values in them."""
        if not can_read(heads.dtype, heads.shape[2], self._rank):
            return self._stock.rotate_and_write(heads, kv, rotation, meta)
        if rotation is not None:
            rotate(self._kernels, rotation, heads, self._rank)
        self._write(kv, heads[:, -kv.shape[2] :], None, meta)
        return heads[:, : -kv.shape[2]]

    def rotated(self, q: Tensor, rotation: Rotation) -> Tensor:
        rotate(self._kernels, rotation, q)
        return q

    def attend(self, q: Tensor, kv: Tensor, meta: StepMeta, window: int) -> Tensor:
        blocks, kv_heads, head_dim = kv.shape[1], kv.shape[2], q.shape[2]
        if not can_read(q.dtype, head_dim, self._rank):
            return self._stock.attend(q, kv, meta, window)
        q = _with_whole_heads(q)
        out = q.new_empty(*q.shape[:2], self._rank or head_dim)
        sequences = len(meta.block_tables)
        # Where all decode, sequence s owns token s.
        starts = None if sequences == meta.num_decodes else meta.starts.long()
        self._kernels.attend[q.dtype](
            self._scores_at,
            self._cache_at,
            q.data_ptr(),
            q.stride(0),
            kv.data_ptr(),
            blocks,
            out.data_ptr(),
            meta.positions.data_ptr(),
            meta.visible.data_ptr(),
            meta.block_tables.data_ptr(),
            meta.block_tables.stride(0),
            None if starts is None else starts.data_ptr(),
            sequences,
            q.shape[1],
            kv_heads,
            head_dim,
            self._rank,
            window,
            torch.get_num_threads(),
        )
        return out


def rotate(kernels: Kernels, rotation: Rotation, heads: Tensor, first: int = 0) -> None:
    """Rotate the features from `first` on of every head of heads [T, n, H] in place; a token's heads lie in one run.

    Queries and keys that stand side by side, as a projection leaves them, are rotated together.
    """
    tokens, count, head_dim = heads.shape
    assert heads.stride(2) == 1 and heads.stride(1) == head_dim
    kernels.rotate[heads.dtype](
        heads.data_ptr() + first * heads.itemsize,
        heads.stride(0),
        rotation.cos.data_ptr(),
        rotation.sin.data_ptr(),
        tokens,
        count,
        head_dim,
        rotation.cos.shape[-1],
        rotation.interleaved,
        torch.get_num_threads(),
    )


def can_read(dtype: torch.dtype, head_dim: int, rank: int = 0) -> bool:
    """Whether the kernels compute with such heads: pairs of bfloat16 share a word. rank: see `Scores`."""
    return dtype == torch.float32 or (dtype == torch.bfloat16 and head_dim % 2 == rank % 2 == 0)


def _with_whole_heads(x: Tensor) -> Tensor:
    """x [T, heads, H] with a token's heads in one run, as the slices of a projection have them."""
    return x if x.stride(2) == 1 and x.stride(1) == x.shape[2] else x.contiguous()
