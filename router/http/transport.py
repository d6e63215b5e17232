"""The sending side of connections: how long clients may leave bytes unread, and how a connection is closed.

`ClientTransport` stands between the HTTP protocol and the event loop's transport. It counts what is written through it,
so that a clock can tell whether what waits in this process is taken: each byte has `unread_timeout` for that, and what
all connections leave unread has a bound (`Unread`).

Closing while a client sends would make the kernel answer its bytes with a reset, which also takes away the answer that
the client has not read yet. So a connection is closed in two steps (RFC 9112, 9.6): nothing more is sent, and what
comes is thrown away until the client has closed too, for a limited time and up to a limited size.
"""

from __future__ import annotations

import asyncio
import socket
import struct
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from router.config import RouterConfig

RESET = struct.pack("ii", 1, 0)  # SO_LINGER: on, for no time
CLOSING_S = 0.5  # for a client to close in its turn: longer than the way there and back
UNREAD_CHECKS = 4  # in each unread_timeout: a client that stops reading is noticed a quarter of it late at most


class ClientTransport(asyncio.Transport):
    """A transport that bounds how long its bytes stay unread, and that is closed in two steps."""

    def __init__(self, transport: asyncio.Transport, shared: Connections, loop: asyncio.AbstractEventLoop) -> None:
        super().__init__()
        self.is_receiving = False  # whether a request has begun to arrive and not ended; the protocol says so
        self._transport = transport
        self._limits = limits = shared.limits
        self._unread = shared.unread
        self._loop = loop
        self._is_closing = False
        self._is_gone = False
        self._num_written = 0
        self._num_coming = 0
        self.num_ahead = 0  # bytes of a request whose turn comes after the answer; the protocol says so
        self.num_discarded = 0
        self._mark = 0  # what had been written at a check of the unread clock
        self._marked_at = 0.0
        self._unread_clock: asyncio.TimerHandle | None = None
        self._linger_clock: asyncio.TimerHandle | None = None
        self._set_option(socket.SO_SNDBUF, limits.send_buffer_bytes)

    # ----------------------------------------------------------------------------------------------- sending

    def write(self, data: Any) -> None:
        """Send. What is written after `close` is dropped."""
        self.send(data)

    def send(self, data: Any) -> int:
        """Send, and return how many bytes wait in this process."""
        if self._is_closing or self._is_gone:
            return 0
        self._transport.write(data)
        self._num_written += len(data)
        if self._num_coming:
            self._num_coming = max(0, self._num_coming - len(data))
        num_waiting = self._transport.get_write_buffer_size()
        if num_waiting:
            if self._unread_clock is None:
                self._start_unread_clock()
            self.note_unread()
        return num_waiting

    @contextmanager
    def coming(self, num_bytes: int) -> Iterator[None]:
        """Count bytes as unread that the block writes once the client has taken what is before them."""
        self._num_coming = num_bytes
        self.note_unread()
        try:
            yield
        finally:
            self._num_coming = 0
            self.note_unread()

    def note_unread(self) -> None:
        """What waits for this client has changed."""
        self._unread.note(self, self._loop.time())

    @property
    def num_unread(self) -> int:
        """Bytes that wait until the client reads, in this transport or for it."""
        return 0 if self._is_gone else self._transport.get_write_buffer_size() + self._num_coming + self.num_ahead

    @property
    def num_taken(self) -> int:
        """Bytes that the kernel has taken."""
        return self._num_written - self._transport.get_write_buffer_size()

    def _start_unread_clock(self) -> None:
        self._mark, self._marked_at = self._num_written, self._loop.time()
        self._check_unread_later()

    def _check_unread_later(self) -> None:
        seconds = self._limits.unread_timeout / UNREAD_CHECKS
        self._unread_clock = self._loop.call_later(seconds, self._check_unread)

    def _check_unread(self) -> None:
        """Reset the connection if bytes that waited at the last mark still wait, and their time is over."""
        num_waiting = self._transport.get_write_buffer_size()
        self.note_unread()
        if not num_waiting:
            self._unread_clock = None
        elif self._num_written - num_waiting >= self._mark:
            self._start_unread_clock()
        elif self._loop.time() - self._marked_at >= self._limits.unread_timeout:
            self.reset()
        else:
            self._check_unread_later()

    # ----------------------------------------------------------------------------------------------- closing

    def close(self) -> None:
        """Send what waits and then no more; close once the client has closed, or does not for too long."""
        if self.is_closing():
            return
        self._is_closing = True
        self._transport.resume_reading()  # it may be paused, for a body that is not read any more
        self._transport.write_eof()
        seconds, at_last = (self._limits.body_timeout, self.reset) if self.is_receiving else (CLOSING_S, self.end)
        self._linger_clock = self._loop.call_later(seconds, at_last)

    def end(self) -> None:
        """Close once everything is sent, whatever the client sends."""
        self._is_closing = True
        self._transport.close()

    def discard(self, num_bytes: int) -> None:
        """Count bytes of a request that is not read; too many of them end the connection."""
        self.num_discarded += num_bytes
        if self.num_discarded > self._limits.max_discarded_bytes:
            self.reset()

    def reset(self) -> None:
        """Close at once. The kernel forgets its unsent bytes too, which it would go on offering to a slow reader."""
        self._set_option(socket.SO_LINGER, RESET)
        self.abort()

    def abort(self) -> None:
        """Close at once, without what waits in this process."""
        self._is_closing = self._is_gone = True
        self._transport.abort()

    def lost(self) -> None:
        """The connection is gone: nothing waits, and no clock runs."""
        self._is_gone = True
        self._unread.forget(self)
        for clock in (self._unread_clock, self._linger_clock):
            if clock is not None:
                clock.cancel()

    def is_closing(self) -> bool:
        """Whether `close` was called, by us or by the event loop."""
        return self._is_closing or self._transport.is_closing()

    # --------------------------------------------------------------------------------- as the event loop has it

    def get_extra_info(self, name: str, default: Any = None) -> Any:
        """As of the transport."""
        return self._transport.get_extra_info(name, default)

    def get_write_buffer_size(self) -> int:
        """As of the transport."""
        return self._transport.get_write_buffer_size()

    def pause_reading(self) -> None:
        """As of the transport."""
        self._transport.pause_reading()

    def resume_reading(self) -> None:
        """As of the transport."""
        self._transport.resume_reading()

    def _set_option(self, option: int, value: int | bytes) -> None:
        self._transport.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, option, value)


