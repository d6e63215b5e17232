"""The schemes of a compressed-tensors checkpoint, from its config: which layers each is for, and how these are stored.

A checkpoint may have been quantised with rotations (`transform_config`): SpinQuant (Liu et al. 2024, arXiv 2405.16406)
and QuIP (Chee et al. 2023, arXiv 2307.13304) multiply a layer's inputs and the weights that make them with orthogonal
matrices that cancel. Where both are weights (R1, R2), a server computes what it always does.

Left out: tensors (`compressed.py`), and rotations of activations (R3, R4), which would have to be computed with every
token.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from server.checkpoint.formats.protocol import FormatError
from server.quant.configs import AGAIN, Budget, block_size, compiled, group_size, shown, strategy_of
from server.quant.left_out import CLASSES, ends

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


OF_WEIGHTS = ("weight_input", "weight_output")


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
