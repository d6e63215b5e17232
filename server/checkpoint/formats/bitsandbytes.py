"""Checkpoints of bitsandbytes: 4-bit codes of a table (QLoRA, Dettmers et al. 2023, arXiv 2305.14314), and int8.

Of a layer [F, D], in blocks of 64 numbers that follow one another:

    weight                                [F D / 2, 1] uint8    two codes in a byte, the first in the high half; the
                                                                bytes may be those of wider numbers (`…_quant_storage`)
    weight.absmax                         [blocks]              the largest magnitude of each, float32 or codes
    weight.quant_map                      [16] float32          what a code stands for, times that
    weight.nested_absmax, nested_quant_map                      what those 8 bits stand for, in blocks of 256
    weight.quant_state.bitsandbytes__nf4  uint8                 JSON: blocksize, shape, nested_offset; or …__fp4

    weight [F, D] int8, SCB [F] float32                         int8: a row's largest magnitude; 127 stands for it
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from server.checkpoint.formats.protocol import Format, FormatError, Part, Ranges, Tensors, covering, finite
from server.quantisation import exclusions
from server.quantisation.configs import LEAST_GROUP, MOST_GROUP, Budget, shown, whole_number
from server.quantisation.stored import QuantisedWeight

MOST_STATE = 1 << 16  # bytes of a state, which has a few hundred
KINDS = ("nf4", "fp4")
LAYOUTS = {1: "col32", 2: "col_turing", 3: "col_ampere"}  # of int8, by number; 0: rows
STORED = {"uint8": torch.uint8, "int8": torch.int8, "float16": torch.float16, "bfloat16": torch.bfloat16,
          "float32": torch.float32, "float64": torch.float64}  # fmt: skip
STATES = {kind: f"weight.quant_state.bitsandbytes__{kind}" for kind in KINDS}


class BitsAndBytesFormat(Format):
    """config: `quantization_config`, which the tensors must agree with. Raises FormatError for what is not served."""

    name = "bitsandbytes"

    def __init__(self, config: Mapping[str, Any], budget: Budget):
        self._is_int8 = bool(config.get("load_in_8bit") or config.get("_load_in_8bit"))
        storage = str(config.get("bnb_4bit_quant_storage") or "uint8")
        if storage.removeprefix("torch.") not in STORED and not self._is_int8:
            raise FormatError(
                f"`bnb_4bit_quant_storage` {shown(storage)} of a bitsandbytes checkpoint is not served: "
                f"{', '.join(STORED)} are"
            )
        self._kind = config.get("bnb_4bit_quant_type")  # older files name none
        if self._kind not in (None, *KINDS) and not self._is_int8:
            raise FormatError(
                f"`bnb_4bit_quant_type` {shown(self._kind)} of a bitsandbytes checkpoint is not served: "
                f"{' and '.join(KINDS)} are, take another checkpoint of this model"
            )
        self.exclusions = exclusions.of_config(config, self.name, budget)

    def has(self, tensors: Tensors) -> bool:
        return tensors.has("SCB") if self._is_int8 else any(map(tensors.has, STATES.values()))

    def read(self, tensors: Tensors, part: Part) -> QuantisedWeight:
        if self._is_int8:
            return _int8(tensors, part)
        if self._kind is not None and not tensors.has(STATES[self._kind]):
            found = next(kind for kind, state in STATES.items() if tensors.has(state))
            raise FormatError(
                f"{tensors.name} is stored as {found}, and `bnb_4bit_quant_type` in config.json says {self._kind}: "
                "they do not belong together, download both again"
            )
        return _four_bits(tensors, part)


def _int8(tensors: Tensors, part: Part) -> QuantisedWeight:
    codes = tensors.read_box("weight", part.size, (torch.int8,), part.rows, [part.columns])
    largest = tensors.read_ranges("SCB", (part.size[0],), (torch.float32, torch.float16), 0, part.rows)
    if tensors.has("weight_format"):
        shape = tensors.shape("weight_format")
        if shape not in ((), (1,)):
            raise FormatError(
                f"{tensors.name}.weight_format has shape {list(shape)}, and must be one number: the checkpoint is "
                "damaged, download it again"
            )
        layout = tensors.read("weight_format", shape, (torch.uint8, torch.int8, torch.int64))
        if not layout.is_meta and layout.any():
            found = LAYOUTS.get(int(layout), str(int(layout)))
            raise FormatError(
                f"the codes of {tensors.name} lie in tiles ({found}, by its `weight_format`), and only rows are "
                "served: save the model anew with bitsandbytes 0.45 or newer"
            )
    scale = finite(tensors, "SCB", largest).reshape(-1, 1) / 127
    return part.weight(codes.contiguous(), 8, scale, torch.zeros(codes.shape[1], dtype=torch.int64))


def _four_bits(tensors: Tensors, part: Part) -> QuantisedWeight:
    outputs, inputs = part.size
    state = next((_state(tensors, name) for name in STATES.values() if tensors.has(name)), {})
    block = _block(tensors, state, "blocksize", 64)
    group = math.gcd(block, inputs)  # a block may go on in the next row
    if group < LEAST_GROUP or inputs % 2:
        raise FormatError(
            f"{tensors.name} has {inputs} inputs, an odd number or one that shares no factor of {LEAST_GROUP} or more "
            f"with its blocks of {block}: such a layer must be left as it is"
        )
    if state.get("shape", list(part.size)) != list(part.size):
        raise FormatError(
            f"`shape` in the quant_state of {tensors.name} must be {list(part.size)}, as config.json says. Given: "
            f"{shown(state['shape'])}; download both again"
        )
    row_bytes = inputs // 2
    data = _bytes(tensors, outputs * row_bytes, [(start * row_bytes, stop * row_bytes) for start, stop in part.rows])
    codes = torch.stack([data >> 4, data & 15], dim=-1).reshape(-1, inputs)[:, slice(*part.columns)].contiguous()
    kept, of_input = part.groups_of(group)
    largest = _largest(tensors, state, -(-outputs * inputs // block)).repeat_interleave(block // group)
    largest = largest[: outputs * inputs // group].reshape(outputs, -1)
    scale = torch.cat([largest[slice(*rows)] for rows in part.rows])[:, kept]
    return part.weight(codes, 4, scale, of_input, levels=_floats(tensors, "weight.quant_map", 16))


def _state(tensors: Tensors, suffix: str) -> dict[str, Any]:
    shape = tensors.shape(suffix)
    if len(shape) != 1 or shape[0] > MOST_STATE:
        raise FormatError(
            f"{tensors.name}.{suffix} has shape {list(shape)}, and must be {MOST_STATE} bytes at most one after the "
            "other: the checkpoint is damaged, download it again"
        )
    try:
        state = json.loads(bytes(tensors.read(suffix, shape, (torch.uint8,)).tolist()))
    except (ValueError, RecursionError):
        state = None
    if not isinstance(state, dict):
        raise FormatError(f"{tensors.name}.{suffix} is not JSON: the checkpoint is damaged, download it again")
    return state


def _block(tensors: Tensors, state: Mapping[str, Any], key: str, usual: int) -> int:
    """How many numbers follow one another in a block."""
    block = state.get(key, usual)
    if not whole_number(block, LEAST_GROUP, MOST_GROUP):
        raise FormatError(
            f"`{key}` in the quant_state of {tensors.name} must be a whole number from {LEAST_GROUP} to {MOST_GROUP}. "
            f"Given: {shown(block)}; the checkpoint is damaged, download it again"
        )
    return int(block)


def _offset(tensors: Tensors, state: Mapping[str, Any]) -> float:
    """What is added to the largest magnitudes that are stored in 8 bits."""
    offset = state.get("nested_offset", 0.0)
    most = torch.finfo(torch.float32).max
    if not isinstance(offset, int | float) or isinstance(offset, bool) or not -most <= offset <= most:
        raise FormatError(
            f"`nested_offset` in the quant_state of {tensors.name} must be a finite number. Given: {shown(offset)}; "
            "the checkpoint is damaged, download it again"
        )
    return float(offset)


def _floats(tensors: Tensors, suffix: str, count: int) -> Tensor:
    """[count] float32, all finite."""
    return finite(tensors, suffix, tensors.read(suffix, (count,), (torch.float32,)))


def _bytes(tensors: Tensors, count: int, ranges: Ranges) -> Tensor:
    """Ranges of the bytes of all codes, which are stored as numbers of any dtype."""
    stored = math.prod(tensors.shape("weight"))
    size = next((dtype.itemsize for dtype in STORED.values() if stored * dtype.itemsize == count), 1)
    dtypes = [dtype for dtype in STORED.values() if dtype.itemsize == size]
    found = []
    for bounds in ranges:
        (first, last), inside = covering(bounds, size, count)
        numbers = tensors.read("weight", (count // size, 1), dtypes, part=(first // size, last // size))
        found.append(numbers.view(torch.uint8).flatten()[inside])
    return torch.cat(found)


def _largest(tensors: Tensors, state: Mapping[str, Any], count: int) -> Tensor:
    """The largest magnitude of each block [count] float32."""
    if not tensors.has("weight.nested_absmax"):
        return _floats(tensors, "weight.absmax", count)
    codes = tensors.read("weight.absmax", (count,), (torch.uint8,))
    block = _block(tensors, state, "nested_blocksize", 256)
    scale = _floats(tensors, "weight.nested_absmax", -(-count // block))
    levels = _floats(tensors, "weight.nested_quant_map", 256)
    largest = levels[codes.long()] * scale[torch.arange(count) // block] + _offset(tensors, state)
    return finite(tensors, "weight.absmax", largest)
