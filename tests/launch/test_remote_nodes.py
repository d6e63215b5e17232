"""Node 0's launcher and another node's, each alone: who is let in, what becomes of shards, and when contact is lost."""

from __future__ import annotations

import json
import selectors
import signal
import socket
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from launch import node_agent as agent_module
from launch import node_links as talk_module
from launch import remote_nodes as remote_nodes_module
from launch.child_processes import Pool
from launch.logs import Log
from launch.node_agent import Agent
from launch.node_links import LinkProcess
from launch.nodes import Layout
from launch.processes import Child, ChildCommand
from launch.remote_nodes import MOST_UNIDENTIFIED, RemoteNodes
from launch.shards import ShardCommands
from launch.timers import Timers
from server.link.config import CONTROL

IDENTITY = {"Lockstep": "1", "--dtype": "float32"}


class Notes:
    """A log that keeps what is said."""

    def __init__(self) -> None:
        self.said: list[str] = []
        self.info = self.warn = self.said.append


class Link:
    """The launcher's side of a link that listens."""

    command = ChildCommand("link", ())
    is_listening = True
    address = ("10.0.0.1", 29500)

    def __init__(self) -> None:
        self.orders: list[tuple[str, dict[int, tuple[str, int]], dict[str, int]]] = []
        self.trouble: dict[str, object] = {}

    def order(self, launch: str, peers: Mapping[int, tuple[str, int]], forwards: Mapping[str, int]) -> None:
        self.orders.append((launch, dict(peers), dict(forwards)))

    def started(self, child: object) -> None: ...
    def take(self, child: object) -> None: ...
    def end(self) -> None: ...


class Process:
    """A child that lives until it is sent a signal, or longer."""

    critical = None
    is_consequence = False
    cause = "as it was told"

    def __init__(self, name: str) -> None:
        self.name = self.title = name
        self.is_running = True
        self.process = SimpleNamespace(returncode=None)
        self.signals: list[int] = []

    def signal(self, number: int) -> None:
        self.signals.append(number)


class Speaker:
    """One end of a talk, in a test's hands."""

    def __init__(self, end: socket.socket) -> None:
        self.end = end
        self._received = b""
        end.setblocking(False)

    def say(self, *messages: object) -> None:
        self.raw(b"".join(json.dumps(message).encode() + b"\n" for message in messages))

    def raw(self, data: bytes) -> None:
        self.end.sendall(data)

    def heard(self) -> list[Any]:
        """What has come, without beats; "end" last where the connection has ended."""
        ends: list[Any] = []
        with suppress(BlockingIOError):
            while data := self.end.recv(1 << 16):
                self._received += data
            ends = ["end"]
        *lines, self._received = self._received.split(b"\n")
        return [m for m in map(json.loads, lines) if "beat" not in m and "echo" not in m] + ends


def turn(selector: selectors.BaseSelector) -> None:
    """Whatever has come is read."""
    while events := selector.select(0):
        for key, _ in events:
            key.data.read(key.fd)


class Master:
    """Node 0 of three, with a rank on each."""

    def __init__(self, folder: Path) -> None:
        self.log, self.link, self.timers = Notes(), Link(), Timers()
        self.selector = selectors.DefaultSelector()
        self.folder = folder
        self.speakers: list[Speaker] = []
        self.remote_nodes = RemoteNodes(
            folder, cast(LinkProcess, self.link), Layout(1, 3, 3), IDENTITY, cast(Log, self.log), patience=30.0
        )
        pool = SimpleNamespace(selector=self.selector, spawn=lambda *_: Process("link"), apart=[], gone=[])
        self.remote_nodes.open(cast(Pool, pool), self.timers)

    def dial(self) -> Speaker:
        """Somebody comes."""
        self.speakers.append(Speaker(socket.socket(socket.AF_UNIX)))
        self.speakers[-1].end.connect(str(self.folder / CONTROL))
        turn(self.selector)
        return self.speakers[-1]

    def greet(self, *more: object, **changes: object) -> Speaker:
        """A launcher says who it is."""
        hello = {"node": 1, "run": "a", "host": "10.0.0.2", "port": 7, "time": time.time(), "identity": IDENTITY}
        speaker = self.dial()
        speaker.say(hello | changes, *more)
        turn(self.selector)
        return speaker

    def beat(self) -> None:
        """A second passes."""
        self.remote_nodes._beat(self.timers)

    def start(self, group: int = 1) -> Child:
        """A shard of node 1."""
        return self.remote_nodes.start(ChildCommand("shard-1", (), node=1), group)

    def turn(self) -> None:
        turn(self.selector)

    def close(self) -> None:
        self.remote_nodes.close("over", 0)
        for speaker in self.speakers:
            speaker.end.close()
        self.selector.close()


