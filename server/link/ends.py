"""One end of a connection, of which two are joined so that what comes at one leaves at the other."""

from __future__ import annotations

import asyncio
from typing import cast

from server.link.greeting import LINE_BYTES, Refused


class End(asyncio.Protocol):
    """An end of a TCP connection or of a unix socket: first a line may be awaited, then it is joined to another.

    It closes with the one that it is joined to. Reading stops while the other cannot write.
    """

    def __init__(self) -> None:
        self.transport: asyncio.Transport | None = None
        self.closed = asyncio.get_running_loop().create_future()  # with the exception that ended it, or None
        self._early = bytearray()  # what came before it was joined
        self._line: asyncio.Future[bytes] | None = None
        self._partner: End | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast(asyncio.Transport, transport)

    def data_received(self, data: bytes) -> None:
        if self._partner is not None:
            self._partner.write(data)
            return
        self._early += data
        self._find_line()
        if len(self._early) > LINE_BYTES and self.transport is not None:
            self.transport.pause_reading()

    def connection_lost(self, error: Exception | None) -> None:
        if not self.closed.done():
            self.closed.set_result(error)
        if self._line is not None and not self._line.done():
            self._line.set_exception(error or ConnectionResetError("it closed the connection"))
        if self._partner is not None and self._partner.transport is not None:
            self._partner.transport.close()  # once what was written has left

    def pause_writing(self) -> None:
        if self._partner is not None and self._partner.transport is not None:
            self._partner.transport.pause_reading()

    def resume_writing(self) -> None:
        if self._partner is not None and self._partner.transport is not None:
            self._partner.transport.resume_reading()

    async def line(self) -> bytes:
        """The first line, without its end. Raises OSError where the connection ends before, Refused for a long one."""
        self._line = asyncio.get_running_loop().create_future()
        if self.closed.done():
            raise self.closed.result() or ConnectionResetError("it closed the connection")
        self._find_line()
        return await self._line

    def write(self, data: bytes) -> None:
        """Send; to an end that is closed, nothing."""
        if self.transport is not None and not self.transport.is_closing():
            self.transport.write(data)

    def join(self, other: End) -> None:
        """Pass on from now on what comes, in both directions."""
        for one, partner in ((self, other), (other, self)):
            one._partner = partner
        for one, partner in ((self, other), (other, self)):
            if one._early:
                partner.write(bytes(one._early))
                one._early.clear()
            if one.closed.done():
                partner.close()
            elif one.transport is not None and not one.transport.is_closing():
                one.transport.resume_reading()

    def close(self) -> None:
        """Close, once what was written has left."""
        if self.transport is not None:
            self.transport.close()

    def abort(self) -> None:
        """Close at once."""
        if self.transport is not None:
            self.transport.abort()

    def _find_line(self) -> None:
        if self._line is None or self._line.done():
            return
        line, found, rest = self._early.partition(b"\n")
        if found:
            self._early = bytearray(rest)
            self._line.set_result(bytes(line))
        elif len(self._early) > LINE_BYTES:
            self._line.set_exception(Refused("it is not a Lockstep link"))
