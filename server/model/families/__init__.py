"""The model families that Lockstep serves, each as data: what it looks like and where its checkpoints keep things.

To add one, see docs/adding-a-family.md.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from server.model.families import bloom
from server.model.names import NameMap
from server.model.spec import ArchSpec


@dataclass(frozen=True)
class Family:
    """Models that share a spec function and a name map."""

    spec: Callable[[Mapping[str, Any]], ArchSpec]
    names: NameMap


FAMILIES: Mapping[str, Family] = {
    "bloom": Family(bloom.spec, bloom.NAMES),
}


def find(hf_config: Mapping[str, Any]) -> tuple[Family, ArchSpec]:
    """The family of a checkpoint's config.json, and its spec. Raises ValueError for what cannot be served."""
    model_type = str(hf_config.get("model_type"))
    if model_type not in FAMILIES:
        raise ValueError(f"config.json says model_type {model_type!r}; served are: {', '.join(sorted(FAMILIES))}")
    family = FAMILIES[model_type]
    try:
        return family, family.spec(hf_config)
    except KeyError as error:
        raise ValueError(f"config.json of a {model_type} model lacks the key {error}") from error