@pytest.fixture
def master(temporary: Path) -> Iterator[Master]:
    made = Master(temporary)
    yield made
    made.close()


def welcome(speaker: Speaker) -> bool:
    return ["welcome"] == [name for message in speaker.heard() for name in message]


# ------------------------------------------------------------------------------------------------ who comes to node 0


def test_a_group_begins_once_all_nodes_are_here(master: Master) -> None:
    assert not master.remote_nodes.begin(1)
    assert welcome(master.greet(node=1))
    assert not master.remote_nodes.begin(1) and [] == master.link.orders
    assert welcome(master.greet(node=2, run="b", port=8))
    assert master.remote_nodes.begin(1)
    [(_, peers, forwards)] = master.link.orders
    assert {0: ("10.0.0.1", 29500), 1: ("10.0.0.2", 7), 2: ("10.0.0.2", 8)} == peers
    assert {1, 2} == set(forwards.values())


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"node": 0}, "there are 3 nodes: give it another --node-rank"),
        ({"node": 3}, "there are 3 nodes: give it another --node-rank"),
        ({"run": "b", "host": "h"}, "node 1 is here already, at 10.0.0.2: give one of them another --node-rank"),
        (
            {"node": 2, "identity": IDENTITY | {"--dtype": "a\x1b"}},
            "its --dtype is a\\x1b and that of node 0 float32: start all nodes alike",
        ),
    ],
)
def test_who_does_not_fit_is_refused_and_told_why(master: Master, changes: dict[str, Any], why: str) -> None:
    first = master.greet()
    assert welcome(first)
    for _ in range(2):
        assert [{"refused": why}, "end"] == master.greet(**changes).heard()
    assert [f"node {changes.get('node', 1)} is refused: {why}"] == [said for said in master.log.said if why in said]
    assert [] == first.heard()


def test_a_launcher_that_comes_again_before_its_loss_was_noticed_is_let_in(master: Master) -> None:
    first = master.greet()
    shard = master.start()
    second = master.greet()
    assert welcome(second)
    assert "end" == first.heard()[-1]
    assert 1 == shard.process.poll() and shard.critical is not None
    assert "contact with its node was lost (its launcher connected again)" in shard.critical
    assert master.start(2).process.poll() is None
    assert ["shard-1"] == [message["start"] for message in second.heard()]


@pytest.mark.parametrize(
    "said",
    [
        b"no message\n", b"[]\n", b"{}\n", b"\xff\n", b"x" * 70_000,
        b'{"node": Infinity, "run": "a", "host": "h", "port": 1, "time": 0, "identity": {}}\n',
        b'{"node": 1, "run": "a", "host": "h", "port": 1, "time": 1' + b"0" * 400 + b', "identity": {}}\n',
        b'{"node": 1, "run": "a", "host": "h", "port": 1, "time": 0, "identity": [1]}\n',
    ],
)  # fmt: skip
def test_who_says_what_is_no_hello_is_sent_away(master: Master, said: bytes) -> None:
    stranger = master.dial()
    with suppress(BrokenPipeError, BlockingIOError):
        stranger.raw(said)
    master.turn()
    master.turn()
    with suppress(ConnectionResetError):
        assert ["end"] == stranger.heard()
    assert welcome(master.greet())


def test_strangers_are_few_and_have_little_time(master: Master, monkeypatch: pytest.MonkeyPatch) -> None:
    strangers = [master.dial() for _ in range(MOST_UNIDENTIFIED)]
    assert ["end"] == master.dial().heard()
    master.beat()
    assert all([] == stranger.heard() for stranger in strangers)
    monkeypatch.setattr(remote_nodes_module, "HELLO_S", -1.0)
    master.beat()
    assert all(["end"] == stranger.heard() for stranger in strangers)
    assert welcome(master.greet())


# ------------------------------------------------------------------------------------------- who leaves node 0, and how


