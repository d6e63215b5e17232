"""One node's link: answers other nodes' links, and dials them for connections to the sockets that it listens at.

A connection has two ends, and two ends are joined so that what comes at one leaves at the other (`End`).

A connection without a certificate of the cluster costs a handshake each time, and nothing is known of it before. So an
address may have a few handshakes at once, and its other connections wait for one of these places
(`HandshakeLimiter`). Where there are too many, the address that has the most loses its latest ones. After some that
failed, an address has to wait for the next second; what comes meanwhile is closed before anything is computed for it.
So the connections of one address never keep out another's, nor the cluster's own each other.
"""

from __future__ import annotations

import asyncio
import logging
import os
import socket
import time
from collections import Counter
from collections.abc import Callable, Coroutine, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from ipaddress import IPv6Address, ip_address
from pathlib import Path
from typing import cast

from server.link.config import CONTROL, LinkConfig, Order
from server.link.handshake import (
    LINE_BYTES,
    Absent,
    Contexts,
    Greeting,
    Refused,
    answer,
    read_answer,
    read_contexts,
    reason,
)

log = logging.getLogger(__name__)

MOST_WAITING = 64  # connections that are not accepted yet
MOST_SAID = 64  # sentences that are not said again for a while
DIAL_S = 5.0
HANDSHAKE_S = 5.0  # for a place among unidentified connections, TLS and the first line
APPEAR_S = 10.0  # in which a socket that a node's own process opens may appear: it may be asked for too early
POLL_S = 0.02
SILENCE_MS = 15_000  # bytes that are not confirmed for so long end a connection
BUFFER_BYTES = 1 << 20
CROWDED = "too many unidentified connections"
LINGER_S = 1.0  # for what was written last to leave
REPEAT_S = 10.0  # between two sentences on the same trouble with the same address
MOST = 512  # unidentified connections
MOST_OF_ONE = 8  # handshakes of one address at once
MOST_FAILURES = 16  # failed handshakes of one address in WINDOW_S
WINDOW_S = 1.0

Tell = Callable[[str, Mapping[str, object]], None]  # an event, and what belongs to it


