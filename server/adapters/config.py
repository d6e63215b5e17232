"""adapter_config.json: what PEFT notes beside an adapter's tensors, checked.

Which layers an adapter changes, its tensors say: `target_modules`, `exclude_modules`, `layers_to_transform` and their
kin chose them when it was made, and are not read. Scales are in the config alone: `lora_alpha`, or what `alpha_pattern`
says of a layer, by the rules of PEFT 0.21 (the first expression that the end of a name matches). Files may be hostile,
so what expressions take has a bound (`server/quantisation/configs.py`).

What changes the computation and is not served is refused by its key. What chose the first numbers of training is not
asked for, but where it changed the base too. A key that is unknown and says something is refused.
"""

from __future__ import annotations

import math
import re
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from server.adapters.identity import CONFIG
from server.adapters.names import plain_name
from server.checkpoint.files import HubError, read_json
from server.quantisation.configs import MOST_EXPRESSION, Budget, Expression, ExpressionError, shown, whole_number

MOST_BYTES = 4_000_000  # of the file: parsing it holds everything else up
MOST_RANK = 1 << 14
MOST_S = 5.0  # of computing, for all expressions of a config and names of layers
MOST_PATTERNS = 100_000
MOST_SAVED = 1000  # names of modules, each compared with all layers
# Of an expression that stands for names of one length, whose dots may be any letter where no backslash is before them.
PLAIN = re.compile(r"(?:\w|\\?\.)+", re.ASCII)
MERGE = "merge it with `lockstep merge` and serve the merged model"
MERGE_BY_PEFT = "merge it with peft (`merge_and_unload`) and serve the merged model"
REFUSED = {
    "alora_invocation_tokens": ("changes a part of each prompt alone", "train it without"),
    "arrow_config": ("chooses among other adapters", "serve those"),
    "kasa_config": ("changes the base too", MERGE_BY_PEFT),
    "layer_replication": ("makes a deeper model of the base", MERGE_BY_PEFT),
    "monteclora_config": ("is drawn anew in each step", "train it without"),
    "use_bdlora": ("has matrices in blocks", MERGE_BY_PEFT),
    "use_qalora": ("averages groups of inputs", MERGE_BY_PEFT),
}
# Ways to choose the first numbers which take something from the base, so that the trained ones fit no other.
CHANGE_THE_BASE = ("pissa", "olora", "corda", "loftq", "lora_ga")
READ = {
    *("peft_type", "base_model_name_or_path", "r", "lora_alpha", "rank_pattern", "alpha_pattern", "use_rslora"),
    *("use_dora", "lora_bias", "modules_to_save", "trainable_token_indices", "ensure_weight_tying"),
    *("target_parameters", "init_lora_weights"),
}
# What says nothing that the tensors do not say, or nothing about what is computed.
WITHOUT_MEANING = {
    *("target_modules", "exclude_modules", "layers_to_transform", "layers_pattern", "bias"),
    *("fan_in_fan_out", "lora_dropout", "loftq_config", "eva_config", "corda_config", "lora_ga_config"),
    *("velora_config", "qalora_group_size", "megatron_config", "megatron_core", "runtime_config", "task_type"),
    *("auto_mapping", "inference_mode", "revision", "peft_version", "modules_to_tie", "target_modules_to_tie"),
    *("enable_lora", "merge_weights"),  # of early versions
}


class AdapterError(ValueError):
    """Why an adapter cannot be served, in one sentence with its remedy."""


class OnlyMerged(AdapterError):
    """It cannot be added to the model while this runs; maybe it can be merged into it. unless: what it may be else."""

    def __init__(self, problem: str, unless: str | None = None) -> None:
        self._problem = problem if unless is None else f"{problem}: {unless}"
        self._joint = ": " if unless is None else ", "
        super().__init__(f"{self._problem}{self._joint}{MERGE}")

    @property
    def by_peft(self) -> str:
        """The same with the remedy of who could not merge it with `lockstep merge` either."""
        return f"{self._problem}{self._joint}{MERGE_BY_PEFT}"


class AdapterUnreadable(AdapterError):
    """Its files cannot be read now, or change meanwhile: the next time it may be otherwise."""


