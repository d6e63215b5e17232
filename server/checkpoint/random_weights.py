"""Random weights in place of a checkpoint, for speed on hardware before a model is downloaded.

Whatever a layer asks for is made up at once: dense numbers are pieces of one random block, so that a large model is
made as fast as memory can be written, and of a quantised layer codes are random bits, while scales are such that its
weights are about as large as the dense ones: activations stay finite through any number of layers. Left out: weights
that mean anything.

Shapes: F output features, D input features.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from server.blocks import ceil_divide
from server.checkpoint.formats.protocol import FLOATS, NOWHERE_ELSE
from server.quantisation.sizes import Storage

LARGEST = 0.05  # of a weight's magnitudes, dense or quantised
# Tensors that a quantised layer may lack, and these do: order of inputs, zeros of symmetric codes, scales of scales.
LACKED = (
    ".g_idx",
    ".weight_g_idx",
    ".weight_zero_point",
    ".input_zero_point",
    ".nested_absmax",
    ".weight_format",
    "._weight_act_pre_scale",
    "._weight_act_quant_scale",
    "._weight_act_quant_zero_point",
)
# What 8-bit inputs are multiplied by where that is fixed: numbers up to 6, which is what norms let through.
INPUT_SCALE = 6 / 127
EXPONENT = 127 - 7  # of a scale of microscaled weights: 2^-7
NO_STATE = b"{}"  # of bitsandbytes, in JSON: everything is as usual


class RandomCheckpoint:
    """A checkpoint in which every tensor exists and is random.

    dtype: of dense numbers; storage: of the layers that are quantised; None: all are dense.
    """

    folder = Path("random weights")

    def __init__(self, dtype: torch.dtype, storage: Storage | None = None) -> None:
        source = torch.Generator().manual_seed(0)  # the same model at each start, whose keys and values can be kept
        self._block = torch.empty(1 << 20, dtype=dtype).uniform_(-LARGEST, LARGEST, generator=source)
        self._bytes = torch.randint(0, 256, (1 << 20,), dtype=torch.uint8, generator=source)
        self.storage = storage

    def __contains__(self, name: str) -> bool:
        if self.storage is not None and not self.storage.is_packed and name.endswith(".weight_packed"):
            return False
        return not name.endswith(LACKED)

    def of_layer(self, size: tuple[int, int]) -> RandomLayer:
        """The same for a quantised layer of size (outputs, inputs)."""
        assert self.storage is not None, "only where layers are quantised"
        return RandomLayer(self, self.storage, size)

    def read(
        self,
        name: str,
        shape: tuple[int, ...],
        *,
        dim: int = 0,
        part: tuple[int, int] | None = None,
        within: Mapping[int, tuple[int, int]] = NOWHERE_ELSE,
        dtypes: Sequence[torch.dtype] = FLOATS,
        dtype: torch.dtype | None = None,
        mapped: bool = False,
    ) -> Tensor:
        """A random tensor of the shape of what `Checkpoint.read` would return: of any bits, where it is no number."""
        parts = dict(within) if part is None else {**within, dim: part}
        size = [stop - start for start, stop in (parts.get(d, (0, n)) for d, n in enumerate(shape))]
        count, stored = math.prod(size), self._block.dtype if self._block.dtype in dtypes else dtypes[0]
        if stored in FLOATS:
            return _repeated(self._block.to(dtype or stored), count).view(size)
        bits = _repeated(self._bytes, count * stored.itemsize)
        if stored == torch.float8_e4m3fn:
            bits = bits & 0b1011_1111  # below 2 and never NaN
        return bits.view(stored).view(size)

    def leftovers(self, ignore: tuple[str, ...]) -> list[str]:
        """Nothing: there is no tensor that could be left over."""
        return []

    def zeros(self, patterns: Sequence[str]) -> list[str]:
        """Nothing, likewise."""
        return []


@dataclass(frozen=True)
class RandomLayer:
    """The tensors of one quantised layer of random weights. size: (F, D)."""

    checkpoint: RandomCheckpoint
    storage: Storage
    size: tuple[int, int]

    def __contains__(self, name: str) -> bool:
        return name in self.checkpoint

    def shape_of(self, name: str) -> tuple[int, ...]:
        """Of a tensor that may have several shapes: a scale for each row and group, text without anything, or one."""
        if ".quant_state." in name:
            return (len(NO_STATE),)
        if name.endswith(".weight_scale"):
            outputs, inputs = self.size
            return outputs, self.storage.num_groups(inputs)
        return ()

    def note_of(self, name: str) -> str:
        """That all is as usual."""
        return ""

    def read(
        self,
        name: str,
        shape: tuple[int, ...],
        *,
        dim: int = 0,
        part: tuple[int, int] | None = None,
        dtypes: Sequence[torch.dtype] = FLOATS,
        mapped: bool = False,
    ) -> Tensor:
        """A tensor as `RandomCheckpoint.read` makes it, or what stands for numbers of a sensible size."""
        if ".quant_state." in name:
            return torch.tensor(list(NO_STATE), dtype=torch.uint8)
        drawn = self.checkpoint.read(name, shape, dim=dim, part=part, dtypes=dtypes)
        make = next((make for end, make in NUMBERS.items() if name.endswith(end)), None)
        return drawn if make is None else make(drawn, self.storage)


def _scales(drawn: Tensor, storage: Storage) -> Tensor:
    """From 1/2 to 3/2 of what makes the largest code the largest weight, in 16 bits as formats have them."""
    if drawn.dtype == torch.uint8:  # exponents of powers of 2
        return torch.full_like(drawn, EXPONENT)
    return _largest(drawn.float(), storage).div_(_most(storage)).half().to(drawn.dtype)


def _scales_of_bytes(drawn: Tensor, storage: Storage) -> Tensor:
    """The same, in as many bits as plans count."""
    scales = _largest(drawn.float(), storage).div_(_most(storage))
    return scales.half().float() if storage.scale_bytes == 2 else scales


def _most(storage: Storage) -> float:
    """The magnitude of the largest code, about."""
    return 2.0 if storage.is_float else 2.0 ** (storage.bits - 1)


def _codes(drawn: Tensor, storage: Storage) -> Tensor:
    """Signed codes of so few bits as they have, in bytes."""
    return drawn >> 4 if storage.bits == 4 and drawn.dtype == torch.int8 else drawn


def _largest(drawn: Tensor, storage: Storage) -> Tensor:
    """From 1/2 to 3/2 of the largest weight."""
    return (drawn.float() / (2 * LARGEST) + 1).mul_(LARGEST).to(drawn.dtype)


def _zeros(drawn: Tensor, storage: Storage) -> Tensor:
    """Symmetric codes; or what weights are raised by, where inputs stay as they are for that."""
    return drawn if storage.has_exact_inputs else torch.zeros_like(drawn)


def _one(drawn: Tensor, storage: Storage) -> Tensor:
    return torch.ones_like(drawn)


def _levels(drawn: Tensor, storage: Storage) -> Tensor:
    return torch.linspace(-1, 1, drawn.numel())


def _input_scale(drawn: Tensor, storage: Storage) -> Tensor:
    return torch.full_like(drawn, INPUT_SCALE)


# By the end of a tensor's name.
NUMBERS: Mapping[str, Callable[[Tensor, Storage], Tensor]] = {
    ".scales": _scales,
    ".weight_scale": _scales,
    "._weight_scale": _scales_of_bytes,
    "._weight_qdata": _codes,
    "._weight_zero_point": _zeros,
    ".weight_scale_2": _one,
    ".weight_global_scale": _one,
    ".weight_scale_inv": _scales,
    ".absmax": _largest,
    ".SCB": _largest,
    ".quant_map": _levels,
    ".input_scale": _input_scale,
}


def _repeated(block: Tensor, count: int) -> Tensor:
    """So many elements, the block's over and over."""
    return block.repeat(ceil_divide(count, block.numel()))[:count]
