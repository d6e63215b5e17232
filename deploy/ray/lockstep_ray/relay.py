"""Relays a request to a replica, and to another one when that is lost.

A stream is continued on another replica behind what the client has, with the same tokens (`streams.py`). An answer that
is no stream is collected before anything of it is passed on, and requested again as a whole. 429 and 503 mean that a
replica did not take the request: another one may. All of this is bounded in tries and in time, and ends with one
sentence. Nothing here knows Ray.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing
from dataclasses import dataclass
from typing import Protocol

import orjson

from lockstep_ray.errors import error_body, error_event
from lockstep_ray.requests import RelayedRequest
from lockstep_ray.streams import Stream, StreamBroken

TOLD = "x-lockstep-told"  # the header of a stream that can be continued
NOT_TAKEN = (429, 503)
MOST_ANSWER_BYTES = 64 << 20  # that is no stream
FIRST_WAIT_S, LONGEST_WAIT_S = 0.05, 2.0


class TooLarge(Exception):
    """An answer that is no stream has more bytes than are kept. Another replica would give the same."""


class ReplicaLost(Exception):
    """The replica that had a request is gone, or its engine. replica: its name, where it is known."""

    def __init__(self, sentence: str, replica: str | None = None) -> None:
        super().__init__(sentence, replica)
        self.replica = replica


@dataclass(frozen=True, slots=True)
class Head:
    """Status and headers of an answer. replica: that sent it."""

    status: int
    headers: tuple[tuple[str, str], ...]
    replica: str

    def header(self, name: str) -> str:
        """The first one of this name; empty where there is none."""
        return next((value for key, value in self.headers if key.lower() == name), "")

    @property
    def is_stream(self) -> bool:
        """Whether it is sent while it is made."""
        return self.header("content-type").startswith("text/event-stream")


class Replicas(Protocol):
    """Sends requests to replicas that a balancer chooses."""

    def ask(self, ask: RelayedRequest) -> AsyncGenerator[Head | bytes, None]:
        """A head, then the body in pieces. Raises ReplicaLost. Closing it before its end ends the request."""


@dataclass(frozen=True)
class Patience:
    """How often a request is sent, and until when it is sent again, in seconds."""

    most_tries: int = 6
    most_refusals: int = 3  # of replicas that did not take it
    give_up_s: float = 120.0


@dataclass
class Counts:
    """What happened since the ingress began."""

    requests: int = 0
    retried: int = 0  # sent again, before the client had anything
    continued: int = 0  # streams that went on on another replica
    failed: int = 0  # given up with a sentence of ours


@dataclass
class Answer:
    """What a client gets. first: the beginning of the body, or all of it; rest: None where that is all."""

    status: int
    headers: tuple[tuple[str, str], ...]
    first: bytes
    rest: AsyncGenerator[bytes, None] | None = None


class Relay:
    """Has requests answered by replicas, and again by others when these are lost."""

    def __init__(
        self, replicas: Replicas, patience: Patience, counts: Counts, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._replicas = replicas
        self._patience = patience
        self._counts = counts
        self._clock = clock

    async def answer(self, ask: RelayedRequest) -> Answer:
        """The whole answer, or a stream's head and the rest of it to come."""
        self._counts.requests += 1
        return await _Relayed(ask, self._replicas, self._patience, self._counts, self._clock).answer()