class Link:
    """All connections of one node. `tell` brings events to the launcher."""

    def __init__(self, config: LinkConfig, tell: Tell) -> None:
        """Raises TlsError where the certificates cannot be used."""
        self._config = config
        self._tell = tell
        self._tls: Contexts | None = read_contexts(config.tls_dir) if config.tls_dir else None
        self._order = Order("", {}, {})
        self._handshakes = HandshakeLimiter()
        self._listener: socket.socket | None = None  # for other links
        self._listeners: dict[str, tuple[int, asyncio.Server]] = {}  # forwards: the node, and what listens for it
        self._carried: dict[str, set[End]] = {}  # their connections
        self._tasks: set[asyncio.Task[None]] = set()
        self._said: dict[str, float] = {}  # when

    def open(self, listener: socket.socket) -> None:
        """Answer other links at a bound socket."""
        listener.listen(MOST_WAITING)
        listener.setblocking(False)
        self._listener = listener
        self._listen_to_links()

    async def obey(self, order: Order) -> None:
        """Listen where the order says, and nowhere else; what it leaves out is closed.

        A socket that cannot be had is only logged: its group is being ended, or fails for want of it.
        """
        self._order = order
        for name in [name for name in self._listeners if order.forwards.get(name) != self._listeners[name][0]]:
            self._listeners.pop(name)[1].close()
            for end in self._carried.pop(name, set()):
                end.abort()
        for name, node in order.forwards.items():
            if name not in self._listeners:
                try:
                    self._listeners[name] = node, await self._listen(name, node)
                except OSError as error:
                    log.warning("cannot listen at %s: %s", name, error.strerror or error)

    async def close(self) -> None:
        """Carry what is on its way, and end everything."""
        if self._listener is not None:
            asyncio.get_running_loop().remove_reader(self._listener)
            self._listener.close()
            self._listener = None
        for _, listener in self._listeners.values():
            listener.close()
        if self._tasks:
            _, waiting = await asyncio.wait(self._tasks, timeout=LINGER_S)
            for task in waiting:
                task.cancel()
            await asyncio.gather(*waiting, return_exceptions=True)

    async def _listen(self, name: str, node: int) -> asyncio.Server:
        path = Path(self._config.folder, name)
        path.unlink(missing_ok=True)

        def came() -> End:
            near = End()
            self._carried.setdefault(name, set()).add(near)
            self._run(self._carry(near, name, node))
            return near

        listener = await asyncio.get_running_loop().create_unix_server(came, str(path))
        os.chmod(path, 0o600)
        return listener

    def _run(self, work: Coroutine[None, None, None]) -> asyncio.Task[None]:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    # ------------------------------------------------------------------------------------------------- from this node

    async def _carry(self, near: End, name: str, node: int) -> None:
        """Connect `near` to the socket `name` of a node until either closes."""
        try:
            far = await self._dial(node, name)
            if far is not None:
                near.join(far)
                await asyncio.wait([near.closed, far.closed])
        finally:
            near.close()
            self._carried.get(name, set()).discard(near)

    async def _dial(self, node: int, name: str) -> End | None:
        """A connection to the socket, or None where there is none, which the launcher hears of."""
        far = End()
        host, port = self._order.peers[node]
        tls = self._tls.dialling if self._tls is not None else None
        try:
            async with asyncio.timeout(DIAL_S):
                await asyncio.get_running_loop().create_connection(lambda: far, host, port, ssl=tls)
            _tune(far)
            far.write(Greeting(self._config.version, self._order.launch, self._config.node, name).line())
            async with asyncio.timeout(APPEAR_S + DIAL_S):
                read_answer(await far.line())
            return far
        except Refused as refusal:
            self._trouble("unreachable" if isinstance(refusal, Absent) else "refused", node, name, str(refusal))
        except TimeoutError:
            self._trouble("unreachable", node, name, "no answer")
        except OSError as error:
            kind = "refused" if self._is_about_tls(error) else "unreachable"
            why = reason(error) if kind == "refused" else error.strerror or str(error)
            if far.transport is not None and self._tls is None:
                why += ", as a node with --tls-dir does to one without"
            self._trouble(kind, node, name, why)
        far.abort()
        return None

    def _is_about_tls(self, error: OSError) -> bool:
        return self._tls is not None and type(error).__name__.startswith("SSL")

    def _trouble(self, event: str, node: int, name: str, why: str) -> None:
        """Tell the launcher, and the log but for node 0's launcher, for which a launcher logs its own waiting."""
        host, port = self._order.peers[node]
        self._tell(event, {"socket": name, "reason": why})
        if name != CONTROL:
            self._warn(f"{name} of node {node} at {host} port {port} cannot be reached: {why}")

    # ----------------------------------------------------------------------------------------------- from other nodes

    def _listen_to_links(self) -> None:
        if self._listener is not None:
            asyncio.get_running_loop().add_reader(self._listener, self._accept, self._listener)

    def _accept(self, listener: socket.socket) -> None:
        """Take one connection. It is closed with its task, even with one that is cancelled before it begins."""
        try:
            raw, address = listener.accept()
        except BlockingIOError:
            return
        except OSError as error:  # no more descriptors, or the other side has gone already
            log.warning("a connection could not be taken: %s", error.strerror)
            asyncio.get_running_loop().remove_reader(listener)
            asyncio.get_running_loop().call_later(POLL_S, self._listen_to_links)
            return
        raw.setblocking(False)
        self._run(self._let_in(raw, address[0])).add_done_callback(lambda _: raw.close())

    async def _let_in(self, raw: socket.socket, address: str) -> None:
        """Connect another node's end to the socket that it asks for, until either closes."""
        far, near = End(), None
        try:
            near = await self._meet(far, raw, address)
            far.write(answer())
            far.join(near)
            await asyncio.wait([near.closed, far.closed])
        except Refused as refusal:
            if not isinstance(refusal, Absent):
                self._warn(f"a connection from {address} is refused: {refusal}")
            far.write(answer(refusal))
        except TimeoutError:
            self._warn(f"a connection from {address} is refused: it sent nothing")
        except OSError as error:
            self._warn(f"a connection from {address} is refused: {reason(error)}")
        finally:
            far.close()
            if near is not None:
                near.close()

    async def _meet(self, far: End, raw: socket.socket, address: str) -> End:
        """Find out which node it is and what it wants; that socket's end. Raises Refused, OSError, TimeoutError."""
        greeting = await self._identify(far, raw, address)
        if greeting.socket in self._listeners:
            raise Refused(f"{greeting.socket} is not on this node")
        return await self._own_socket(greeting.socket)

    async def _identify(self, far: End, raw: socket.socket, address: str) -> Greeting:
        """What it says once it is its turn. Raises Refused, OSError, TimeoutError."""
        tls, is_known = self._tls.answering if self._tls is not None else None, False
        clock = asyncio.timeout(HANDSHAKE_S)

        def expel() -> None:
            if not clock.expired():
                clock.reschedule(0.0)

        handshake = self._handshakes.enter(address, time.monotonic(), expel)
        if handshake is None:
            raise Refused(CROWDED)
        try:
            async with clock:
                await handshake.turn.wait()
                await asyncio.get_running_loop().connect_accepted_socket(lambda: far, raw, ssl=tls)
                _tune(far)
                greeting = Greeting.read(await far.line())
            greeting.check(self._config.version, self._order.launch)
            is_known = True
            return greeting
        except TimeoutError:
            if handshake.turn.is_set():
                raise
            raise Refused(CROWDED) from None
        finally:
            self._handshakes.leave(handshake, is_known=is_known)

    async def _own_socket(self, name: str) -> End:
        """A connection to a socket of this node's, once it is there. Raises Refused."""
        path, until = str(Path(self._config.folder, name)), time.monotonic() + APPEAR_S
        while True:
            try:
                return (await asyncio.get_running_loop().create_unix_connection(End, path))[1]
            except OSError:
                if time.monotonic() > until:
                    raise Absent(f"{name} is not there") from None
            await asyncio.sleep(POLL_S)

    def _warn(self, sentence: str) -> None:
        """Say so, but not for each of many."""
        now = time.monotonic()
        for known in [known for known, at in self._said.items() if at <= now - REPEAT_S]:
            del self._said[known]
        if sentence not in self._said and len(self._said) < MOST_SAID:
            self._said[sentence] = now
            log.warning("%s", sentence)


