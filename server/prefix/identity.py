"""What kept keys and values are of: a digest of all that they depend on beside the tokens.

Blocks are found on disk by the tokens that they stand for, so whatever else changes a key or a value has to be in the
name of the file: the weights, config.json, what is computed in and by what, how the cache stores it, how ranks divide
it, and this version of ours. A file with another name is never opened.

Weights are not read whole, which would take as long as loading them. A checkpoint's files are told apart by size, time
of change and header, and by a few bytes of every tensor, so that a folder in which others were put, with their old
times, is another one. Left out: an attacker who changes single numbers within a tensor and sets back the clock of the
file.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Sequence
from hashlib import blake2b
from pathlib import Path

from server.checkpoint.files import weight_files

IDENTITY_BYTES = 16
LAYOUT = "1"  # of what a block's bytes mean; another number where a version reads them otherwise
SAMPLE_BYTES = 64  # of each tensor, from its middle


def identity(model_folder: Path, weights_folder: Path | None, facts: Sequence[str]) -> bytes:
    """The digest of a model and of `facts`, sentences about how it is run. No folder of weights: they are made up.

    Raises OSError for files that cannot be read.
    """
    digest = blake2b(digest_size=IDENTITY_BYTES)
    for part in _parts(model_folder, weights_folder, facts):
        digest.update(len(part).to_bytes(8, "little"))
        digest.update(part)
    return digest.digest()


def _parts(model_folder: Path, weights_folder: Path | None, facts: Sequence[str]) -> Iterator[bytes]:
    yield LAYOUT.encode()
    yield from (fact.encode() for fact in facts)
    yield (model_folder / "config.json").read_bytes()
    for path in [] if weights_folder is None else sorted(weight_files(weights_folder)):
        yield from _of_file(path)


def _of_file(path: Path) -> Iterator[bytes]:
    """What tells a file of safetensors from others."""
    with path.open("rb", buffering=0) as file:
        status = os.fstat(file.fileno())
        yield f"{path.name} {status.st_size} {status.st_mtime_ns}".encode()
        length = int.from_bytes(file.read(8), "little")
        header = file.read(min(length, status.st_size))
        yield header
        for start, end in sorted(_extents(header)):
            middle = 8 + length + start + (end - start) // 2
            yield os.pread(file.fileno(), SAMPLE_BYTES, middle)


def _extents(header: bytes) -> Iterator[tuple[int, int]]:
    """Where each tensor lies behind the header, which was found to be sound when the model was loaded."""
    for name, tensor in json.loads(header).items():
        if name != "__metadata__":
            start, end = tensor["data_offsets"]
            yield int(start), int(end)
