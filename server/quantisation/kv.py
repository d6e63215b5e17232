"""How a KV cache stores keys and values: as they are computed, or in a byte for each number.

A row is one token's key, or value, of one kv head; a cache of one part has keys alone. A format says how many elements
a row takes, and how rows are written and read in stock operators, which defines correct: quantise on writing,
dequantise on reading. What a row is stored as depends on nothing but the row, so that neither neighbours nor the number
of ranks change it. Nothing that is stored stands for NaN or infinity: a weight of zero must silence whatever a slot
holds, were it written by an adapter that somebody made for that.

int8 has one scale for each row, because nothing is known of later tokens when the first is stored. The scales are
bfloat16, which has float32's range: in float16, those of rows below 0.008 would lose bits. float8 (Micikevicius et al.
2022, arXiv 2209.05433) has scales only where a checkpoint brings them, one for a layer's keys and one for its values.

Left out: fewer than 8 bits, and what kernels do instead of this (`server/backends/`).

Shapes: T tokens, K local kv heads, H head dim, B blocks, P tokens per block, W elements that a row takes.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

SCALE_BYTES = 2  # of a row in int8
LARGEST_INT8 = 127.0  # -128 would have no opposite
MOST_COMPUTED = 2.0**64  # larger numbers are taken for it, so that products with a query's are finite too
MOST_INT8 = 2.0**127  # larger numbers are taken for it, so that what is read stays finite in bfloat16


@dataclass(frozen=True)
class KvFormat(ABC):
    """One way of storing rows.

    scales: of a layer's keys and of its values, by which they are divided before they are stored.
    """

    name: ClassVar[str]  # as `--kv-cache-dtype` has it
    scales: tuple[float, float] = (1.0, 1.0)

    @abstractmethod
    def stored(self, computed: torch.dtype) -> torch.dtype:
        """The dtype of the cache's elements, for a model that computes in `computed`."""

    def width(self, head_dim: int) -> int:
        """Elements that a row takes."""
        return head_dim

    @abstractmethod
    def write(self, kv: Tensor, k: Tensor, v: Tensor | None, slots: Tensor) -> None:
        """Store k and v [T, K, H] in kv [2, B, K, P, W], or k alone in [1, …], at `slots` [T], block * P + offset."""

    @abstractmethod
    def expand(self, raw: Tensor, head_dim: int, part: int) -> Tensor:
        """What blocks hold: raw [..., P * W] → [..., P, H]. part: 0 for keys, 1 for values."""


class AsComputed(KvFormat):
    """Rows in the model's own dtype."""

    name = "auto"

    def stored(self, computed: torch.dtype) -> torch.dtype:
        return computed

    def write(self, kv: Tensor, k: Tensor, v: Tensor | None, slots: Tensor) -> None:
        parts, _, kv_heads, block_size, head_dim = kv.shape
        heads = torch.arange(kv_heads, device=kv.device)
        first = slots // block_size * kv_heads * block_size + slots % block_size  # [T], of the first kv head
        rows = first.unsqueeze(1) + heads * block_size  # [T, K]
        most = min(MOST_COMPUTED, torch.finfo(kv.dtype).max)
        for flat, x in zip(kv.view(parts, -1, head_dim), _given(k, v), strict=True):
            flat.index_copy_(0, rows.flatten(), x.flatten(0, 1).nan_to_num(0.0).clamp_(-most, most))

    def expand(self, raw: Tensor, head_dim: int, part: int) -> Tensor:
        return raw.unflatten(-1, (-1, head_dim))


class Float8(KvFormat):
    """Rows in one of the two kinds of float8, saturated at its largest number."""

    kind: ClassVar[torch.dtype]

    def stored(self, computed: torch.dtype) -> torch.dtype:
        return torch.uint8  # which every operator takes

    def write(self, kv: Tensor, k: Tensor, v: Tensor | None, slots: Tensor) -> None:
        for rows, x, scale in zip(kv, _given(k, v), self.scales, strict=False):
            _put(rows, slots, saturated(x.float() / scale, self.kind).view(torch.uint8))

    def expand(self, raw: Tensor, head_dim: int, part: int) -> Tensor:
        return raw.view(self.kind).float().unflatten(-1, (-1, head_dim)) * self.scales[part]


class Float8E4M3(Float8):
    """4 bits of exponent and 3 of mantissa: up to 448."""

    name, kind = "fp8_e4m3", torch.float8_e4m3fn


class Float8E5M2(Float8):
    """5 bits of exponent and 2 of mantissa: up to 57344."""

    name, kind = "fp8_e5m2", torch.float8_e5m2


class Int8(KvFormat):
    """Rows in int8 with a scale each. In a block, the codes of all its tokens come first, then their scales."""

    name = "int8"

    def stored(self, computed: torch.dtype) -> torch.dtype:
        return torch.uint8

    def width(self, head_dim: int) -> int:
        return head_dim + SCALE_BYTES

    def write(self, kv: Tensor, k: Tensor, v: Tensor | None, slots: Tensor) -> None:
        head_dim = k.shape[-1]
        for blocks, x in zip(kv, _given(k, v), strict=True):
            codes, scales = _row_codes(x)
            stored_codes, stored_scales = self._split(blocks.flatten(2), head_dim)
            _put(stored_codes, slots, codes)
            _put(stored_scales, slots, scales)

    def expand(self, raw: Tensor, head_dim: int, part: int) -> Tensor:
        codes, scales = self._split(raw, head_dim)
        return codes.float() * scales.float().unsqueeze(-1)

    def _split(self, raw: Tensor, head_dim: int) -> tuple[Tensor, Tensor]:
        """Views of blocks [..., P * W]: codes [..., P, H] in int8, scales [..., P] in bfloat16."""
        block_size = raw.shape[-1] // self.width(head_dim)
        codes, scales = raw.split([block_size * head_dim, block_size * SCALE_BYTES], dim=-1)
        return codes.view(torch.int8).unflatten(-1, (block_size, head_dim)), scales.view(torch.bfloat16)


AS_COMPUTED = AsComputed()
KV_FORMATS: Mapping[str, KvFormat] = {f.name: f for f in (AS_COMPUTED, Float8E4M3(), Float8E5M2(), Int8())}


def _given(k: Tensor, v: Tensor | None) -> tuple[Tensor, ...]:
    return (k,) if v is None else (k, v)


def _row_codes(x: Tensor) -> tuple[Tensor, Tensor]:
    """x [..., H] → codes [..., H] in int8 and scales [...] in bfloat16, of which the product is nearest to x."""
    x = x.float().nan_to_num(0.0).clamp(-MOST_INT8, MOST_INT8)
    scales = (x.abs().amax(dim=-1) / LARGEST_INT8).to(torch.bfloat16)
    divided = x / scales.float().clamp(min=torch.finfo(torch.float32).tiny).unsqueeze(-1)
    return divided.round().clamp(-LARGEST_INT8, LARGEST_INT8).to(torch.int8), scales


def saturated(x: Tensor, kind: torch.dtype) -> Tensor:
    """x in the given float8, the nearest number that it has; NaN becomes 0."""
    largest = torch.finfo(kind).max
    return x.nan_to_num(0.0, largest, -largest).clamp(-largest, largest).to(kind)


def _put(target: Tensor, slots: Tensor, x: Tensor) -> None:
    """Put x [T, K, ...] at `slots` [T] of target [B, K, P, ...]."""
    block_size = target.shape[2]
    target[slots // block_size, :, slots % block_size] = x
