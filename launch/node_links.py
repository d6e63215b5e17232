"""How launchers of several nodes are connected: the process that carries the connections, and the messages on them.

A link (`server/link/`) is a child of each launcher, which is told here which sockets to forward. Through it two
launchers exchange lines of JSON over a socket that never blocks, and a heartbeat every second. A heartbeat is answered
by an echo, which gives the round-trip time. Malformed lines close the channel, as silence does.
"""

from __future__ import annotations

import json
import math
import signal
import socket
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from host.version import version
from launch.nodes import Nodes
from launch.processes import Child, ChildCommand
from server.link.config import CONTROL, LinkConfig, Order

END_S = 3.0  # for a link to send what it has
BEAT_S = 1.0
SILENCE_S = 10.0  # after which the other side counts as gone; a shorter interruption is survived
LINE_BYTES = 1 << 16
READ_BYTES = 1 << 16
MOST = 1 << 53  # the largest whole number in a message: beyond it floats are not exact


class LinkProcess:
    """The link of this node. One that ends is replaced; its connections, and the group of shards, are lost."""

    def __init__(self, folder: Path, nodes: Nodes, address: str, python: tuple[str, ...], log_level: str) -> None:
        """address: this node's. python: the command of a link, without its arguments."""
        self.trouble: Mapping[str, object] = {}  # the latest with node 0's launcher: `event`, `reason`
        self._config = folder / "link.json"
        self._python = python
        self._child: Child | None = None
        self._order: Order | None = None
        self._port: int | None = None
        self._host = address
        # Nodes on one machine cannot all have one port.
        port = 0 if nodes.index and nodes.is_local else nodes.master[1]
        LinkConfig(str(folder), self._host, port, nodes.index, version(), nodes.tls_dir, log_level).save(self._config)

    @property
    def command(self) -> ChildCommand:
        """How a link is started."""
        return ChildCommand("link", (*self._python, "--config", str(self._config)), has_stdin=True)

    @property
    def is_listening(self) -> bool:
        """Whether the link can be reached, and reaches."""
        return self._port is not None

    @property
    def address(self) -> tuple[str, int]:
        """Where other nodes reach it."""
        assert self._port is not None, "it listens"
        return self._host, self._port

    def started(self, child: Child) -> None:
        """`child` is the link from now on; it has no order yet."""
        self._child, self._port, self._order = child, None, None

    def order(self, launch: str, peers: Mapping[int, tuple[str, int]], forwards: Mapping[str, int]) -> None:
        """Forward exactly these sockets, each to the node that has it."""
        self._order = Order(launch, peers, forwards)
        self._tell()

    def take(self, child: Child) -> None:
        """Act on the events of the link."""
        while child.events:
            record = child.events.popleft()
            if child is not self._child:
                continue
            if record["event"] == "listening":
                self._port = int(record["port"])
                self._tell()
            elif record["event"] in ("refused", "unreachable") and record["socket"] == CONTROL:
                self.trouble = record

    def end(self) -> None:
        """Let it send what it has, and wait for its end."""
        if self._child is None or self._child.process.stdin is None:
            return
        self._child.process.stdin.close()
        if not self._child.process.ends_within(END_S):
            self._child.signal(signal.SIGKILL)

    def _tell(self) -> None:
        if self._order is not None and self._child is not None and self.is_listening:
            self._child.write(self._order.to_json())


class ChannelClosed(Exception):
    """The other side is gone, or has sent something invalid; the exception's text says which."""


class Channel:
    """One end, whose descriptor a selector watches. round_trip_s: the shortest so far, of a heartbeat and its echo."""

    def __init__(self, end: socket.socket) -> None:
        end.setblocking(False)
        self.round_trip_s: float | None = None
        self._end = end
        self._received = bytearray()
        self._heard_at = time.monotonic()
        self._num_beats = 0
        self._beat_at = 0.0

    def fileno(self) -> int:
        """For the selector."""
        return self._end.fileno()

    def send(self, message: Mapping[str, Any]) -> None:
        """Send a message. Raises ChannelClosed where it cannot be sent."""
        line = json.dumps(message).encode() + b"\n"
        try:
            if self._end.send(line) != len(line):
                raise ChannelClosed("it no longer accepts messages")
        except OSError as error:
            raise ChannelClosed(error.strerror or "the connection ended") from None

    def receive(self) -> list[dict[str, Any]]:
        """The messages that have come, without heartbeats and echoes. Raises ChannelClosed once there are no more."""
        try:
            data = self._end.recv(READ_BYTES)
        except BlockingIOError:
            return []
        except OSError as error:
            raise ChannelClosed(error.strerror or "the connection ended") from None
        self._received += data
        *lines, rest = self._received.split(b"\n")
        self._received = bytearray(rest)
        if lines:
            self._heard_at = time.monotonic()
            return [message for line in lines if not self._is_beat(message := _parse(bytes(line)))]
        if not data:
            raise ChannelClosed("the connection ended")
        if len(rest) > LINE_BYTES:
            raise ChannelClosed("it sent an invalid message")
        return []

    def beat(self) -> None:
        """Send a heartbeat. Raises ChannelClosed where none has come for SILENCE_S."""
        if time.monotonic() - self._heard_at > SILENCE_S:
            raise ChannelClosed(f"it was silent for {SILENCE_S:g} s")
        self._num_beats += 1
        self._beat_at = time.monotonic()
        self.send({"beat": self._num_beats})

    def _is_beat(self, message: Mapping[str, Any]) -> bool:
        """Whether this is a heartbeat, which is answered, or the echo of one. Raises ChannelClosed."""
        if "beat" in message:
            self.send({"echo": message["beat"]})
        elif message.get("echo") == self._num_beats:
            took = time.monotonic() - self._beat_at
            self.round_trip_s = took if self.round_trip_s is None else min(self.round_trip_s, took)
        return "beat" in message or "echo" in message

    def close(self) -> None:
        """Close this end; the other side notices."""
        self._end.close()


def _parse(line: bytes) -> dict[str, Any]:
    try:
        message = json.loads(line, parse_int=_whole, parse_float=_finite, parse_constant=_finite)
    except (ValueError, RecursionError):
        message = None
    if not isinstance(message, dict):
        raise ChannelClosed("it sent an invalid message")
    return message


def _whole(text: str) -> int:
    number = int(text)
    if abs(number) > MOST:
        raise ValueError(f"{number} is more than {MOST}")
    return number


def _finite(text: str) -> float:
    number = float(text)
    if not math.isfinite(number):
        raise ValueError(f"{text} is not a finite number")
    return number
