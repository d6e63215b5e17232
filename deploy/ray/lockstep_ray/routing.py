"""The router's own policies of dispatch (`router/scheduling/balancing.py`) in the interface of Ray Serve.

Every ingress keeps count of what it has sent itself. Places on the ring follow from the replicas' names, so that all
ingresses send what begins alike to the same replica.
"""

from __future__ import annotations

from random import Random
from typing import Any

from ray.serve.request_router import PendingRequest, ReplicaID, RequestRouter, RunningReplica

from lockstep_ray.requests import RelayedRequest
from router.scheduling.balancing import Balancer


class PolicyRouter(RequestRouter):
    """A request router by one of the policies."""

    def initialize_state(self, policy: str = "prefix-affine") -> None:
        """policy: its name."""
        self._balancer = Balancer(policy, Random())
        self._numbers: dict[str, int] = {}  # by name
        self._up: set[str] = set()
        self._sent: dict[str, tuple[int, int]] = {}  # by Serve's id of the request: replica, tokens

    async def choose_replicas(
        self, candidate_replicas: list[RunningReplica], pending_request: PendingRequest | None = None
    ) -> list[list[RunningReplica]]:
        """The one by the policy, and behind it all others, for where that one is full."""
        by_name = {replica.replica_id.unique_id: replica for replica in candidate_replicas}
        self._follow(set(by_name))
        ask = _request_of(pending_request)
        if ask is None:
            return [list(candidate_replicas)]
        if ask.only is not None:
            return [[by_name[ask.only]]] if ask.only in by_name else []
        chosen = self._chosen(ask, set(by_name))
        others = [replica for name, replica in by_name.items() if name != chosen and name not in ask.avoid]
        return [ranked for ranked in ([by_name[chosen]] if chosen else [], others) if ranked]

    def _chosen(self, ask: RelayedRequest, names: set[str]) -> str | None:
        """The policy's choice among those that did not have the request yet, or among all, where all had it."""
        avoided = [self._numbers[name] for name in ask.avoid & names] if names - ask.avoid else []
        for number in avoided:
            self._balancer.down(number)
        chosen = self._balancer.choose(ask.tokens, ask.prefix)
        for number in avoided:
            self._balancer.up(number)
        return None if chosen is None else self._balancer.loads.names[chosen]

    def _follow(self, names: set[str]) -> None:
        """These replicas take requests now."""
        for name in self._up - names:
            self._balancer.down(self._numbers[name])
        for name in sorted(names - self._up):
            if name not in self._numbers:
                self._numbers[name] = self._balancer.add(name=name)
            self._balancer.up(self._numbers[name])
        self._up = names

    def on_request_routed(self, pending_request: PendingRequest, replica_id: ReplicaID, result: Any) -> None:
        """A replica has taken it."""
        ask, number = _request_of(pending_request), self._numbers.get(replica_id.unique_id)
        if ask is not None and number is not None:
            self._sent[pending_request.metadata.internal_request_id] = (number, ask.tokens)
            self._balancer.sent(number, ask.tokens)

    def on_request_completed(self, replica_id: ReplicaID, internal_request_id: str) -> None:
        """It is over, however it ended."""
        sent = self._sent.pop(internal_request_id, None)
        if sent is not None:
            self._balancer.done(*sent)


def _request_of(pending_request: PendingRequest | None) -> RelayedRequest | None:
    args = pending_request.args if pending_request is not None else ()
    return args[0] if args and isinstance(args[0], RelayedRequest) else None
