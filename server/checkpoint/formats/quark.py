"""Checkpoints of AMD Quark, which has a scheme for all layers, and others for some (`server/quantisation/quark.py`).

Of a layer [F, D] with G groups of inputs:

    weight            [D, F / 8] int32                  4 bits in groups: of 8 neighbouring outputs, in a word's order
                      [F, D / 8] int32                  4 bits otherwise: of 8 neighbouring inputs, likewise
                      [D, F] int8 or uint8              8 bits in groups
                      [F, D] int8, uint8 or float8_e4m3fn
                      [F, D / 2] uint8                  float4
    weight_scale      [G, F], [F] or []; of float4 [F, G] uint8: exponents of powers of 2
    weight_zero_point the codes of 0, as the scales are; of 4 bits in words along the outputs, but for the one of all
    input_scale, input_zero_point  []                   where inputs have fixed ones

A word has its codes from the lowest bit on, in the order of AWQ (`pack_method` reorder) or in theirs (order). Signed
ones are two's complements; read of 4 bits they are raised by 8.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from server.checkpoint.formats.awq import PACKED, PLACES, packed_outputs
from server.checkpoint.formats.compressed import float4_codes, of_exponents
from server.checkpoint.formats.float8 import FLOAT8, read_above_0, read_scalar, scale_of_rows
from server.checkpoint.formats.protocol import (
    FLOATS,
    SCALES_OF_KV,
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
from server.quantisation.packing import Codes, PackedCodes, unpack_rows, unpacked
from server.quantisation.quark import Layers, Scheme
from server.quantisation.rounding import float4_levels
from server.quantisation.stored import QuantisedWeight, RoundedInputs

RAISED = 8  # of signed codes of 4 bits
SIGNS = -0x77777778  # 0x88888888: the highest bit of each code of a word
ORDERS: Mapping[object, tuple[int, ...]] = {"reorder": PLACES, "order": tuple(range(PACKED))}
DTYPES = {"int8": torch.int8, "uint8": torch.uint8, "fp8_e4m3": FLOAT8}


class QuarkFormat(Format):
    """config: `quantization_config`. Raises FormatError for what is not served."""

    name = "quark"
    ignored = (r"\.(weight|input)_zero_point$", r"\.input_scale$", *SCALES_OF_KV)

    def __init__(self, config: Mapping[str, Any], budget: Budget):
        self._layers = Layers(config, budget)
        order = (config.get("export") or {}).get("pack_method")
        if order not in ORDERS:
            raise FormatError(
                f"`pack_method` in `export` of a quark checkpoint must be {' or '.join(map(str, ORDERS))}. Given: "
                f"{shown(order)}; take a checkpoint that Quark 1.0 or newer exported"
            )
        self._places = ORDERS[order]
        self.exclusions = exclusions.of_config(config, self.name, budget)

    def has(self, tensors: Tensors) -> bool:
        return tensors.has("weight_scale")

    def read(self, tensors: Tensors, part: Part) -> QuantisedWeight:
        if (scheme := self._layers.of(tensors.name)) is None:
            raise FormatError(
                f"{tensors.name} has a `weight_scale`, and config.json leaves it dense: they do not belong together, "
                "download both again"
            )
        outputs, inputs = part.size
        refuse_undivided(tensors, inputs, scheme.group, "such a layer must be left as it is (`exclude`)")
        if scheme.is_in_words and (outputs % PACKED or (not scheme.group and inputs % PACKED)):
            raise FormatError(
                f"{tensors.name} has {outputs} outputs and {inputs} inputs, and quark packs {PACKED} at a time: such a "
                "layer must be left as it is (`exclude`)"
            )
        kept, of_input = part.groups_of(scheme.group)
        some = int(kept[0]), int(kept[-1]) + 1
        return part.weight(
            self._codes(tensors, part, scheme),
            scheme.bits,
            _scale(tensors, part, scheme, some),
            of_input,
            zero=self._zeros(tensors, part, scheme, some),
            levels=float4_levels() if scheme.dtype == "fp4" else None,
            inputs=_inputs(tensors, scheme),
        )

    def _codes(self, tensors: Tensors, part: Part, scheme: Scheme) -> Codes:
        outputs, inputs = part.size
        if scheme.dtype == "fp4":
            return float4_codes(tensors, "weight", part)
        if not scheme.is_in_words:
            codes = _of_rows(tensors, "weight", part, scheme, DTYPES[scheme.dtype], inputs, part.columns)
            return numbers_of_float8(tensors, "weight", codes) if scheme.dtype == "fp8_e4m3" else codes
        if scheme.group:
            size = inputs, outputs
            return _raised(packed_outputs(tensors, "weight", size, part.columns, part.rows, self._places), scheme)
        wide, inside = covering(part.columns, PACKED, inputs)
        columns = [(wide[0] // PACKED, wide[1] // PACKED)]
        words = tensors.read_box("weight", (outputs, inputs // PACKED), (torch.int32,), part.rows, columns)
        return _raised(unpack_rows(words.t().contiguous(), scheme.bits, self._places)[inside].t().contiguous(), scheme)

    def _zeros(self, tensors: Tensors, part: Part, scheme: Scheme, groups: tuple[int, int]) -> Tensor | None:
        """[rows, groups] float32: the codes of 0; None: it is 0."""
        if not scheme.has_zero:
            count = sum(stop - start for start, stop in part.rows), groups[1] - groups[0]
            return torch.full(count, float(RAISED)) if scheme.is_in_words else None
        outputs, inputs = part.size
        suffix, num_groups = "weight_zero_point", scheme.num_groups(inputs)
        if scheme.is_of_all:
            zero = tensors.read(suffix, (), (torch.int32, torch.int8, torch.uint8)).float()
            return rows_of_all(zero, part) + (RAISED if scheme.is_signed and scheme.is_in_words else 0)
        if not scheme.is_in_words:
            return _of_rows(tensors, suffix, part, scheme, DTYPES[scheme.dtype], num_groups, groups).float()
        if scheme.group:
            words = packed_outputs(tensors, suffix, (num_groups, outputs), groups, part.rows, self._places)
            return unpacked(_raised(words, scheme)).float()
        found = []
        for rows in part.rows:
            (first, last), inside = covering(rows, PACKED, outputs)
            bounds = first // PACKED, last // PACKED
            words = tensors.read(suffix, (outputs // PACKED,), (torch.int32,), part=bounds)
            found.append(unpack_rows(words[:, None], scheme.bits, self._places)[inside])
        return unpacked(_raised(torch.cat(found), scheme)).float()


def _of_rows(
    tensors: Tensors,
    suffix: str,
    part: Part,
    scheme: Scheme,
    dtype: torch.dtype,
    count: int,
    columns: tuple[int, int],
) -> Tensor:
    """[rows, columns] of a tensor with `count` numbers for each output: [count, F] in groups, or [F, count], or [F]."""
    outputs = part.size[0]
    if scheme.group:
        return tensors.read_box(suffix, (count, outputs), (dtype,), [columns], part.rows).t().contiguous()
    if suffix != "weight":
        return tensors.read_ranges(suffix, (outputs,), (dtype,), 0, part.rows).reshape(-1, 1)
    return tensors.read_box(suffix, (outputs, count), (dtype,), part.rows, [columns]).contiguous()


def _raised(codes: Codes, scheme: Scheme) -> Codes:
    """Codes of 4 bits with the signed ones raised, so that none is below 0."""
    if not scheme.is_signed:
        return codes
    if isinstance(codes, PackedCodes):
        return replace(codes, parts=tuple(words ^ SIGNS for words in codes.parts))
    return codes ^ RAISED


def _scale(tensors: Tensors, part: Part, scheme: Scheme, groups: tuple[int, int]) -> Tensor:
    """[rows, groups] float32."""
    suffix, count = "weight_scale", scheme.num_groups(part.size[1])
    if not scheme.group:
        return scale_of_rows(tensors, part)
    if scheme.dtype == "fp4":
        bytes_of = (torch.uint8, torch.float8_e8m0fnu)
        stored = tensors.read_ranges(suffix, (part.size[0], count), bytes_of, 0, part.rows)[:, slice(*groups)]
        return finite(tensors, suffix, of_exponents(stored)).contiguous()
    stored = tensors.read_box(suffix, (count, part.size[0]), FLOATS, [groups], part.rows)
    return finite(tensors, suffix, stored).t().contiguous()


def _inputs(tensors: Tensors, scheme: Scheme) -> RoundedInputs | None:
    if (given := scheme.inputs) is None:
        return None
    dtype = DTYPES[given["dtype"]]
    if given.get("is_dynamic"):
        return RoundedInputs(dtype)
    is_centred = dtype == FLOAT8 or given.get("symmetric", True)
    zero = None if is_centred else read_scalar(tensors, "input_zero_point")
    return RoundedInputs(dtype, scale=read_above_0(tensors, "input_scale"), zero=zero)
