"""Files of one launch: a private folder, and sockets at a path that the user chose."""

from __future__ import annotations

import fcntl
import os
import shutil
import stat
import tempfile
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from router.launch.errors import Refusal

SOCKET_PATH_BYTES = 107  # sun_path of Linux less its final NUL


@contextmanager
def private_folder() -> Iterator[Path]:
    """A folder of this launch alone, removed at the end; short, because a socket's path may have 107 bytes."""
    parent = None if len(os.fsencode(tempfile.gettempdir())) < SOCKET_PATH_BYTES - 40 else "/tmp"
    folder = Path(tempfile.mkdtemp(prefix="lockstep-", dir=parent))
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


@contextmanager
def shared_sockets(prefix: str, count: int) -> Iterator[tuple[str, ...]]:
    """Sockets at a path that the user chose. A lock keeps a second launch from stealing them, which gRPC would do."""
    sockets = tuple(f"{prefix}-{rank}" for rank in range(count))
    if len(os.fsencode(sockets[-1])) > SOCKET_PATH_BYTES:
        raise Refusal([f"--shard-uds-path {prefix} is too long: a socket's path may have 107 bytes"], 1)
    try:
        lock = os.open(f"{prefix}.lock", os.O_CREAT | os.O_RDWR | os.O_NOFOLLOW, 0o600)
    except OSError as error:
        raise Refusal([f"--shard-uds-path {prefix} cannot be used: {error.strerror}; choose another"], 1) from None
    try:
        _take_lock(lock, prefix)
        _remove_sockets(sockets)
        yield sockets
        _remove_sockets(sockets)
    finally:
        os.close(lock)


def _take_lock(lock: int, prefix: str) -> None:
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise Refusal([f"--shard-uds-path {prefix} is in use by another launch: choose another"], 1) from None


def _remove_sockets(sockets: Iterable[str]) -> None:
    for path in sockets:
        with suppress(FileNotFoundError):
            if not stat.S_ISSOCK(os.lstat(path).st_mode):
                raise Refusal([f"--shard-uds-path: {path} exists and is no socket; move it away"], 1)
            os.unlink(path)
