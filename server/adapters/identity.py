"""What an adapter is known by: its content. Without torch, for the router."""

from __future__ import annotations

from collections.abc import Iterator
from hashlib import blake2b
from pathlib import Path

CONFIG = "adapter_config.json"
WEIGHTS = "*.safetensors"
KEY_BYTES = 16
PIECE_BYTES = 1 << 20


def content_key(folder: Path) -> bytes:
    """The digest of an adapter's config and weights, each with its name and length. Raises OSError."""
    digest = blake2b(digest_size=KEY_BYTES)
    for path in content(folder):
        digest.update(f"{path.name}\0{path.stat().st_size}\0".encode())
        with path.open("rb") as file:
            while piece := file.read(PIECE_BYTES):
                digest.update(piece)
    return digest.digest()


def content(folder: Path) -> Iterator[Path]:
    """The files that an adapter is made of, by name."""
    yield folder / CONFIG
    yield from sorted(folder.glob(WEIGHTS))
