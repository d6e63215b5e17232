"""Which layers a quantised checkpoint leaves dense, by its config: plans count so, and random weights are made so.

Where weights are read, their tensors tell. No torch here.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from server.quantisation.configs import AGAIN, Budget, Expression, FormatError, compiled, shown, strings
from server.quantisation.quark import Layers

HEADS = ("lm_head", "embed_out", "output_layer")
HEADS_AND_ROUTERS = (*HEADS, "gate")  # what tools leave dense unless they are told otherwise
EXPERTS = r"re:.*\.experts\."  # what is in MXFP4, whatever lists of names say
NAMED = ("modules_to_not_convert", "ignore", "ignored_layers", "llm_int8_skip_modules")  # lists of what is dense
KEYS_OF_HEADS = {"gptq": "lm_head", "torchao": "include_input_output_embeddings"}  # by `quant_method`
CLASSES = ("Linear", "Conv1D")  # of modules, which targets of compressed-tensors may be
# Expressions that stand for one name, of which auto-round's config has one for each layer.
LITERAL = re.compile(r"(?:\w|\\\W)+\$", re.ASCII)


@dataclass(frozen=True)
class Names:
    """Layers by name: whole ones, parts between dots, or `re:` and an expression. Raises FormatError.

    only_ends: of parts, those that end a name alone. budget: of the config that the entries are of.
    """

    entries: tuple[str, ...] = ()
    only_ends: bool = False
    budget: Budget = field(default_factory=Budget, compare=False, repr=False)

    def __post_init__(self) -> None:
        assert self._patterns is not None, "compiled at once, so that a bad one is refused here"

    def hold(self, name: str) -> bool:
        """Whether an entry names this layer. Takes as long for many plain names as for one."""
        if name not in self._known:
            parts = ends(name) if self.only_ends else _parts(name)
            self._known[name] = any(part in self._plain for part in parts) or any(
                pattern.match(name) for pattern in self._patterns
            )
        return self._known[name]

    @cached_property
    def _known(self) -> dict[str, bool]:
        return {}

    @cached_property
    def _plain(self) -> frozenset[str]:
        return frozenset(entry for entry in self.entries if not entry.startswith("re:"))

    @cached_property
    def _patterns(self) -> list[Expression]:
        return compiled([entry.removeprefix("re:") for entry in self.entries if entry.startswith("re:")], self.budget)


def ends(name: str) -> Iterator[str]:
    """A name, and what follows each of its dots."""
    yield name
    for place, letter in enumerate(name):
        if letter == ".":
            yield name[place + 1 :]


def _parts(name: str) -> Iterator[str]:
    """Whatever lies between two dots of a name, or its beginning and its end."""
    for end in ends(name):
        yield end
        yield from (end[:place] for place, letter in enumerate(end) if letter == ".")


@dataclass(frozen=True)
class Rule:
    """What GPTQModel's `dynamic` says of some layers. change: in place of the usual values."""

    is_dense: bool
    change: Mapping[str, Any]


