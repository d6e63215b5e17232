"""The other nodes as node 0's launcher knows them: who has come, what their shards do, and when contact is lost.

A launcher of another node dials a socket in the launch's folder, to which the links carry it, and says who it is. It is
let in if it agrees with this node on version, model and settings. From then on it starts shards as told and says how
they ended; to the supervisor they are children like others. A node that is silent has lost its shards, whatever they
still do: its own launcher ends them before it comes again.
"""

from __future__ import annotations

import secrets
import selectors
import signal
import socket
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import IO, Any

from launch.errors import Refusal
from launch.logs import Log, printable
from launch.node_links import BEAT_S, Linking, Talk, TalkEnded
from launch.nodes import Layout, first_difference
from launch.pool import Pool
from launch.processes import Child, ChildCommand
from launch.timers import Timers
from server.link.config import CONTROL

HELLO_S = 5.0  # in which who dials says who it is
MOST_STRANGERS = 16
MOST_CODE = 255  # with which a process ends by itself; by a signal with its negative number
REMEDY = "start the launcher on every node with the same settings and its own --node-rank, or raise --node-timeout"
SKEW_S = 30.0  # between two nodes' clocks, from which on it is worth a sentence
FAR_S = 0.002  # to a node and back, likewise
BEATS = 5  # after which the way to a node is known


class RemoteProcess:
    """A shard on another node; see `processes.Process`. It has ended as soon as it was told to die."""

    stdin: IO[bytes] | None = None
    stdout: IO[bytes] | None = None
    stderr: IO[bytes] | None = None
    pid = -1

    def __init__(self, node: Node, name: str, group: int) -> None:
        self.returncode: int | None = None
        self.code: int | None = None  # what its launcher has said, until it is looked at
        self._node = node
        self._which = {"shard": name, "group": group}

    def poll(self) -> int | None:
        """The return code, once it is known."""
        if self.returncode is None:
            self.returncode = self.code
        return self.returncode

    def wait(self) -> int:
        """Its launcher sees to its end."""
        return self.returncode or 0

    def ends_within(self, seconds: float) -> bool:
        """Whether it has ended; this process hears of it only between two looks."""
        return self.returncode is not None

    def send_signal(self, number: int) -> None:
        """Have its launcher send it."""
        self._node.say({"signal": number} | self._which)

    def kill_group(self) -> None:
        """Have its launcher kill it, which it does before it starts another."""
        if self.returncode is None:
            self.returncode = -signal.SIGKILL
            self.send_signal(signal.SIGKILL)


class RemoteShard(Child):
    """A shard on another node, whose output its own launcher writes."""

    def __init__(self, node: Node, name: str, group: int, log: Log) -> None:
        self.process: RemoteProcess
        super().__init__(name, RemoteProcess(node, name, group), log)
        self.group = group
        self._node = node

    @property
    def title(self) -> str:
        """Its name for people."""
        return f"{super().title} on node {self._node.index}"

    def end(self, code: int, critical: str | None, last: str = "", *, is_consequence: bool = False) -> None:
        """It has ended, for this reason if one is known."""
        self.critical, self.is_consequence = critical, is_consequence
        self._errors.append(last)
        self.process.code = code


@dataclass
class Node:
    """One other node that has come."""

    index: int
    run: str  # its launcher's, other for each
    host: str
    port: int  # its link's
    talk: Talk
    shards: list[RemoteShard]
    num_beats: int = 0

    def say(self, message: Mapping[str, Any]) -> None:
        """Tell its launcher; one that is gone is noticed when it is heard."""
        with suppress(TalkEnded):
            self.talk.say(message)


