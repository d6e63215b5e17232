"""GPTQ's checkpoints (Frantar et al. 2022, arXiv 2210.17323), as AutoGPTQ and GPTQModel write them.

Of a layer [F, D] with G groups, codes of b bits, packed from the lowest bit on:

    qweight [D b / 32, F] int32      codes, along the inputs
    qzeros  [G, F b / 32] int32      the codes of 0, along the outputs; one less than these but in version 2 (`_raised`)
    scales  [G, F] float16
    g_idx   [D] int32                the group of each input, where they are out of order (`desc_act`)
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from server.checkpoint.formats.protocol import (
    FLOATS,
    SCALES_OF_KV,
    Format,
    FormatError,
    Part,
    Ranges,
    Tensors,
    checked_groups,
    covering_words,
    finite,
)
from server.quantisation import exclusions
from server.quantisation.configs import Budget, group_size, shown
from server.quantisation.packing import WORD_BITS, packed_inputs, unit_of, unpack, words_of
from server.quantisation.stored import QuantisedWeight, contiguous_groups

BITS = (2, 3, 4, 8)
VERSIONS = {"gptq": 1, "gptq_v2": 0}  # of the packing, and what is added to its codes of 0


class GptqFormat(Format):
    """config: `quantization_config`, or the file quantize_config.json. Raises FormatError for what is not served."""

    name = "gptq"
    ignored = (r"\.g_idx$", r"^gptq_(bits|groupsize)$", *SCALES_OF_KV)
    zeros = (r"\.bias$",)  # some tools write one for every layer that they pack

    def __init__(self, config: Mapping[str, Any], budget: Budget):
        named = (config.get(key) for key in ("checkpoint_format", "format"))
        version = next((name for name in named if name not in (None, "")), "gptq")
        if config.get("is_marlin_format"):
            version = "marlin"
        if not isinstance(version, str) or version not in VERSIONS:
            raise FormatError(
                f"`checkpoint_format` {shown(version)} of a gptq checkpoint is not served: {' and '.join(VERSIONS)} "
                "are, take a checkpoint of this model in one of them"
            )
        self._zero_offset = VERSIONS[version]
        self._usual = settings_of(config)
        self.exclusions = exclusions.of_config(config, self.name, budget)
        self._of_rules = [
            None if rule.is_dense else settings_of({**config, **rule.change}) for rule in self.exclusions.rules.all
        ]
        self._known: dict[str, Settings | None] = {}  # name of a layer -> its settings

    def has(self, tensors: Tensors) -> bool:
        return tensors.has("qweight")

    def _settings(self, name: str) -> Settings | None:
        """Those of a layer: of the first pattern of `dynamic` that names it, or the usual ones; None: it is dense."""
        if name not in self._known:
            place = self.exclusions.rules.place_of(name)
            self._known[name] = self._usual if place is None else self._of_rules[place]
        return self._known[name]

    def read(self, tensors: Tensors, part: Part) -> QuantisedWeight:
        outputs, inputs = part.size
        settings = self._settings(tensors.name) or self._usual
        bits, unit = settings.bits, unit_of(settings.bits)
        if inputs % unit or outputs % unit:
            raise FormatError(
                f"{tensors.name} has {inputs} inputs and {outputs} outputs, and gptq with {bits} bits packs {unit} "
                "at a time: such a layer must be left as it is"
            )
        box, inside = covering_words(part.columns, bits, inputs)
        words = replace(tensors, mapped=True).read_box(
            "qweight", (words_of(inputs, bits), outputs), (torch.int32,), [box], part.rows
        )
        kept, of_input = part.groups_of(_groups(tensors, settings, inputs))
        num_groups = settings.num_groups(inputs)
        scale = _of_groups(tensors, "scales", (num_groups, outputs), FLOATS, kept, part.rows)
        zero = self._zeros(tensors, bits, num_groups, part, kept)
        codes = packed_inputs(words, bits, inside)
        return part.weight(codes, bits, finite(tensors, "scales", scale).t(), of_input, zero=zero)

    def _zeros(self, tensors: Tensors, bits: int, num_groups: int, part: Part, kept: Tensor) -> Tensor:
        """[rows, groups] float32: the codes of 0."""
        outputs = part.size[0]
        shape = (num_groups, words_of(outputs, bits))
        found = []
        for rows in part.rows:
            bounds, inside = covering_words(rows, bits, outputs)
            words = _of_groups(tensors, "qzeros", shape, (torch.int32,), kept, [bounds])
            found.append(self._raised(words, bits)[:, inside])
        return torch.cat(found, dim=1).t().float().contiguous()

    def _raised(self, words: Tensor, bits: int) -> Tensor:
        """The codes in words of zeros, by as much more as the version stores them less.

        Writers take 1 from all codes of a word at once, so that a 0 borrows from the next one; but not of 3 bits, which
        run on from word to word.
        """
        if WORD_BITS % bits:
            return (unpack(words, bits, dim=1).int() + self._zero_offset) & ((1 << bits) - 1)
        ones = sum(self._zero_offset << shift for shift in range(0, WORD_BITS, bits))
        return unpack((words.long() + ones) & 0xFFFFFFFF, bits, dim=1).int()


@dataclass(frozen=True)
class Settings:
    """How a layer is packed. group_size: inputs that share a scale; -1: all do."""

    bits: int
    group_size: int

    def num_groups(self, inputs: int) -> int:
        """How many groups a layer of so many inputs has."""
        return 1 if self.group_size == -1 else -(-inputs // self.group_size)


def settings_of(config: Mapping[str, Any]) -> Settings:
    """What a config says of all layers, or of some. Raises FormatError."""
    bits, size = config.get("bits"), config.get("group_size", -1)
    if bits not in BITS:
        raise FormatError(
            f"`bits` of a gptq checkpoint must be 2, 3, 4 or 8. Given: {shown(bits)}; take another checkpoint of "
            "this model"
        )
    if config.get("pack_dtype", "int32") != "int32":
        raise FormatError(
            f"`pack_dtype` {shown(config['pack_dtype'])} of a gptq checkpoint is not served: int32 is, convert it"
        )
    return Settings(int(bits), group_size(size, "a gptq checkpoint"))


def _groups(tensors: Tensors, settings: Settings, inputs: int) -> Tensor:
    """[inputs] int64: the group of each, whatever the config says of their order."""
    if settings.group_size == -1 or not tensors.has("g_idx"):
        return contiguous_groups(settings.group_size, inputs)
    groups = tensors.read("g_idx", (inputs,), (torch.int32,)).long()
    return checked_groups(tensors, "g_idx", groups, settings.num_groups(inputs))


def _of_groups(
    tensors: Tensors,
    suffix: str,
    shape: tuple[int, int],
    dtypes: Sequence[torch.dtype],
    kept: Tensor,
    columns: Ranges,
) -> Tensor:
    """Groups `kept`, ascending, of a tensor [G, …]."""
    first, last = int(kept[0]), int(kept[-1]) + 1
    found = tensors.read_box(suffix, shape, dtypes, [(first, last)], columns)
    return found if len(kept) == last - first else found[kept - first]
