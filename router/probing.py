"""Health of the shards for many probes at once: they share one answer.

A probe that asked the shards itself would cost both sides a call. Ten thousand balancers, or one attacker, would keep
them from computing tokens.
"""

from __future__ import annotations

import asyncio
import time

from router.client import ShardHealth, Shards

REUSED_S = 0.1  # probes ask every few seconds: to them this is now


class SharedHealth:
    """Asks the shards once for all who ask at nearly the same time."""

    def __init__(self, shards: Shards) -> None:
        self._shards = shards
        self._asked_at = 0.0
        self._answer: asyncio.Task[ShardHealth] | None = None

    async def health(self) -> ShardHealth:
        """As `Shards.health`, REUSED_S old at most when it was asked for. Raises ShardError."""
        if self._answer is None or (self._answer.done() and time.monotonic() - self._asked_at > REUSED_S):
            self._asked_at = time.monotonic()
            self._answer = asyncio.create_task(self._shards.health())
            self._answer.add_done_callback(_take_notice)
        return await asyncio.shield(self._answer)


def _take_notice(answer: asyncio.Task[ShardHealth]) -> None:
    """Whoever asked may be gone: then nobody else looks at an error."""
    if not answer.cancelled():
        answer.exception()