@dataclass(frozen=True)
class Rules:
    """GPTQModel's `dynamic`: the first expression that begins a layer's name decides. Raises FormatError."""

    dynamic: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    budget: Budget = field(default_factory=Budget, compare=False, repr=False)

    def __post_init__(self) -> None:
        found = self.dynamic
        if not isinstance(found, Mapping) or not all(isinstance(change, Mapping) for change in found.values()):
            raise FormatError(
                "`dynamic` of a gptq checkpoint must be an object of objects, by expressions for names of layers. "
                f"Given: {shown(found)}; {AGAIN}"
            )
        assert self._patterns is not None, "compiled at once, so that a bad one is refused here"

    @cached_property
    def all(self) -> list[Rule]:
        """In their order."""
        return [Rule(entry.startswith("-:"), change) for entry, change in self.dynamic.items()]

    def place_of(self, name: str) -> int | None:
        """Which of all decides on the layer of this name; None: none does."""
        literal = self._names.get(name, len(self.dynamic))
        earlier = (place for place, pattern in self._patterns if place < literal and pattern.match(name))
        found = next(earlier, literal)
        return found if found < len(self.dynamic) else None

    @cached_property
    def _texts(self) -> list[str]:
        return [entry.removeprefix("+:").removeprefix("-:") for entry in self.dynamic]

    @cached_property
    def _names(self) -> dict[str, int]:
        """The places of those that stand for one name, by it."""
        literal = [(place, text) for place, text in enumerate(self._texts) if LITERAL.fullmatch(text)]
        return {re.sub(r"\\(.)", r"\1", text[:-1], flags=re.DOTALL): place for place, text in reversed(literal)}

    @cached_property
    def _patterns(self) -> list[tuple[int, Expression]]:
        others = [place for place, text in enumerate(self._texts) if not LITERAL.fullmatch(text)]
        return list(zip(others, compiled([self._texts[place] for place in others], self.budget), strict=True))


@dataclass(frozen=True)
class Exclusions:
    """named: dense ones; rules: what they call so; only: where there are any, all others are dense.

    of_quark: the schemes of all others.
    """

    named: Names = field(default_factory=Names)
    rules: Rules = field(default_factory=Rules)
    only: Names = field(default_factory=Names)
    of_quark: Layers | None = None

    def hold(self, name: str) -> bool:
        """Whether the layer of this name is dense."""
        if self.named.hold(name) or (self.only.entries and not self.only.hold(name)):
            return True
        if self.of_quark is not None:
            return self.of_quark.of(name) is None
        place = self.rules.place_of(name)
        return place is not None and self.rules.all[place].is_dense

    @property
    def holds_head(self) -> bool:
        """Whether a head that is not tied is dense."""
        return any(self.hold(head) for head in HEADS)


def of_config(config: Mapping[str, Any], method: str, budget: Budget) -> Exclusions:
    """What a config of this `quant_method` leaves dense. Raises FormatError."""
    if method == "mxfp4":
        return Exclusions(only=Names((EXPERTS,)))
    if method == "quark":
        return Exclusions(Names(strings(config, "exclude"), budget=budget), of_quark=Layers(config, budget))
    named = [entry for key in NAMED for entry in strings(config, key)]
    if method == "compressed-tensors":
        targets = _targets(config)
        if not targets:  # only the cache of keys and values is in fewer bits
            return Exclusions(Names(("re:",)))
        only = () if any(target in CLASSES for target in targets) else targets
        return Exclusions(Names(tuple(named), budget=budget), only=Names(only, only_ends=True, budget=budget))
    has_head = bool(config.get(KEYS_OF_HEADS.get(method, "")))
    named += [name for name in HEADS_AND_ROUTERS if not (has_head and name in HEADS)]
    dense = Names(tuple(named), budget=budget)
    if method != "gptq":
        return Exclusions(dense)
    blocks = _in_blocks(config)
    only = (*blocks, *HEADS) if blocks and has_head else blocks
    rules = Rules(config.get("dynamic") or {}, budget)
    return Exclusions(dense, rules, Names(only, only_ends=True, budget=budget))


def _in_blocks(config: Mapping[str, Any]) -> tuple[str, ...]:
    """Names in `modules_in_block_to_quantize`, which is a list of them, or of lists."""
    key = "modules_in_block_to_quantize"
    blocks = config.get(key) or []
    if not isinstance(blocks, list):
        return strings(config, key)
    return strings({key: [name for one in blocks for name in (one if isinstance(one, list) else [one])]}, key)


def _targets(config: Mapping[str, Any]) -> tuple[str, ...]:
    """What the groups of compressed-tensors are for whose weights are quantised."""
    groups = (config.get("config_groups") or {}).values()
    return tuple(target for group in groups if group.get("weights") for target in strings(group, "targets") or CLASSES)
