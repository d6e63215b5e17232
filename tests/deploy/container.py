"""Runs one command in a tree of files as a container runs it: `unshare … python -P container.py FILE`, as root.

It is started in namespaces of its own, so that its mounts are nobody else's and end with it: no mount is left below a
tree that is removed later. FILE holds a `Start` as JSON. It needs no module of this project.
"""

from __future__ import annotations

import ctypes
import fcntl
import json
import os
import socket
import struct
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

NAMESPACES = ("--mount", "--pid", "--fork", "--kill-child")
OF_NETWORK = ("--net", "--ipc", "--uts")
DEVICES = ("null", "zero", "full", "random", "urandom")
SET_INTERFACE_FLAGS = 0x8914  # of linux/sockios.h
INTERFACE_UP = 0x1 | 0x40  # of linux/if.h: up and running
NO_NEW_PRIVILEGES = 38  # of linux/prctl.h


@dataclass(frozen=True)
class Start:
    """A command and its surroundings. binds: folders and files of the host by their places in the tree, read-only;
    volumes: folders that are written to although the tree is not."""

    root: str
    command: Sequence[str]
    env: Mapping[str, str]
    folder: str = "/"
    user: str = "0:0"
    binds: Mapping[str, str] = field(default_factory=dict)
    volumes: Sequence[str] = ()
    is_read_only: bool = False
    is_apart: bool = False  # with a network of its own, too, which has nothing but loopback

    def argv(self, file: Path) -> list[str]:
        """What starts it; `file` is written for it."""
        file.write_text(json.dumps(asdict(self)))
        namespaces = (*NAMESPACES, *(OF_NETWORK if self.is_apart else ()))
        return ["unshare", *namespaces, sys.executable, "-P", __file__, str(file)]


def mount(*arguments: str | Path) -> None:
    """One `mount`. Raises CalledProcessError."""
    subprocess.run(["mount", *map(str, arguments)], check=True)


def mount_all(start: Start) -> None:
    """Give the tree what a container's has: /proc, devices, folders of memory, and what is bound into it."""
    root = Path(start.root)
    mount("--bind", root, root)
    mount("-t", "tmpfs", "tmpfs", root / "mnt")  # places for what is bound, which leave no trace in the tree
    for place, source in start.binds.items():
        bind(Path(source), inside(root, place))
    mount("-t", "proc", "-o", "nosuid,nodev,noexec", "proc", root / "proc")
    kept = {folder: inside(root, folder).stat() for folder in start.volumes}
    mount("-t", "tmpfs", "-o", "nosuid,mode=755", "tmpfs", root / "dev")
    for name in DEVICES:
        (root / "dev" / name).touch()
        mount("--bind", f"/dev/{name}", root / "dev" / name)
    (root / "dev" / "fd").symlink_to("/proc/self/fd")
    (root / "dev" / "shm").mkdir()
    mount("-t", "tmpfs", "-o", "nosuid,nodev,noexec,size=64m,mode=1777", "tmpfs", root / "dev" / "shm")
    if start.is_read_only:
        mount("-o", "remount,bind,ro", root)
    for folder, found in kept.items():
        options = f"nosuid,nodev,noexec,mode={found.st_mode & 0o7777:o},uid={found.st_uid},gid={found.st_gid}"
        mount("-t", "tmpfs", "-o", options, "tmpfs", inside(root, folder))


def inside(root: Path, place: str) -> Path:
    """A place of the tree, on the host."""
    return root / place.lstrip("/")


def bind(source: Path, place: Path) -> None:
    """Mount a folder or a file read-only, at a place that is made for it if it is not there."""
    if source.is_dir():
        place.mkdir(parents=True, exist_ok=True)
    elif not place.exists():
        place.parent.mkdir(parents=True, exist_ok=True)
        place.touch()
    mount("--bind", source, place)
    mount("-o", "remount,bind,ro", place)


def start_loopback() -> None:
    """Bring `lo` up, which is down in a new network."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
        fcntl.ioctl(any_socket, SET_INTERFACE_FLAGS, struct.pack("16sh", b"lo", INTERFACE_UP))


def become(user: str) -> None:
    """Give up root, for good, for a user with a numeric id and group."""
    uid, _, gid = user.partition(":")
    if int(uid):
        assert ctypes.CDLL(None).prctl(NO_NEW_PRIVILEGES, 1, 0, 0, 0) == 0
    os.setgroups([])
    os.setgid(int(gid))
    os.setuid(int(uid))


def main() -> None:
    """Becomes the command. Raises OSError where it is not found."""
    start = Start(**json.loads(Path(sys.argv[1]).read_text()))
    mount_all(start)
    if start.is_apart:
        start_loopback()
    os.chroot(start.root)
    os.chdir(start.folder)
    become(start.user)
    os.environ["PATH"] = start.env["PATH"]  # in which the command is looked for
    os.execvpe(start.command[0], list(start.command), dict(start.env))


if __name__ == "__main__":
    main()
