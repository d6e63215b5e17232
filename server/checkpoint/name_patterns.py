"""Which tensors of a checkpoint belong to which layers, as patterns of their names.

A pipeline stage loads some layers, and must not call the others' tensors unknown.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping

from server.arch.names import NameMap


def of_layers(names: NameMap, prefix: str, layers: Iterable[int]) -> tuple[str, ...]:
    """Of all tensors of these layers of the decoder."""
    starts = {name[: name.index("{i}")] for name in _all(names.roles) if "{i}" in name}
    return tuple(rf"^({re.escape(prefix)})?{re.escape(start)}{layer}\." for start in sorted(starts) for layer in layers)


def outside_layers(names: NameMap, prefix: str) -> tuple[str, ...]:
    """Of all tensors before and after the decoder's layers, an encoder's among them."""
    outside = [rf"{re.escape(name)}(\.|$)" for name in _all(names.roles) if "{i}" not in name]
    encoder = [re.escape(name.partition("{i}")[0]) for name in _all(names.encoder or {})]
    return tuple(rf"^({re.escape(prefix)})?{name}" for name in outside + encoder)


def _all(roles: Mapping[str, str | tuple[str, ...]]) -> list[str]:
    return [name for entry in roles.values() for name in ((entry,) if isinstance(entry, str) else entry)]
