"""The folder of an adapter on the disk: whether it is one, what it looks like now, and the key of its content.

Whoever may write there decides what is served, so nothing is trusted but the folder that the settings name: where one
is, all that is read lies in it, wherever links lead. Functions block, and are for threads. What tensors mean, the
shards say (`server/adapters/`); nothing but bytes is read here.
"""

from __future__ import annotations

import os
import stat
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

from server.adapters.identity import CONFIG, content_key

WEIGHTS = ".safetensors"
MOST_FILES = 256  # in the folder: it is looked at again and again
NUM_TRIES = 3  # to read files that somebody is writing


class Missing(ValueError):
    """There is no such folder, or no adapter in it."""


class Unfit(ValueError):
    """It cannot be served, in words that follow its name."""


class Away(ValueError):
    """The folder that all adapters lie in is not there: what was in it may come again."""


class Changing(ValueError):
    """It was written to for as long as it was read."""


@dataclass(frozen=True, slots=True)
class Appearance:
    """Where an adapter is, and what tells without reading that its files are others: inode, size and times of each."""

    folder: str  # without links
    files: tuple[tuple[str, int, int, int, int], ...]

    def has(self, name: str, state: os.stat_result) -> bool:
        """Whether a file is one of these, which a link may have been turned from since."""
        return _marks(name, state) in self.files


@dataclass(frozen=True, slots=True)
class Content:
    """What was read of an adapter that looks like this."""

    looks: Appearance
    key: bytes


def appearance(path: str, within: str | None, most_bytes: int) -> Appearance:
    """What an adapter looks like. Raises Missing, Unfit and Away.

    within: the folder in which it must lie, below at least one name; None: anywhere. most_bytes: of its files.
    """
    try:
        home = None if within is None else os.path.realpath(within, strict=True)
    except OSError as error:
        raise Away(f"the folder for adapters cannot be read: {error.strerror}") from None
    try:
        folder = os.path.realpath(path, strict=True)
        _refuse_outside(folder, home)
        if not stat.S_ISDIR(os.stat(folder).st_mode):
            raise Missing("is no folder")
        with os.scandir(folder) as entries:
            names = [entry.name for entry in islice(entries, MOST_FILES + 1)]
        return Appearance(folder, _files(folder, names, home, most_bytes))
    except (OSError, ValueError) as error:  # a name that is too long, or has a zero byte, is no file's either
        if isinstance(error, Missing | Unfit):
            raise
        raise Missing("is no folder that can be read") from None


def _files(
    folder: str, names: list[str], home: str | None, most_bytes: int
) -> tuple[tuple[str, int, int, int, int], ...]:
    if CONFIG not in names:
        raise Missing(f"has no {CONFIG}")
    if len(names) > MOST_FILES:
        raise Unfit(f"has more than {MOST_FILES} files in its folder: leave there what belongs to it")
    wanted = [name for name in names if name.endswith(WEIGHTS)]
    if not wanted:
        is_old = any(name.endswith(".bin") for name in names)
        raise Unfit(
            "has weights in *.bin, which are not read while the server runs: name it in --lora-adapters, or save it as "
            "safetensors"
            if is_old
            else f"has no *{WEIGHTS}: copy all of it"
        )
    found = []
    for name in sorted([CONFIG, *wanted]):
        status = _state(os.path.join(folder, name), home)
        if not stat.S_ISREG(status.st_mode):
            raise Unfit(f"has a {name} that is no regular file: copy it there")
        found.append(_marks(name, status))
    if (size := sum(file[2] for file in found)) > most_bytes:
        raise Unfit(
            f"has {size / 1e6:,.1f} MB, and --adapter-memory has room for what {most_bytes / 1e6:,.1f} MB of files "
            "take at most: raise --adapter-memory"
        )
    return tuple(found)


def _state(path: str, home: str | None) -> os.stat_result:
    """Of a file that lies in the folder for adapters: the one that was opened, wherever links lead a moment later."""
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    try:
        if home is not None:
            _refuse_outside(os.readlink(f"/proc/self/fd/{descriptor}"), home)
        return os.fstat(descriptor)
    finally:
        os.close(descriptor)


def _marks(name: str, state: os.stat_result) -> tuple[str, int, int, int, int]:
    return name, state.st_ino, state.st_size, state.st_mtime_ns, state.st_ctime_ns


def _refuse_outside(path: str, home: str | None) -> None:
    if home is not None and not path.startswith(home.rstrip("/") + "/"):
        raise Missing("does not lie in the folder for adapters")


def read_content(path: str, within: str | None, most_bytes: int) -> Content:
    """What it looks like and what its content is, at one time. Raises Missing, Unfit and Changing."""
    for _ in range(NUM_TRIES):
        before = appearance(path, within, most_bytes)
        try:
            key = content_key(Path(before.folder), is_meant=before.has)
        except OSError:
            continue  # the next look says what has become of it
        if appearance(path, within, most_bytes) == before:
            return Content(before, key)
    raise Changing("is being written")