class _Relayed:
    """One request."""

    def __init__(
        self, ask: RelayedRequest, replicas: Replicas, patience: Patience, counts: Counts, clock: Callable[[], float]
    ) -> None:
        self._ask = ask
        self._replicas = replicas
        self._patience = patience
        self._counts = counts
        self._clock = clock
        self._began = clock()
        self._stream = Stream()
        self._avoid: set[str] = set()
        self._num_tries = 0
        self._num_refusals = 0

    async def answer(self) -> Answer:
        while True:
            pieces = self._send()
            try:
                head = await anext(pieces)
                assert isinstance(head, Head)
                if head.status == 200 and head.is_stream:
                    return Answer(200, _shown(head), b"", self._streamed(head, pieces))
                answer = Answer(head.status, _shown(head), await _whole(pieces))
            except ReplicaLost as lost:
                if await self._may_go_on(lost.replica):
                    self._counts.retried += 1
                    continue
                return self._failed(503, self._sentence(lost))
            except TooLarge as error:
                await pieces.aclose()
                return self._failed(422, str(error))
            await pieces.aclose()
            if head.status not in NOT_TAKEN or not await self._may_be_taken(head.replica):
                return answer
            self._counts.retried += 1

    def _send(self) -> AsyncGenerator[Head | bytes, None]:
        self._num_tries += 1
        ask = self._ask.again(frozenset(self._avoid), self._stream)
        return _closable(self._replicas.ask(ask))

    def _failed(self, status: int, sentence: str) -> Answer:
        self._counts.failed += 1
        headers = [("content-type", "application/json"), *([("retry-after", "5")] if status == 503 else [])]
        return Answer(status, tuple(headers), orjson.dumps(error_body(self._ask.path, status, sentence)))

    def _sentence(self, lost: BaseException) -> str:
        return f"{lost.args[0]}, also after {self._num_tries} tries: send the request again later"

    async def _streamed(self, head: Head, pieces: AsyncGenerator[Head | bytes, None]) -> AsyncGenerator[bytes, None]:
        """The frames, of however many replicas."""
        is_told, has_sent = head.header(TOLD) != "", False
        while True:
            try:
                async with aclosing(pieces):
                    async for piece in pieces:
                        assert isinstance(piece, bytes)
                        ready = self._stream.feed(piece) if is_told else piece
                        if ready:
                            has_sent = True
                            yield ready
                if not is_told or self._stream.is_over:
                    return
                lost = ReplicaLost("the replica ended in the middle of the stream", head.replica)
            except ReplicaLost as found:
                lost = found
            except StreamBroken as broken:
                lost = ReplicaLost(str(broken), head.replica)
            error = self._stream.lost()
            if not is_told and has_sent:
                error = b""
            elif (again := await self._resumed(lost)) is not None:
                self._counts.continued += 1
                head, pieces = again
                is_told = head.header(TOLD) != ""
                continue
            self._counts.failed += 1
            yield error if b"error" in error else error_event(self._ask.path, self._sentence(lost))
            return

    async def _resumed(self, lost: ReplicaLost) -> tuple[Head, AsyncGenerator[Head | bytes, None]] | None:
        """The same stream from another replica; None once that was tried often enough."""
        replica = lost.replica
        while await self._may_go_on(replica):
            pieces = self._send()
            try:
                head = await anext(pieces)
            except ReplicaLost as again:
                replica = again.replica
                continue
            assert isinstance(head, Head)
            if head.status == 200:
                return head, pieces
            await pieces.aclose()
            if head.status not in NOT_TAKEN:
                return None
            replica = head.replica
        return None

    async def _may_go_on(self, replica: str | None) -> bool:
        """Whether it is sent again, after a wait, to another replica than this one."""
        if replica is not None:
            self._avoid.add(replica)
        if self._num_tries >= self._patience.most_tries or self._clock() - self._began > self._patience.give_up_s:
            return False
        await asyncio.sleep(min(FIRST_WAIT_S * 2 ** (self._num_tries - 1), LONGEST_WAIT_S))
        return True

    async def _may_be_taken(self, replica: str) -> bool:
        self._num_refusals += 1
        return self._num_refusals < self._patience.most_refusals and await self._may_go_on(replica)


async def _closable(pieces: AsyncGenerator[Head | bytes, None]) -> AsyncGenerator[Head | bytes, None]:
    """The same as a generator that can be closed; an end without a head is a loss."""
    has_head = False
    async with aclosing(pieces):
        async for piece in pieces:
            has_head = True
            yield piece
    if not has_head:
        raise ReplicaLost("the replica ended before it had answered")


async def _whole(pieces: AsyncGenerator[Head | bytes, None]) -> bytes:
    body = bytearray()
    async for piece in pieces:
        assert isinstance(piece, bytes)
        body += piece
        if len(body) > MOST_ANSWER_BYTES:
            raise TooLarge(f"The answer is larger than {MOST_ANSWER_BYTES} bytes: ask for less of it, or for a stream")
    return bytes(body)


def _shown(head: Head) -> tuple[tuple[str, str], ...]:
    """Headers for the client: not those of one connection, nor what Serve adds, nor what is told to balancers."""
    hidden = ("connection", "keep-alive", "transfer-encoding", "date", "server", "x-request-id", TOLD)
    return tuple((name, value) for name, value in head.headers if name.lower() not in hidden)