@dataclass(frozen=True)
class AdapterConfig:
    """What is asked of a config. The ranks are what the tensors must have."""

    path: Path
    base: str | None  # the model that it was trained on, as it was called there
    rank: int
    alpha: float
    rank_pattern: Mapping[str, int]
    alpha_pattern: Mapping[str, float]
    is_rank_stabilised: bool
    has_magnitudes: bool  # DoRA
    has_bias: bool  # of the second matrix
    saved: tuple[str, ...]  # modules that were trained whole, or the ends of their names
    tokens: Mapping[str, tuple[int, ...]] | tuple[int, ...] | None  # trained alone: by table, or of the input's table
    parameters: frozenset[str]  # `target_parameters`, or the ends of their names
    is_tied: bool  # whether what changes the embedding changes a head that is tied to it

    @classmethod
    def read(cls, folder: Path) -> AdapterConfig:
        """Raises AdapterError."""
        path = folder / CONFIG
        if not path.exists():
            raise AdapterError(f"{folder} has no {CONFIG}: give the folder of an adapter")
        try:
            if (size := path.stat().st_size) > MOST_BYTES:
                raise AdapterError(f"{path} has {size} bytes, and {MOST_BYTES} are the most: give another adapter")
            found = read_json(path, "what kind of adapter this is")
        except HubError as error:
            raise AdapterError(str(error)) from None
        except OSError as error:
            raise AdapterError(f"{path} cannot be read ({error.strerror}): give another adapter") from None
        return _checked(path, found)

    def other_base(self, model: str) -> str:
        """What it was trained on, quoted, where that has another name than a model; empty: it has not, or says nothing.

        The last parts of both names are compared, of which one may say more than the other.
        """
        own, other = (name.rstrip("/").rpartition("/")[2].lower() for name in (self.base or "", model))
        return "" if own.startswith(other) or other.startswith(own) else shown(self.base)

    def rank_of(self, name: str) -> int:
        """Of the layer of this name, without what stands around the model. Raises AdapterError."""
        return int(self._said(self._ranks, "rank_pattern", self._key(name), self.rank))

    def scale_of(self, name: str) -> float:
        """By which the product of the layer's two matrices is multiplied. Raises AdapterError."""
        alpha, rank = self._said(self._alphas, "alpha_pattern", self._key(name), self.alpha), self.rank_of(name)
        return alpha / math.sqrt(rank) if self.is_rank_stabilised else alpha / rank

    def names_parameter(self, name: str) -> bool:
        """Whether `target_parameters` has a parameter, or the end of its name."""
        parts = name.split(".")
        return any(".".join(parts[start:]) in self.parameters for start in range(len(parts)))

    def _key(self, name: str) -> str:
        """What patterns are compared with: for a layer whose weight was chosen as a parameter, its name."""
        return f"{name}.weight" if self.parameters and self.names_parameter(f"{name}.weight") else name

    def tokens_of(self, name: str) -> tuple[int, ...] | None:
        """The tokens of a table that were trained alone; None: the config names none."""
        if not isinstance(self.tokens, Mapping):
            return self.tokens
        named = (ids for table, ids in self.tokens.items() if plain_name(name) == plain_name(table))
        ending = (ids for table, ids in self.tokens.items() if name.endswith(f".{table}"))
        return next(named, None) or next(ending, None)

    def _said(self, patterns: Patterns, key: str, name: str, otherwise: float) -> float:
        try:
            return patterns.of(name, otherwise)
        except ExpressionError as error:
            raise AdapterError(
                f"`{key}` of {self.path} cannot be compared with the names of layers in {MOST_S:g} seconds: name the "
                "layers one by one"
            ) from error

    @cached_property
    def _budget(self) -> Budget:
        return Budget(MOST_S)

    @cached_property
    def _ranks(self) -> Patterns:
        return Patterns(self.path, "rank_pattern", self.rank_pattern, self._budget)

    @cached_property
    def _alphas(self) -> Patterns:
        return Patterns(self.path, "alpha_pattern", self.alpha_pattern, self._budget)


class Patterns:
    """Numbers by expressions, of which the first counts that the end of a name matches, from a dot on or whole."""

    def __init__(self, path: Path, key: str, numbers: Mapping[str, float], budget: Budget) -> None:
        self._budget = budget
        self._rules: list[tuple[str, Expression | str, float]] = []  # each with a letter or more that end a match
        for text, number in numbers.items():
            if PLAIN.fullmatch(text):
                pattern = text.replace("\\.", "\0").replace(".", "?").replace("\0", ".")
                self._rules.append((re.split(r"[.?]", pattern)[-1], pattern, number))
                continue
            try:
                if len(text) > MOST_EXPRESSION:
                    raise ExpressionError(f"more than {MOST_EXPRESSION} characters")
                self._rules.append(("", Expression(rf"(.*\.)?({text})$", budget), number))
            except ExpressionError as error:
                raise AdapterError(
                    f"`{key}` of {path} must have names of layers, or regular expressions of {MOST_EXPRESSION} "
                    f"characters at most. Given: {shown(text)} ({error}); correct it"
                ) from None

    def of(self, name: str, otherwise: float) -> float:
        """Raises ExpressionError where that takes too long."""
        for end, pattern, number in self._rules:
            if name.endswith(end) and self._is_of(name, pattern):
                return number
        return otherwise

    def _is_of(self, name: str, pattern: Expression | str) -> bool:
        if not isinstance(pattern, str):
            return pattern.match(name)
        began = time.thread_time()
        found = _ends(name, pattern)
        self._budget.spend(began)
        return found


def _ends(name: str, pattern: str) -> bool:
    """Whether the name is so, or what follows one of its dots; `?` is any letter."""
    before = len(name) - len(pattern)
    if before < 0 or (before and name[before - 1] != "."):
        return False
    return all(wanted in ("?", letter) for wanted, letter in zip(pattern, name[before:], strict=True))


