"""Which layers a quantised checkpoint leaves dense, by its config: plans count so, and random weights are made so.

Where weights are read, their tensors tell. No torch here.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from server.quant.configs import AGAIN, FormatError, compiled, shown, strings
from server.quant.expressions import Expression
from server.quant.quark import Layers

HEADS = ("lm_head", "embed_out", "output_layer")
HEADS_AND_ROUTERS = (*HEADS, "gate")  # what tools leave dense unless they are told otherwise
NAMED = ("modules_to_not_convert", "ignore", "ignored_layers", "llm_int8_skip_modules")  # lists of what is dense
CLASSES = ("Linear", "Conv1D")  # of modules, which targets of compressed-tensors may be


@dataclass(frozen=True)
class Names:
    """Layers by name: whole ones, parts between dots, or `re:` and an expression. Raises FormatError."""

    entries: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        assert self._patterns is not None, "compiled at once, so that a bad one is refused here"

    def hold(self, name: str) -> bool:
        """Whether an entry names this layer."""
        if name not in self._known:
            self._known[name] = any(f".{part}." in f".{name}." for part in self._parts) or any(
                pattern.match(name) for pattern in self._patterns
            )
        return self._known[name]

    @cached_property
    def _known(self) -> dict[str, bool]:
        return {}

    @cached_property
    def _parts(self) -> list[str]:
        return [entry for entry in self.entries if not entry.startswith("re:")]

    @cached_property
    def _patterns(self) -> list[Expression]:
        return compiled([entry.removeprefix("re:") for entry in self.entries if entry.startswith("re:")])


@dataclass(frozen=True)
class Ends:
    """Layers by the ends of their names, or `re:` and an expression. Raises FormatError."""

    entries: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        assert self._patterns is not None, "compiled at once, so that a bad one is refused here"

    def hold(self, name: str) -> bool:
        """Whether an entry names this layer."""
        return any(f".{name}".endswith(f".{end}") for end in self._ends) or any(p.match(name) for p in self._patterns)

    @cached_property
    def _ends(self) -> list[str]:
        return [entry for entry in self.entries if not entry.startswith("re:")]

    @cached_property
    def _patterns(self) -> list[Expression]:
        return compiled([entry.removeprefix("re:") for entry in self.entries if entry.startswith("re:")])


@dataclass(frozen=True)
class Rule:
    """What GPTQModel's `dynamic` says of the layers that an expression begins. change: in place of the usual values."""

    pattern: Expression
    is_dense: bool
    change: Mapping[str, Any]


@dataclass(frozen=True)
class LeftOut:
    """named: dense ones; rules: the first that fits decides; only: where there are any, all others are dense.

    of_quark: the schemes of all others.
    """

    named: Names = field(default_factory=Names)
    rules: tuple[Rule, ...] = ()
    only: Ends = field(default_factory=Ends)
    of_quark: Layers | None = None

    def hold(self, name: str) -> bool:
        """Whether the layer of this name is dense."""
        if self.named.hold(name) or (self.only.entries and not self.only.hold(name)):
            return True
        if self.of_quark is not None:
            return self.of_quark.of(name) is None
        rule = next((rule for rule in self.rules if rule.pattern.match(name)), None)
        return rule is not None and rule.is_dense

    @property
    def holds_head(self) -> bool:
        """Whether a head that is not tied is dense."""
        return any(self.hold(head) for head in HEADS)


def of_config(config: Mapping[str, Any], method: str) -> LeftOut:
    """What a config of this `quant_method` leaves dense. Raises FormatError."""
    if method == "quark":
        return LeftOut(Names(strings(config, "exclude")), of_quark=Layers(config))
    named = [entry for key in NAMED for entry in strings(config, key)]
    if method == "compressed-tensors":
        targets = _targets(config)
        if not targets:  # only the cache of keys and values is in fewer bits
            return LeftOut(Names(("re:",)))
        only = () if any(target in CLASSES for target in targets) else targets
        return LeftOut(Names(tuple(named)), only=Ends(only))
    has_head = method == "gptq" and bool(config.get("lm_head"))
    named += [name for name in HEADS_AND_ROUTERS if not (has_head and name in HEADS)]
    if method != "gptq":
        return LeftOut(Names(tuple(named)))
    blocks = _in_blocks(config)
    only = (*blocks, *HEADS) if blocks and has_head else blocks
    return LeftOut(Names(tuple(named)), tuple(rules(config)), Ends(only))


def rules(config: Mapping[str, Any]) -> list[Rule]:
    """Those of GPTQModel's `dynamic`, in their order. Raises FormatError."""
    found = config.get("dynamic") or {}
    if not isinstance(found, Mapping) or not all(isinstance(change, Mapping) for change in found.values()):
        raise FormatError(
            "`dynamic` of a gptq checkpoint must be an object of objects, by expressions for names of layers. Given: "
            f"{shown(found)}; {AGAIN}"
        )
    patterns = compiled([entry.removeprefix("+:").removeprefix("-:") for entry in found])
    return [
        Rule(pattern, entry.startswith("-:"), change)
        for pattern, (entry, change) in zip(patterns, found.items(), strict=True)
    ]


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
