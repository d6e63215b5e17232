"""Files of one launch: a private folder, a file without a name, and sockets at a path that the user chose.

A launch holds a lock in its folder. The kernel releases it when the launch is killed, and the next launch of the same
user removes folders that are not locked.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import stat
import tempfile
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from launch.errors import Refusal

NOT_IN_ADDRESSES = ",%#?"  # which separate parts of an address, and gRPC waits for another socket or none
SOCKET_PATH_BYTES = 107  # sun_path of Linux less its final NUL
PREFIX = "lockstep-"
LOCK = "launch.lock"


@contextmanager
def private_folder() -> Iterator[Path]:
    """A folder of this launch alone, removed at the end; short, because a socket's path may have 107 bytes."""
    parent = Path(tempfile.gettempdir())
    if len(os.fsencode(parent)) >= SOCKET_PATH_BYTES - 40 or any(one in str(parent) for one in NOT_IN_ADDRESSES):
        parent = Path("/tmp")
    _remove_leftovers(parent)
    folder, lock = _make_folder(parent)
    try:
        yield folder
    finally:
        _remove(folder)
        os.close(lock)


def _make_folder(parent: Path) -> tuple[Path, int]:
    """A new folder that only its owner may enter, and its lock."""
    while True:
        folder = Path(tempfile.mkdtemp(prefix=PREFIX, dir=parent))  # of mode 0700 whatever the umask
        lock = _hold(folder / LOCK, os.O_CREAT)
        if lock is not None:
            return folder, lock
        # Another launch came between the lock's making and its taking, and removes the folder.


def _remove_leftovers(parent: Path) -> None:
    """Remove the folders of this user's launches that are gone."""
    for folder in parent.glob(f"{PREFIX}*"):
        with suppress(OSError):  # gone meanwhile, or not ours to look into
            found = folder.lstat()
            if stat.S_ISDIR(found.st_mode) and found.st_uid == os.geteuid():
                lock = _hold(folder / LOCK)
                if lock is not None:
                    _remove(folder)
                    os.close(lock)


def _hold(path: Path, flags: int = 0) -> int | None:
    """A descriptor that holds the lock at `path`, or None if another process does, or has removed it."""
    try:
        lock = os.open(path, os.O_RDWR | os.O_NOFOLLOW | flags, 0o600)
    except FileNotFoundError:
        return None
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if os.path.samestat(os.fstat(lock), path.lstat()):
            return lock
    except (BlockingIOError, FileNotFoundError):
        pass
    os.close(lock)
    return None


def _remove(folder: Path) -> None:
    """Remove a folder whose lock we hold; the lock last, so that a removal cut short is finished by the next launch."""
    with suppress(OSError):
        for path in folder.iterdir():
            if path.is_dir() and not path.is_symlink():
                shutil.rmtree(path, ignore_errors=True)
            elif path.name != LOCK:
                path.unlink(missing_ok=True)
    shutil.rmtree(folder, ignore_errors=True)


@contextmanager
def nameless_file(text: str) -> Iterator[int]:
    """A descriptor of a file that holds `text` and has no name: a process that inherits it reads it at /dev/fd/N, and
    nothing of it is left on a disk, even after a crash."""
    with tempfile.TemporaryFile() as file:
        file.write(text.encode())
        file.seek(0)
        yield file.fileno()


@contextmanager
def shared_sockets(prefix: str, count: int) -> Iterator[tuple[str, ...]]:
    """Sockets at a path that the user chose. A lock keeps a second launch from stealing them, which gRPC would do."""
    check_sockets(prefix, count)
    sockets = tuple(f"{prefix}-{rank}" for rank in range(count))
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


def check_sockets(prefix: str, count: int) -> None:
    """Raise Refusal where sockets cannot be made at a path that the user chose."""
    if (found := next((one for one in NOT_IN_ADDRESSES if one in prefix), None)) is not None:
        raise Refusal(
            [f"--shard-uds-path {prefix} has a {found!r}, which the address of a socket may not: choose another"], 1
        )
    if len(os.fsencode(f"{prefix}-{count - 1}")) > SOCKET_PATH_BYTES:
        raise Refusal([f"--shard-uds-path {prefix} is too long: a socket's path may have 107 bytes"], 1)
    folder = Path(prefix).parent
    if not os.access(folder, os.W_OK | os.X_OK):
        raise Refusal(
            [f"--shard-uds-path {prefix} cannot be used: {folder} is no folder to write to; choose another"], 1
        )


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
