"""The other nodes as node 0's launcher sees them: which are connected, what their shards do, and when one is lost.

The launcher of another node (`node_agent.py`) connects to a socket in the launch's folder, to which the links forward
it, and introduces itself. It is accepted if it agrees with this node on version, model and settings. From then on it
starts shards as told and reports their ends; to the supervisor they are children like the local ones. The shards of a
silent node count as lost: its launcher ends them before it connects again.
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

from launch.child_processes import Pool
from launch.errors import Refusal
from launch.logs import Log, printable
from launch.node_links import BEAT_S, Channel, ChannelClosed, LinkProcess
from launch.nodes import Layout, first_difference
from launch.processes import Child, ChildCommand
from launch.timers import Timers
from server.link.config import CONTROL

HELLO_S = 5.0  # for a connection to introduce itself
MOST_UNIDENTIFIED = 16  # connections that have not done so
MOST_CODE = 255  # the largest exit code; a signal is a negative one
REMEDY = "start the launcher on every node with the same settings and its own --node-rank, or raise --node-timeout"
SKEW_S = 30.0  # between two nodes' clocks, beyond which a warning is logged
FAR_S = 0.002  # of a round trip, likewise
BEATS = 5  # heartbeats after which the round-trip time counts as known


class RemoteProcess:
    """The process of a shard on another node; see `processes.Process`. Once it is killed it counts as ended."""

    stdin: IO[bytes] | None = None
    stdout: IO[bytes] | None = None
    stderr: IO[bytes] | None = None
    pid = -1

    def __init__(self, node: Node, name: str, group: int) -> None:
        self.returncode: int | None = None
        self.code: int | None = None  # as its launcher has reported it
        self._node = node
        self._which = {"shard": name, "group": group}

    def poll(self) -> int | None:
        """The return code, once it is known."""
        if self.returncode is None:
            self.returncode = self.code
        return self.returncode

    def wait(self) -> int:
        """Its launcher waits for its end."""
        return self.returncode or 0

    def ends_within(self, seconds: float) -> bool:
        """Whether it has ended; this process learns of it between two polls only."""
        return self.returncode is not None

    def send_signal(self, number: int) -> None:
        """Have its launcher send it."""
        self._node.send({"signal": number} | self._which)

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
    """One other node that is connected."""

    index: int
    run: str  # differs for each run of its launcher
    host: str
    port: int  # its link's
    channel: Channel
    shards: list[RemoteShard]
    num_beats: int = 0

    def send(self, message: Mapping[str, Any]) -> None:
        """Send to its launcher; that it is gone is noticed when its messages are read."""
        with suppress(ChannelClosed):
            self.channel.send(message)


class RemoteNodes:
    """All nodes but this one. identity: what all nodes must agree on, by the names that people know it by."""

    def __init__(
        self,
        folder: Path,
        link: LinkProcess,
        layout: Layout,
        identity: Mapping[str, Any],
        log: Log,
        *,
        patience: float,
    ) -> None:
        """patience: seconds to wait for all nodes, whenever a group is to start."""
        self._folder = folder
        self._link = link
        self._layout = layout
        self._identity = identity
        self._launch = secrets.token_hex(8)
        self._log = log
        self._patience = patience
        self._until: float | None = None  # when patience ends
        self._link_child: Child | None = None
        self._pool: Pool | None = None
        self._listener: socket.socket | None = None
        self._unidentified: dict[int, tuple[Channel, float]] = {}  # by descriptor: since when
        self._nodes: dict[int, Node] = {}
        self._why_not: dict[int, str] = {}  # why nodes are not connected
        self._refused: dict[int, str] = {}  # the last reason, by the index that was claimed

    def open(self, pool: Pool, timers: Timers) -> None:
        """Accept connections of other launchers. Raises OSError."""
        self._pool = pool
        self._listener = socket.socket(socket.AF_UNIX)
        self._listener.bind(str(self._folder / CONTROL))
        self._listener.listen()
        self._listener.setblocking(False)
        pool.selector.register(self._listener, selectors.EVENT_READ, self)
        self._start_link()
        self._beat(timers)

    def look(self) -> str | None:
        """Take the events of the link and start it again if it has ended; the reason if that cannot help."""
        assert self._link_child is not None and self._pool is not None, "open() comes first"
        link = self._link_child
        has_ended = link.process.poll() is not None
        if has_ended:
            link.drain()
        self._link.take(link)
        if not has_ended:
            return None
        self._pool.apart.remove(link)
        self._pool.gone.append(link)
        sentence = f"link stopped: {printable(link.cause)}"
        if not self._link.is_listening:
            return sentence
        self._log.warn(f"{sentence}; it is started again")
        self._start_link()
        return None

    def _start_link(self) -> None:
        assert self._pool is not None, "open() comes first"
        self._link_child = self._pool.spawn(self._link.command, lambda _: None)
        self._pool.apart.append(self._link_child)
        self._link.started(self._link_child)

    @property
    def _missing(self) -> str | None:
        """The nodes that are not connected, in words."""
        missing = [node for node in range(1, self._layout.num_nodes) if node not in self._nodes]
        if not missing:
            return None
        named = [f"{node} ({self._why_not[node]})" if node in self._why_not else str(node) for node in missing]
        return f"node{'s' * (len(named) > 1)} {' and '.join(named)}"

    def begin(self, group: int) -> bool:
        """Forward the sockets of a group, if all nodes are connected; whether they are.

        Raises Refusal when one has been missing for too long.
        """
        missing, now = self._missing, time.monotonic()
        if missing is not None or not self._link.is_listening:
            if self._until is None:
                self._until = now + self._patience
                self._log.info(f"waits for {missing or 'its link'}, {self._patience:g} s at most")
            if now > self._until:
                raise Refusal([f"{missing or 'the link'} did not come within {self._patience:g} s: {REMEDY}"], 1)
            return False
        self._until = None
        self._link.order(self._launch, self._peers(), self._layout.forwards(group))
        return True

    def start(self, command: ChildCommand, group: int) -> Child:
        """Start a shard of a group on the node that the command names."""
        assert command.node is not None, "the supervisor starts local shards"
        node = self._nodes[command.node]
        shard = RemoteShard(node, command.name, group, self._log)
        node.shards.append(shard)
        peers = {str(index): address for index, address in self._peers().items()}
        node.send({"start": command.name, "group": group, "peers": peers})
        return shard

    def _beat(self, timers: Timers) -> None:
        """Send heartbeats, and give up nodes that were silent for too long."""
        timers.set("beat", BEAT_S, partial(self._beat, timers))
        for node in list(self._nodes.values()):
            try:
                node.channel.beat()
            except ChannelClosed as error:
                self._lose(node, str(error))
            node.num_beats += 1
            if node.num_beats == BEATS and (node.channel.round_trip_s or 0.0) > FAR_S:
                self._log.warn(self._far(node.index, node.channel.round_trip_s or 0.0))
        for descriptor, (_, since) in list(self._unidentified.items()):
            if time.monotonic() - since > HELLO_S:
                self._forget(descriptor)

    def _far(self, node: int, seconds: float) -> str:
        """A warning on a long round trip, with the remedy."""
        far = f"a message to node {node} and back takes {1000 * seconds:.1f} ms"
        if self._layout.splits_stages:
            return (
                f"{far}, and every layer waits for one: cut the model by --pipeline-parallel {self._layout.num_nodes}"
            )
        return f"{far}, and every token waits for one: --micro-batches gives stages work meanwhile"

    def read(self, descriptor: int) -> bool:
        """Read from one of the descriptors that were registered. They are unregistered here, too."""
        if self._listener is not None and descriptor == self._listener.fileno():
            self._accept(self._listener)
            return True
        if descriptor in self._unidentified:
            self._greet(descriptor)
            return True
        node = next((node for node in self._nodes.values() if node.channel.fileno() == descriptor), None)
        if node is not None:
            try:
                for message in node.channel.receive():
                    self._take(node, message)
            except ChannelClosed as error:
                self._lose(node, str(error))
        return True

    def close(self, sentence: str, code: int) -> None:
        """Tell all nodes why and with which exit code the server ends, and close all connections and the link."""
        for node in self._nodes.values():
            node.send({"end": sentence, "code": code})
            node.channel.close()
        for descriptor in list(self._unidentified):
            self._forget(descriptor)
        if self._listener is not None:
            self._listener.close()
        self._nodes.clear()
        self._link.end()
        if self._pool is not None:
            self._pool.gone += self._pool.apart

    def _peers(self) -> dict[int, tuple[str, int]]:
        return {0: self._link.address} | {node.index: (node.host, node.port) for node in self._nodes.values()}

    # -------------------------------------------------------------------------------------------- connections of nodes

    def _accept(self, listener: socket.socket) -> None:
        assert self._pool is not None, "open() comes first"
        with suppress(OSError):  # it has gone again
            end, _ = listener.accept()
            if len(self._unidentified) >= MOST_UNIDENTIFIED:
                end.close()
                return
            channel = Channel(end)
            self._unidentified[channel.fileno()] = channel, time.monotonic()
            self._pool.selector.register(channel, selectors.EVENT_READ, self)

    def _forget(self, descriptor: int) -> None:
        """Close a connection that has not introduced itself."""
        assert self._pool is not None, "open() comes first"
        channel, _ = self._unidentified.pop(descriptor)
        self._pool.selector.unregister(descriptor)
        channel.close()

    def _greet(self, descriptor: int) -> None:
        """Read an introduction, and accept or refuse the node."""
        channel, _ = self._unidentified[descriptor]
        try:
            messages = channel.receive()
            if not messages:
                return
            hello, *more = messages
            node, problem = self._introduced(channel, hello)
            if problem is None:
                channel.send({"welcome": self._launch})
                del self._unidentified[descriptor]
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
            channel.send({"refused": problem})
        except ChannelClosed:
            pass
        except (KeyError, TypeError, ValueError, OverflowError):
            self._log.warn("a connection sent an invalid message and is refused")
        self._forget(descriptor)

    def _introduced(self, channel: Channel, hello: Mapping[str, Any]) -> tuple[Node, str | None]:
        """The node that introduces itself, and why it is refused, if so. Raises KeyError, TypeError or ValueError."""
        host, port = printable(str(hello["host"])), int(hello["port"])
        node = Node(int(hello["node"]), str(hello["run"]), host, port, channel, [])
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
        """Act on a message of a connected node."""
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
            self._pool.selector.unregister(node.channel)
        node.channel.close()
        verb = "its launcher stopped" if has_left else "contact with its node was lost"
        self._why_not[node.index] = why if has_left else f"contact was lost: {why}"
        if not node.shards:
            self._log.warn(f"node {node.index} is gone: {why}")
        for shard in node.shards:
            shard.end(1, f"{verb} ({why})")
