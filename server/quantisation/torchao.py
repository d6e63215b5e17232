"""What a torchao checkpoint's config says of its weights, as transformers 5 saves it: a class and its settings.

No torch here. Left out: tensors (`server/checkpoint/formats/torchao.py`), and configs that round inputs or lay codes
out in tiles, which are refused by name.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from server.quantisation.configs import AGAIN, FormatError, group_size, shown

OF = "a torchao checkpoint"
INSTEAD = "save the model anew in one of them, or take it as it was published, in 16 bits, with --quantize int8 or int4"
VERSION = 2  # of a config's class, beside which torchao 0.18 reads no other one
CLASS_OF_PACKING = {"PLAIN": "Int4Tensor", "PLAIN_INT32": "Int4PlainInt32Tensor"}
MAPPINGS = {"SYMMETRIC": False, "SYMMETRIC_NO_CLIPPING_ERR": False, "ASYMMETRIC": True}  # -> whether zeros differ
INTEGERS = {f"int{bits}": bits for bits in range(1, 9)}


@dataclass(frozen=True)
class Layout:
    """How layers are stored. tensor: torchao's class of them.

    bits: of a code, of which less than 8 may lie in a byte all the same; group: inputs that share a scale; 0: all of a
    row do; is_of_rows: each row has scales of its own, else all share one; has_zeros: codes of 0 differ.
    """

    tensor: str
    bits: int = 8
    group: int = 0
    is_of_rows: bool = True
    has_zeros: bool = False


def layout_of(config: Mapping[str, Any]) -> Layout:
    """That of a checkpoint's config. Raises FormatError for what is not served."""
    name, data = class_of(config)
    return READERS[name](data)


def class_of(config: Mapping[str, Any]) -> tuple[str, Mapping[str, Any]]:
    """The class in `quant_type` and its settings, each without the class of its value. Raises FormatError."""
    given = config.get("quant_type")
    found = given.get("default") if isinstance(given, Mapping) and len(given) == 1 else None
    if not isinstance(found, Mapping) or not isinstance(found.get("_data"), Mapping):
        raise FormatError(
            f"`quant_type` of {OF} must be an object with a config of torchao as its `default`. Given: {shown(given)}; "
            "older versions of transformers wrote others, save the model anew with 5 or newer"
        )
    name = found.get("_type")
    if not isinstance(name, str) or name not in READERS:
        raise FormatError(f"`quant_type` {shown(name)} of {OF} is not served: {', '.join(READERS)} are; {INSTEAD}")
    if found.get("_version", VERSION) != VERSION:
        raise FormatError(
            f"`_version` {shown(found['_version'])} of {name} is not served: {VERSION} is, save the model anew with a "
            "newer torchao"
        )
    return name, {key: plain(value) for key, value in found["_data"].items()}


def plain(value: Any) -> Any:
    """A value of an enumeration or a dtype by its name; what has settings of its own stays as it is."""
    is_named = isinstance(value, Mapping) and isinstance(value.get("_data"), str)
    return value["_data"] if is_named else value


def _granularity(data: Mapping[str, Any], usual: str, *served: str) -> tuple[int, bool]:
    """(group, whether rows have scales of their own)."""
    found = data.get("granularity") or {"_type": usual, "_data": {}}
    kind = found.get("_type") if isinstance(found, Mapping) else None
    settings = found.get("_data") if isinstance(found, Mapping) else None
    if kind not in served or not isinstance(settings, Mapping):
        raise FormatError(f"`granularity` {shown(found)} of {OF} is not served: {', '.join(served)} are; {INSTEAD}")
    if kind == "PerGroup":
        return group_size(settings.get("group_size"), OF, may_be_all=False), True
    key, rows = ("axis", (0,)) if kind == "PerAxis" else ("dim", (-1, 1))
    if (place := settings.get(key, rows[0])) not in rows or isinstance(place, bool):
        raise FormatError(
            f"`{key}` {shown(place)} of {kind} of {OF} is not served: {rows[0]} is, a scale for each row; {INSTEAD}"
        )
    return 0, kind != "PerTensor"


def _int4(data: Mapping[str, Any]) -> Layout:
    packing = data.get("int4_packing_format") or "PLAIN"
    if not isinstance(packing, str) or packing not in CLASS_OF_PACKING:
        raise FormatError(
            f"`int4_packing_format` {shown(packing)} of {OF} is not served, whose codes lie in tiles: "
            f"{' and '.join(CLASS_OF_PACKING)} are; {INSTEAD}"
        )
    size = group_size(data.get("group_size", 128), OF, may_be_all=False)
    return Layout(CLASS_OF_PACKING[packing], 4, size, has_zeros=True)


def _int8(data: Mapping[str, Any]) -> Layout:
    return Layout("Int8Tensor", 8, *_granularity(data, "PerRow", "PerRow", "PerTensor", "PerGroup"))


def _float8(data: Mapping[str, Any]) -> Layout:
    return Layout("Float8Tensor", 8, *_granularity(data, "PerRow", "PerRow", "PerTensor", "PerGroup"))


def _integers(data: Mapping[str, Any]) -> Layout:
    dtype, mapping = data.get("weight_dtype") or "int8", data.get("mapping_type") or "SYMMETRIC"
    for key, value, served in (("weight_dtype", dtype, INTEGERS), ("mapping_type", mapping, MAPPINGS)):
        if not isinstance(value, str) or value not in served:
            raise FormatError(f"`{key}` of {OF} must be one of {', '.join(served)}. Given: {shown(value)}; {AGAIN}")
    size, _ = _granularity(data, "PerAxis", "PerAxis", "PerGroup")
    return Layout("IntxUnpackedToInt8Tensor", INTEGERS[dtype], size, has_zeros=MAPPINGS[mapping])


# By the class in `quant_type`.
READERS: Mapping[str, Callable[[Mapping[str, Any]], Layout]] = {
    "Int4WeightOnlyConfig": _int4,
    "Int8WeightOnlyConfig": _int8,
    "Float8WeightOnlyConfig": _float8,
    "IntxWeightOnlyConfig": _integers,
}
