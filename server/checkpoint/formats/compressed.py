"""Checkpoints of compressed-tensors, which llm-compressor writes: each group of layers has a scheme of its own.

Of a layer [F, D] with G groups of inputs:

    weight            [F, D] int8 or float8_e4m3fn    (formats int-quantized, float-quantized, naive-quantized)
    weight_packed     [F, D b / 32] int32             codes of b bits, raised by 2^(b - 1), by inputs (pack-quantized)
    weight_packed     [F, D / 2] uint8                float4 (nvfp4-pack-quantized, mxfp4-pack-quantized)
    weight_global_scale [1] float32                   by which those in float8 are divided; ModelOpt has what they are
                                                      multiplied with, weight_scale_2, and calls weight_packed weight
    weight_scale      [1], [F, 1], [F, G], or [F / n, D / m] for blocks
    weight_zero_point the codes of 0: as the weight is, [1] or [F, G]; or packed along the outputs, [F b / 32, G]
    weight_g_idx      [D] int32                       the group of each input, where they are out of order
    input_scale, input_zero_point  [1]                where inputs have fixed ones

Left out: sparse weights, inputs in 4-bit floats, which are taken as they are, and activations other than inputs
(`compressed_scheme.py`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from server.checkpoint.formats.compressed_scheme import FLOAT8, Scheme, Targets, refuse_online_rotations, scheme_of
from server.checkpoint.formats.float4 import float4_codes, float4_levels, of_exponents
from server.checkpoint.formats.float8 import read_above_0, read_scalar
from server.checkpoint.formats.protocol import (
    FLOATS,
    SCALES_OF_KV,
    Format,
    FormatError,
    Part,
    Tensors,
    checked_groups,
    covering,
    finite,
    numbers_of_float8,
    rows_of_all,
)
from server.quant import left_out
from server.quant.configs import AGAIN, Budget, shown, strings
from server.quant.packing import Codes, packed_inputs, unit_of, unpack, words_of
from server.quant.stored import QuantisedWeight, RoundedInputs, contiguous_groups

ALONE = ((), (1,), (1, 1))  # shapes of a tensor of one number


class CompressedFormat(Format):
    """config: `quantization_config`. Raises FormatError for what is not served."""

    name = "compressed-tensors"
    ignored: tuple[str, ...] = (r"\.weight_shape$", r"\.(weight|input)_zero_point$", r"\.weight_g_idx$",
               r"\.input_global_scale$", *SCALES_OF_KV)  # fmt: skip

    def __init__(self, config: Mapping[str, Any], budget: Budget):
        sparsity = config.get("sparsity_config") or {}
        if sparsity and sparsity.get("format") != "dense":
            raise FormatError(
                f"`sparsity_config` of a compressed-tensors checkpoint has format {shown(sparsity.get('format'))}, and "
                "only dense is served: write it dense"
            )
        refuse_online_rotations(config.get("transform_config") or {})
        groups = config.get("config_groups")
        if not isinstance(groups, dict) or not (groups or config.get("kv_cache_scheme")):
            raise FormatError(
                "`config_groups` of a compressed-tensors checkpoint is missing, which says how layers are stored: "
                f"{AGAIN}"
            )
        format = str(config.get("format"))
        schemes = (
            (target, scheme)
            for group in groups.values()
            if (scheme := scheme_of(group, format)) is not None
            for target in strings(group, "targets") or ("Linear",)
        )
        self._targets = Targets(schemes, budget)
        if any(scheme.is_float4 for scheme in self._targets.schemes):
            self.ignored += (r"\.input_scale$",)
        self._known: dict[str, Scheme | None] = {}  # name of a layer -> its scheme
        self.left_out = left_out.of_config(config, self.name, budget)

    def has(self, tensors: Tensors) -> bool:
        return tensors.has("weight_scale")

    def read(self, tensors: Tensors, part: Part) -> QuantisedWeight:
        scheme = self._scheme_of(tensors.name)
        groups = _groups(tensors, part, scheme)
        kept, of_input = torch.unique(groups, return_inverse=True)
        read = _packed if scheme.is_packed else _float4 if scheme.is_float4 else _plain
        codes, zero = read(tensors, part, scheme)
        if zero is not None:
            zero = zero.expand(-1, scheme.num_groups(part.size[1]))[:, kept].contiguous()
        return QuantisedWeight(
            codes,
            scheme.bits if scheme.is_packed or scheme.is_float4 else 8,
            _scale(tensors, part, scheme)[:, kept].contiguous(),
            of_input,
            zero=zero,
            levels=float4_levels() if scheme.is_float4 else None,
            inputs=_inputs(tensors, scheme),
            first_input=part.columns[0],
            num_inputs=part.size[1],
        )

    def _scheme_of(self, name: str) -> Scheme:
        if name not in self._known:
            self._known[name] = self._targets.of(name)
        if (found := self._known[name]) is not None:
            return found
        raise FormatError(
            f"{name} has a `weight_scale`, and no group of `config_groups` names it in a format of fewer bits: its "
            "packer did not compress it, or config.json and weights do not belong together; write it anew"
        )


def _groups(tensors: Tensors, part: Part, scheme: Scheme) -> Tensor:
    """[columns] int64: the group of each input of the part."""
    _, inputs = part.size
    size = scheme.group_size if scheme.block is None else scheme.block[1]
    if scheme.group_size != -1 and inputs % scheme.group_size:
        raise FormatError(
            f"{tensors.name} has {inputs} inputs, which groups of {scheme.group_size} do not divide: such a layer "
            "must be left as it is (`ignore`)"
        )
    if scheme.group_size == -1 or not tensors.has("weight_g_idx"):
        return contiguous_groups(size, inputs)[slice(*part.columns)]
    groups = tensors.read("weight_g_idx", (inputs,), (torch.int32, torch.int64)).long()
    return checked_groups(tensors, "weight_g_idx", groups, scheme.num_groups(inputs))[slice(*part.columns)]


def _packed(tensors: Tensors, part: Part, scheme: Scheme) -> tuple[Codes, Tensor]:
    """Codes [rows, columns] uint8 and the codes of 0 [rows, G or 1] float32."""
    outputs, inputs = part.size
    bits, unit = scheme.bits, unit_of(scheme.bits)
    wide, inside = covering(part.columns, unit, inputs)
    columns = [(words_of(wide[0], bits), words_of(wide[1], bits))]
    words = tensors.read_box("weight_packed", (outputs, words_of(inputs, bits)), (torch.int32,), part.rows, columns)
    codes = packed_inputs(words.t(), bits, inside)
    if not scheme.has_zero:
        return codes, torch.full((len(words), 1), float(1 << (bits - 1)))
    if not scheme.is_of_rows:
        return codes, rows_of_all(read_scalar(tensors, "weight_zero_point"), part) + (1 << (bits - 1))
    shape = (words_of(outputs, bits), scheme.num_groups(inputs))
    zeros = []
    for rows in part.rows:
        (first, last), inside = covering(rows, unit, outputs)
        bounds = (words_of(first, bits), words_of(last, bits))
        words = tensors.read("weight_zero_point", shape, (torch.int32,), part=bounds)
        zeros.append(unpack(words, bits, dim=0)[inside])
    return codes, torch.cat(zeros).float()


def _float4(tensors: Tensors, part: Part, scheme: Scheme) -> tuple[Tensor, None]:
    """Codes [rows, columns] uint8, whose 0 is 0."""
    return float4_codes(tensors, "weight_packed" if tensors.has("weight_packed") else "weight", part), None


def _plain(tensors: Tensors, part: Part, scheme: Scheme) -> tuple[Tensor, Tensor | None]:
    """Codes [rows, columns] int8 or float8 and the codes of 0 [rows, G or 1] float32, where they are not 0."""
    codes = tensors.read_box("weight", part.size, (scheme.dtype,), part.rows, [part.columns]).contiguous()
    if scheme.dtype == FLOAT8:
        numbers_of_float8(tensors, "weight", codes)
    return codes, _of_rows(tensors, "weight_zero_point", part, scheme, (torch.int8,)) if scheme.has_zero else None


def _scale(tensors: Tensors, part: Part, scheme: Scheme) -> Tensor:
    """[rows, G] float32."""
    if scheme.has_exponents:
        return _of_rows(tensors, "weight_scale", part, scheme, (torch.uint8, torch.float8_e8m0fnu))
    if scheme.has_scale_of_all:
        of_groups = _of_rows(tensors, "weight_scale", part, scheme, (FLOAT8,))
        if tensors.has("weight_scale_2"):
            return of_groups * read_above_0(tensors, "weight_scale_2")
        return of_groups / read_above_0(tensors, "weight_global_scale")
    if scheme.block is None:
        return _of_rows(tensors, "weight_scale", part, scheme, FLOATS)
    rows, columns = scheme.block
    shape = (-(-part.size[0] // rows), -(-part.size[1] // columns))
    blocks = finite(tensors, "weight_scale", tensors.read("weight_scale", shape, FLOATS))
    return blocks[torch.cat([torch.arange(start, stop) // rows for start, stop in part.rows])]


def _of_rows(tensors: Tensors, suffix: str, part: Part, scheme: Scheme, dtypes: Sequence[torch.dtype]) -> Tensor:
    """[rows, G] float32 of a tensor with one number for all, or those of each row."""
    shape = tensors.shape(suffix)
    if not scheme.is_of_rows:
        return rows_of_all(read_scalar(tensors, suffix), part)
    outputs, num_groups = part.size[0], scheme.num_groups(part.size[1])
    expected = (outputs,) if len(shape) == 1 and num_groups == 1 else (outputs, num_groups)
    found = tensors.read_ranges(suffix, expected, dtypes, 0, part.rows)
    numbers = of_exponents(found) if scheme.has_exponents else found
    return finite(tensors, suffix, numbers).reshape(-1, num_groups)


def _inputs(tensors: Tensors, scheme: Scheme) -> RoundedInputs | None:
    if (given := scheme.inputs) is None:
        return None
    dtype = torch.int8 if given.get("type", "int") == "int" else FLOAT8
    if given.get("dynamic"):
        return RoundedInputs(dtype, group=int(given.get("group_size") or 0) if given.get("strategy") == "group" else 0)
    zero = None if given.get("symmetric", True) else read_scalar(tensors, "input_zero_point")
    return RoundedInputs(dtype, scale=read_above_0(tensors, "input_scale"), zero=zero)
