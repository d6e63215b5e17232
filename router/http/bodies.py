"""Reading request bodies into memory, all of them together within a bound.

A body comes before its request's permit, so permits do not bound it: a hundred clients that each hold back the last
byte of 2 MB would hold 200 MB. When unfinished bodies take more than their share of memory, the account or else the
peer that holds the most gives one up, the one that has kept the most bytes for the longest since a part of it came:
bodies of ordinary clients arrive in milliseconds, or over a slow line bit by bit, and what is held back is silent.
"""

from __future__ import annotations

import asyncio
from collections.abc import Hashable, Iterator
from contextlib import contextmanager, suppress
from itertools import islice

from starlette.requests import ClientDisconnect, Request

from router.errors import BodyTooLarge, Overloaded

MOST_CANDIDATES = 100  # that are compared when a body has to go, those that have been silent the longest


class _Body:
    """One that is arriving."""

    def __init__(self) -> None:
        self.data = bytearray()
        self.heard_at = 0.0  # when its last part came
        self.is_given_up = False
        self.waiting = asyncio.timeout(None)

    def give_up(self) -> None:
        """Free its memory, and end the wait for the rest."""
        self.is_given_up = True
        self.data = bytearray()
        self.waiting.reschedule(0)


class _Owner:
    """An account or a peer, and its bodies."""

    def __init__(self) -> None:
        self.num_bytes = 0
        self.bodies: dict[_Body, None] = {}  # the one that has been silent the longest first


class Bodies:
    """All bodies that have not arrived as a whole."""

    def __init__(self, max_unfinished_bytes: int, payload_limit: int) -> None:
        self._payload_limit = payload_limit
        self._num_left = max(max_unfinished_bytes, payload_limit)
        self._owners: dict[Hashable, _Owner] = {}

    async def read(self, request: Request, owner: Hashable) -> bytes:
        """A whole body. Raises BodyTooLarge before its end, and Overloaded if others need the memory.

        owner: whose it is, for who has to give way.
        """
        if int(request.headers.get("content-length", 0)) > self._payload_limit:
            raise self._too_large()
        with self._receiving(owner) as body:
            with suppress(TimeoutError):  # it was given up
                async with body.waiting:
                    while await self._receive(request, owner, body):
                        pass
            if body.is_given_up:
                raise Overloaded
            return bytes(body.data)

    async def _receive(self, request: Request, owner: Hashable, body: _Body) -> bool:
        """Wait for the next part. Returns whether more is to come. A part is kept nowhere else, nor by an error."""
        message = await request.receive()
        if message["type"] == "http.disconnect":
            raise ClientDisconnect
        self._add(owner, body, message.get("body", b""))
        is_more: bool = message.get("more_body", False)
        return is_more

    @contextmanager
    def _receiving(self, owner: Hashable) -> Iterator[_Body]:
        body = _Body()
        self._owners.setdefault(owner, _Owner()).bodies[body] = None
        try:
            yield body
        finally:
            if not body.is_given_up:
                self._remove(owner, body)

    def _add(self, owner: Hashable, body: _Body, part: bytes) -> None:
        if body.is_given_up:
            return
        body.data += part
        self._num_left -= len(part)
        of_owner = self._owners[owner]
        of_owner.num_bytes += len(part)
        of_owner.bodies[body] = of_owner.bodies.pop(body)  # the last one: something has come
        body.heard_at = now = asyncio.get_running_loop().time()
        if len(body.data) > self._payload_limit:
            raise self._too_large()
        while self._num_left < 0:
            self._make_room(now)

    def _make_room(self, now: float) -> None:
        owner = max(self._owners, key=lambda owner: self._owners[owner].num_bytes)
        silent = islice(self._owners[owner].bodies, MOST_CANDIDATES)
        held_back = max(silent, key=lambda body: len(body.data) * (now - body.heard_at))
        self._remove(owner, held_back)
        held_back.give_up()

    def _remove(self, owner: Hashable, body: _Body) -> None:
        of_owner = self._owners[owner]
        del of_owner.bodies[body]
        of_owner.num_bytes -= len(body.data)
        self._num_left += len(body.data)
        if not of_owner.bodies:
            del self._owners[owner]

    def _too_large(self) -> BodyTooLarge:
        limit = self._payload_limit
        return BodyTooLarge(f"the body is larger than `--payload-limit`, {limit} bytes: send a shorter prompt")
