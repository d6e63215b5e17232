"""What an adapter is known by: its content. Without torch, for the router."""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Iterator
from hashlib import blake2b
from pathlib import Path
from typing import BinaryIO

CONFIG = "adapter_config.json"
WEIGHTS = "*.safetensors"
KEY_BYTES = 16
PIECE_BYTES = 1 << 20


def content_key(folder: Path) -> bytes:
    """The digest of an adapter's config and weights, each with its name and length. Raises OSError."""
    digest = blake2b(digest_size=KEY_BYTES)
    for path in content(folder):
        with opened(path) as file:
            digest.update(f"{path.name}\0{os.fstat(file.fileno()).st_size}\0".encode())
            while piece := file.read(PIECE_BYTES):
                digest.update(piece)
    return digest.digest()


def content(folder: Path) -> Iterator[Path]:
    """The files that an adapter is made of, by name."""
    yield folder / CONFIG
    yield from sorted(folder.glob(WEIGHTS))


def opened(path: Path) -> BinaryIO:
    """A file that has an end, and nobody to wait for. Raises OSError for a pipe or a device."""
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise OSError(errno.EINVAL, "it is no regular file", str(path))
    return os.fdopen(descriptor, "rb")
