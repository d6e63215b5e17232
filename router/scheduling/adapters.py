"""Adapters as requests carry them."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Adapter:
    """One adapter. key: of its content, 16 bytes, which tells it from another that has had its name or its folder."""

    name: str
    key: bytes
    folder: str
