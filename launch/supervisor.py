"""Runs the processes of a launch until a signal or a failure, and leaves none behind.

Before the first *ready*, a process that ends by itself is a failed launch. Afterwards a shard that dies, or that the
router found hung, ends its whole group, and a fresh group takes its place; a router that dies is started again beside
the shards. One thread: a selector over the children's pipes and a wake-up pipe for signals, so there is nothing to
lock.

SIGTERM, SIGINT and SIGHUP (a terminal that closes, unless `nohup` had it ignored) let requests finish; SIGQUIT and a
second signal do not. SIGUSR1 restarts the router. Before its processes run and after they have ended, a signal ends the
launcher at once.
"""

from __future__ import annotations

import os
import selectors
import signal
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from enum import Enum, auto
from functools import partial
from typing import Any

from launch.child_processes import Pool
from launch.errors import Refusal
from launch.logs import Log, printable
from launch.processes import Child, ChildCommand
from launch.remote_nodes import RemoteNodes
from launch.restarts import RestartCommands, RestartPolicy, cause_of_loss, culprit
from launch.router_process import RouterProcess
from launch.timers import Timers

CAUSE_S = 1.0  # to wait for the cause: a rank that lost its peers may be noticed before the one that failed
REAP_S = 0.02  # between looks at whether a killed group is gone
NODES_S = 0.1  # between looks at whether all nodes are connected
FILES_S, FILES_PATIENCE_S = 1.0, 600.0  # between looks at files that a router needs, and as long as it waits for them
GIVE_UP_S = 8.0  # for the router to tell its clients that it ends
LEAST_LOAD_S, LOAD_FACTOR = 30.0, 10.0  # a group may take LOAD_FACTOR times as long to load as the first one took


class Phase(Enum):
    """Where a launch stands."""

    STARTING = auto()
    SERVING = auto()
    FAILING = auto()  # a process has ended and is not started again; the cause may still come
    DRAINING = auto()  # the router finishes its requests, as SIGTERM asked
    STOPPING = auto()  # every process is told to end


