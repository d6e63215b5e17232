"""The launcher's side of a link: starts it, gives it orders, and hears how its connections fare."""

from __future__ import annotations

import signal
from collections.abc import Mapping
from pathlib import Path

from router.launch.nodes import Nodes
from router.launch.processes import Child, ChildCommand
from router.version import version
from server.link.config import CONTROL, LinkConfig, Order

END_S = 3.0


class Linking:
    """One link after the other. One that ends is replaced; its connections, and the group of shards, are lost."""

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
        return ChildCommand("link", (*self._python, "--config", str(self._config)), hears=True)

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
        """This is the link from now on, without orders as yet."""
        self._child, self._port, self._order = child, None, None

    def order(self, launch: str, peers: Mapping[int, tuple[str, int]], forwards: Mapping[str, int]) -> None:
        """Have it listen at these sockets, each for that of the node, and nowhere else."""
        self._order = Order(launch, peers, forwards)
        self._tell()

    def take(self, child: Child) -> None:
        """Act on what the link has said."""
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
        """Let it carry what is on its way, and wait for its end."""
        if self._child is None or self._child.process.stdin is None:
            return
        self._child.process.stdin.close()
        if not self._child.process.ends_within(END_S):
            self._child.signal(signal.SIGKILL)

    def _tell(self) -> None:
        if self._order is not None and self._child is not None and self.is_listening:
            self._child.write(self._order.to_json())
