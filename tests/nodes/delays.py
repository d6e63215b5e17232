"""A cable with a delay: two TAP interfaces, between which a process passes on each frame some milliseconds later.

    python -m tests.nodes.delays INTERFACE NAMESPACE INTERFACE MS N

makes the first interface here and the second one in the namespace, says `ready`, and passes frames on until it is
ended, with which the interfaces are gone. One frame in N is lost, at random; with N = 0 none is. In user space, because
not every kernel can delay packets or lose them; a delay of 0 tells what the relay costs by itself.
"""

from __future__ import annotations

import ctypes
import fcntl
import os
import random
import select
import struct
import sys
import time
from collections import deque

TUNSETIFF = 0x400454CA
TAP_WITHOUT_HEADER = 0x0002 | 0x1000
CLONE_NEWNET = 0x40000000
FRAME_BYTES = 1 << 16
SPIN_S = 100e-6  # which a wait for a moment may last longer than asked for


def tap(name: str) -> int:
    """A descriptor that reads what is sent at a new interface of this name, and writes what is received there."""
    descriptor = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK)
    fcntl.ioctl(descriptor, TUNSETIFF, struct.pack("16sH22x", name.encode(), TAP_WITHOUT_HEADER))
    return descriptor


def tap_in(namespace: str, name: str) -> int:
    """The same in a network namespace, which this process leaves again."""
    libc = ctypes.CDLL(None, use_errno=True)
    with open("/proc/self/ns/net") as here, open(f"/run/netns/{namespace}") as there:
        for handle in (there, here):
            if libc.setns(handle.fileno(), CLONE_NEWNET):
                raise OSError(ctypes.get_errno(), "setns")
            if handle is there:
                descriptor = tap(name)
    return descriptor


def relay(ends: tuple[int, int], delay_s: float, loses_one_in: int) -> None:
    """Pass frames on between both descriptors, in order, each `delay_s` after it came, or never."""
    other = {ends[0]: ends[1], ends[1]: ends[0]}
    waiting: deque[tuple[float, int, bytes]] = deque()  # when it is due, where, and the frame
    while True:
        patience = max(0.0, waiting[0][0] - time.monotonic() - SPIN_S) if waiting else None
        readable, _, _ = select.select(ends, [], [], patience)
        now = time.monotonic()
        for end in readable:
            try:
                while True:
                    frame = os.read(end, FRAME_BYTES)
                    if not loses_one_in or random.randrange(loses_one_in):
                        waiting.append((now + delay_s, other[end], frame))
            except BlockingIOError:
                pass
        while waiting and waiting[0][0] <= time.monotonic():
            _, end, frame = waiting.popleft()
            try:
                os.write(end, frame)
            except OSError:
                pass  # the interface is down, or full: a frame is lost, as on a cable


def main() -> None:
    """Run the command."""
    here, namespace, there, delay_ms, loses_one_in = sys.argv[1:]
    ends = tap(here), tap_in(namespace, there)
    print("ready", flush=True)
    relay(ends, float(delay_ms) / 1000, int(loses_one_in))


if __name__ == "__main__":
    main()
