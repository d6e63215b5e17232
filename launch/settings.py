"""Every public setting: what it is called, what values it takes, and which value this launch has.

The settings are the dataclass fields of LauncherConfig, RouterConfig and ShardConfig that carry a `help`. Flags, their
help and `docs/settings.md` are made from the same fields (`flags.py`), so that none can be forgotten. All wrong values
are reported together. This module does not read the environment: it is passed in.
"""

from __future__ import annotations

import dataclasses
import math
import types
import typing
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from launch.compatibility import peers, tgi
from launch.config import GROUPS, NULL_MODEL, REMOVED, LauncherConfig
from launch.logs import printable
from router.config import RouterConfig, adapter_problems, relation_problems, speculative_problems
from server.config import ShardConfig, tier_problems

# The settings with rules between them: what `relation_problems` asks for.
RELATED = (
    "max_input_length",
    "max_total_tokens",
    "max_batch_total_tokens",
    "waiting_served_ratio",
    "prefill_chunk",
    "max_inter_token_ms",
)
# Likewise those that `tier_problems` asks for.
TIERS = (
    "prefix_cache_host_gb",
    "prefix_cache_disk_gb",
    "prefix_cache_dir",
    "disable_prefix_caching",
    "kv_on_device",
)
ADAPTERS = ("adapter_dir", "allow_adapter_changes")  # and `adapter_problems`
SPECULATIVE = ("speculative_model", "speculative_method", "speculate")  # and `speculative_problems`
LARGEST = 2**31 - 1  # of a setting without a bound of its own: what 32 bits hold on the wire and in tensors


@dataclass(frozen=True)
class Setting:
    """One public setting, as its dataclass field describes it."""

    name: str
    kind: type  # bool, int, float, str or tuple
    default: Any
    metadata: Mapping[str, Any]

    @property
    def names(self) -> tuple[str, ...]:
        """The setting's name, and its other names."""
        return (self.name, *self.metadata.get("aliases", ()))

    @property
    def is_switch(self) -> bool:
        """Whether the flag alone means true; `--sharded`, which has three states, needs its value."""
        return self.kind is bool and self.default is not None

    @property
    def default_text(self) -> str:
        """The default as `--help` and the settings page show it."""
        if "default" in self.metadata:
            return str(self.metadata["default"])
        return str(self.default).lower() if self.kind is bool else str(self.default)

    def variable(self, name: str) -> str | None:
        """The environment variable that sets it under `name`, if there is one."""
        variable: str | None = self.metadata.get("environment", name.upper())
        return variable


@dataclass(frozen=True)
class Settings:
    """Every public setting's value, and where it came from: "flag", "environment" or "default".

    idle: a sentence for each setting of another server's that was given and changes nothing here.
    """

    values: Mapping[str, Any]
    sources: Mapping[str, str]
    idle: Sequence[str] = ()

    def pick(self, config: type) -> dict[str, Any]:
        """The values of the fields that `config` declares."""
        return {f.name: self.values[f.name] for f in dataclasses.fields(config) if f.name in self.values}

    @property
    def is_null_model(self) -> bool:
        """Whether the shards answer with fixed tokens, without a model."""
        return bool(self.values["model_id"] == NULL_MODEL)

    @property
    def has_adapters(self) -> bool:
        """Whether requests may name adapters."""
        return any(self.values[name] for name in ("lora_adapters", "adapter_dir", "allow_adapter_changes"))

    @property
    def shown_model(self) -> str:
        """The model's name for people. The embedded model's is not its path on this machine: clients see the name."""
        return "server/demo" if self.sources["model_id"] == "default" else str(self.values["model_id"])


def flag(name: str) -> str:
    """The option that sets `name`."""
    return "--" + name.replace("_", "-")


def public_settings() -> dict[str, Setting]:
    """All public settings by name, in the order of the documentation."""
    found = {}
    for config in (LauncherConfig, RouterConfig, ShardConfig):
        hints = typing.get_type_hints(config)
        for f in dataclasses.fields(config):
            if "help" in f.metadata:
                found[f.name] = Setting(f.name, _plain_type(hints[f.name]), f.default, f.metadata)
    ordered = [name for names in GROUPS.values() for name in names.split()]
    assert found.keys() == set(ordered), f"in no group, or in one without being a setting: {found.keys() ^ ordered}"
    return {name: found[name] for name in ordered}


def _plain_type(hint: Any) -> type:
    """`int | None` and `int | Literal["auto"]` -> int, `tuple[str, ...]` -> tuple."""
    is_union = isinstance(hint, types.UnionType) or typing.get_origin(hint) is typing.Union
    options = [t for t in typing.get_args(hint) if t is not types.NoneType] if is_union else []
    plain: type = options[0] if options else typing.get_origin(hint) or hint
    return plain


