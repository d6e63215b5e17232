"""How many connections may be about to say who they are, so that those of one address never keep out another's.

Whoever has no certificate of ours costs a handshake each time. An address may have a few of them at once, and after
some that failed it has to wait for the next second; what comes meanwhile is closed before anything is computed for it.
"""

from __future__ import annotations

from collections import Counter
from ipaddress import IPv6Address, ip_address

MOST = 64  # at once
MOST_OF_ONE = 8  # at once, of one address
MOST_FAILURES = 16  # of one address in WINDOW_S
WINDOW_S = 1.0


class Strangers:
    """Connections that have not said who they are, by the address that they come from."""

    def __init__(self) -> None:
        self._here: Counter[str] = Counter()
        self._failed: Counter[str] = Counter()  # of this window
        self._since = 0.0  # when the window began

    def may_enter(self, address: str, now: float) -> bool:
        """Whether one more may come; if so it is here until `leave`."""
        if now - self._since >= WINDOW_S:
            self._failed.clear()
            self._since = now
        of_one = _network(address)
        is_full = self._here.total() >= MOST or self._here[of_one] >= MOST_OF_ONE
        if is_full or self._failed[of_one] >= MOST_FAILURES:
            return False
        self._here[of_one] += 1
        return True

    def leave(self, address: str, *, has_failed: bool) -> None:
        """One is known by now, or gone."""
        of_one = _network(address)
        self._here[of_one] -= 1
        if not self._here[of_one]:
            del self._here[of_one]
        if has_failed:
            self._failed[of_one] += 1


def _network(address: str) -> str:
    """The address itself, or what one holder of IPv6 addresses has of them: all that begin alike."""
    found = ip_address(address.partition("%")[0])
    if not isinstance(found, IPv6Address):
        return str(found)
    return str(found.ipv4_mapped or found.packed[:8].hex())
