"""Who may say now who it is, so that those of one address never keep out another's, nor the cluster's own each other.

Whoever has no certificate of ours costs a handshake each time, and nobody is known before it. So an address may have a
few handshakes at once, and its other connections wait for one of these places. Where too many are here, the address
that has the most sends its latest away. After some that failed, an address has to wait for the next second; what comes
meanwhile is closed before anything is computed for it. How long one may wait and speak is left to `link.py`.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from ipaddress import IPv6Address, ip_address

MOST = 512  # that wait or speak
MOST_OF_ONE = 8  # of one address that speak at once
MOST_FAILURES = 16  # of one address in WINDOW_S
WINDOW_S = 1.0


@dataclass(eq=False)
class Visit:
    """A connection that has not said who it is. It may once `turn` is set, and has to end when it is expelled."""

    holder: str
    expel: Callable[[], None]
    turn: asyncio.Event = field(default_factory=asyncio.Event)


class Strangers:
    """Connections that have not said who they are, by who holds the address that they come from."""

    def __init__(self) -> None:
        self._visits: dict[str, list[Visit]] = {}  # of each holder, in the order in which they came
        self._failed: Counter[str] = Counter()  # of this window
        self._since = 0.0  # when the window began

    def enter(self, address: str, now: float, expel: Callable[[], None] = lambda: None) -> Visit | None:
        """Wait among the others until `leave`. None: it may not."""
        if now - self._since >= WINDOW_S:
            self._failed.clear()
            self._since = now
        holder = _holder(address)
        if self._failed[holder] >= MOST_FAILURES or not self._has_room(holder):
            return None
        visit = Visit(holder, expel)
        self._visits.setdefault(holder, []).append(visit)
        self._let_speak(holder)
        return visit

    def leave(self, visit: Visit, *, is_known: bool) -> None:
        """It is known by now, or gone."""
        if visit.turn.is_set() and not is_known:
            self._failed[visit.holder] += 1
        self._remove(visit)

    def _has_room(self, holder: str) -> bool:
        """Whether there is a place for one more of this holder, if need be that of another who has more."""
        if sum(map(len, self._visits.values())) < MOST:
            return True
        crowd = max(self._visits.values(), key=len)
        if len(crowd) <= len(self._visits.get(holder, ())):
            return False
        latest = crowd[-1]
        self._remove(latest)
        latest.expel()
        return True

    def _remove(self, visit: Visit) -> None:
        visits = self._visits.get(visit.holder, [])
        if visit in visits:  # it was not expelled
            visits.remove(visit)
            self._let_speak(visit.holder)
            if not visits:
                del self._visits[visit.holder]

    def _let_speak(self, holder: str) -> None:
        """The first ones; where too many failed, those who still wait go instead."""
        visits = self._visits[holder]
        if self._failed[holder] < MOST_FAILURES:
            for visit in visits[:MOST_OF_ONE]:
                visit.turn.set()
            return
        waiting = [visit for visit in visits if not visit.turn.is_set()]
        visits[:] = [visit for visit in visits if visit.turn.is_set()]
        for visit in waiting:
            visit.expel()


def _holder(address: str) -> str:
    """The address itself, or what one holder of IPv6 addresses has of them at most: all that begin alike."""
    found = ip_address(address.partition("%")[0])
    if not isinstance(found, IPv6Address):
        return str(found)
    return str(found.ipv4_mapped or found.packed[:6].hex())