def test_a_node_that_leaves_while_a_group_loads_ends_its_shards(master: Master) -> None:
    node = master.greet()
    shard = master.start()
    assert shard.process.poll() is None
    node.say({"leaving": "SIGTERM"})
    master.turn()
    assert 1 == shard.process.poll() and "its launcher stopped (SIGTERM)" == shard.critical
    assert not master.remote_nodes.begin(2)
    assert "waits for nodes 1 (SIGTERM) and 2, 30 s at most" == master.log.said[-1]


def test_who_leaves_with_the_hello_is_heard(master: Master) -> None:
    master.greet({"leaving": "SIGINT"})
    assert not master.remote_nodes.begin(1)
    assert "waits for nodes 1 (SIGINT) and 2, 30 s at most" == master.log.said[-1]


@pytest.mark.parametrize("end", ["silence", "nonsense", "hangs up"])
def test_a_node_that_is_lost_has_lost_its_shards(master: Master, monkeypatch: pytest.MonkeyPatch, end: str) -> None:
    node = master.greet()
    shard = master.start()
    if end == "silence":
        master.beat()
        assert shard.process.poll() is None
        monkeypatch.setattr(talk_module, "SILENCE_S", -1.0)
        master.beat()
    elif end == "nonsense":
        node.raw(b"hm\n")
    else:
        node.end.close()
    master.turn()
    assert 1 == shard.process.poll() and str(shard.critical).startswith("contact with its node was lost")


def test_what_an_old_group_did_is_not_the_new_ones(master: Master) -> None:
    node = master.greet()
    old = master.start(1)
    new = master.start(2)
    node.say({"ended": "shard-1", "group": 1, "code": 3, "critical": "no memory", "last": "x"})
    master.turn()
    assert (3, "no memory", None) == (old.process.poll(), old.critical, new.process.poll())
    node.say({"ended": "shard-1", "group": 1, "code": 4}, {"ended": "shard-7", "group": 2, "code": 5}, {"a": 1})
    master.turn()
    assert (3, None) == (old.process.poll(), new.process.poll())
    node.say({"ended": "shard-1", "group": 2, "code": "?"})
    master.turn()
    assert 1 == new.process.poll()


def test_the_end_is_told_to_all(master: Master) -> None:
    nodes = [master.greet(), master.greet(node=2)]
    stranger = master.dial()
    assert all(map(welcome, nodes))
    master.remote_nodes.close("the disk is full", 1)
    assert [[{"end": "the disk is full", "code": 1}, "end"]] * 2 == [node.heard() for node in nodes]
    assert ["end"] == stranger.heard()
    with pytest.raises(ConnectionRefusedError):
        master.dial()


# ------------------------------------------------------------------------------------------ another node's launcher


class Elsewhere:
    """Node 1 of two, whose node 0 is in a test's hands."""

    def __init__(self, folder: Path) -> None:
        layout = Layout(1, 2, 2, 1)
        commands = [ChildCommand("shard-0", (), node=0), ChildCommand("shard-1", ())]
        shard_commands = SimpleNamespace(
            folder=folder, layout=layout, identity=lambda: IDENTITY, group=lambda number: (commands, ())
        )
        self.log, self.link = Notes(), Link()
        self.agent = Agent(
            cast(ShardCommands, shard_commands),
            cast(LinkProcess, self.link),
            {},
            cast(Log, self.log),
            patience=30.0,
            master=("h", 1),
        )
        self.started: list[Process] = []
        self.agent._pool.spawn = self._spawn  # type: ignore[method-assign]
        self._listener = socket.socket(socket.AF_UNIX)
        self._listener.bind(str(folder / CONTROL))
        self._listener.listen()
        self._listener.setblocking(False)
        self.agent._start_link()
        self.hello: dict[str, Any] = {}
        self._speakers: list[Speaker] = []

    def _spawn(self, command: ChildCommand, on_fork_server_end: Callable[[Child], None]) -> Child:
        self.started.append(Process(command.name))
        return cast(Child, self.started[-1])

    @property
    def shards(self) -> list[Process]:
        return [process for process in self.started if process.name != "link"]

    def turn(self) -> None:
        turn(self.agent._pool.selector)
        self.agent._timers.run()
        turn(self.agent._pool.selector)

    def meet(self) -> Speaker:
        """It dials node 0, which does not answer yet."""
        self.turn()
        speaker = Speaker(self._listener.accept()[0])
        self._speakers.append(speaker)
        [self.hello] = speaker.heard()
        return speaker

    def close(self) -> None:
        for speaker in self._speakers:
            speaker.end.close()
        self.agent._hang_up()
        self.agent._pool.selector.close()
        self._listener.close()


