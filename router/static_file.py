"""A file of the documentation page, sent from memory.

Sending from disk would hold a descriptor and a thread's time for each client, and would answer ranges that no browser
asks of a script. Sending it whole would copy what a slow client has not read; so it goes in pieces, each when the
client has taken those before it.
"""

from __future__ import annotations

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

PIECE_BYTES = 64 * 1024  # what uvicorn lets wait for a client before it lets us wait


class StaticFile(Response):
    """The whole content, in pieces."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send it."""
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        for begin in range(0, len(self.body), PIECE_BYTES):
            piece = bytes(self.body[begin : begin + PIECE_BYTES])
            await send({"type": "http.response.body", "body": piece, "more_body": True})
        await send({"type": "http.response.body", "body": b"", "more_body": False})