class Supervisor:
    """One launch. After a failure, `failure` is a sentence that says which process failed and why.

    restart: without it, the first death ends the launch. on_ready: called with whether the router is the first one.
    """

    def __init__(
        self,
        commands: Sequence[ChildCommand],
        environment: Mapping[str, str],
        log: Log,
        *,
        drain_seconds: float,
        on_ready: Callable[[bool], None] = lambda is_first: None,
        stop_seconds: float = 10.0,
        restart: RestartCommands | None = None,
        sockets: Sequence[str] = (),
        remote_nodes: RemoteNodes | None = None,
    ) -> None:
        self.failure: str | None = None
        self._commands = commands
        self._log = log
        self._drain_seconds = drain_seconds
        self._on_ready = on_ready
        self._stop_seconds = stop_seconds
        self._restart = restart
        most = restart.most_deaths if restart is not None else 0
        self._group_deaths = RestartPolicy(most)
        self._phase = Phase.STARTING
        self._shards: list[Child] = []  # of the group that serves, or that loads
        self._remote_nodes = remote_nodes
        self._group = 1  # that serves, loads or comes next
        self._without_files_since: float | None = None
        self._is_warm = False  # whether this group has been ready for a router
        self._started_group = 1, sockets  # the latest that was started: a router waits there for the next one
        self._failed: list[Child] = []  # of this group or launch, in the order in which they ended
        self._report: Mapping[str, Any] | None = None  # why the router gave this group up
        self._verb = "stopped"
        self._exit_code = 0
        self._started_at = time.monotonic()
        self._load_s = LEAST_LOAD_S
        self._timers = Timers()
        self._pool = Pool(environment, log)
        self._router = RouterProcess(
            self._timers, log, drain_seconds=drain_seconds, stop_seconds=stop_seconds, most_deaths=most
        )

    @property
    def _children(self) -> list[Child]:
        children = (self._pool.fork_server, *self._shards, self._router.child, *self._pool.gone)
        return [child for child in children if child is not None]

    def run(self, wakeup: int) -> int:
        """Start all processes and watch them until the last has ended; returns the exit code.

        `wakeup` is the pipe into which `signals_to_pipe` writes the number of each signal.
        """
        self._pool.selector.register(wakeup, selectors.EVENT_READ)
        try:
            if self._remote_nodes is not None:
                self._remote_nodes.open(self._pool, self._timers)
            self._start(self._commands)
            while any(child.is_running for child in self._children) or self._may_restart or self._is_waiting:
                self._turn(wakeup)
            if self._phase is Phase.FAILING:  # all have ended before the cause was known
                self._fail()
        finally:
            self._kill()
            if self._remote_nodes is not None:
                self._remote_nodes.close(self.failure or "the server is stopped", 1 if self.failure else 0)
            self._pool.close(self._children)
        if self._exit_code == 0:
            self._log.info("stopped")
        return self._exit_code

    @property
    def _is_waiting(self) -> bool:
        """Whether other nodes are waited for, before anything runs."""
        return self._phase is Phase.STARTING and "start" in self._timers

    @property
    def _may_restart(self) -> bool:
        return self._phase in (Phase.SERVING, Phase.DRAINING)

    def _spawn(self, command: ChildCommand) -> None:
        if command.node is not None:
            assert self._remote_nodes is not None, "another node's shard has a node"
            child = self._remote_nodes.start(command, self._group)
        else:
            child = self._pool.spawn(command, self._lose_fork_server)
        if command.name == "router":
            self._router.started(child)
        else:
            self._shards.append(child)

    def _turn(self, wakeup: int) -> None:
        """Wait for output, signals, ends of processes or a timer, and act on what has come."""
        self._take_signals(self._pool.wait(wakeup, self._timers.patience))
        if self._remote_nodes is not None and (sentence := self._remote_nodes.look()) is not None:
            self._give_up(sentence)
        for child, has_ended in self._pool.look(self._children):
            self._take_events(child)
            if has_ended:
                self._take_exit(child)
        self._timers.run()

    # ------------------------------------------------------------------------------------------------- events

    def _take_events(self, child: Child) -> None:
        """Act on the events of the router."""
        while child.events:
            record = child.events.popleft()
            if child is not self._router.child:
                continue
            if record["event"] == "beat":
                self._router.beat()
            elif record["event"] == "ready":
                self._ready(record.get("group", self._group))
            elif record.get("group") != self._group:
                continue  # of a group that is gone
            elif record["event"] == "group_ready":
                self._group_ready()
            elif record["event"] == "group_advanced":
                self._group_deaths.advanced()
                self._router.deaths.advanced()
            elif record["event"] == "group_lost":
                self._take_loss(record)

    def _ready(self, group: int) -> None:
        """A router serves, with a group that may be gone by now."""
        if self._phase is Phase.STOPPING:
            return
        self._router.ready()
        if group == self._group:
            self._group_ready()
        is_first = self._phase is Phase.STARTING
        if is_first:
            self._phase = Phase.SERVING
            self._load_s = max(LEAST_LOAD_S, LOAD_FACTOR * (time.monotonic() - self._started_at))
        self._on_ready(is_first)

    def _group_ready(self) -> None:
        self._is_warm = True
        self._timers.cancel("load")

    def _take_loss(self, report: Mapping[str, Any]) -> None:
        """The router has found the group lost. Of the first group it is the cause, unless a shard reports another."""
        if self._may_restart:
            self._lose_group(report=report)
        elif self._phase is Phase.STARTING:
            self._report, self._verb, self._phase = report, "cannot start", Phase.FAILING
            self._timers.set("cause", CAUSE_S, self._fail)

    def _take_signals(self, numbers: bytes) -> None:
        for number in numbers:
            if number == signal.SIGCHLD:
                continue
            if number == signal.SIGUSR1:
                self._restart_router()
            elif self._phase in (Phase.STARTING, Phase.SERVING) and number != signal.SIGQUIT:
                self._stop(number)
            else:
                self._log.warn(f"{signal.Signals(number).name}: aborted, connections are cut")
                self._exit_code = 128 + number
                self._kill()

    def _take_exit(self, child: Child) -> None:
        """A process has ended: as it was told to, or as the first sign of a failure."""
        if self._phase is Phase.STOPPING or child in self._pool.gone:
            return
        if child is self._pool.fork_server and self._may_restart:
            self._lose_fork_server(child)
            return
        if self._phase is Phase.DRAINING and child is self._router.child:
            if child.process.returncode:
                self._set_failure(child)
            self._stop_all(self._stop_seconds)
        elif self._may_restart and self._restart is not None:
            if child is self._router.child:
                self._lose_router(child)
            else:
                self._lose_group(child)
        else:
            self._failed.append(child)
            if self._phase is not Phase.FAILING:
                self._verb = "cannot start" if self._phase is Phase.STARTING else "stopped"
                self._phase = Phase.FAILING
                self._timers.set("cause", CAUSE_S, self._fail)
            if child.has_cause or self.failure is not None:
                self._fail()

    # ------------------------------------------------------------------------------------------ groups of shards

    def _lose_group(self, child: Child | None = None, report: Mapping[str, Any] | None = None) -> None:
        """The group is lost: a shard has ended, or the router says so. The cause may come later."""
        if child is not None:
            self._failed.append(child)
        self._report = self._report or report
        if (child is not None and child.has_cause) or (report is not None and report.get("is_known")):
            self._end_group()
        elif "cause" not in self._timers:
            self._timers.set("cause", CAUSE_S, self._end_group)

    def _end_group(self) -> None:
        """End what is left of the group and, unless it has died too often, start the next."""
        sentence = cause_of_loss(self._failed, self._report)
        self._timers.cancel("cause", "load")
        self._failed, self._report = [], None
        for shard in self._shards:
            shard.signal(signal.SIGKILL)
        self._pool.gone += self._shards
        self._shards = []
        self._is_warm = False
        delay = self._group_deaths.delay(time.monotonic())
        if delay is None:
            self._give_up(sentence)
            return
        self._group += 1
        soon = f" in {delay:g} s" if delay else ""
        self._log.warn(f"{sentence}; all shards are started again{soon}, and running requests go on")
        self._timers.set("start", delay, self._start_group)

    def _lose_fork_server(self, child: Child) -> None:
        """Only shards that have not started are lost with it; the next group has another fork server."""
        self._pool.gone.append(child)
        self._pool.fork_server = None
        if any(shard.process.pid is None for shard in self._shards):
            self._failed.append(child)  # they will end, and this is why
        else:
            self._log.warn(f"fork server stopped: {printable(child.cause)}; running shards need it no more")

    def _start_group(self) -> None:
        assert self._restart is not None
        if any(child.is_running for child in self._pool.gone):  # a device cannot serve two groups at once
            self._timers.set("start", REAP_S, self._start_group)
            return
        try:
            commands, sockets = self._restart.group(self._group)
        except (OSError, Refusal) as error:
            self._give_up(f"the shards cannot be started again: {error}")
            return
        self._started_group = self._group, sockets
        self._start(commands)

    def _start(self, commands: Sequence[ChildCommand]) -> None:
        """Start a group, and with the first one the router, once all nodes are connected."""
        try:
            if self._remote_nodes is not None and not self._remote_nodes.begin(self._group):
                self._timers.set("start", NODES_S, partial(self._start, commands))
                return
            for command in commands:
                self._spawn(command)
        except Refusal as refusal:  # a node did not come
            self._give_up(str(refusal))
            return
        except OSError as error:
            if self._phase is Phase.STARTING:
                raise
            self._give_up(f"the shards cannot be started again: {error}")
            return
        if self._phase is Phase.STARTING:
            return
        self._timers.set("load", self._load_s, self._end_group)
        if self._router.child is not None:
            number, sockets = self._started_group
            self._router.child.tell({"group": number, "sockets": list(sockets)})

    def _give_up(self, sentence: str) -> None:
        """Let the router tell its clients why, and end."""
        self.failure, self._exit_code = sentence, 1
        self._phase = Phase.FAILING
        self._timers.cancel("start", "router", "load", "cause")
        if self._router.child is None or not self._router.child.is_running:
            self._kill()
            return
        self._log.warn(f"{sentence}; the server ends")
        self._router.child.tell({"refusal": sentence})
        self._timers.set("kill", GIVE_UP_S, self._kill)

    # ----------------------------------------------------------------------------------------------------- the router

    def _lose_router(self, child: Child) -> None:
        """Start the router again beside the shards, unless it has died too often."""
        self._pool.gone.append(child)
        sentence, delay = self._router.lost()
        if delay is None:
            self._give_up(sentence)
        else:
            self._timers.set("router", delay, self._start_router)

    def _start_router(self) -> None:
        assert self._restart is not None
        if self._waits_for_files(self._restart.problems()):
            self._timers.set("router", FILES_S, self._start_router)
            return
        try:
            self._spawn(self._restart.router(*self._started_group, self._is_warm))
        except (OSError, Refusal) as error:
            self._give_up(f"the router cannot be started again: {error}")
            return
        self._router.expect(self._load_s, lambda: any(name in self._timers for name in ("cause", "start", "load")))

    def _waits_for_files(self, problems: Sequence[str]) -> bool:
        """Whether a router waits for files that it could not start with: one that tried would die until it is given up.

        After FILES_PATIENCE_S it tries, whatever they are like.
        """
        now = time.monotonic()
        if not problems:
            self._without_files_since = None
        elif self._without_files_since is None:
            self._without_files_since = now
            self._log.warn(f"the router waits until this is mended: {'; '.join(problems)}")
        return self._without_files_since is not None and now - self._without_files_since < FILES_PATIENCE_S

    def _restart_router(self) -> None:
        """As SIGUSR1 asks: the router finishes its requests and another takes its place."""
        is_there = self._router.child is not None and not self._router.is_leaving
        if self._phase is not Phase.SERVING or not is_there or self._restart is None:
            self._log.warn("SIGUSR1: there is no router to restart now")
            return
        if problems := self._restart.problems():
            self._log.warn(f"SIGUSR1: the router stays, as another could not start: {'; '.join(problems)}")
            return
        self._log.info(
            f"SIGUSR1: the router is restarted; its requests may finish within {self._drain_seconds:g} s, new ones are "
            "refused until another is ready"
        )
        self._router.is_leaving = True
        self._router.leave()

    # ------------------------------------------------------------------------------------------------------------ end

    def _stop(self, number: int) -> None:
        """Act on the first signal: end at once while nothing can be running yet, else let the router drain."""
        name = signal.Signals(number).name
        is_ready = self._router.child is not None and "router" not in self._timers  # it may have been started again
        if self._phase is Phase.STARTING or not is_ready:
            self._log.info(f"{name}: stopping before the server is ready")
            self._stop_all(2.0)
            return
        self._phase = Phase.DRAINING
        self._log.info(f"{name}: running requests may finish within {self._drain_seconds:g} s; once more to abort")
        self._router.leave()

    def _stop_all(self, patience: float) -> None:
        self._begin_to_stop()
        for child in self._children:
            child.signal(signal.SIGTERM)
        self._timers.set("kill", patience, self._kill)

    def _kill(self) -> None:
        self._begin_to_stop()
        for child in self._children:
            child.signal(signal.SIGKILL)

    def _begin_to_stop(self) -> None:
        """From now on nothing is started again, and nothing is waited for but the ends of processes."""
        self._phase = Phase.STOPPING
        self._timers.cancel("start", "router", "watchdog", "load", "cause", "drain")

    def _fail(self) -> None:
        """Name the process that caused the failure, and end all."""
        if self.failure is None:
            cause = culprit(self._failed)
            if cause is not None:
                self._set_failure(cause)
            else:
                self.failure, self._exit_code = cause_of_loss((), self._report, self._verb), 1
        self._kill()

    def _set_failure(self, child: Child) -> None:
        self.failure = f"{child.title} {self._verb}: {printable(child.cause)}"
        self._exit_code = 1


