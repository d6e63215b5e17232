"""Folders for data that leaves memory: whether they are on a disk, their permissions, and files without a name in them.

No torch here: the launcher looks at these folders before anything is downloaded.
"""

from __future__ import annotations

import errno
import fcntl
import os
import tempfile
from pathlib import Path

from host.direct_io import open_direct

MOUNTS = Path("/proc/self/mountinfo")
# File systems; that a file can be opened with O_DIRECT does not tell them, for since Linux 6.6 theirs can.
IN_MEMORY = ("tmpfs", "ramfs", "devtmpfs")


def refuse_memory(folder: Path, flag: str) -> None:
    """Raise ValueError for a folder whose files are in memory. flag: the setting that names it."""
    kind = _file_system(folder)
    if kind in IN_MEMORY:
        raise ValueError(
            f"{flag} {folder} is in memory ({kind}), which offloading is meant to save: name a folder on a disk"
        )


def nearest_folder(path: Path) -> Path:
    """The path, or the nearest folder above it that is there: where it would be made."""
    return next((one for one in (path, *path.absolute().parents) if one.exists()), path)


def make_private(folder: Path) -> None:
    """Make a folder, and those above it that are not there, for this user alone, whatever the umask. Raises OSError.

    One that is there keeps its mode: a user may have opened it on purpose.
    """
    for missing in reversed([one for one in (folder, *folder.parents) if not one.exists()]):
        missing.mkdir(mode=0o700, exist_ok=True)


def free_bytes(folder: Path) -> int:
    """What this user may still write there. Raises OSError."""
    found = os.statvfs(folder)
    return found.f_bavail * found.f_frsize


def open_unnamed(folder: Path, flag: str) -> tuple[int, bool]:
    """A descriptor of a new file that no folder names, and whether what is read and written passes the page cache by.

    Raises ValueError for a folder that cannot have such a file, or is in memory; flag: the setting that names it.
    """
    refuse_memory(folder, flag)
    try:
        return open_direct(lambda flags: _unnamed_file(folder, flags))
    except OSError as error:
        raise ValueError(
            f"{flag} {folder}: no file can be made there ({error.strerror}): name a folder on a disk that this user "
            "may write to"
        ) from None


def _unnamed_file(folder: Path, flags: int) -> int:
    """A descriptor of a new file that no folder names. Raises OSError."""
    try:
        return os.open(folder, os.O_TMPFILE | os.O_RDWR | flags, 0o600)
    except OSError as error:
        if error.errno not in (errno.EOPNOTSUPP, errno.EISDIR):  # what file systems without such files say
            raise
    descriptor, name = tempfile.mkstemp(dir=folder, prefix=".lockstep-")
    try:
        os.unlink(name)
        if flags:
            fcntl.fcntl(descriptor, fcntl.F_SETFL, fcntl.fcntl(descriptor, fcntl.F_GETFL) | flags)
    except OSError:
        os.close(descriptor)
        raise
    return descriptor


def _file_system(folder: Path) -> str | None:
    """The kind of file system that a folder is on; None: not known, as for one that is not there."""
    try:
        device = os.stat(folder).st_dev
        mounts = MOUNTS.read_text(errors="replace").splitlines()
    except OSError:
        return None
    wanted = f"{os.major(device)}:{os.minor(device)}"
    for fields in map(str.split, mounts):  # id, parent, device, root, place, options …, -, kind, source, options
        if wanted == fields[2]:
            return fields[fields.index("-") + 1]
    return None
