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

Float4 is E2M1: a sign, two bits of exponent, one of fraction; two in a byte, the first in the low half. Of OCP
Microscaling Formats 1.0 (2023), MXFP4 has a scale for each 32 inputs, a power of 2 whose exponent is a byte; NVIDIA's
NVFP4 has one for each 16, in float8, times a number of all.

A checkpoint may have been quantised with rotations (`transform_config`): SpinQuant (Liu et al. 2024, arXiv 2405.16406)
and QuIP (Chee et al. 2023, arXiv 2307.13304) multiply a layer's inputs and the weights that make them with orthogonal
matrices that cancel. Where both are weights (R1, R2), a server computes what it always does.

Left out: sparse weights, activations other than inputs, rotations of activations (R3, R4), which would have to be
computed with every token, and inputs in 4-bit floats, which are taken as they are.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

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
    covering_words,
    finite,
    numbers_of_float8,
    refuse_undivided,
    rows_of_all,
)
from server.quantisation import exclusions
from server.quantisation.configs import AGAIN, Budget, block_size, compiled, group_size, shown, strategy_of, strings
from server.quantisation.exclusions import CLASSES, ends
from server.quantisation.packing import Codes, packed_inputs, unpack, words_of
from server.quantisation.rounding import float4_levels
from server.quantisation.stored import QuantisedWeight, RoundedInputs

FLOAT8 = torch.float8_e4m3fn
PACKED = "pack-quantized"
NVFP4, MXFP4, MXFP8 = "nvfp4-pack-quantized", "mxfp4-pack-quantized", "mxfp8-quantized"
IN_BYTES = {"int": (4, 8), "float": (8,)}
# By format: what weights may be, and in how many bits.
SERVED: Mapping[str, Mapping[str, Sequence[int]]] = {
    PACKED: {"int": (2, 3, 4, 8)},
    "int-quantized": IN_BYTES,
    "float-quantized": IN_BYTES,
    "naive-quantized": IN_BYTES,
    NVFP4: {"float": (4,)},
    MXFP4: {"float": (4,)},
    MXFP8: {"float": (8,)},
}
TABLES = "Embedding"  # the class of an embedding table
NAMES_OF_TABLES = ("embed_tokens", "word_embeddings", "wte", "embed_in", "shared", "embedding")
IN_GROUPS = ("group", "tensor_group")  # of the second, groups' scales are multiplied with one of all
OF_DYNAMIC_INPUTS = ("token", "group")
STRATEGIES = ("tensor", "channel", "group", "block")
OF_WEIGHTS = ("weight_input", "weight_output")  # locations of rotations
EXPONENT_BIAS = 127  # of exponents in a byte


