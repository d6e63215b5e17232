"""What the config of AMD Quark says of each layer: how its weight is stored, and how its inputs are rounded.

Read for plans and for weights, so without torch. Every layer has one entry of the config: the first that names it, of
those that leave layers dense, of the cache's, of single layers, of classes, and of all. Left out: tensors
(`server/checkpoint/formats/quark.py`), and keys that mean the same wherever they stand (`config_keys.py`).
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from server.quantisation.configs import Budget, Expression, FormatError, compiled, group_size, shown, strings

Entry = Mapping[str, Any]

BITS: Mapping[str, int] = {"int4": 4, "uint4": 4, "int8": 8, "uint8": 8, "fp8_e4m3": 8, "fp4": 4}
OF_ROWS = ("per_tensor", "per_channel")
# By `dtype` of weights: what may share a scale (`qscheme`).
SCHEMES: Mapping[str, Sequence[str]] = dict.fromkeys(("int4", "uint4", "int8", "uint8"), (*OF_ROWS, "per_group")) | {
    "fp8_e4m3": OF_ROWS,
    "fp4": ("per_group",),
}
ROUNDED = ("int8", "fp8_e4m3")  # `dtype` of weights beside which inputs may have the same
KEYS_OF_ENTRIES = ("kv_cache_quant_config", "layer_quant_config", "layer_type_quant_config")
AXES = {"per_channel": (0,), "per_group": (1, -1)}  # `ch_axis` of weights [F, D]: along which scales differ
OF_FLOAT4 = 32  # inputs that share a power of 2
MERGED = ("smooth", "autosmoothquant", "awq", "gptq", "gptaq", "autoround", "qronos")  # their results are the weights
ONLINE = ("r3", "r4", "online_r1_rotation")  # of which every token would need one


@dataclass(frozen=True)
class Scheme:
    """How the layers of an entry are stored.

    dtype: of codes, in Quark's words; is_of_all: whether all rows share a scale; group: neighbouring inputs that share
    one; 0: all of a row do; has_zero: beside a scale; inputs: how they are rounded; None: they are not.
    """

    dtype: str
    is_of_all: bool = False
    group: int = 0
    has_zero: bool = False
    inputs: Entry | None = None

    @property
    def bits(self) -> int:
        """Of a code."""
        return BITS[self.dtype]

    @property
    def is_signed(self) -> bool:
        """Whether codes are integers on both sides of 0."""
        return self.dtype in ("int4", "int8")

    @property
    def is_float(self) -> bool:
        """Whether codes are floats."""
        return self.dtype.startswith("fp")

    @property
    def is_in_words(self) -> bool:
        """Whether codes are integers of which a word has several."""
        return self.dtype in ("int4", "uint4")

    def num_groups(self, inputs: int) -> int:
        """How many groups a layer of so many inputs has."""
        return inputs // self.group if self.group else 1


# Schemes by whole names, and by patterns of names.
Named = tuple[Mapping[str, Scheme | None], Sequence[tuple[Expression, Scheme | None]]]


class Layers:
    """The schemes of a model's layers. config: `quantization_config`. Raises FormatError for what is not served."""

    def __init__(self, config: Mapping[str, Any], budget: Budget):
        _refuse_algorithms(config.get("algo_config"))
        cached, named, classes = (_entries(config, key) for key in KEYS_OF_ENTRIES)
        of_all = _part(config, "global_quant_config")
        if other := next((name for name in classes if name != "Linear"), None):
            raise _unserved("layer_type_quant_config", other, "Linear is")
        of_cache = {*cached, *strings(_part(config, "export"), "kv_cache_group")}  # the latter is older
        outside = [*(entry for name, entry in named.items() if name not in of_cache), *classes.values(), of_all]
        if any(entry.get("output_tensors") is not None for entry in outside):
            raise FormatError(
                "`output_tensors` of a quark checkpoint are served where `kv_cache_quant_config` has them too, and "
                "other layers have some: take another checkpoint of this model"
            )
        # What comes first counts.
        self._named: list[Named] = [
            _named(dict.fromkeys(strings(config, "exclude")), budget),
            *(_named({name: scheme_of(one) for name, one in entries.items()}, budget) for entries in (cached, named)),
        ]
        self._others = scheme_of(classes.get("Linear") or of_all)
        of_names = [scheme for exact, globs in self._named for scheme in (*exact.values(), *(one for _, one in globs))]
        self.first = next((scheme for scheme in (self._others, *of_names) if scheme is not None), None)

    def of(self, name: str) -> Scheme | None:
        """The scheme of the layer of this name; None: it is dense."""
        for exact, globs in self._named:
            if name in exact:
                return exact[name]
            for pattern, scheme in globs:
                if pattern.match(name):
                    return scheme
        return self._others


def parts_of(config: Mapping[str, Any]) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """Every part of a config that was read without an error, and what kind it is of: of the config, or of an entry."""
    yield "export", _part(config, "export")
    named = (entry for key in KEYS_OF_ENTRIES for entry in _entries(config, key).values())
    for entry in (_part(config, "global_quant_config"), *named):
        yield "entry", entry
        for kind in ("weight", "input_tensors", "output_tensors"):
            if entry.get(kind) is not None:
                yield kind, entry[kind]