def _tune(end: End) -> None:
    """Send at once, keep some bytes for a peer that is slow, and notice within seconds that it is gone."""
    assert end.transport is not None
    raw = end.transport.get_extra_info("socket")
    options = [(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1), (socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)]
    for name, value in (
        ("TCP_USER_TIMEOUT", SILENCE_MS),
        ("TCP_KEEPIDLE", 5),
        ("TCP_KEEPINTVL", 5),
        ("TCP_KEEPCNT", 2),
    ):
        if hasattr(socket, name):
            options.append((socket.IPPROTO_TCP, getattr(socket, name), value))
    with suppress(OSError):  # it has closed already
        for option in options:
            raw.setsockopt(*option)
    end.transport.set_write_buffer_limits(high=BUFFER_BYTES)


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


class HandshakeLimiter:
    """Connections that are not identified yet, by the holder of the address that they come from."""

    def __init__(self) -> None:
        self._pending: dict[str, list[PendingHandshake]] = {}  # of each holder, in the order in which they came
        self._failed: Counter[str] = Counter()  # of this window
        self._since = 0.0  # when the window began

    def enter(self, address: str, now: float, expel: Callable[[], None] = lambda: None) -> PendingHandshake | None:
        """Count a new connection until `leave`. None: it is refused."""
        if now - self._since >= WINDOW_S:
            self._failed.clear()
            self._since = now
        holder = _holder(address)
        if self._failed[holder] >= MOST_FAILURES or not self._has_room(holder):
            return None
        handshake = PendingHandshake(holder, expel)
        self._pending.setdefault(holder, []).append(handshake)
        self._start(holder)
        return handshake

    def leave(self, handshake: PendingHandshake, *, is_known: bool) -> None:
        """It is identified by now, or gone."""
        if handshake.turn.is_set() and not is_known:
            self._failed[handshake.holder] += 1
        self._remove(handshake)

    def _has_room(self, holder: str) -> bool:
        """Whether there is a place for one more of this holder, if need be that of a holder with more."""
        if sum(map(len, self._pending.values())) < MOST:
            return True
        crowd = max(self._pending.values(), key=len)
        if len(crowd) <= len(self._pending.get(holder, ())):
            return False
        latest = crowd[-1]
        self._remove(latest)
        latest.expel()
        return True

    def _remove(self, handshake: PendingHandshake) -> None:
        pending = self._pending.get(handshake.holder, [])
        if handshake in pending:  # it was not expelled
            pending.remove(handshake)
            self._start(handshake.holder)
            if not pending:
                del self._pending[handshake.holder]

    def _start(self, holder: str) -> None:
        """Let the first ones begin their handshakes; where too many failed, expel those that still wait."""
        pending = self._pending[holder]
        if self._failed[holder] < MOST_FAILURES:
            for handshake in pending[:MOST_OF_ONE]:
                handshake.turn.set()
            return
        waiting = [handshake for handshake in pending if not handshake.turn.is_set()]
        pending[:] = [handshake for handshake in pending if handshake.turn.is_set()]
        for handshake in waiting:
            handshake.expel()


@dataclass(eq=False)
class PendingHandshake:
    """A connection that is not identified. Its handshake may begin once `turn` is set; `expel` ends it."""

    holder: str
    expel: Callable[[], None]
    turn: asyncio.Event = field(default_factory=asyncio.Event)


def _holder(address: str) -> str:
    """The address itself, or what one holder of IPv6 addresses has of them at most: all that begin alike."""
    found = ip_address(address.partition("%")[0])
    if not isinstance(found, IPv6Address):
        return str(found)
    return str(found.ipv4_mapped or found.packed[:6].hex())
