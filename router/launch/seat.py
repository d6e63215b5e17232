"""The router of one launch: the port that it serves, and what it is told.

Its settings hold the API key and are in no folder: it reads them from a file without a name.
"""

from __future__ import annotations

import socket
from collections.abc import Sequence
from dataclasses import dataclass

from router.config import RouterConfig
from router.launch.crew import ModelFiles, python
from router.launch.layout import Layout
from router.launch.machine import bind, is_on_loopback
from router.launch.processes import ChildCommand
from router.launch.settings import Settings

CONTROL_FD = 0  # the router's standard input, on which it hears of later groups


@dataclass
class Seat:
    """Names the command. The launcher holds `listener` until the router has it."""

    settings: Settings
    layout: Layout
    model: ModelFiles
    listener: socket.socket

    def __post_init__(self) -> None:
        self._port = self.listener.getsockname()[1]

    def router(self, group: int, sockets: Sequence[str], is_warm: bool = False) -> ChildCommand:
        """A router for group `group`, which is warm if another was before it; one after the first takes the port anew.

        Raises Refusal when that is taken.
        """
        if self.listener.fileno() < 0:
            self.listener = bind(self.settings.values["hostname"], self._port)
        secret = self.router_config(group, sockets, is_warm).to_json()
        return ChildCommand("router", python("router"), (self.listener.fileno(),), hears=True, secret=secret)

    def router_config(self, group: int, sockets: Sequence[str], is_warm: bool = False) -> RouterConfig:
        """What the router is told to serve; the port that was taken replaces the one that was asked for."""
        given = self.settings.pick(RouterConfig) | {"model_id": self.settings.shown_model, "port": self._port}
        return RouterConfig(
            model_path=str(self.model.path),
            tokenizer_path=str(self.model.tokenizer_path),
            shard_sockets=tuple(sockets),
            model_sha=self.model.sha,
            listen_fd=self.listener.fileno(),
            is_on_loopback=is_on_loopback(self.listener),
            control_fd=CONTROL_FD,
            group=group,
            is_warm=is_warm,
            num_stages=self.layout.num_stages,
            sources=dict(self.settings.sources),
            **given,
        )

    def hand_over(self) -> None:
        """Let go of the socket, which the router has by now."""
        # Connections are accepted from here on; this lets a later launch bind beside those in TIME_WAIT.
        self.listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        self.listener.close()  # or the port would stay open while the router drains

    def close(self) -> None:
        """Give the port back, if no router has it."""
        self.listener.close()
