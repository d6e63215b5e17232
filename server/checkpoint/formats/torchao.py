"""Checkpoints of torchao whose weights alone are in fewer bits, as transformers 5 saves them.

Of a layer [F, D] with G groups of inputs, by the class of its tensor (`server/quantisation/torchao.py`):

    _weight_qdata      [F, D] int8               Int8Tensor, and IntxUnpackedToInt8Tensor for codes of 1 to 8 bits
                       [F, D] float8_e4m3fn      Float8Tensor
                       [F, D / 2] int8           Int4Tensor: two signed codes in a byte, the first in the low half
                       [F, D / 8] int32          Int4PlainInt32Tensor: eight codes without a sign, by inputs
    _weight_scale      [F, G] or [1, 1]; [G, F] of the two classes for 4 bits
    _weight_zero_point as scales are: the codes of 0, int8; of Int4Tensor, what codes times scales are raised by

A note in JSON among the metadata of the file, under the name that the dense weight had, says of which class it is. It
is missed where transformers renames a tensor on saving, as GPT-NeoX's head, and not its note. Left out: rounded inputs,
and scales for inputs.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from server.checkpoint.formats.protocol import (
    FLOATS,
    Format,
    FormatError,
    Part,
    Tensors,
    covering,
    finite,
    numbers_of_float8,
    refuse_undivided,
    rows_of_all,
)
from server.quantisation import exclusions
from server.quantisation.configs import Budget, shown
from server.quantisation.packing import Codes, packed_inputs
from server.quantisation.stored import QuantisedWeight
from server.quantisation.torchao import Layout, layout_of, plain

APART = "do not belong together, download both again"
RAISED = 8  # what is added to signed codes of 4 bits, so that they are from 0 on
IN_WORD = 8  # codes of 4 bits
OF_INPUTS = ("_weight_act_pre_scale", "_weight_act_quant_scale", "_weight_act_quant_zero_point")
# Of a note: what of them, beside null, leaves inputs as they are.
NOTES_OF_INPUTS = {"act_quant_kwargs": None, "activation_quantization": None, "activation_dtype": "bfloat16"}


class TorchaoFormat(Format):
    """config: `quantization_config`. Raises FormatError for what is not served."""

    name = "torchao"

    def __init__(self, config: Mapping[str, Any], budget: Budget):
        self._layout = layout_of(config)
        self.exclusions = exclusions.of_config(config, self.name, budget)

    def has(self, tensors: Tensors) -> bool:
        return tensors.has("_weight_qdata")

    def read(self, tensors: Tensors, part: Part) -> QuantisedWeight:
        layout, inputs = self._layout, part.size[1]
        _refuse_other_note(tensors, layout)
        refuse_undivided(tensors, inputs, layout.group, f"config.json and weights {APART}")
        kept, of_input = part.groups_of(layout.group)
        codes = _codes(tensors, part, layout)
        scale = _of_groups(tensors, "_weight_scale", part, layout, FLOATS)
        zero = _zero(tensors, part, layout, scale)
        zero = None if zero is None else zero[:, kept].contiguous()
        return part.weight(codes, 4 if layout.bits <= 4 else 8, scale[:, kept], of_input, zero=zero)


def _refuse_other_note(tensors: Tensors, layout: Layout) -> None:
    """Raise FormatError where inputs are not as they are, or the file's note of this weight is of another class."""
    if (note := tensors.note("weight")) == "":
        return
    if beside := next((suffix for suffix in OF_INPUTS if tensors.has(suffix)), None):
        raise FormatError(
            f"{tensors.name}.{beside} scales inputs, which is not served: take a checkpoint of weights only"
        )
    if note is None:
        return
    found = _object(note)
    if found.get("_type") != layout.tensor:
        raise FormatError(
            f"the metadata of the weights says that {tensors.name} is {shown(found.get('_type'))}, and config.json "
            f"says {layout.tensor}: save the model anew, or download both again"
        )
    data = found.get("_data")
    if not isinstance(data, Mapping):
        raise FormatError(
            f"the metadata of the weights has no settings of {tensors.name}: the checkpoint is damaged, download it "
            "again"
        )
    for key, usual in NOTES_OF_INPUTS.items():
        if (given := plain(data.get(key))) not in (None, usual):
            raise FormatError(
                f"`{key}` {shown(given)} of {tensors.name} in the metadata of the weights is not served: inputs as "
                "they are are, take a checkpoint of weights only"
            )


