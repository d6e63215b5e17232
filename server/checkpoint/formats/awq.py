"""AWQ's checkpoints (Lin et al. 2023, arXiv 2306.00978), in the order of AutoAWQ's GEMM kernels.

Of a layer [F, D] with G groups, codes of 4 bits; of 8 neighbouring outputs, a word has those of `ORDER` from the lowest
bit on:

    qweight [D, F / 8] int32
    qzeros  [G, F / 8] int32      the codes of 0
    scales  [G, F] float16
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch

from server.checkpoint.formats.protocol import (
    FLOATS,
    SCALES_OF_KV,
    Format,
    FormatError,
    Part,
    Ranges,
    Tensors,
    covering,
    finite,
)
from server.quantisation import exclusions
from server.quantisation.configs import AGAIN, Budget, group_size, shown
from server.quantisation.packing import Codes, PackedCodes, joined_outputs, unpacked
from server.quantisation.stored import QuantisedWeight, contiguous_groups

BITS = 4
PACKED = 8  # outputs in a word
ORDER = (0, 2, 4, 6, 1, 3, 5, 7)
PLACES = tuple(ORDER.index(output) for output in range(PACKED))  # where each output's code lies in its word


class AwqFormat(Format):
    """config: `quantization_config`. Raises FormatError for what is not served."""

    name = "awq"
    ignored = SCALES_OF_KV

    def __init__(self, config: Mapping[str, Any], budget: Budget):
        bits = _either(config, ("bits", "w_bit"), BITS)
        if bits != BITS:
            raise FormatError(
                f"`bits` of an awq checkpoint must be 4. Given: {shown(bits)}; take another checkpoint of this model"
            )
        version = str(_either(config, ("version", "checkpoint_format", "format"), "gemm")).lower()
        if config.get("is_marlin_format"):
            version = "marlin"
        if version != "gemm":
            raise FormatError(
                f"`version` {shown(version)} of an awq checkpoint is not served: gemm is, take a checkpoint in it"
            )
        if config.get("backend", "autoawq") != "autoawq":
            raise FormatError(
                f"`backend` {shown(config['backend'])} of an awq checkpoint is not served: autoawq is, take a "
                "checkpoint of this model that it wrote"
            )
        if not isinstance(has_zeros := config.get("zero_point", True), bool):
            raise FormatError(
                f"`zero_point` of an awq checkpoint must be true or false. Given: {shown(has_zeros)}; {AGAIN}"
            )
        if not has_zeros and config.get("pack_method") is not None:
            raise FormatError(
                "`zero_point` false of an awq checkpoint that Quark wrote is not served, since its codes are signed: "
                "export it as quark and not as awq"
            )
        self._group_size = group_size(_either(config, ("group_size", "q_group_size"), 128), "an awq checkpoint")
        self.exclusions = exclusions.of_config(config, self.name, budget)

    def has(self, tensors: Tensors) -> bool:
        return tensors.has("qweight")

    def read(self, tensors: Tensors, part: Part) -> QuantisedWeight:
        outputs, inputs = part.size
        if outputs % PACKED:
            raise FormatError(
                f"{tensors.name} has {outputs} outputs, and awq packs {PACKED} at a time: such a layer must be left as "
                "it is (`modules_to_not_convert`)"
            )
        num_groups = int(contiguous_groups(self._group_size, inputs)[-1]) + 1
        kept, of_input = part.groups_of(self._group_size)
        first, last = int(kept[0]), int(kept[-1]) + 1
        scale = tensors.read_box("scales", (num_groups, outputs), FLOATS, [(first, last)], part.rows)
        codes = packed_outputs(tensors, "qweight", (inputs, outputs), part.columns, part.rows)
        zeros = packed_outputs(tensors, "qzeros", (num_groups, outputs), (first, last), part.rows)
        return part.weight(codes, BITS, finite(tensors, "scales", scale).t(), of_input, zero=unpacked(zeros).float())


def _either(config: Mapping[str, Any], keys: Sequence[str], usual: object) -> Any:
    """A setting that has several names, by what there is. Raises FormatError where two are given and differ."""
    found = {key: config[key] for key in keys if config.get(key) not in (None, "")}
    first = next(iter(found), "")
    for key, value in found.items():
        if str(value).lower() != str(found[first]).lower():
            raise FormatError(
                f"`{first}` and `{key}` of an awq checkpoint must be the same. Given: {shown(found[first])} and "
                f"{shown(value)}; {AGAIN}"
            )
    return found[first] if found else usual


def packed_outputs(
    tensors: Tensors,
    suffix: str,
    shape: tuple[int, int],
    part: tuple[int, int],
    rows: Ranges,
    places: tuple[int, ...] = PLACES,
) -> Codes:
    """Codes [outputs, part] of a tensor of (inputs or groups, outputs) codes of 4 bits: those of the layer's `rows`.

    places: where in its word each of 8 neighbouring outputs lies.
    """
    found: list[Codes] = []
    for bounds in rows:
        (first, last), inside = covering(bounds, PACKED, shape[1])
        words = replace(tensors, mapped=True).read_box(
            suffix, (shape[0], shape[1] // PACKED), (torch.int32,), [part], [(first // PACKED, last // PACKED)]
        )
        whole = PackedCodes((words,), BITS, places)
        found.append(whole if (first, last) == bounds else whole.unpacked()[inside])
    return joined_outputs(found)
