"""One node's link: answers other nodes' links, and dials them for whoever connects to a socket that it listens at."""

from __future__ import annotations

import asyncio
import logging
import os
import socket
import time
from collections.abc import Callable, Coroutine, Mapping
from contextlib import suppress
from pathlib import Path

from server.link.config import CONTROL, LinkConfig, Order
from server.link.ends import End
from server.link.greeting import Absent, Greeting, Refused, answer, read_answer
from server.link.strangers import Strangers
from server.link.tls import Contexts, read_contexts, reason

log = logging.getLogger(__name__)

MOST_WAITING = 64  # connections that nobody has looked at yet
MOST_SAID = 64  # sentences that are not said again for a while
DIAL_S = 5.0
HANDSHAKE_S = 5.0  # for a place among those who do not say who they are, TLS and the first line
APPEAR_S = 10.0  # in which a socket that a node's own process opens may appear; who asks has asked too early
POLL_S = 0.02
SILENCE_MS = 15_000  # bytes that nobody confirms for so long end a connection
BUFFER_BYTES = 1 << 20
CROWDED = "too many unidentified connections"
LINGER_S = 1.0  # for what was written last to leave
REPEAT_S = 10.0  # between two sentences on the same trouble with the same address

Tell = Callable[[str, Mapping[str, object]], None]  # an event, and what belongs to it


class Link:
    """All connections of one node. `tell` brings events to the launcher."""

    def __init__(self, config: LinkConfig, tell: Tell) -> None:
        """Raises TlsError where the certificates cannot be used."""
        self._config = config
        self._tell = tell
        self._tls: Contexts | None = read_contexts(config.tls_dir) if config.tls_dir else None
        self._order = Order("", {}, {})
        self._strangers = Strangers()
        self._answering: asyncio.Task[None] | None = None
        self._listeners: dict[str, tuple[int, asyncio.Server]] = {}  # forwards: the node, and who listens for it
        self._carried: dict[str, set[End]] = {}  # their connections
        self._tasks: set[asyncio.Task[None]] = set()
        self._said: dict[str, float] = {}  # when

    def open(self, listener: socket.socket) -> None:
        """Answer other links at a bound socket."""
        listener.listen(MOST_WAITING)
        listener.setblocking(False)
        self._answering = asyncio.get_running_loop().create_task(self._answer(listener))

    async def obey(self, order: Order) -> None:
        """Listen where the order says, and nowhere else; what it leaves out is closed.

        A socket that cannot be had is left to whoever misses it: its group is being ended, or fails for want of it.
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
        if self._answering is not None:
            self._answering.cancel()
        for _, listener in self._listeners.values():
            listener.close()
        if self._tasks:
            await asyncio.wait(self._tasks, timeout=LINGER_S)

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

    def _run(self, work: Coroutine[None, None, None]) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

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
        """Who waits for node 0's launcher says so itself, again and again; of all else the log hears."""
        host, port = self._order.peers[node]
        self._tell(event, {"socket": name, "reason": why})
        if name != CONTROL:
            self._warn(f"{name} of node {node} at {host} port {port} cannot be reached: {why}")

    # ----------------------------------------------------------------------------------------------- from other nodes

    async def _answer(self, listener: socket.socket) -> None:
        with listener:
            while True:
                try:
                    raw, address = await asyncio.get_running_loop().sock_accept(listener)
                except OSError as error:  # no more descriptors, or the other side has gone already
                    log.warning("a connection could not be taken: %s", error.strerror)
                    await asyncio.sleep(POLL_S)
                else:
                    self._run(self._let_in(raw, address[0]))

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
            raw.close()  # what no transport has taken
            if near is not None:
                near.close()

    async def _meet(self, far: End, raw: socket.socket, address: str) -> End:
        """Find out who it is and what it wants; that socket's end. Raises Refused, OSError, TimeoutError."""
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

        visit = self._strangers.enter(address, time.monotonic(), expel)
        if visit is None:
            raise Refused(CROWDED)
        try:
            async with clock:
                await visit.turn.wait()
                await asyncio.get_running_loop().connect_accepted_socket(lambda: far, raw, ssl=tls)
                _tune(far)
                greeting = Greeting.read(await far.line())
            greeting.check(self._config.version, self._order.launch)
            is_known = True
            return greeting
        except TimeoutError:
            if visit.turn.is_set():
                raise
            raise Refused(CROWDED) from None
        finally:
            self._strangers.leave(visit, is_known=is_known)

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
