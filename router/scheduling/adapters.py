"""Adapters as requests name them."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True)
class Adapter:
    """A LoRA folder that requests may name. Its content alone decides what they get: `key` is the digest of that."""

    name: str  # as clients say it
    key: bytes  # of `server/adapters/identity.py`
    folder: Path