def _object(note: str) -> Mapping[str, Any]:
    """The object in a note; empty where there is none."""
    try:
        found = json.loads(note)
    except (ValueError, RecursionError):
        return {}
    return found if isinstance(found, Mapping) else {}


def _codes(tensors: Tensors, part: Part, layout: Layout) -> Codes:
    """Codes [rows, columns]; signed ones of 4 bits are raised by RAISED."""
    if layout.tensor == "Int4PlainInt32Tensor":
        words, inside = _packed(tensors, part, IN_WORD, torch.int32)
        return packed_inputs(words.t(), layout.bits, inside)
    if layout.tensor == "Int4Tensor":
        pairs, inside = _packed(tensors, part, 2, torch.int8)
        low, high = pairs.view(torch.uint8) & 15, pairs.view(torch.uint8) >> 4
        return (torch.stack([low, high], dim=-1).flatten(1)[:, inside] ^ RAISED).contiguous()
    dtype = torch.float8_e4m3fn if layout.tensor == "Float8Tensor" else torch.int8
    codes = tensors.read_box("_weight_qdata", part.size, (dtype,), part.rows, [part.columns]).contiguous()
    if dtype != torch.int8:
        return numbers_of_float8(tensors, "_weight_qdata", codes)
    if layout.bits > 4:
        return codes
    raised = codes + RAISED
    if not raised.is_meta and raised.numel() and (int(codes.max()) > 7 or int(codes.min()) < -RAISED):
        raise FormatError(
            f"{tensors.name}._weight_qdata has codes beyond {layout.bits} bits, as which config.json tells them: the "
            "checkpoint is damaged, download it again"
        )
    return raised.view(torch.uint8)


def _packed(tensors: Tensors, part: Part, count: int, dtype: torch.dtype) -> tuple[Tensor, slice]:
    """Numbers that have `count` codes each and cover the part's columns, and where these lie in them."""
    outputs, inputs = part.size
    if inputs % count:
        raise FormatError(
            f"{tensors.name} has {inputs} inputs, and torchao packs {count} at a time: config.json and weights {APART}"
        )
    (first, last), inside = covering(part.columns, count, inputs)
    shape, columns = (outputs, inputs // count), (first // count, last // count)
    return tensors.read_box("_weight_qdata", shape, (dtype,), part.rows, [columns]).contiguous(), inside


def _zero(tensors: Tensors, part: Part, layout: Layout, scale: Tensor) -> Tensor | None:
    """The codes of 0 [rows, G] float32; None: it is 0."""
    if layout.tensor == "Float8Tensor" or (layout.tensor == "Int8Tensor" and not tensors.has("_weight_zero_point")):
        return None
    whole = (torch.int8,) if layout.tensor == "Int4PlainInt32Tensor" else (torch.int8, *FLOATS)
    found = _of_groups(tensors, "_weight_zero_point", part, layout, whole)
    if layout.tensor == "Int4Tensor":
        return RAISED - _divided(tensors, found, scale)
    if layout.tensor == "Int4PlainInt32Tensor":
        return found
    if not layout.has_zeros and not found.is_meta and found.any():
        raise FormatError(
            f"{tensors.name}._weight_zero_point is not 0, and config.json says that codes are symmetric: they do not "
            "belong together, download both again"
        )
    if layout.bits <= 4:
        return found + RAISED
    return found if layout.has_zeros else None


def _divided(tensors: Tensors, raised_by: Tensor, scale: Tensor) -> Tensor:
    """In codes, what weights are raised by."""
    divided = torch.where(raised_by == 0, 0.0, raised_by / scale)
    if not divided.is_meta and not divided.isfinite().all():
        raise FormatError(
            f"{tensors.name}._weight_scale has numbers so small that its zero points are no codes: the checkpoint is "
            "damaged, download it again"
        )
    return divided


def _of_groups(tensors: Tensors, suffix: str, part: Part, layout: Layout, dtypes: Sequence[torch.dtype]) -> Tensor:
    """[rows, G] float32 of a tensor with a number for each row and group, or for all."""
    outputs, inputs = part.size
    if not layout.is_of_rows:
        return rows_of_all(finite(tensors, suffix, tensors.read(suffix, (1, 1), dtypes)), part)
    num_groups = inputs // layout.group if layout.group else 1
    if layout.tensor in ("Int4Tensor", "Int4PlainInt32Tensor"):
        found = tensors.read_box(suffix, (num_groups, outputs), dtypes, [(0, num_groups)], part.rows).t()
    else:
        found = tensors.read_ranges(suffix, (outputs, num_groups), dtypes, 0, part.rows)
    return finite(tensors, suffix, found)