def read_settings(
    flags: Mapping[str, Any], environ: Mapping[str, str], names: Sequence[str] | None = None
) -> tuple[Settings, list[str]]:
    """Every setting's value, and one sentence for each that is wrong. A flag wins over the environment.

    names: the settings that are read, for a command that needs a few; the others have their defaults.
    """
    values: dict[str, Any] = {}
    sources: dict[str, str] = {}
    problems: list[str] = []
    for name, setting in public_settings().items():
        values[name], sources[name] = setting.default, "default"
        try:
            if (names is None or name in names) and (given := _given(setting, flags, environ)):
                text, source, label = given
                values[name], sources[name] = parse_value(setting, text, label), source
        except ValueError as error:
            problems.append(str(error))
    idle: list[str] = []
    if names is None:
        idle, refused = tgi.read(flags, environ)
        idle += peers.idle(environ)
        problems += refused
        problems += [
            f"{name.upper()} is no setting any more: {REMOVED[name]}" for name in REMOVED if name.upper() in environ
        ]
    problems += relation_problems(**{name: values[name] for name in RELATED})
    problems += tier_problems(**{name: values[name] for name in TIERS})
    problems += adapter_problems(**{name: values[name] for name in ADAPTERS})
    problems += speculative_problems(**{name: values[name] for name in SPECULATIVE})
    return Settings(values, sources, idle), problems


def _given(setting: Setting, flags: Mapping[str, Any], environ: Mapping[str, str]) -> tuple[str, str, str] | None:
    """(text, source, how to call it in a message), or None where the default holds."""
    by_flag = {flag(name): flags[name] for name in setting.names if name in flags}
    variables = [v for name in setting.names if (v := setting.variable(name))]
    by_environment = {variable: environ[variable] for variable in variables if environ.get(variable)}
    source = "flag" if by_flag else "environment"
    given: dict[str, Any] = by_flag or by_environment
    if len(given) > 1:
        raise ValueError(f"{' and '.join(given)} are two names of one setting: give only one of them")
    for label, value in given.items():
        text = ",".join(value) if isinstance(value, list) else value
        return tgi.own_value(setting.name, text), source, label
    return None


def parse_value(setting: Setting, text: str, label: str) -> Any:
    """`text` as the setting's type, or ValueError in one sentence that names value, bound and remedy."""
    try:
        value = _value(setting, text.strip())
        _check_bounds(setting.metadata, value)
        if (check := setting.metadata.get("check")) and value not in setting.metadata.get("words", ()):
            check(value)
    except ValueError as error:
        origin = "" if label.startswith("--") else f" (from environment {label})"
        shown = "empty" if not text.strip() else "***" if setting.metadata.get("secret") else printable(text)
        raise ValueError(f"{flag(setting.name)} is {shown}: {error}{origin}") from None
    return value


def _value(setting: Setting, text: str) -> Any:
    """A word that stands for no value of the type, or a value of it."""
    words = setting.metadata.get("words", ())
    if (word := _as_listed(text, words)) in words:
        return word
    try:
        return _as_listed(_convert(setting.kind, text), setting.metadata.get("choices", ()))
    except ValueError as error:
        raise ValueError(" or ".join([str(error), *words])) from None


def _convert(kind: type, text: str) -> Any:
    if kind is bool:
        return _boolean(text)
    if kind is tuple:
        return tuple(part.strip() for part in text.split(",") if part.strip())
    if kind is str:
        if not text:
            raise ValueError("give a value or leave it out")
        return text
    try:
        value = kind(text)
    except ValueError:
        raise ValueError("give a whole number" if kind is int else "give a number") from None
    if not math.isfinite(value):
        raise ValueError("give a finite number")
    return value


def _boolean(text: str) -> bool:
    if text.lower() not in ("true", "1", "false", "0"):
        raise ValueError("give true or false")
    return text.lower() in ("true", "1")


def _as_listed(value: Any, choices: Sequence[Any]) -> Any:
    """A word as the list of choices spells it: INFO is info."""
    if isinstance(value, str):
        return next((choice for choice in choices if choice.lower() == value.lower()), value)
    return value


def _check_bounds(metadata: Mapping[str, Any], value: Any) -> None:
    if remedy := metadata.get("refused", {}).get(str(value).lower()):
        raise ValueError(remedy)
    if "choices" in metadata and value not in metadata["choices"]:
        raise ValueError(f"give one of {', '.join(str(choice) for choice in metadata['choices'])}")
    if value in metadata.get("words", ()):
        return
    if "min" in metadata and value < metadata["min"]:
        raise ValueError(f"the smallest allowed value is {metadata['min']}")
    largest = metadata.get("max", LARGEST if isinstance(value, int) else math.inf)
    if not isinstance(value, (str, tuple)) and value > largest:
        raise ValueError(f"the largest allowed value is {largest}")