class Others:
    """All other nodes. `identity`: what all nodes must agree on, by the names that people know it by."""

    def __init__(
        self,
        folder: Path,
        linking: Linking,
        layout: Layout,
        identity: Mapping[str, Any],
        log: Log,
        *,
        patience: float,
    ) -> None:
        """patience: seconds for all nodes to be here, whenever a group is to start."""
        self._folder = folder
        self._linking = linking
        self._layout = layout
        self._identity = identity
        self._launch = secrets.token_hex(8)
        self._log = log
        self._patience = patience
        self._until: float | None = None  # when patience ends
        self._link: Child | None = None
        self._pool: Pool | None = None
        self._listener: socket.socket | None = None
        self._strangers: dict[int, tuple[Talk, float]] = {}  # by descriptor: who has not said who it is, and since when
        self._nodes: dict[int, Node] = {}
        self._why_not: dict[int, str] = {}  # what became of those that are not here
        self._refused: dict[int, str] = {}  # why somebody was last, by the node that it said it was

    def open(self, pool: Pool, timers: Timers) -> None:
        """Let other launchers in. Raises OSError."""
        self._pool = pool
        self._listener = socket.socket(socket.AF_UNIX)
        self._listener.bind(str(self._folder / CONTROL))
        self._listener.listen()
        self._listener.setblocking(False)
        pool.selector.register(self._listener, selectors.EVENT_READ, self)
        self._start_link()
        self._beat(timers)

    def look(self) -> str | None:
        """See to the link; why it cannot be had, if that is so."""
        assert self._link is not None and self._pool is not None, "open() comes first"
        link = self._link
        has_ended = link.process.poll() is not None
        if has_ended:
            link.drain()
        self._linking.take(link)
        if not has_ended:
            return None
        self._pool.apart.remove(link)
        self._pool.gone.append(link)
        sentence = f"link stopped: {printable(link.cause)}"
        if not self._linking.is_listening:
            return sentence
        self._log.warn(f"{sentence}; it is started again")
        self._start_link()
        return None

    def _start_link(self) -> None:
        assert self._pool is not None, "open() comes first"
        self._link = self._pool.spawn(self._linking.command, lambda _: None)
        self._pool.apart.append(self._link)
        self._linking.started(self._link)

    @property
    def _missing(self) -> str | None:
        """The nodes that are not here, in words."""
        missing = [node for node in range(1, self._layout.num_nodes) if node not in self._nodes]
        if not missing:
            return None
        named = [f"{node} ({self._why_not[node]})" if node in self._why_not else str(node) for node in missing]
        return f"node{'s' * (len(named) > 1)} {' and '.join(named)}"

    def begin(self, group: int) -> bool:
        """Have the link listen for what a group has on other nodes, if all are here; whether they are.

        Raises Refusal when one is not for too long.
        """
        missing, now = self._missing, time.monotonic()
        if missing is not None or not self._linking.is_listening:
            if self._until is None:
                self._until = now + self._patience
                self._log.info(f"waits for {missing or 'its link'}, {self._patience:g} s at most")
            if now > self._until:
                raise Refusal([f"{missing or 'the link'} did not come within {self._patience:g} s: {REMEDY}"], 1)
            return False
        self._until = None
        self._linking.order(self._launch, self._peers(), self._layout.forwards(group))
        return True

    def start(self, command: ChildCommand, group: int) -> Child:
        """Start a shard of a group on the node of the command's, which is here."""
        assert command.node is not None, "the supervisor starts its own"
        node = self._nodes[command.node]
        shard = RemoteShard(node, command.name, group, self._log)
        node.shards.append(shard)
        peers = {str(index): address for index, address in self._peers().items()}
        node.say({"start": command.name, "group": group, "peers": peers})
        return shard

    def _beat(self, timers: Timers) -> None:
        """Tell all that this node is there; give up whoever was silent for too long."""
        timers.set("beat", BEAT_S, partial(self._beat, timers))
        for node in list(self._nodes.values()):
            try:
                node.talk.beat()
            except TalkEnded as error:
                self._lose(node, str(error))
            node.num_beats += 1
            if node.num_beats == BEATS and (node.talk.round_trip_s or 0.0) > FAR_S:
                self._log.warn(self._far(node.index, node.talk.round_trip_s or 0.0))
        for descriptor, (_, since) in list(self._strangers.items()):
            if time.monotonic() - since > HELLO_S:
                self._forget(descriptor)

    def _far(self, node: int, seconds: float) -> str:
        """What it means that a node is far away."""
        far = f"a message to node {node} and back takes {1000 * seconds:.1f} ms"
        if self._layout.splits_stages:
            return (
                f"{far}, and every layer waits for one: cut the model by --pipeline-parallel {self._layout.num_nodes}"
            )
        return f"{far}, and every token waits for one: --micro-batches gives stages work meanwhile"

    def read(self, descriptor: int) -> bool:
        """Take what has come at one of the descriptors that were registered. They are unregistered here, too."""
        if self._listener is not None and descriptor == self._listener.fileno():
            self._let_in(self._listener)
            return True
        if descriptor in self._strangers:
            self._greet(descriptor)
            return True
        node = next((node for node in self._nodes.values() if node.talk.fileno() == descriptor), None)
        if node is not None:
            try:
                for message in node.talk.hear():
                    self._take(node, message)
            except TalkEnded as error:
                self._lose(node, str(error))
        return True

    def close(self, sentence: str, code: int) -> None:
        """Tell all that this was it, and with which exit code; let nobody in any more, and end the link."""
        for node in self._nodes.values():
            node.say({"end": sentence, "code": code})
            node.talk.close()
        for descriptor in list(self._strangers):
            self._forget(descriptor)
        if self._listener is not None:
            self._listener.close()
        self._nodes.clear()
        self._linking.end()
        if self._pool is not None:
            self._pool.gone += self._pool.apart

    def _peers(self) -> dict[int, tuple[str, int]]:
        return {0: self._linking.address} | {node.index: (node.host, node.port) for node in self._nodes.values()}

    # ----------------------------------------------------------------------------------------------- who comes and goes

    def _let_in(self, listener: socket.socket) -> None:
        assert self._pool is not None, "open() comes first"
        with suppress(OSError):  # it has gone again
            end, _ = listener.accept()
            if len(self._strangers) >= MOST_STRANGERS:
                end.close()
                return
            talk = Talk(end)
            self._strangers[talk.fileno()] = talk, time.monotonic()
            self._pool.selector.register(talk, selectors.EVENT_READ, self)

    def _forget(self, descriptor: int) -> Talk:
        """Somebody is no stranger any more; closes nothing that was let in."""
        assert self._pool is not None, "open() comes first"
        talk, _ = self._strangers.pop(descriptor)
        self._pool.selector.unregister(descriptor)
        talk.close()
        return talk

    def _greet(self, descriptor: int) -> None:
        """Find out whether a stranger is one of the nodes."""
        talk, _ = self._strangers[descriptor]
        try:
            messages = talk.hear()
            if not messages:
                return
            hello, *more = messages
            node, problem = self._introduced(talk, hello)
            if problem is None:
                talk.say({"welcome": self._launch})
                del self._strangers[descriptor]
                self._nodes[node.index] = node
                self._why_not.pop(node.index, None)
                self._refused.pop(node.index, None)
                self._log.info(f"node {node.index} is here, at {node.host} port {node.port}")
                for message in more:
                    self._take(node, message)
                return
            if self._refused.get(place := max(0, min(node.index, self._layout.num_nodes))) != problem:
                self._refused[place] = problem  # it may come again and again
                self._log.warn(f"node {node.index} is refused: {problem}")
            if node.index not in self._nodes:
                self._why_not[node.index] = problem
            talk.say({"refused": problem})
        except TalkEnded:
            pass
        except (KeyError, TypeError, ValueError, OverflowError):
            self._log.warn("a connection sent an invalid message and is refused")
        self._forget(descriptor)

    def _introduced(self, talk: Talk, hello: Mapping[str, Any]) -> tuple[Node, str | None]:
        """Who says this, and why it is refused, if it is. Raises KeyError, TypeError or ValueError for no node."""
        host, port = printable(str(hello["host"])), int(hello["port"])
        node = Node(int(hello["node"]), str(hello["run"]), host, port, talk, [])
        skew = float(hello["time"]) - time.time()
        if not 0 < node.index < self._layout.num_nodes:
            return node, f"there are {self._layout.num_nodes} nodes: give it another --node-rank"
        if (known := self._nodes.get(node.index)) is not None and known.run == node.run:
            self._lose(known, "its launcher connected again")  # it has noticed before this one
        elif known is not None:
            return node, f"node {node.index} is here already, at {known.host}: give one of them another --node-rank"
        if (found := first_difference(self._identity, dict(hello["identity"]))) is not None:
            name, ours, theirs = (printable(str(value)) for value in found)
            return node, f"its {name} is {theirs[:100]} and that of node 0 {ours[:100]}: start all nodes alike"
        if abs(skew) > SKEW_S:
            side = "ahead of" if skew > 0 else "behind"
            self._log.warn(
                f"the clock of node {node.index} is {abs(skew):.0f} s {side} this one's: logs will not line up"
            )
        return node, None

    def _take(self, node: Node, message: Mapping[str, Any]) -> None:
        """A message of a node that is here."""
        if "leaving" in message:
            self._lose(node, printable(str(message["leaving"])), has_left=True)
        for shard in [s for s in node.shards if s.name == message.get("ended") and s.group == message.get("group")]:
            code, critical = message.get("code"), message.get("critical")
            shard.end(
                code if isinstance(code, int) and -signal.NSIG < code <= MOST_CODE else 1,
                None if critical is None else str(critical),
                str(message.get("last", "")),
                is_consequence=message.get("is_consequence") is True,
            )
            node.shards.remove(shard)

    def _lose(self, node: Node, why: str, *, has_left: bool = False) -> None:
        """A node is gone, and its shards with it."""
        assert self._pool is not None, "open() comes first"
        if self._nodes.get(node.index) is not node:
            return
        del self._nodes[node.index]
        with suppress(KeyError):
            self._pool.selector.unregister(node.talk)
        node.talk.close()
        verb = "its launcher stopped" if has_left else "contact with its node was lost"
        self._why_not[node.index] = why if has_left else f"contact was lost: {why}"
        if not node.shards:
            self._log.warn(f"node {node.index} is gone: {why}")
        for shard in node.shards:
            shard.end(1, f"{verb} ({why})")
