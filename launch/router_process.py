"""The router of one launch: its command, and when another has to take its place.

The launcher holds the port for as long as it lives, with a socket that never listens: between two routers no other
program can take it, and with it the keys and prompts of clients. Each router has a listener of its own beside that
socket, so that clients are refused when no router listens. Its settings hold the API key and are in no folder: it reads
them from a file without a name.

A router that serves shows every second that its event loop turns. One that is silent for SILENCE_S is killed, which is
a death like another. While it loads it may block, within the time that the shards may take, because reading a large
tokenizer is one long call.
"""

from __future__ import annotations

import os
import signal
import socket
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from launch.logs import Log, printable
from launch.machine import FILES, bind_beside, is_on_loopback
from launch.nodes import Layout
from launch.processes import Child, ChildCommand
from launch.restarts import RestartPolicy
from launch.settings import Settings
from launch.shards import ModelFiles, python
from launch.timers import SILENCE_S, TICK_S, Timers, Watchdog
from router.config import RouterConfig

CONTROL_FD = 0  # the router's standard input, on which it is told of later groups


class RouterProcess:
    """The router that runs now, if one does. Its timers are "router", "watchdog" and "drain"."""

    def __init__(
        self, timers: Timers, log: Log, *, drain_seconds: float, stop_seconds: float, most_deaths: int
    ) -> None:
        self.child: Child | None = None
        self.is_leaving = False  # because of SIGUSR1
        self.deaths = RestartPolicy(most_deaths)
        self._timers = timers
        self._log = log
        self._drain_seconds = drain_seconds
        self._patience = drain_seconds + stop_seconds
        self._watchdog: Watchdog | None = None
        self._num_records = 0  # that had come from it at the last check

    def started(self, child: Child) -> None:
        """`child` is the router from now on."""
        self.child = child

    def expect(self, seconds: float, is_waiting: Callable[[], bool]) -> None:
        """Kill it if it is not ready in so many seconds, which begin anew as long as it waits for shards."""

        def look() -> None:
            if is_waiting():
                self._timers.set("router", seconds, look)
            else:
                self._kill(f"it was not ready after {seconds:g} s and was killed")

        self._timers.set("router", seconds, look)

    def ready(self) -> None:
        """It serves."""
        self._timers.cancel("router")

    def beat(self) -> None:
        """Its event loop turns; from the first time on, it must give signs of life."""
        if self._watchdog is None:
            self._watchdog = Watchdog(time.monotonic())
            self._timers.set("watchdog", TICK_S, self._look)

    def leave(self) -> None:
        """Let it finish its requests and end. A router that leaves already has its time anew."""
        assert self.child is not None, "it is there"
        if "drain" not in self._timers:  # a second SIGTERM would abort it
            self.child.signal(signal.SIGTERM)
        late = f"it had not finished its requests after {self._drain_seconds:g} s and was killed"
        self._timers.set("drain", self._patience, lambda: self._kill(late))

    def lost(self) -> tuple[str, float | None]:
        """It has ended. Returns why, and in how many seconds another may be started; None: it has died too often."""
        assert self.child is not None, "it has just ended"
        child, self.child, self._watchdog = self.child, None, None
        self._timers.cancel("router", "watchdog", "drain")
        sentence = f"router stopped: {printable(child.cause)}"
        if self.is_leaving:
            self.is_leaving = False
            if child.process.returncode:
                self._log.warn(f"{sentence}; another takes its place")
            return sentence, 0.0
        delay = self.deaths.delay(time.monotonic())
        if delay is not None:
            soon = f" in {delay:g} s" if delay else ""
            self._log.warn(f"{sentence}; it is started again{soon}, without the requests that it had")
        return sentence, delay

    def _look(self) -> None:
        """Every record is a sign of life: a beat is left out where other records wait to be read."""
        assert self.child is not None and self._watchdog is not None, "its end cancels this"
        if self.child.num_records != self._num_records:
            self._num_records = self.child.num_records
            self._watchdog.reset()
        if self._watchdog.is_silent(time.monotonic()):
            self._kill(f"it gave no sign of life for {SILENCE_S:g} s and was killed")
        else:
            self._timers.set("watchdog", TICK_S, self._look)

    def _kill(self, why: str) -> None:
        if self.child is not None:
            self.child.critical = why
            self.child.signal(signal.SIGKILL)


@dataclass
class RouterCommand:
    """Makes the router's command. holder: the bound socket that keeps the port."""

    settings: Settings
    layout: Layout
    model: ModelFiles
    holder: socket.socket
    adapters: Sequence[tuple[str, Path]] = ()  # name and folder of each that the settings name

    def __post_init__(self) -> None:
        self._listener: socket.socket | None = None  # of the router that is being started

    def command(self, group: int, sockets: Sequence[str], is_warm: bool = False) -> ChildCommand:
        """A router for group `group`, which is warm if it has served another router. Raises OSError."""
        self.close_listener()  # of a router that was never ready
        self._listener = bind_beside(self.holder)
        descriptor = self._listener.fileno()
        secret = self.router_config(group, sockets, descriptor, is_warm).to_json()
        return ChildCommand("router", python("router"), (descriptor,), has_stdin=True, secret=secret)

    def router_config(
        self, group: int, sockets: Sequence[str], listen_fd: int | None = None, is_warm: bool = False
    ) -> RouterConfig:
        """What the router is told to serve; the port that was taken replaces the one that was asked for."""
        port = self.holder.getsockname()[1]
        given = self.settings.pick(RouterConfig) | {"model_id": self.settings.shown_model, "port": port}
        given |= {name: os.path.expanduser(given[name]) for name in FILES if given[name]}
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
            adapters=tuple((name, str(folder)) for name, folder in self.adapters),
            **given,
        )

    def close_listener(self) -> None:
        """Close the listener, which the router has by now: it would stay open while the router drains."""
        if self._listener is not None:
            self._listener.close()

    def close(self) -> None:
        """Release the port."""
        self.close_listener()
        self.holder.close()
