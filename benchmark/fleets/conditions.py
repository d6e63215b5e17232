"""What a simulated fleet is made of, and what befalls it: pools of replicas, failures, restarts, retries, autoscaling.

Plain data, checked where it is made. Times are in seconds.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

from benchmark.cost import Cost, StepWork
from router.limits import Limits

Role = Literal["both", "prefill", "decode"]
ROLES: tuple[Role, ...] = ("both", "prefill", "decode")


@dataclass(frozen=True)
class Scaling:
    """How many replicas a pool has, by what its replicas have to do."""

    least: int
    most: int
    target: float  # requests outstanding on a replica, waiting or running
    interval_s: float = 15.0  # from one look to the next
    calm_s: float = 300.0  # how long fewer must have been enough before one goes

    def __post_init__(self) -> None:
        if not 1 <= self.least <= self.most:
            raise ValueError(
                f"autoscaling from {self.least} to {self.most} replicas: give at least 1, and no more at least than "
                "at most"
            )
        if not 0 < self.target < math.inf:
            raise ValueError(f"autoscaling aims at {self.target:g} requests a replica: give more than 0")

    def wanted(self, outstanding: int) -> int:
        """How many replicas so many requests ask for."""
        return min(max(math.ceil(outstanding / self.target), self.least), self.most)


@dataclass(frozen=True)
class Pool:
    """Replicas of one kind."""

    name: str
    limits: Limits
    cost: Cost
    num_replicas: int
    role: Role = "both"
    model: str | None = None  # whose requests it takes; None: those of any
    share: float = 1.0  # how fast a replica is, relative to those of other pools
    price: float = 0.0  # of a replica, for an hour
    kv_bytes: float = 0.0  # of a prompt's token, which go from a prefill replica to one that decodes
    scaling: Scaling | None = None


@dataclass(frozen=True)
class Conditions:
    """What befalls a fleet. The default: nothing does."""

    retries: int = 0  # how often a request that is refused or lost is sent again …
    backoff_s: float = 0.1  # … about so long after the first time, and twice as long after each next
    mean_life_s: float = math.inf  # of a replica, until it fails
    failures_at: tuple[float, ...] = ()  # each of one replica, any
    restarts_at: tuple[float, ...] = ()  # of all, one after the other, each emptied before
    startup_s: float = 60.0  # until a replica that is started takes requests
    slow_share: float = 0.0  # of the replicas, …
    slow_factor: float = 1.0  # … whose steps take so many times as long
    delay_s: float = 0.0  # of every sending: between clients and a replica's steps, there and back
    link_bytes: float = 50e9  # a second, between a prefill replica and one that decodes
    link_s: float = 0.002  # of any such transfer
    affinity_tokens: int = 512  # the beginning of a prompt that `prefix-affine` goes by
    seed: int = 0


@dataclass(frozen=True)
class Slowed:
    """A cost model times a factor."""

    cost: Cost
    factor: float

    def seconds(self, work: StepWork) -> float:
        """How long the shards compute."""
        return self.factor * self.cost.seconds(work)


def check_pools(pools: list[Pool]) -> None:
    """Raise ValueError for pools that cannot serve together."""
    names = [pool.name for pool in pools]
    if len(names) > len(set(names)):
        raise ValueError(f"two pools have one name, of {', '.join(names)}: give each its own")
    for model in dict.fromkeys(pool.model for pool in pools):
        roles = {pool.role for pool in pools if pool.model == model}
        called = "the pools" if model is None else f"the pools of model {model}"
        if roles not in ({"both"}, {"prefill", "decode"}):
            raise ValueError(
                f"{called} have roles {', '.join(sorted(roles))}: give them all `both`, or some `prefill` and the "
                "others `decode`"
            )
