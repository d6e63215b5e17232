"""Which replica gets a request: policies over plain numbers, for the simulator and for balancers of real servers.

No clock, no HTTP and nothing of requests but how long they may become and what they begin with. A `Balancer` keeps
count of the tokens outstanding on every replica; a policy reads that count and chooses.

`prefix-affine` is consistent hashing with bounded loads (Mirrokni, Thorup and Zadimoghaddam 2018, arXiv 1608.01350):
requests that begin alike go to one replica, whose prefix cache knows the beginning, unless it has more than a share
above the mean to do; then to the next one on the ring, which is the same for all of them. `power-of-two` is
Mitzenmacher's (2001): nearly as good as asking all, at a cost that does not grow with the fleet.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from bisect import bisect_left, insort
from collections.abc import Callable, Mapping
from hashlib import blake2b
from random import Random

PLACES = 64  # of each replica on the ring, so that neighbours share about equally what it leaves
BOUND = 1.25  # times the mean of the outstanding tokens that a replica may have for the sake of its prefix cache
MOST_LOOKED_AT = 256  # places of the ring
FREE_TOKENS = 8192  # outstanding tokens that never count as too many: an idle fleet's mean says nothing


class Loads:
    """What each replica has to do. `up` are the replicas that take requests, in ascending order."""

    def __init__(self) -> None:
        self.up: list[int] = []
        self.tokens: list[float] = []  # of each replica ever known: outstanding, as long as they may become
        self.names: list[str] = []  # by which places on a ring are found: the same in all balancers of a fleet
        self.shares: list[float] = []  # how fast each is, relative to the others
        self.total = 0.0  # of those in `up`
        self.capacity = 0.0  # sum of the shares of those in `up`

    def relative(self, replica: int) -> float:
        """Outstanding tokens, for its speed."""
        return self.tokens[replica] / self.shares[replica]


class Policy(ABC):
    """Chooses by what is known. `prefix` names what a request begins with; None: nothing that others begin with."""

    def __init__(self, loads: Loads, random: Random) -> None:
        self.loads = loads
        self.random = random

    @abstractmethod
    def choose(self, tokens: int, prefix: int | None) -> int:
        """The replica for a request of so many tokens. There is one that is up."""

    def changed(self, replica: int, *, is_up: bool) -> None:
        """A replica takes requests from now on, or no more. Most policies keep nothing of that."""
        return


class RoundRobin(Policy):
    """One after the other."""

    def __init__(self, loads: Loads, random: Random) -> None:
        super().__init__(loads, random)
        self._number = -1

    def choose(self, tokens: int, prefix: int | None) -> int:
        """The next one in turn."""
        self._number += 1
        return self.loads.up[self._number % len(self.loads.up)]


class LeastTokens(Policy):
    """Whoever has the fewest tokens outstanding. Its cost grows with the fleet."""

    def choose(self, tokens: int, prefix: int | None) -> int:
        """The least loaded; of several, the first."""
        return min(self.loads.up, key=self.loads.relative)


class PowerOfTwo(Policy):
    """The less loaded of two at random."""

    def choose(self, tokens: int, prefix: int | None) -> int:
        """The one of the two with fewer tokens."""
        up, random = self.loads.up, self.random.random
        one, other = up[int(random() * len(up))], up[int(random() * len(up))]
        return one if self.loads.relative(one) <= self.loads.relative(other) else other


class PrefixAffine(PowerOfTwo):
    """Where the prefix was computed, unless that one has too much to do. Without a prefix: the better of two."""

    def __init__(self, loads: Loads, random: Random) -> None:
        super().__init__(loads, random)
        self._ring: list[tuple[int, int]] = []  # (place, replica), ascending

    def changed(self, replica: int, *, is_up: bool) -> None:
        """Its places join the ring, or leave it; those of the others stay."""
        if is_up:
            for number in range(PLACES):
                insort(self._ring, (_place(f"{self.loads.names[replica]} {number}"), replica))
        else:
            self._ring = [one for one in self._ring if one[1] != replica]

    def choose(self, tokens: int, prefix: int | None) -> int:
        """The first on the ring behind the prefix's place that is below the bound."""
        if prefix is None:
            return super().choose(tokens, prefix)
        loads, ring = self.loads, self._ring
        mean = (loads.total + tokens) / loads.capacity
        most = max(BOUND * mean, FREE_TOKENS)
        start = bisect_left(ring, (_place(str(prefix)), -1))
        for place in range(start, start + min(MOST_LOOKED_AT, len(ring))):
            replica = ring[place % len(ring)][1]
            if loads.relative(replica) + tokens <= most:
                return replica
        return super().choose(tokens, None)


def _place(name: str) -> int:
    return int.from_bytes(blake2b(name.encode(), digest_size=8).digest())


POLICIES: Mapping[str, Callable[[Loads, Random], Policy]] = {
    "power-of-two": PowerOfTwo,
    "round-robin": RoundRobin,
    "least-tokens": LeastTokens,
    "prefix-affine": PrefixAffine,
}
ALIASES = {"better-of-two": "power-of-two"}


class Balancer:
    """Sends requests to replicas by a policy, and keeps count of what each has to do."""

    def __init__(self, policy: str, random: Random) -> None:
        """policy: a key of POLICIES or ALIASES. Raises ValueError for another."""
        name = ALIASES.get(policy, policy)
        if name not in POLICIES:
            raise ValueError(f"{policy} is no dispatch policy: give one of {', '.join(POLICIES)}")
        self.loads = Loads()
        self._policy = POLICIES[name](self.loads, random)

    def add(self, share: float = 1.0, name: str | None = None) -> int:
        """A new replica, which is not up yet; its number, which is its name where it has no other.

        share: its speed, relative to the others.
        """
        number = len(self.loads.tokens)
        self.loads.tokens.append(0)
        self.loads.shares.append(share)
        self.loads.names.append(str(number) if name is None else name)
        return number

    def up(self, replica: int) -> None:
        """It takes requests from now on."""
        insort(self.loads.up, replica)
        self._changed(replica, is_up=True)

    def down(self, replica: int) -> None:
        """It takes no more, but may still have some to answer. Nothing happens where it took none before."""
        if replica in self.loads.up:
            self.loads.up.remove(replica)
            self._changed(replica, is_up=False)

    def _changed(self, replica: int, *, is_up: bool) -> None:
        sign = 1 if is_up else -1
        self.loads.total += sign * self.loads.tokens[replica]
        self.loads.capacity += sign * self.loads.shares[replica]
        self._policy.changed(replica, is_up=is_up)

    def send(self, tokens: int, prefix: int | None = None) -> int | None:
        """Choose the replica for a request that may become so long; None where none is up."""
        replica = self.choose(tokens, prefix)
        if replica is not None:
            self.sent(replica, tokens)
        return replica

    def choose(self, tokens: int, prefix: int | None = None) -> int | None:
        """The replica that should get it, for callers that send it later (`sent`); None where none is up."""
        return self._policy.choose(tokens, prefix) if self.loads.up else None

    def sent(self, replica: int, tokens: int) -> None:
        """The replica has got such a request."""
        self.loads.tokens[replica] += tokens
        if self._is_up(replica):
            self.loads.total += tokens

    def done(self, replica: int, tokens: int) -> None:
        """A request that was sent there is answered, refused or lost."""
        self.loads.tokens[replica] -= tokens
        if self._is_up(replica):
            self.loads.total -= tokens

    def _is_up(self, replica: int) -> bool:
        up = self.loads.up
        at = bisect_left(up, replica)
        return at < len(up) and up[at] == replica