@contextmanager
def signals_to_pipe() -> Iterator[int]:
    """Within the block each signal that concerns the launcher is one byte, its number, in the pipe that is yielded.

    After it, a signal ends this process at once.
    """
    reader, writer = os.pipe()
    os.set_blocking(reader, False)
    os.set_blocking(writer, False)
    previous_wakeup = signal.set_wakeup_fd(writer, warn_on_full_buffer=False)
    _handle(lambda *_: None, _stopping_signals() | {signal.SIGCHLD, signal.SIGUSR1})
    try:
        yield reader
    finally:
        _handle(_abort, _stopping_signals())
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        signal.set_wakeup_fd(previous_wakeup)
        os.close(reader)
        os.close(writer)


@contextmanager
def leave_on_signal(log: Log) -> Iterator[None]:
    """Within the block a signal ends the launch at once, even a download: there is nothing to drain yet.

    Files that are complete stay for the next launch; a conversion dies with its parent. After the block, when the
    launch is over and may have failed, the exit code tells of the signal.
    """

    def leave(number: int, _: object) -> None:
        log.info(f"{signal.Signals(number).name}: stopped before the model was there")
        # Threads of a download would hold up an orderly exit.
        os._exit(128 + number if number == signal.SIGQUIT else 0)

    _handle(leave, _stopping_signals())
    signal.signal(signal.SIGUSR1, signal.SIG_IGN)  # there is no router yet that it could restart
    try:
        yield
    finally:
        _handle(_abort, _stopping_signals())


def _stopping_signals() -> set[signal.Signals]:
    """The signals that stop a launch. One that `nohup` has ignored stays so: it asks to outlive the terminal."""
    stopping = {signal.SIGTERM, signal.SIGINT, signal.SIGQUIT, signal.SIGHUP}
    return stopping if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN else stopping - {signal.SIGHUP}


def _handle(handler: Callable[[int, object], None], numbers: set[signal.Signals]) -> None:
    for number in numbers:
        signal.signal(number, handler)


def _abort(number: int, _: object) -> None:
    os._exit(128 + number)