@dataclass
class Connections:
    """What all connections of one listener share: their limits, what they leave unread, and which could make room."""

    limits: RouterConfig
    max_connections: int
    is_leaving: bool = False  # the server will stop: each answer is the last of its connection, and says so
    unread: Unread = field(init=False)
    # Protocols by what they wait for, the longest one first.
    closing: dict[Any, None] = field(default_factory=dict)
    idle: dict[Any, None] = field(default_factory=dict)
    in_headers: dict[Any, None] = field(default_factory=dict)
    in_body: dict[Any, None] = field(default_factory=dict)
    of_peer: dict[str | None, dict[Any, None]] = field(default_factory=dict)  # by address, whatever they wait for

    def __post_init__(self) -> None:
        """Nothing waits yet."""
        self.unread = Unread(self.limits.max_unread_bytes)

    def of_largest_peer(self) -> dict[Any, None]:
        """The connections of the address that has the most."""
        return max(self.of_peer.values(), key=len, default={})

    def forget(self, peer: str | None, protocol: Any) -> None:
        """A connection of this peer is gone."""
        if (others := self.of_peer.get(peer)) is not None:
            others.pop(protocol, None)
            if not others:
                del self.of_peer[peer]


class Unread:
    """What waits for the clients of all connections of one listener, and the bound on it.

    A permit is given back when an answer is computed, so permits do not bound what clients leave unread; and each byte
    has `unread_timeout`, in which a hundred clients could each leave megabytes. When more waits than `max_bytes`, the
    client that has taken nothing for the longest is given up: one that reads takes something many times a second.
    """

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._num_bytes = 0  # as last seen: what clients have taken since makes it less
        self._waiting: dict[ClientTransport, _Waiting] = {}

    def note(self, client: ClientTransport, now: float) -> None:
        """Bytes were added to what waits for a client. Resets connections if that is too much of all."""
        self._look(client, now)
        if self._num_bytes > self._max_bytes:
            self._look_at_all(now)
            while self._num_bytes > self._max_bytes and len(self._waiting) > 1:  # one alone is no longer than an answer
                self._reset_slowest()

    def reset_slowest(self, now: float) -> bool:
        """Reset the connection whose client has taken nothing for the longest. Returns whether any waits."""
        self._look_at_all(now)
        return self._reset_slowest()

    def forget(self, client: ClientTransport) -> None:
        """Nothing waits for this client any more."""
        waiting = self._waiting.pop(client, None)
        if waiting is not None:
            self._num_bytes -= waiting.num_bytes

    def _look_at_all(self, now: float) -> None:
        for client in list(self._waiting):
            self._look(client, now)

    def _look(self, client: ClientTransport, now: float) -> None:
        num_bytes = client.num_unread
        if not num_bytes:
            self.forget(client)
            return
        num_taken = client.num_taken
        waiting = self._waiting.get(client)
        if waiting is None:
            waiting = self._waiting[client] = _Waiting(0, num_taken, now)
        if num_taken > waiting.num_taken:
            waiting.num_taken, waiting.taken_at = num_taken, now
        self._num_bytes += num_bytes - waiting.num_bytes
        waiting.num_bytes = num_bytes

    def _reset_slowest(self) -> bool:
        slowest = min(self._waiting, key=lambda client: self._waiting[client].taken_at, default=None)
        if slowest is None:
            return False
        self.forget(slowest)
        slowest.reset()
        return True


@dataclass(slots=True)
class _Waiting:
    """What was seen of one client."""

    num_bytes: int
    num_taken: int
    taken_at: float  # when its number of taken bytes was first seen
