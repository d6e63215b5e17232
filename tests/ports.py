"""TCP ports for what must be told one before it starts.

What is looked up as free by binding port 0 may be taken before it is used: connections and other such binds are given
ports of the same range. So these are from below that range, or from above where it begins that low: there a port is
only taken by who names it. Whoever can bind port 0 itself, and say which port that was, needs nothing of this.
"""

from __future__ import annotations

import random
import socket
from pathlib import Path

LOWEST = 20_000  # below it are ports that services have, and those that Ray gives its workers
HIGHEST = 65_535
GIVEN = Path("/proc/sys/net/ipv4/ip_local_port_range")  # the kernel's, to connections and binds to port 0


def free_port(address: str = "127.0.0.1") -> int:
    """A port that nobody has, and that nobody is given who does not ask for it. Raises RuntimeError without one."""
    first, last = map(int, GIVEN.read_text().split())
    among = range(LOWEST, first) or range(last + 1, HIGHEST + 1)
    for port in random.SystemRandom().sample(among, k=min(100, len(among))):
        with socket.socket() as probe:
            try:
                probe.bind((address, port))
            except OSError:
                continue
            return port
    raise RuntimeError(f"no port of {address} is free that is not from {first} to {last}: narrow the range in {GIVEN}")