def scheme_of(entry: Entry) -> Scheme | None:
    """The scheme of an entry; None where it leaves weights alone. Raises FormatError."""
    weight, inputs = (_part(entry, key) for key in ("weight", "input_tensors"))
    if not weight:
        if inputs:
            raise _unserved("input_tensors", inputs, "they are where there is a `weight`")
        return None
    dtype = str(weight.get("dtype"))
    if dtype not in SCHEMES:
        raise _unserved("dtype", weight.get("dtype"), f"for weights {', '.join(SCHEMES)} are")
    scheme, axis = str(weight.get("qscheme")), weight.get("ch_axis")
    if scheme not in SCHEMES[dtype]:
        raise _unserved("qscheme", weight.get("qscheme"), f"for weights in {dtype} {', '.join(SCHEMES[dtype])} is")
    if scheme in AXES and axis not in AXES[scheme]:
        raise _unserved("ch_axis", axis, f"for weights {scheme} {AXES[scheme][0]} is")
    format, found = "e8m0" if dtype == "fp4" else "float32", weight.get("scale_format")
    if found != format and (found or dtype == "fp4"):
        raise _unserved("scale_format", found, f"for weights in {dtype} {format} is")
    size = 0
    if scheme == "per_group":
        size = group_size(weight.get("group_size"), "a quark checkpoint", may_be_all=False)
    if dtype == "fp4" and size != OF_FLOAT4:
        raise _unserved("group_size", size, f"for weights in fp4 {OF_FLOAT4} is")
    has_zero = dtype.startswith("u") or (dtype.startswith("int") and not weight.get("symmetric", True))
    return Scheme(dtype, scheme == "per_tensor", size, has_zero, _inputs(inputs, dtype, size))


def _inputs(inputs: Entry, dtype: str, group: int) -> Entry | None:
    """How inputs are rounded; those in float4 are taken as they are. Raises FormatError."""
    if not inputs or dtype == inputs.get("dtype") == "fp4":
        return None
    if dtype not in ROUNDED or inputs.get("dtype") != dtype or group:
        told = f"beside weights of rows in {' or '.join(ROUNDED)} the same is, or inputs as they are"
        raise _unserved("dtype", inputs.get("dtype"), f"for `input_tensors` {told}")
    scheme, axis, is_dynamic = (inputs.get(key) for key in ("qscheme", "ch_axis", "is_dynamic"))
    if scheme != "per_tensor" and not (is_dynamic and scheme == "per_channel" and axis == 1):
        told = "per_tensor is, and where they are dynamic per_channel along 1"
        raise _unserved("qscheme", scheme, f"for `input_tensors` {told}")
    if is_dynamic and inputs.get("symmetric") is False:
        raise _unserved("symmetric", False, "for `input_tensors` that are dynamic true is")
    return inputs


def _unserved(key: str, value: object, good: str) -> FormatError:
    return FormatError(
        f"`{key}` {shown(value)} of a quark checkpoint is not served: {good}; take another checkpoint of this model"
    )


def _part(config: Mapping[str, Any], key: str) -> Entry:
    """An object in a config, empty where there is none. Raises FormatError."""
    found = config.get(key)
    if found is not None and not isinstance(found, Mapping):
        raise _unserved(key, found, "an object is, of a single step of rounding")
    return found or {}


def _entries(config: Mapping[str, Any], key: str) -> Mapping[str, Entry]:
    """Entries by names of layers or of classes. Raises FormatError."""
    found = _part(config, key)
    return {name: _part(found, name) for name in found}


def _named(schemes: Mapping[str, Scheme | None], budget: Budget) -> Named:
    globs = {name: scheme for name, scheme in schemes.items() if re.search(r"[*?\[]", name)}
    patterns = compiled(list(map(_expression, globs)), budget)
    exact = {name: scheme for name, scheme in schemes.items() if name not in globs}
    return exact, list(zip(patterns, globs.values(), strict=True))


def _expression(glob: str) -> str:
    """A name with `*` and `?` in it as an expression. Raises FormatError for sets of letters."""
    if "[" in glob:
        raise _unserved("exclude", glob, "for patterns of names * and ? are")
    return re.escape(glob).replace(r"\*", ".*").replace(r"\?", ".") + "$"


def _refuse_algorithms(algorithms: Any) -> None:
    """Raise FormatError for an algorithm that leaves something to do for each token."""
    for one in algorithms if isinstance(algorithms, list) else [algorithms] if algorithms else []:
        settings = one if isinstance(one, Mapping) else {"name": one}
        name, online = settings.get("name"), [key for key in ONLINE if settings.get(key)]
        if name not in MERGED and (name != "rotation" or online):
            good = f"{', '.join(MERGED)} are, and rotation without {', '.join(ONLINE)}, since they end up in weights"
            raise _unserved("algo_config", name, good)
