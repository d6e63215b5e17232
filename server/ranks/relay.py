"""One ordered stream of steps for all ranks: the router speaks to rank 0, which passes a step on before it starts it.

A gRPC stream to each rank would cost the router's one thread a quarter of a millisecond for each rank and step. Here
rank 0 writes each step to one unix socket per rank, in the order of the stream, so every rank issues the same
collectives in the same order. A rank that dies is the end of its socket; nothing polls and nothing spins. What lost is
in docs/decisions/0011-rank-0-passes-steps-on.md.

Every rank answers every step, and no answer is waited for while all is well: that rank 0 finished step k means that its
collectives were done, so all ranks had started it. Its reply waits only for the others' answers to step k-1.
Where the model is cut into pipeline stages, a rank of the last one has the tokens: its answers go to the router.
"""

from __future__ import annotations

import asyncio
import math
import os
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import cast

import grpc

from server.pb import MAX_MESSAGE_BYTES, MESSAGE_SIZES
from server.pb import generate_pb2 as pb
from server.pb import generate_pb2_grpc as pb_grpc

LENGTH_BYTES = 4  # before each message
MAX_LAG = 1  # steps that another rank may be behind rank 0 when rank 0's reply goes out
POLL_S = 0.05
MAX_UNANSWERED = 32  # steps on their way to one rank; the router has two under way, or one more than micro-batches

Start = Callable[[pb.StepRequest], "asyncio.Future[pb.StepReply]"]


def shard_server(servicer: pb_grpc.ShardServicer, socket_path: str) -> grpc.aio.Server:
    """What serves a rank on a unix socket once it is started: nobody else can listen there then."""
    Path(socket_path).unlink(missing_ok=True)
    server = grpc.aio.server(options=[*MESSAGE_SIZES, ("grpc.so_reuseport", 0)])
    pb_grpc.add_ShardServicer_to_server(servicer, server)
    server.add_insecure_port(f"unix://{socket_path}")
    return server


@dataclass(frozen=True)
class RankPlace:
    """A rank's place among all, those of other pipeline stages too. speaker: the rank whose answers have the tokens."""

    rank: int = 0
    count: int = 1
    speaker: int = 0


@dataclass(frozen=True)
class Deadlines:
    """How long rank 0 waits for another, and for the router, in seconds."""

    connect: float = 10.0  # the router begins when all ranks serve, so their sockets are there
    agreement: float = 10.0  # ranks report one step's error within one step of each other; one that hangs never does
    cause: float = 0.5  # the end of a rank is known at once; that others lost it may be known a moment earlier
    lag: float = 120.0  # as in a collective: far longer than any step
    leave: float = 10.0  # for the router to end a stream that has failed


class _Messages(asyncio.Protocol):
    """One end of a socket between ranks: whole messages in both directions."""

    def __init__(self) -> None:
        self._received = bytearray()
        self._transport: asyncio.Transport | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)  # uvloop's is none by its class

    def data_received(self, data: bytes) -> None:
        self._received += data
        while len(self._received) >= LENGTH_BYTES:
            length = int.from_bytes(self._received[:LENGTH_BYTES], "little")
            if length > MAX_MESSAGE_BYTES:
                return self.close()  # no rank sends that much
            end = LENGTH_BYTES + length
            if len(self._received) < end:
                return
            with memoryview(self._received) as view:
                message = bytes(view[LENGTH_BYTES:end])
            del self._received[:end]
            self.take(message)

    def take(self, message: bytes) -> None:
        raise NotImplementedError

    def give(self, message: bytes) -> None:
        """Send without waiting; to a socket that has ended, nothing."""
        if self._transport is not None and not self._transport.is_closing():
            self._transport.write(len(message).to_bytes(LENGTH_BYTES, "little") + message)

    def close(self) -> None:
        if self._transport is not None:
            self._transport.abort()  # what a rank that no longer reads was sent would never leave


class _LeaderLink(_Messages):
    """The end of a rank other than 0: starts each step as it comes, answers in the same order."""

    def __init__(self, start: Start) -> None:
        super().__init__()
        self._start = start
        self._replies: asyncio.Queue[asyncio.Future[pb.StepReply]] = asyncio.Queue()
        self._answering: asyncio.Task[None] | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(transport)
        self._answering = asyncio.get_running_loop().create_task(self._answer())

    def connection_lost(self, error: Exception | None) -> None:
        if self._answering is not None:
            self._answering.cancel()

    def take(self, message: bytes) -> None:
        self._replies.put_nowait(self._start(pb.StepRequest.FromString(message)))

    async def _answer(self) -> None:
        while True:
            reply = await self._replies.get()
            await asyncio.wait((reply,))  # which leaves the step alone when this task is cancelled
            self.give(reply.result().SerializeToString())


