"""A link carries bytes between sockets of two nodes, and lets nobody in who is no link of the same launch."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import json
import os
import socket
import ssl
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from datetime import UTC, datetime, timedelta
from functools import partial
from pathlib import Path

import pytest

from launch.commands.tls import certificates
from server.link import handshake
from server.link.config import CONTROL, LinkConfig, Order
from server.link.handshake import Greeting, Refused, answer, read_answer
from server.link.link import MOST, MOST_FAILURES, MOST_OF_ONE, HandshakeLimiter, Link

SHARD = "group-1/shard-1.sock"


def write_certificates(folder: Path, days: int = 10, now: datetime | None = None) -> str:
    folder.mkdir()
    for name, content in certificates(days, now or datetime.now(UTC)).items():
        (folder / name).write_bytes(content)
    return str(folder)


class Node:
    """A link in a loop of its own, with what it tells its launcher."""

    def __init__(self, folder: Path, index: int, tls_dir: str | None = None, version: str = "1") -> None:
        (folder / "group-1").mkdir(parents=True)
        self.folder = folder
        self.told: list[tuple[str, dict[str, object]]] = []
        self.listener = socket.create_server(("127.0.0.1", 0))
        self.address = self.listener.getsockname()
        self.loop = asyncio.new_event_loop()
        config = LinkConfig(str(folder), "127.0.0.1", 0, index, version, tls_dir)
        self.link = Link(config, lambda event, values: self.told.append((event, dict(values))))
        self.loop.run_until_complete(self._open())
        self.thread = threading.Thread(target=self.loop.run_forever, daemon=True)
        self.thread.start()

    async def _open(self) -> None:
        self.link.open(self.listener)

    def obey(self, forwards: dict[str, int], *peers: Node, launch: str = "L") -> None:
        order = Order(launch, dict(enumerate(peer.address for peer in peers)), forwards)
        asyncio.run_coroutine_threadsafe(self.link.obey(order), self.loop).result(5)

    def close(self) -> None:
        asyncio.run_coroutine_threadsafe(self.link.close(), self.loop).result(5)
        self.loop.call_soon_threadsafe(self.loop.stop)
        self.thread.join()
        self.loop.close()

    def listen(self, name: str = SHARD) -> socket.socket:
        listener = socket.socket(socket.AF_UNIX)
        listener.settimeout(60)
        listener.bind(str(self.folder / name))
        listener.listen()
        return listener

    def dial(self, name: str = SHARD) -> socket.socket:
        end = socket.socket(socket.AF_UNIX)
        end.settimeout(60)
        end.connect(str(self.folder / name))
        return end


Make = Callable[..., Node]


@pytest.fixture
def node(tmp_path: Path) -> Iterator[Make]:
    made: list[Node] = []

    def make(*args: object, **kwargs: object) -> Node:
        made.append(Node(tmp_path / f"node-{len(made)}", len(made), *args, **kwargs))  # type: ignore[arg-type]
        return made[-1]

    yield make
    for one in made:
        one.close()


@pytest.mark.parametrize("is_encrypted", [False, True])
def test_bytes_go_both_ways_and_an_end_ends_both(node: Make, tmp_path: Path, is_encrypted: bool) -> None:
    folder = write_certificates(tmp_path / "tls") if is_encrypted else None
    here, there = node(folder), node(folder)
    here.obey({SHARD: 1}, here, there)
    there.obey({}, here, there)
    assert 0o600 == os.stat(here.folder / SHARD).st_mode & 0o777
    near = here.dial()  # before anybody listens there
    with there.listen() as listener:
        far, _ = listener.accept()
    far.settimeout(60)
    data = os.urandom(5_000_000)
    threading.Thread(target=near.sendall, args=(data,), daemon=True).start()
    with far.makefile("rb") as file:
        assert data == file.read(len(data))
    far.sendall(b"answer")
    assert b"answer" == near.recv(100)
    near.close()
    assert b"" == far.recv(1)
    far.close()


def test_what_an_order_leaves_out_is_closed(node: Make) -> None:
    here, there = node(), node()
    for one, forwards in ((here, {SHARD: 1}), (there, {})):
        one.obey(forwards, here, there)
    with there.listen() as listener, here.dial() as near:
        far, _ = listener.accept()
        here.obey({}, here, there)
        assert b"" == near.recv(1)
        far.settimeout(60)
        assert b"" == far.recv(1)
        far.close()
    # Nobody listens, or there is not even a socket, which asyncio removes since Python 3.13.
    with socket.socket(socket.AF_UNIX) as end, pytest.raises((ConnectionRefusedError, FileNotFoundError)):
        end.connect(str(here.folder / SHARD))


def test_a_socket_of_a_group_that_is_gone_leaves_the_others_alone(node: Make, caplog: pytest.LogCaptureFixture) -> None:
    here, there = node(), node()
    here.obey({"group-9/shard-1.sock": 1, SHARD: 1}, here, there)
    assert "cannot listen at group-9/shard-1.sock: No such file or directory" in caplog.text
    there.obey({}, here, there)
    with there.listen() as listener, here.dial():
        listener.accept()[0].close()


def greet(address: tuple[str, int], line: bytes, context: ssl.SSLContext | None = None) -> bytes:
    """What a link answers to a line."""
    with socket.create_connection(address, timeout=60) as raw:
        end = context.wrap_socket(raw) if context is not None else raw
        end.sendall(line)
        with end.makefile("rb") as file:
            return file.readline()


@pytest.mark.parametrize(
    ("line", "why"),
    [
        (b"GET / HTTP/1.1\r\n", "it is not a Lockstep link"),
        (b"\x16\x03\x01\x02\x00 a handshake\n", "it speaks TLS, and this node has no --tls-dir"),
        (b"[" * 900 + b"\n", "it is not a Lockstep link"),
        (b"x" * 5000 + b"\n", "it is not a Lockstep link"),
        (b'{"lockstep": {"version": "1", "launch": "L", "node": "1", "socket": []}}\n', "it is not a Lockstep link"),
        (Greeting("0.9", "L", 1, SHARD).line(), "it runs Lockstep '0.9' and this node '1': install the same on all"),
        (Greeting("1", "other", 1, SHARD).line(), "it is of another launch"),
        (Greeting("1", "L", 1, "launch.lock").line(), "it asks for a path that is not a socket of a launch"),
        (Greeting("1", "L", 1, "../../etc/passwd").line(), "it asks for a path that is not a socket of a launch"),
        (Greeting("1", "L", 1, "group-1/../link.json").line(), "it asks for a path that is not a socket of a launch"),
        (Greeting("1", "L", 1, "group-1/steps-3.sock").line(), "group-1/steps-3.sock is not on this node"),
    ],
)
def test_strangers_are_refused_by_name(node: Make, caplog: pytest.LogCaptureFixture, line: bytes, why: str) -> None:
    here = node()
    here.obey({"group-1/steps-3.sock": 0}, here)
    with pytest.raises(Refused) as caught:
        read_answer(greet(here.address, line))
    assert why in str(caught.value)
    assert f"a connection from 127.0.0.1 is refused: {caught.value}" in caplog.text


def test_who_says_nothing_is_let_go(
    node: Make, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("server.link.link.HANDSHAKE_S", 0.05)
    with socket.create_connection(node().address, timeout=60) as end:
        assert b"" == end.recv(1)
    assert "a connection from 127.0.0.1 is refused: it sent nothing" in caplog.text


def test_many_who_say_nothing_do_not_keep_others_out_for_long(node: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("server.link.link.MOST", 2)
    monkeypatch.setattr("server.link.link.HANDSHAKE_S", 0.3)
    here = node()
    silent = [socket.create_connection(here.address, timeout=60) for _ in range(4)]
    for end in silent:  # two are closed at once, two after their time
        assert b"" == end.recv(1)
        end.close()
    monkeypatch.setattr("server.link.link.HANDSHAKE_S", 60.0)
    assert b"connected" in greet(here.address, b"hello\n")


@pytest.mark.parametrize("turns", range(4))
def test_what_comes_while_a_link_closes_is_closed_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, turns: int
) -> None:
    """A socket that nothing closes would be a warning, which fails the test."""
    monkeypatch.setattr("server.link.link.LINGER_S", 0.01)

    async def close_after(turns: int) -> bytes:
        link, listener = (
            Link(LinkConfig(str(tmp_path), "127.0.0.1", 0, 0, "1", None), lambda *_: None),
            socket.create_server(("127.0.0.1", 0)),
        )
        link.open(listener)
        await asyncio.sleep(0)
        with socket.create_connection(listener.getsockname(), timeout=60) as end:
            for _ in range(turns):
                await asyncio.sleep(0)
            await link.close()
            with contextlib.suppress(ConnectionResetError):
                return end.recv(1)
            return b""

    assert b"" == asyncio.run(close_after(turns))
    gc.collect()


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """A link that lets few unidentified connections in, and waits long for them."""
    monkeypatch.setattr("server.link.link.MOST", 40)
    monkeypatch.setattr("server.link.link.HANDSHAKE_S", 120.0)


def silent(here: Node, address: str, count: int) -> list[socket.socket]:
    return [socket.create_connection(here.address, timeout=60, source_address=(address, 0)) for _ in range(count)]


@pytest.mark.usefixtures("small")
def test_those_of_one_address_keep_out_no_other(node: Make) -> None:
    """As many as there may be at all say nothing, and more; another address is answered at once."""
    here = node()
    theirs = silent(here, "127.0.0.2", 46)
    for end in theirs[40:]:
        assert b"" == end.recv(1)
    assert b"connected" in greet(here.address, b"hello\n")
    for end in theirs:
        end.close()


@pytest.mark.usefixtures("small")
def test_several_addresses_together_keep_out_no_other(node: Make) -> None:
    here = node()
    theirs = [end for host in range(2, 10) for end in silent(here, f"127.0.0.{host}", 8)]
    for _ in range(MOST_FAILURES):
        assert b"connected" in greet(here.address, b"hello\n")
    for end in theirs:
        end.close()


@pytest.mark.parametrize("is_encrypted", [False, True])
def test_many_of_the_cluster_s_own_at_once_wait_for_each_other(
    node: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_encrypted: bool
) -> None:
    """While a stranger of another address dials without rest, and says nothing or what is wrong."""
    monkeypatch.setattr("server.link.link.DIAL_S", 60.0)
    monkeypatch.setattr("server.link.link.HANDSHAKE_S", 60.0)
    folder = write_certificates(tmp_path / "tls") if is_encrypted else None
    here, there = node(folder), node(folder)
    here.obey({SHARD: 1}, here, there)
    there.obey({}, here, there)
    is_over = threading.Event()

    def storm() -> None:
        held: deque[socket.socket] = deque()
        while not is_over.is_set():
            held += silent(there, "127.0.0.2", 2)
            with contextlib.suppress(OSError):
                held[-1].sendall(b"hello\n")
            if len(held) > 100:
                held.popleft().close()
        while held:
            held.popleft().close()

    storming = threading.Thread(target=storm)
    storming.start()
    try:
        with there.listen() as listener:
            near = [here.dial() for _ in range(32)]
            for number, end in enumerate(near):
                end.sendall(bytes([number]))
            far = [listener.accept()[0] for _ in near]
        assert set(range(32)) == {end.recv(1)[0] for end in far}
        for end in (*near, *far):
            end.close()
    finally:
        is_over.set()
        storming.join()


def test_an_address_that_fails_again_and_again_waits_for_the_next_second() -> None:
    limiter = HandshakeLimiter()
    for _ in range(MOST_FAILURES):
        visit = limiter.enter("10.0.0.1", 100.0)
        assert visit is not None
        limiter.leave(visit, is_known=False)
    assert limiter.enter("10.0.0.1", 100.9) is None
    assert limiter.enter("::ffff:10.0.0.1", 100.9) is None
    assert limiter.enter("10.0.0.2", 100.9) is not None
    assert limiter.enter("10.0.0.1", 101.0) is not None


def test_who_waits_behind_those_who_fail_goes_with_them() -> None:
    limiter, expelled = HandshakeLimiter(), 0

    def expel() -> None:
        nonlocal expelled
        expelled += 1

    visits = [limiter.enter("10.0.0.1", 100.0, expel) for _ in range(MOST_FAILURES + MOST_OF_ONE + 5)]
    for visit in visits:
        assert visit is not None
        limiter.leave(visit, is_known=False)
    assert 6 == expelled  # the others spoke before as many had failed
    assert limiter.enter("10.0.0.1", 101.0) is not None


def test_addresses_that_begin_alike_are_one_and_wait_for_each_other() -> None:
    limiter = HandshakeLimiter()
    visits = [limiter.enter(f"2001:db8:0:{host:x}::1", 100.0) for host in range(MOST_OF_ONE + 1)]
    assert [True] * MOST_OF_ONE + [False] == [visit is not None and visit.turn.is_set() for visit in visits]
    other, first = limiter.enter("2001:db8:1::1", 100.0), visits[0]
    assert other is not None and other.turn.is_set() and first is not None
    limiter.leave(first, is_known=True)
    assert visits[-1] is not None and visits[-1].turn.is_set()


def test_where_too_many_are_here_the_latest_of_the_largest_crowd_goes() -> None:
    limiter = HandshakeLimiter()
    expelled: list[int] = []
    for number in range(MOST):
        assert limiter.enter("10.0.0.1", 100.0, partial(expelled.append, number)) is not None
    assert limiter.enter("10.0.0.1", 100.0) is None
    assert all(limiter.enter("10.0.1.1", 100.0) is not None for _ in range(MOST // 2))
    assert limiter.enter("10.0.1.1", 100.0) is None
    assert list(range(MOST - 1, MOST // 2 - 1, -1)) == expelled


@pytest.mark.parametrize(
    ("theirs", "why"),
    [
        (None, "it does not use TLS"),
        ("other", "its certificate and ours are not of one authority"),
        ("expired", "a certificate has expired"),
    ],
)
def test_who_has_no_certificate_of_ours_is_refused(
    node: Make, tmp_path: Path, caplog: pytest.LogCaptureFixture, theirs: str | None, why: str
) -> None:
    folder = write_certificates(tmp_path / "tls")
    other = write_certificates(tmp_path / "other")
    if theirs == "expired":
        folder = other = write_certificates(tmp_path / "expired", 1, datetime.now(UTC) - timedelta(days=2))
    here, there = node(other if theirs else None), node(folder)
    here.obey({CONTROL: 1}, here, there)
    there.obey({}, here, there)
    with here.dial(CONTROL) as near:
        assert b"" == near.recv(1)
    event, told = here.told[-1]
    assert ("refused" if theirs else "unreachable", CONTROL) == (event, told["socket"])
    expected = why if theirs else "as a node with --tls-dir does to one without"
    assert expected in str(told["reason"])
    until = time.monotonic() + 300  # a bound of liveness
    while "a connection from 127.0.0.1 is refused: " not in caplog.text:  # the one who answers finds out by itself
        assert time.monotonic() < until
        time.sleep(0.01)


def test_certificates_that_cannot_be_used_are_named(tmp_path: Path) -> None:
    folder = write_certificates(tmp_path / "tls")
    (tmp_path / "tls" / "key.pem").unlink()
    with pytest.raises(handshake.TlsError, match=r"key\.pem cannot be read \(No such file"):
        handshake.read_contexts(folder)
    (tmp_path / "tls" / "key.pem").write_text("no key")
    with pytest.raises(handshake.TlsError, match="the certificates cannot be used"):
        handshake.read_contexts(folder)


@pytest.mark.parametrize("line", [b"", b"no JSON", b"[]", b'{"connected": true}', json.dumps([1]).encode()])
def test_answers_of_others_are_refusals(line: bytes) -> None:
    with pytest.raises(Refused, match="not from a Lockstep link"):
        read_answer(line)


def test_an_answer_is_read_as_it_was_given() -> None:
    read_answer(answer())
    with pytest.raises(Refused, match=r"^why$"):
        read_answer(answer(Refused("why")))
