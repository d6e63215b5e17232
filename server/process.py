"""What a process asks of Linux about itself and its kin: when to end, whom to adopt, how it is called. Linux only."""

from __future__ import annotations

import ctypes
import os
import signal
import sys
import time
from collections.abc import Callable

# Of linux/prctl.h.
SET_PARENT_DEATH_SIGNAL = 1
SET_NAME = 15
SET_CHILD_SUBREAPER = 36

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
    return sys.platform == "linux" and ctypes.CDLL(None).prctl(SET_CHILD_SUBREAPER, 1, 0, 0, 0) == 0


def become_child_of(parent: int) -> None:
    """Wait until `parent`, an ancestor that adopts orphans, has this process, and end with it. Ends it otherwise."""
    patience = time.monotonic() + ADOPTION_S
    while os.getppid() != parent and time.monotonic() < patience:
        time.sleep(0.001)
    ctypes.CDLL(None).prctl(SET_PARENT_DEATH_SIGNAL, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent:
        os._exit(1)


def name_process(name: str) -> None:
    """What `ps -o comm` and `top` call this process; the kernel keeps 15 bytes."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(SET_NAME, name.encode(), 0, 0, 0)
