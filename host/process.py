"""System calls of Linux for processes: death signal, adoption of orphans, priority, name, refusal of connections."""

from __future__ import annotations

import ctypes
import os
import signal
import socket
import struct
import sys
import time
from collections.abc import Callable, Iterator

# Of linux/prctl.h.
SET_PARENT_DEATH_SIGNAL = 1
SET_NAME = 15
SET_CHILD_SUBREAPER = 36

ATTACH_FILTER = 26  # of asm/socket.h
DROP_ALL = struct.pack("HBBI", 0x06, 0, 0, 0)  # the filter program "return 0", of linux/filter.h

ADOPTION_S = 5.0  # in which a parent that has ended leaves its child to the next


def end_with_parent(number: int = signal.SIGKILL) -> Callable[[], None] | None:
    """What a child runs between fork and exec (`preexec_fn`) so that the kernel sends it signal `number` when this
    process dies. None where the kernel cannot."""
    if sys.platform != "linux":
        return None
    libc = ctypes.CDLL(None)  # loaded here: between fork and exec it would be too late
    parent = os.getpid()

    def guard() -> None:
        libc.prctl(SET_PARENT_DEATH_SIGNAL, number, 0, 0, 0)
        if os.getppid() != parent:  # it died before prctl took effect
            os._exit(1)

    return guard


def adopt_orphans() -> bool:
    """Become the parent of what this process's descendants leave behind; False where the kernel cannot."""
    return sys.platform == "linux" and bool(ctypes.CDLL(None).prctl(SET_CHILD_SUBREAPER, 1, 0, 0, 0) == 0)


def become_child_of(parent: int) -> None:
    """Wait until `parent`, an ancestor that adopts orphans, has this process, and end with it. Ends it otherwise."""
    patience = time.monotonic() + ADOPTION_S
    while os.getppid() != parent and time.monotonic() < patience:
        time.sleep(0.001)
    ctypes.CDLL(None).prctl(SET_PARENT_DEATH_SIGNAL, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent:
        os._exit(1)


def lower_priority(niceness: int) -> None:
    """Run at this priority, 19 at the lowest, or at a lower one where that is this process's already."""
    os.setpriority(os.PRIO_PROCESS, 0, max(niceness, os.getpriority(os.PRIO_PROCESS, 0)))


def name_process(name: str) -> None:
    """What `ps -o comm` and `top` call this process; the kernel keeps 15 bytes."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(SET_NAME, name.encode(), 0, 0, 0)


def refuse_connections() -> None:
    """Drop what is sent to the TCP ports at which this process listens. Open connections go on.

    A library may go on listening when all its peers are connected: every further connection would cost a descriptor.
    """
    if sys.platform != "linux":
        return
    program = ctypes.create_string_buffer(DROP_ALL, len(DROP_ALL))
    for listener in _listeners():
        with listener:
            listener.setsockopt(socket.SOL_SOCKET, ATTACH_FILTER, struct.pack("HP", 1, ctypes.addressof(program)))


def _listeners() -> Iterator[socket.socket]:
    """Copies of this process's TCP sockets that listen."""
    for name in os.listdir("/proc/self/fd"):
        try:
            if not os.readlink(f"/proc/self/fd/{name}").startswith("socket:"):
                continue
            found = socket.socket(fileno=os.dup(int(name)))
        except OSError:  # of the listing itself, which is over
            continue
        if found.family in (socket.AF_INET, socket.AF_INET6) and found.getsockopt(
            socket.SOL_SOCKET, socket.SO_ACCEPTCONN
        ):
            yield found
        else:
            found.close()
