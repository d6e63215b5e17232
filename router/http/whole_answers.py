"""Answers that are ready as a whole: JSON, sent at once, and files of the documentation page, sent from memory.

JSON counts as unread from when it is there: behind an earlier answer that its client does not read, it waits beside the
transport, which alone would not know of it.

Sending a file from disk would hold a descriptor and a thread's time for each client, and would answer ranges that no
browser asks of a script. Sending it whole would count as unread in full; so it goes in pieces, each when the client has
taken those before it. They are views: however many clients leave them unread, the file is there once.
"""

from __future__ import annotations

from collections.abc import Mapping

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from router.http.guard import ClientConnection


class PlainAnswer(Response):
    """JSON that is ready."""

    media_type = "application/json"

    def __init__(self, content: bytes, headers: Mapping[str, str] | None = None) -> None:
        super().__init__(bytes(memoryview(content)), headers=headers)  # orjson's own bytes take eight times their size

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send it."""
        with ClientConnection.of(scope).coming(len(self.body)):
            await super().__call__(scope, receive, send)


PIECE_BYTES = 16 * 1024


class StaticFile(Response):
    """The whole content, in pieces."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send it."""
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        content = memoryview(self.body)
        for begin in range(0, len(content), PIECE_BYTES):
            piece = content[begin : begin + PIECE_BYTES]
            await send({"type": "http.response.body", "body": piece, "more_body": True})
        await send({"type": "http.response.body", "body": b"", "more_body": False})