class _RankLink(_Messages):
    """Another rank as rank 0 knows it: what it was sent, what it has answered, and whether it is there."""

    def __init__(self, rank: int, path: str, notice: Callable[[bool], None], speaks: bool) -> None:
        super().__init__()
        self.speaks = speaks
        self.rank = rank
        self.path = path
        self.answered = 0  # steps, those that failed too
        self.errors: dict[int, pb.StepReply] = {}  # by the number of the step
        self.said: dict[int, pb.StepReply] = {}  # likewise, without an error; of the rank that has the tokens
        self.is_lost = False
        self._notice = notice

    @property
    def is_connected(self) -> bool:
        return self._transport is not None

    @property
    def is_victim(self) -> bool:
        """Whether all that it has reported is that another rank went away."""
        return bool(self.errors) and all(reply.lost_peer for reply in self.errors.values())

    def connection_lost(self, error: Exception | None) -> None:
        self.is_lost = True
        self._notice(True)

    def take(self, message: bytes) -> None:
        self.answered += 1
        reply = pb.StepReply.FromString(message)
        (self.errors if reply.error else self.said)[self.answered] = reply
        if not self.speaks:
            self.said.clear()
        self._notice(bool(reply.error))


class StepStream:
    """Where a rank's steps come from: rank 0's from the router, the others' from rank 0.

    `sockets` are those of rank 1, 2 and so on. `start` queues a step behind those before it; the future that it returns
    never raises. A reply with `failed_rank` is the last: that rank alone failed, or is gone. speaker: see `RankPlace`.
    """

    def __init__(
        self, rank: int, sockets: Sequence[str], start: Start, deadlines: Deadlines | None = None, *, speaker: int = 0
    ) -> None:
        self.rank = rank
        self._sockets = sockets
        self._start = start
        self._deadlines = deadlines or Deadlines()
        self._number = 0  # of the latest step, over all streams
        self._first = 1  # step of the latest stream
        self._refused: set[int] = set()  # steps that rank 0 failed while it went on
        self._answered = asyncio.Event()  # set by whatever comes from another rank, and when a step of ours is done …
        self._changed = asyncio.Event()  # … and this one not by answers without an error, which come all the time
        self._dialling = asyncio.Lock()
        self._links = (
            [_RankLink(n, path, self._notice, n == speaker) for n, path in enumerate(sockets, 1)] if rank == 0 else []
        )
        self._speaker = self._links[speaker - 1] if self._links and speaker else None
        self._server: asyncio.Server | None = None
        self._followers: list[_LeaderLink] = []

    async def open(self) -> None:
        """Listen for rank 0, on a rank other than that; its socket exists from then on, for its owner alone."""
        if self.rank == 0:
            return
        path = self._sockets[self.rank - 1]
        Path(path).unlink(missing_ok=True)
        self._server = await asyncio.get_running_loop().create_unix_server(self._follow, path)
        os.chmod(path, 0o600)

    def _follow(self) -> _LeaderLink:
        self._followers.append(_LeaderLink(self._start))
        return self._followers[-1]

    def close(self) -> None:
        """End every connection between ranks."""
        if self._server is not None:
            self._server.close()
        for end in (*self._followers, *self._links):
            end.close()

    async def run(self, requests: AsyncIterator[pb.StepRequest]) -> AsyncIterator[pb.StepReply]:
        """Answer the router's stream of steps, of which there may be one after another; refused but on rank 0.

        Behind a failure the router ends the stream: of one that ends while it writes, gRPC gives it no reply any more.
        """
        failure = await self._refusal()
        started: asyncio.Queue[tuple[int, asyncio.Future[pb.StepReply]] | None] = asyncio.Queue()
        self._first = self._number + 1

        async def read() -> None:
            try:
                async for request in requests:
                    if failure is None:
                        await self._room()
                        started.put_nowait((number := self._pass_on(request), own := self._start(request)))
                        own.add_done_callback(partial(self._note, number))
            finally:
                started.put_nowait(None)

        reader = asyncio.create_task(read())
        try:
            while failure is None and (step := await started.get()) is not None:
                reply = await self._agreed(*step)
                if reply.HasField("failed_rank"):
                    failure = reply
                else:
                    yield reply
            if failure is not None:
                yield failure
                await asyncio.wait((reader,), timeout=self._deadlines.leave)
        finally:
            reader.cancel()

    # -------------------------------------------------------------------------------------------- on the way out

    async def _refusal(self) -> pb.StepReply | None:
        """Why no step can be taken. Ranks that were not dialled yet are."""
        if self.rank:
            return _failure_of(self.rank, f"steps reach rank {self.rank} through rank 0")
        async with self._dialling:
            for other in self._links:
                try:
                    if not other.is_connected:
                        await _dial(other, self._deadlines.connect)
                except OSError as error:  # a TimeoutError too
                    return _failure_of(other.rank, f"it takes no steps: {error.strerror or 'no answer'}")
        return None

    async def _room(self) -> None:
        """Wait until no rank has too many steps unanswered; `_agreed`, which waits for the oldest, has the timer."""
        while any(self._number - other.answered >= MAX_UNANSWERED and not other.is_lost for other in self._links):
            self._answered.clear()
            await self._answered.wait()

    def _pass_on(self, request: pb.StepRequest) -> int:
        """Send to every other rank; the step's number."""
        self._number += 1
        if self._links:
            message = request.SerializeToString()
            for other in self._links:
                other.give(message)
        return self._number

    # -------------------------------------------------------------------------------------------- on the way back

    async def _agreed(self, number: int, own: asyncio.Future[pb.StepReply]) -> pb.StepReply:
        """Rank 0's reply to step `number` if all ranks agree with it, else the failure that ends the stream."""
        if not self._links:
            return await asyncio.shield(own)
        patience, since = math.inf, 0.0
        while (reply := self._settled(number, own)) is None:
            if (now := self._patience(number, own)) != patience:
                patience, since = now, time.monotonic()
            left = since + patience - time.monotonic()
            if left <= 0:
                return self._failure(number, own)
            event = self._answered if own.done() else self._changed
            event.clear()
            with suppress(TimeoutError):
                async with asyncio.timeout(left if left < math.inf else None):
                    await event.wait()
        return reply

    def _notice(self, is_change: bool) -> None:
        self._answered.set()
        if is_change:
            self._changed.set()

    def _note(self, number: int, own: asyncio.Future[pb.StepReply]) -> None:
        """Rank 0 has done a step."""
        if self._links and own.result().error:
            self._refused.add(number)
        self._notice(True)

    def _forget_earlier(self) -> None:
        """What all ranks refused alike in a stream before, of a router that died before it read that."""
        for other in self._links:
            for number in [number for number in other.errors if number < self._first and number in self._refused]:
                del other.errors[number]

    def _settled(self, number: int, own: asyncio.Future[pb.StepReply]) -> pb.StepReply | None:
        """What can be said to the router now; None while another rank or our own step has to be waited for."""
        self._forget_earlier()
        reply = own.result() if own.done() else None
        if self._has_ended(number, reply):
            return self._failure(number, own)
        if reply is None:
            return None
        failed = [other for other in self._links if number in other.errors]
        if not (reply.error or failed):
            if any(other.answered < number - MAX_LAG for other in self._links):
                return None
            return reply if self._speaker is None else self._speaker.said.pop(number, None)
        if any(other.answered < number for other in self._links):
            return None
        if not reply.error or len(failed) < len(self._links):
            return self._failure(number, own)
        for other in failed:
            del other.errors[number]
        self._refused.discard(number)
        return reply  # all ranks failed alike, and lost the same sequences

    def _has_ended(self, number: int, reply: pb.StepReply | None) -> bool:
        """Whether a rank has failed for good, or failed a step that rank 0 has answered already."""
        reports = [(number, reply)] if reply is not None else []
        reports += [report for other in self._links for report in other.errors.items()]
        return any(other.is_lost and not other.is_victim for other in self._links) or any(
            n <= number and not report.lost_peer and (report.HasField("failed_rank") or (report.error and n < number))
            for n, report in reports
        )

    def _patience(self, number: int, own: asyncio.Future[pb.StepReply]) -> float:
        """How long rank 0 waits as things stand."""
        reports = [own.result()] if own.done() and own.result().error else []
        reports += [report for other in self._links for n, report in other.errors.items() if n <= number]
        if any(not report.lost_peer for report in reports):
            return self._deadlines.agreement
        if reports or any(other.is_lost for other in self._links):
            return self._deadlines.cause
        return self._deadlines.lag if own.done() else math.inf

    def _failure(self, number: int, own: asyncio.Future[pb.StepReply]) -> pb.StepReply:
        """The cause: the first rank that failed by itself, else one gone, silent or behind, else a victim."""
        reports = [(n, other.rank, report) for other in self._links for n, report in other.errors.items()]
        if own.done() and own.result().error:
            reports.append((number, 0, own.result()))
        reports.sort(key=lambda report: report[:2])
        for _, rank, report in reports:
            if not report.lost_peer:
                return _failure_of(rank, report.error)
        others = [other for other in self._links if not other.is_victim]
        for other in others:
            if other.is_lost:
                return _failure_of(other.rank, "its connection ended", lost_peer=True)
        if late := min(others, key=lambda other: other.answered, default=None):
            if late.answered < number:
                return _failure_of(late.rank, f"it has not answered its last {number - late.answered} steps")
        _, rank, report = reports[0]
        return _failure_of(rank, report.error, lost_peer=True)


async def _dial(other: _RankLink, seconds: float) -> None:
    async with asyncio.timeout(seconds):
        while True:
            with suppress(FileNotFoundError, ConnectionRefusedError):
                await asyncio.get_running_loop().create_unix_connection(lambda: other, other.path)
                return
            await asyncio.sleep(POLL_S)


def _failure_of(rank: int, cause: str, *, lost_peer: bool = False) -> pb.StepReply:
    return pb.StepReply(error=cause, failed_rank=rank, lost_peer=lost_peer)
