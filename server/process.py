"""A child that the kernel ends when its parent dies, in whatever way. Linux only."""

from __future__ import annotations

import ctypes
import os
import signal
import sys
from collections.abc import Callable


def end_with_parent(number: int = signal.SIGKILL) -> Callable[[], None] | None:
    """What a child runs between fork and exec (`preexec_fn`) so that the kernel sends it signal `number` when this
    process dies. None where the kernel cannot."""
    if sys.platform != "linux":
        return None
    libc = ctypes.CDLL(None)  # loaded here: between fork and exec it would be too late
    parent = os.getpid()
    set_parent_death_signal = 1  # PR_SET_PDEATHSIG

    def guard() -> None:
        libc.prctl(set_parent_death_signal, number, 0, 0, 0)
        if os.getppid() != parent:  # it died before prctl took effect
            os._exit(1)

    return guard
