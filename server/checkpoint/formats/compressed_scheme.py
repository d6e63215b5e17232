"""The schemes of a compressed-tensors checkpoint, from its config: which layers each is for, and how these are stored.

Left out: tensors (`compressed.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from server.checkpoint.formats.protocol import FormatError
from server.quant.configs import block_size, compiled, group_size, shown
from server.quant.left_out import CLASSES

FLOAT8 = torch.float8_e4m3fn
PACKED = "pack-quantized"
SERVED = (PACKED, "int-quantized", "float-quantized", "naive-quantized")
STRATEGIES = ("tensor", "channel", "group", "block")
PACKED_BITS = (2, 3, 4, 8)


@dataclass(frozen=True)
class Scheme:
    """How the layers of one group are stored.

    is_packed: in 32-bit words, else as dtype; is_of_rows: each row has scales of its own, else all share one;
    group_size: inputs that share a scale; -1: all of a row do; block: (rows, inputs) that share one.
    """

    bits: int
    dtype: torch.dtype
    is_packed: bool
    has_zero: bool
    is_of_rows: bool
    group_size: int
    block: tuple[int, int] | None
    inputs: Mapping[str, Any] | None

    def num_groups(self, inputs: int) -> int:
        """How many groups a layer of so many inputs has."""
        size = self.group_size if self.block is None else self.block[1]
        return 1 if size == -1 else -(-inputs // size)


def scheme_of(group: Mapping[str, Any], format: str) -> Scheme | None:
    """The scheme of an entry of `config_groups`; None where it leaves weights alone. Raises FormatError."""
    format = group.get("format") or format
    weights = group.get("weights")
    if weights is None and group.get("input_activations") is None:
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
    good = PACKED_BITS if is_packed else (4, 8)
    if not ((kind == "int" and bits in good) or (kind, bits, is_packed) == ("float", 8, False)):
        raise FormatError(
            f"weights of type {shown(kind)} with {shown(bits)} bits are not served in format {format!r}: int with "
            f"{', '.join(map(str, good))} bits{'' if is_packed else ', and float with 8,'} are"
        )
    strategy = weights.get("strategy") or _strategy_of_older(weights)
    if strategy not in STRATEGIES:
        raise FormatError(
            f"`strategy` {shown(strategy)} of weights is not served: {', '.join(STRATEGIES)} are, write the "
            "checkpoint so"
        )
    return Scheme(
        bits=int(bits),
        dtype=FLOAT8 if kind == "float" else torch.int8,
        is_packed=is_packed,
        has_zero=not weights.get("symmetric", True),
        is_of_rows=strategy != "tensor",
        group_size=group_size(weights.get("group_size"), "weights", may_be_all=False) if strategy == "group" else -1,
        block=block_size(weights.get("block_structure"), "block_structure") if strategy == "block" else None,
        inputs=_checked_inputs(group.get("input_activations")),
    )


def _strategy_of_older(weights: Mapping[str, Any]) -> str:
    size = weights.get("group_size")
    return "tensor" if size is None else "channel" if size == -1 else "group"


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
    if inputs.get("dynamic") and inputs.get("strategy") == "group" and inputs.get("group_size") is not None:
        group_size(inputs["group_size"], "input activations", may_be_all=False)
    return inputs


def sorted_by_precision(schemes: Iterable[tuple[str, Scheme]]) -> list[tuple[Callable[[str], bool], Scheme]]:
    """(whether a layer's name is meant, scheme) of all targets: names first, then expressions, then classes."""

    def rank(target: str) -> int:
        return 2 if target in CLASSES else 1 if target.startswith("re:") else 0

    ranked = sorted(schemes, key=lambda pair: rank(pair[0]))
    patterns = iter(compiled([target.removeprefix("re:") for target, _ in ranked if rank(target) == 1]))
    return [
        (next(patterns).match if rank(target) == 1 else partial(_matches, target), scheme) for target, scheme in ranked
    ]


def _matches(target: str, name: str) -> bool:
    """As compressed-tensors matches: a class of modules, or a name or its end."""
    return target in CLASSES or name == target or name.endswith(f".{target}")