@pytest.fixture
def node(temporary: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Elsewhere]:
    for name in ("REDIAL_S", "REAP_S", "BEAT_S"):
        monkeypatch.setattr(agent_module, name, 0.0)
    made = Elsewhere(temporary)
    yield made
    made.close()


START = {"start": "shard-1", "group": 1, "peers": {"0": ["x", 2], "1": ["y", 3]}}


def test_shards_start_as_told_and_their_ends_are_reported(node: Elsewhere) -> None:
    master = node.meet()
    assert (1, IDENTITY) == (node.hello["node"], node.hello["identity"])
    master.say({"welcome": "L"}, START, {"signal": signal.SIGTERM, "shard": "shard-1", "group": 0})
    node.turn()
    [shard] = node.shards
    assert ("L", {0: ("h", 1), 1: ("y", 3)}, {CONTROL: 0, "group-1/stage-0.sock": 0}) == node.link.orders[-1]
    master.say({"signal": signal.SIGTERM, "shard": "shard-1", "group": 1})
    node.turn()
    assert [signal.SIGTERM] == shard.signals
    shard.process.returncode = 3
    node.agent._take_exit(cast(Child, shard))
    [ended] = master.heard()
    assert ("shard-1", 1, 3) == (ended["ended"], ended["group"], ended["code"])


def test_a_shard_that_is_told_to_end_before_it_began_never_does(node: Elsewhere) -> None:
    master = node.meet()
    before = Process("shard-1")  # of a group before, and still there
    node.agent._pool.gone.append(cast(Child, before))
    master.say({"welcome": "L"}, START)
    node.turn()
    assert [] == node.shards
    master.say({"signal": signal.SIGKILL, "shard": "shard-1", "group": 1})
    node.turn()
    assert [{"ended": "shard-1", "group": 1, "code": -signal.SIGKILL}] == master.heard()
    before.is_running = False
    node.turn()
    assert [] == node.shards


@pytest.mark.parametrize("end", ["silence", "nonsense", "hangs up", "a wrong message"])
def test_who_loses_contact_ends_its_shards_and_dials_as_the_same(
    node: Elsewhere, monkeypatch: pytest.MonkeyPatch, end: str
) -> None:
    master = node.meet()
    master.say({"welcome": "L"}, START)
    node.turn()
    first = node.hello["run"]
    if end == "silence":
        with monkeypatch.context() as patch:
            patch.setattr(talk_module, "SILENCE_S", -1.0)
            node.agent._beat()
    elif end == "nonsense":
        master.raw(b"hm\n")
    elif end == "hangs up":
        master.end.close()
    else:
        master.raw(b'{"start": "shard-1", "group": Infinity, "peers": {}}\n')
    turn(node.agent._pool.selector)
    assert [[signal.SIGKILL]] == [shard.signals for shard in node.shards]
    node.shards[0].is_running = False
    again = node.meet()
    assert first == node.hello["run"]
    again.say({"welcome": "M"}, START)  # of another launcher, whose first group this is
    node.turn()
    assert 2 == len(node.shards) and "M" == node.link.orders[-1][0]


def test_a_node_0_that_does_not_answer_is_given_up(node: Elsewhere, monkeypatch: pytest.MonkeyPatch) -> None:
    silent = node.meet()
    node.turn()
    assert [] == silent.heard()
    monkeypatch.setattr(talk_module, "SILENCE_S", -1.0)
    node.turn()
    assert "end" == silent.heard()[-1]
    node.agent._until = 0.0
    node.turn()
    assert node.agent.failure is not None and "node 0 at h port 1 was not there for 30 s" in node.agent.failure


@pytest.mark.parametrize(
    ("said", "failure"),
    [
        ({"refused": "too\nold"}, "node 0 at h port 1 refuses this node: too\\nold"),
        ({"end": "no disk", "code": 1}, "node 0 has ended: no disk"),
        ({"end": "the server is stopped", "code": 0}, None),
    ],
)
def test_a_node_ends_with_node_0(node: Elsewhere, said: dict[str, Any], failure: str | None) -> None:
    master = node.meet()
    master.say({"welcome": "L"}, START)
    node.turn()
    master.say(said)
    node.turn()
    assert node.agent._is_over and failure == node.agent.failure
    assert [[signal.SIGKILL]] == [shard.signals for shard in node.shards]
