"""A whole answer, sent at once.

It counts as unread from when it is there: behind an earlier answer that its client does not read, it waits beside the
transport, which alone would not know of it.
"""

from __future__ import annotations

from collections.abc import Mapping

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from router.guard import ClientConnection


class PlainAnswer(Response):
    """JSON that is ready."""

    media_type = "application/json"

    def __init__(self, content: bytes, headers: Mapping[str, str] | None = None) -> None:
        super().__init__(bytes(memoryview(content)), headers=headers)  # orjson's own bytes take eight times their size

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send it."""
        with ClientConnection.of(scope).coming(len(self.body)):
            await super().__call__(scope, receive, send)