@dataclass(frozen=True)
class Scheme:
    """How the layers of one group are stored.

    is_packed: in 32-bit words, else as dtype; is_of_rows: each row has scales of its own, else all share one;
    group_size: inputs that share a scale; -1: all of a row do; block: (rows, inputs) that share one; has_exponents: of
    scales, which are powers of 2; has_scale_of_all: by which those of groups are divided.
    """

    bits: int
    dtype: torch.dtype
    is_packed: bool
    has_zero: bool
    is_of_rows: bool
    group_size: int
    block: tuple[int, int] | None
    inputs: Mapping[str, Any] | None
    has_exponents: bool = False
    has_scale_of_all: bool = False

    @property
    def is_float4(self) -> bool:
        """Whether codes are floats of 4 bits, two in a byte."""
        return self.dtype == FLOAT8 and self.bits == 4

    def num_groups(self, inputs: int) -> int:
        """How many groups a layer of so many inputs has."""
        size = self.group_size if self.block is None else self.block[1]
        return 1 if size == -1 else -(-inputs // size)


def scheme_of(group: Mapping[str, Any], format: str) -> Scheme | None:
    """The scheme of an entry of `config_groups`; None where it leaves weights alone. Raises FormatError."""
    format = group.get("format") or format
    weights = group.get("weights")
    if format == "dense" or (weights is None and group.get("input_activations") is None):
        return None
    if not isinstance(weights, Mapping):
        raise FormatError(
            "a group of `config_groups` rounds inputs and has no `weights`, which is not served: quantise its weights"
        )
    if format not in SERVED:
        raise FormatError(
            f"`format` {shown(format)} of a compressed-tensors checkpoint is not served: {', '.join(SERVED)} are"
        )
    if group.get("output_activations") is not None:
        raise FormatError("`output_activations` of a compressed-tensors checkpoint are not served: write it without")
    bits, kind = weights.get("num_bits", 8), str(weights.get("type", "int"))
    is_packed = format == PACKED
    if isinstance(bits, bool) or bits not in SERVED[format].get(kind, ()):
        told = ", and ".join(f"{name} with {', '.join(map(str, good))}" for name, good in SERVED[format].items())
        raise FormatError(
            f"weights of type {shown(kind)} with {shown(bits)} bits are not served in format {format!r}: {told} are"
        )
    strategy = strategy_of(weights)
    served = ("tensor_group",) if format == NVFP4 else ("group",) if format in (MXFP4, MXFP8) else STRATEGIES
    if strategy not in served:
        raise FormatError(
            f"`strategy` {shown(strategy)} of weights is not served in format {format!r}: {', '.join(served)} "
            f"{'is' if len(served) == 1 else 'are'}, write the checkpoint so"
        )
    if not weights.get("symmetric", True) and format in (NVFP4, MXFP4, MXFP8):
        raise FormatError(f"`symmetric` false of weights is not served in format {format!r}: true is")
    return Scheme(
        bits=int(bits),
        dtype=FLOAT8 if kind == "float" else torch.int8,
        is_packed=is_packed,
        has_zero=not weights.get("symmetric", True),
        is_of_rows=strategy != "tensor",
        group_size=group_size(weights.get("group_size"), "weights", may_be_all=False) if strategy in IN_GROUPS else -1,
        block=block_size(weights.get("block_structure"), "block_structure") if strategy == "block" else None,
        inputs=None if format in (NVFP4, MXFP4, MXFP8) else _checked_inputs(group.get("input_activations")),
        has_exponents=format in (MXFP4, MXFP8),
        has_scale_of_all=format == NVFP4,
    )


def _checked_inputs(inputs: Mapping[str, Any] | None) -> Mapping[str, Any] | None:
    if inputs is None:
        return None
    kind, bits = inputs.get("type", "int"), inputs.get("num_bits", 8)
    if kind not in ("int", "float") or bits != 8:
        raise FormatError(
            f"input activations of type {shown(kind)} with {shown(bits)} bits are not served: int or float with 8 "
            "are, write the checkpoint so"
        )
    if inputs.get("dynamic") and not inputs.get("symmetric", True):
        raise FormatError(
            "input activations that are dynamic and not symmetric are not served: write it with symmetric ones"
        )
    if not inputs.get("dynamic") and inputs.get("strategy", "tensor") != "tensor":
        raise FormatError(
            f"input activations with fixed scales of strategy {shown(inputs['strategy'])} are not served: `tensor` "
            "is, write the checkpoint so"
        )
    if inputs.get("dynamic") and inputs.get("strategy", "token") not in OF_DYNAMIC_INPUTS:
        raise FormatError(
            f"dynamic input activations of strategy {shown(inputs['strategy'])} are not served: "
            f"{' and '.join(OF_DYNAMIC_INPUTS)} are, write the checkpoint so"
        )
    if inputs.get("dynamic") and inputs.get("strategy") == "group" and inputs.get("group_size") is not None:
        group_size(inputs["group_size"], "input activations", may_be_all=False)
    return inputs


class Targets:
    """Which scheme a layer has: names count more than expressions, and these more than classes.

    Of two alike that fit one layer, readers take different ones, so that their schemes must be the same. Whether a name
    is that of a table is told by its end, since every other one could be a linear layer's.
    """

    def __init__(self, schemes: Iterable[tuple[str, Scheme]], budget: Budget):
        pairs = list(schemes)
        self.schemes = [scheme for _, scheme in pairs]
        self._plain: dict[str, list[Scheme]] = {}
        for target, scheme in pairs:
            self._plain.setdefault(target, []).append(scheme)
        expressions = [(target, scheme) for target, scheme in pairs if target.startswith("re:")]
        patterns = compiled([target.removeprefix("re:") for target, _ in expressions], budget)
        self._patterns = list(zip(patterns, expressions, strict=True))

    def of(self, name: str) -> Scheme | None:
        """The scheme of the layer of this name; None: no group names it. Raises FormatError."""
        tables = (TABLES,) if name.endswith(NAMES_OF_TABLES) else ()
        found = (
            self._named(end for end in ends(name) if end not in (*CLASSES, TABLES))
            or [entry for pattern, entry in self._patterns if pattern.match(name)]
            or self._named(tables)
            or self._named(CLASSES)
        )
        for target, scheme in found[1:]:
            if scheme != found[0][1]:
                raise FormatError(
                    f"two groups of `config_groups` name {name}, by {shown(found[0][0])} and {shown(target)}, and "
                    "store it in different ways, of which readers take different ones: write targets that do not "
                    "overlap"
                )
        return found[0][1] if found else None

    def _named(self, targets: Iterable[str]) -> list[tuple[str, Scheme]]:
        return [(target, scheme) for target in targets for scheme in self._plain.get(target, ())]


def refuse_online_rotations(config: Mapping[str, Any]) -> None:
    """Raise FormatError where a rotation is of anything but weights."""
    groups = config.get("config_groups") or {}
    if not isinstance(groups, Mapping) or set(config) - {"config_groups"}:
        raise FormatError(
            "`transform_config` of a compressed-tensors checkpoint must be an object of `config_groups`. Given: "
            f"{shown(config)}; {AGAIN}"
        )
    for name, group in groups.items():
        for applied in group["apply"]:
            if applied["location"] not in OF_WEIGHTS:
                raise FormatError(
                    f"rotation {shown(name)} in `transform_config` is of {shown(applied['location'])}, and only those "
                    f"of weights are served, {' and '.join(OF_WEIGHTS)}, such as R1 and R2 of SpinQuant: write the "
                    "checkpoint without R3 and R4"
                )


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
        self.exclusions = exclusions.of_config(config, self.name, budget)

    def has(self, tensors: Tensors) -> bool:
        return tensors.has("weight_scale")

    def read(self, tensors: Tensors, part: Part) -> QuantisedWeight:
        scheme = self._scheme_of(tensors.name)
        kept, of_input = part.groups_of(_groups(tensors, part, scheme))
        read = _packed if scheme.is_packed else _float4 if scheme.is_float4 else _plain
        codes, zero = read(tensors, part, scheme)
        if zero is not None:
            zero = zero.expand(-1, scheme.num_groups(part.size[1]))[:, kept].contiguous()
        bits = scheme.bits if scheme.is_packed or scheme.is_float4 else 8
        levels = float4_levels() if scheme.is_float4 else None
        inputs, scale = _inputs(tensors, scheme), _scale(tensors, part, scheme)[:, kept]
        return part.weight(codes, bits, scale, of_input, zero=zero, levels=levels, inputs=inputs)

    def _scheme_of(self, name: str) -> Scheme:
        if name not in self._known:
            self._known[name] = self._targets.of(name)
        if (found := self._known[name]) is not None:
            return found
        raise FormatError(
            f"{name} has a `weight_scale`, and no group of `config_groups` names it in a format of fewer bits: its "
            "packer did not compress it, or config.json and weights do not belong together; write it anew"
        )


def _groups(tensors: Tensors, part: Part, scheme: Scheme) -> int | Tensor:
    """How many neighbours are a group, or the group [D] of each input."""
    _, inputs = part.size
    size = scheme.group_size if scheme.block is None else scheme.block[1]
    refuse_undivided(tensors, inputs, scheme.group_size, "such a layer must be left as it is (`ignore`)")
    if scheme.group_size == -1 or not tensors.has("weight_g_idx"):
        return size
    groups = tensors.read("weight_g_idx", (inputs,), (torch.int32, torch.int64)).long()
    return checked_groups(tensors, "weight_g_idx", groups, scheme.num_groups(inputs))


def _packed(tensors: Tensors, part: Part, scheme: Scheme) -> tuple[Codes, Tensor]:
    """Codes [rows, columns] uint8 and the codes of 0 [rows, G or 1] float32."""
    outputs, inputs = part.size
    bits, shape = scheme.bits, (outputs, words_of(inputs, scheme.bits))
    columns, inside = covering_words(part.columns, bits, inputs)
    words = tensors.read_box("weight_packed", shape, (torch.int32,), part.rows, [columns])
    codes = packed_inputs(words.t(), bits, inside)
    if not scheme.has_zero:
        return codes, torch.full((len(words), 1), float(1 << (bits - 1)))
    if not scheme.is_of_rows:
        return codes, rows_of_all(read_scalar(tensors, "weight_zero_point"), part) + (1 << (bits - 1))
    shape = (words_of(outputs, bits), scheme.num_groups(inputs))
    zeros = []
    for rows in part.rows:
        bounds, inside = covering_words(rows, bits, outputs)
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


def float4_codes(tensors: Tensors, suffix: str, part: Part) -> Tensor:
    """Codes [rows, columns] uint8 of a tensor [F, D / 2] of bytes. Raises CheckpointError."""
    outputs, inputs = part.size
    (first, last), inside = covering(part.columns, 2, inputs)
    shape = (outputs, -(-inputs // 2))
    pairs = tensors.read_box(suffix, shape, (torch.uint8,), part.rows, [(first // 2, -(-last // 2))])
    return torch.stack([pairs & 15, pairs >> 4], dim=-1).flatten(1)[:, inside].contiguous()


def of_exponents(exponents: Tensor) -> Tensor:
    """Powers of 2 float32 by their bytes; 255 stands for no number."""
    if exponents.dtype != torch.uint8:
        return exponents.float()
    powers = torch.exp2(exponents.float() - EXPONENT_BIAS)
    return torch.where(exponents == 255, torch.nan, powers)
