"""Reading request bodies into memory, all of them together within a bound.

A body comes before its request's permit, so permits do not bound it: a hundred clients that each hold back the last
byte of 2 MB would hold 200 MB. When unfinished bodies take more than their share of memory, the one that has been
arriving the longest is given up: bodies of ordinary clients arrive in milliseconds, and so are never the oldest for
long, however many others hold theirs back.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager, suppress

from starlette.requests import Request

from router.errors import BodyTooLarge, Overloaded


class _Body:
    """One that is arriving."""

    def __init__(self) -> None:
        self.data = bytearray()
        self.is_given_up = False
        self.waiting = asyncio.timeout(None)

    def give_up(self) -> None:
        """Free its memory, and end the wait for the rest."""
        self.is_given_up = True
        self.data = bytearray()
        self.waiting.reschedule(0)


class Bodies:
    """All bodies that have not arrived as a whole."""

    def __init__(self, max_unfinished_bytes: int, payload_limit: int) -> None:
        self._payload_limit = payload_limit
        self._num_left = max(max_unfinished_bytes, payload_limit)
        self._unfinished: dict[_Body, None] = {}  # the oldest first

    async def read(self, request: Request) -> bytes:
        """A whole body. Raises BodyTooLarge before its end, and Overloaded if others need the memory."""
        if int(request.headers.get("content-length", 0)) > self._payload_limit:
            raise self._too_large()
        with self._receiving() as body:
            with suppress(TimeoutError):  # it was given up
                async with body.waiting:
                    async for chunk in request.stream():
                        self._add(body, chunk)
            if body.is_given_up:
                raise Overloaded
            return bytes(body.data)

    @contextmanager
    def _receiving(self) -> Iterator[_Body]:
        body = _Body()
        self._unfinished[body] = None
        try:
            yield body
        finally:
            self._remove(body)

    def _add(self, body: _Body, chunk: bytes) -> None:
        if body.is_given_up:
            return
        body.data += chunk
        self._num_left -= len(chunk)
        if len(body.data) > self._payload_limit:
            raise self._too_large()
        while self._num_left < 0:
            oldest = next(iter(self._unfinished))
            self._remove(oldest)
            oldest.give_up()

    def _remove(self, body: _Body) -> None:
        if body in self._unfinished:
            del self._unfinished[body]
            self._num_left += len(body.data)

    def _too_large(self) -> BodyTooLarge:
        limit = self._payload_limit
        return BodyTooLarge(f"the body is larger than `payload_limit`, {limit} bytes: send a shorter prompt")