def _checked(path: Path, found: Mapping[str, Any]) -> AdapterConfig:
    value = Values(path, found)
    if found.get("peft_type") != "LORA":
        raise AdapterError(f"{path} is of an adapter of type {shown(found.get('peft_type'))}: only LORA is served")
    _refuse_unserved(path, found)
    has_magnitudes, has_bias = value.flag("use_dora"), value.flag("lora_bias")
    if has_magnitudes and has_bias:
        raise AdapterError(f"{path} has both `use_dora` and `lora_bias`, which peft does not know either: correct it")
    base = found.get("base_model_name_or_path")
    config = AdapterConfig(
        path=path,
        base=base if isinstance(base, str) and base else None,
        rank=value.rank("r", found.get("r", 8)),
        alpha=value.number("lora_alpha", found.get("lora_alpha", 8)),
        rank_pattern={k: value.rank("rank_pattern", v) for k, v in value.table("rank_pattern").items()},
        alpha_pattern={k: value.number("alpha_pattern", v) for k, v in value.table("alpha_pattern").items()},
        is_rank_stabilised=value.flag("use_rslora"),
        has_magnitudes=has_magnitudes,
        has_bias=has_bias,
        saved=value.names("modules_to_save", MOST_SAVED),
        parameters=frozenset(value.names("target_parameters", MOST_PATTERNS)),
        tokens=value.tokens("trainable_token_indices"),
        is_tied=value.flag("ensure_weight_tying"),
    )
    assert config._ranks and config._alphas, "compiled at once, so that a bad expression is refused here"
    return config


def _refuse_unserved(path: Path, found: Mapping[str, Any]) -> None:
    for key, (what, remedy) in REFUSED.items():
        if found.get(key):
            raise AdapterError(f"{path} has `{key}`: an adapter that {what} is not served, {remedy}")
    init = found.get("init_lora_weights")
    if isinstance(init, str) and init.lower().startswith(CHANGE_THE_BASE):
        raise AdapterError(
            f"{path} has `init_lora_weights` {shown(init)}: it was trained on a base from which its first numbers had "
            "been taken; save it with `path_initial_model_for_weight_conversion`, which makes it one for the base "
            "itself"
        )
    known = READ | WITHOUT_MEANING | REFUSED.keys()
    if unknown := next((key for key in sorted(found.keys() - known) if found[key]), None):
        raise AdapterError(
            f"{path} has `{shown(unknown)[1:-1]}`, which is not known here: if it changes nothing that is computed, "
            "take it out"
        )


@dataclass(frozen=True)
class Values:
    """Reads values of the types that they must have. All raise AdapterError."""

    path: Path
    found: Mapping[str, Any]

    def flag(self, key: str) -> bool:
        """False where there is none."""
        value = self.found.get(key)
        return bool(self._must(value is None or isinstance(value, bool), key, "true or false", value))

    def rank(self, key: str, value: Any) -> int:
        """A rank."""
        return int(self._must(whole_number(value, 1, MOST_RANK), key, f"ranks from 1 to {MOST_RANK}", value))

    def number(self, key: str, value: Any) -> float:
        """A finite number."""
        is_number = isinstance(value, int | float) and not isinstance(value, bool) and abs(value) < 1e30
        return float(self._must(is_number, key, "finite numbers", value))

    def table(self, key: str) -> dict[str, Any]:
        """An object, empty where there is none."""
        value = self.found.get(key) or {}
        is_table = isinstance(value, dict) and len(value) <= MOST_PATTERNS
        found: dict[str, Any] = self._must(is_table, key, f"an object of {MOST_PATTERNS} entries at most", value)
        return found

    def names(self, key: str, most: int) -> tuple[str, ...]:
        """A list of names, or one."""
        value = self.found.get(key) or []
        listed = [value] if isinstance(value, str) else value
        is_list = isinstance(listed, list) and len(listed) <= most and all(isinstance(one, str) for one in listed)
        return tuple(self._must(is_list, key, f"a list of names, {most} at most", listed))

    def tokens(self, key: str) -> Mapping[str, tuple[int, ...]] | tuple[int, ...] | None:
        """Tokens' ids, or lists of them by table."""
        value = self.found.get(key)
        if value is None:
            return None
        lists: Sequence[Any] = list(value.values()) if isinstance(value, dict) else [value]
        is_good = all(
            isinstance(ids, list) and all(whole_number(one, 0, 1 << 31) for one in ids) and len(set(ids)) == len(ids)
            for ids in lists
        )
        self._must(is_good, key, "lists of different tokens' ids", value)
        return {name: tuple(ids) for name, ids in value.items()} if isinstance(value, dict) else tuple(value)

    def _must(self, is_good: bool, key: str, what: str, value: Any) -> Any:
        if not is_good:
            raise AdapterError(f"`{key}` of {self.path} must be {what}. Given: {shown(value)}; correct it")
        return value
