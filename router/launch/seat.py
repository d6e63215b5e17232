"""The router of one launch: the port that it serves, and what it is told.

The launcher holds the port for as long as it lives, with a socket that never listens: between two routers nobody else
can take it, and with it the keys and prompts of clients. Each router has a listener of its own beside that socket, so
that clients are refused when no router listens.

Its settings hold the API key and are in no folder: it reads them from a file without a name.
"""

from __future__ import annotations

import socket
from collections.abc import Sequence
from dataclasses import dataclass

from router.config import RouterConfig
from router.launch.crew import ModelFiles, python
from router.launch.layout import Layout
from router.launch.machine import bind_beside, is_on_loopback
from router.launch.processes import ChildCommand
from router.launch.settings import Settings

CONTROL_FD = 0  # the router's standard input, on which it hears of later groups


@dataclass
class Seat:
    """Names the command. holder: the bound socket that keeps the port."""

    settings: Settings
    layout: Layout
    model: ModelFiles
    holder: socket.socket

    def __post_init__(self) -> None:
        self._listener: socket.socket | None = None  # of the router that is being started

    def router(self, group: int, sockets: Sequence[str], is_warm: bool = False) -> ChildCommand:
        """A router for group `group`, which is warm if another was before it. Raises OSError."""
        self.hand_over()  # of a router that was never ready
        self._listener = bind_beside(self.holder)
        descriptor = self._listener.fileno()
        secret = self.router_config(group, sockets, descriptor, is_warm).to_json()
        return ChildCommand("router", python("router"), (descriptor,), hears=True, secret=secret)

    def router_config(
        self, group: int, sockets: Sequence[str], listen_fd: int | None = None, is_warm: bool = False
    ) -> RouterConfig:
        """What the router is told to serve; the port that was taken replaces the one that was asked for."""
        port = self.holder.getsockname()[1]
        given = self.settings.pick(RouterConfig) | {"model_id": self.settings.shown_model, "port": port}
        return RouterConfig(
            model_path=str(self.model.path),
            tokenizer_path=str(self.model.tokenizer_path),
            shard_sockets=tuple(sockets),
            model_sha=self.model.sha,
            listen_fd=listen_fd,
            is_on_loopback=is_on_loopback(self.holder),
            control_fd=CONTROL_FD,
            group=group,
            is_warm=is_warm,
            num_stages=self.layout.num_stages,
            sources=dict(self.settings.sources),
            **given,
        )

    def hand_over(self) -> None:
        """Let go of the listener, which the router has by now: it would stay open while the router drains."""
        if self._listener is not None:
            self._listener.close()

    def close(self) -> None:
        """Give the port back."""
        self.hand_over()
        self.holder.close()
