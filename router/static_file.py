"""A file of the documentation page, sent from memory.

Sending from disk would hold a descriptor and a thread's time for each client, and would answer ranges that no browser
asks of a script. Sending it whole would count as unread in full; so it goes in pieces, each when the client has taken
those before it. They are views: however many clients leave them unread, the file is there once.
"""

from __future__ import annotations

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

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
