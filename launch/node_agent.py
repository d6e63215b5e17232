"""The launcher of a node other than 0: it starts and ends shards as node 0's launcher tells it, and reports their ends.

It connects to node 0 through its link until it is accepted. When the connection is lost, its shards are ended before
it connects again, so that no device ever has shards of two groups. It serves no requests, and node 0 alone decides
what the death of a shard means.
"""

from __future__ import annotations

import secrets
import signal
import socket
import time
from collections.abc import Mapping
from typing import Any

from launch.child_processes import Pool
from launch.logs import Log, printable
from launch.node_links import BEAT_S, Channel, ChannelClosed, LinkProcess
from launch.processes import Child
from launch.shards import ShardCommands
from launch.timers import Timers
from server.link.config import CONTROL

REDIAL_S = 0.5
REAP_S = 0.02  # between looks at whether a killed group is gone
REMIND_S = 30.0  # between log lines on what is waited for
MASTER = 0
REMEDY = (
    "start it with the same flags and --node-rank 0, compare --master-addr and --master-port on both nodes, or raise "
    "--node-timeout"
)


class Agent:
    """One run. After a failure, `failure` says why."""

    def __init__(
        self,
        shard_commands: ShardCommands,
        link: LinkProcess,
        environment: Mapping[str, str],
        log: Log,
        *,
        patience: float,
        master: tuple[str, int],
        stop_seconds: float = 10.0,
    ) -> None:
        """patience: seconds to wait for node 0, at the start and whenever the connection is lost."""
        self.failure: str | None = None
        self._shard_commands = shard_commands
        self._link = link
        self._log = log
        self._patience = patience
        self._master = master
        self._stop_seconds = stop_seconds
        self._pool = Pool(environment, log)
        self._link_child: Child | None = None
        self._channel: Channel | None = None
        self._is_welcome = False
        self._run = secrets.token_hex(8)  # tells this launcher from another one with its rank
        self._launch = ""
        self._shards: list[Child] = []
        self._group = 0
        self._wanted: list[str] = []  # shards of the group to be started once the one before is gone
        self._told: set[str] = set()  # shards of the group that node 0 has told to end
        self._commands: dict[str, Any] = {}  # of the group's shards, by name
        self._timers = Timers()
        self._until = time.monotonic() + patience
        self._is_over = False
        self._exit_code = 0

    @property
    def _children(self) -> list[Child]:
        return [c for c in (self._pool.fork_server, *self._shards, *self._pool.gone, self._link_child) if c is not None]

    def run(self, wakeup: int) -> int:
        """Do as node 0 says until it ends, a signal, or a failure. Returns the exit code."""
        pool = self._pool
        pool.selector.register(wakeup, 1)
        try:
            self._start_link()
            self._timers.set("remind", REMIND_S, self._remind)
            while not self._is_over or any(shard.is_running for shard in self._shards):
                for number in pool.wait(wakeup, self._timers.patience):
                    self._take_signal(number)
                for child, has_ended in pool.look(self._children):
                    if child is self._link_child:
                        self._link.take(child)
                    if has_ended:
                        self._take_exit(child)
                self._timers.run()
        finally:
            self._hang_up()
            self._link.end()
            for child in self._children:
                if child is not self._link_child or self.failure is not None:
                    child.signal(signal.SIGKILL)
            pool.close(self._children)
        return self._exit_code

    def read(self, _: int) -> bool:
        """Read the messages of node 0."""
        assert self._channel is not None, "it is registered as long as it is there"
        try:
            for message in self._channel.receive():
                self._take(message)
                if self._channel is None:
                    break
        except ChannelClosed as error:
            self._lose_contact(str(error))
        except (KeyError, TypeError, ValueError, OverflowError):
            self._lose_contact("it sent an invalid message")
        return True

    # ------------------------------------------------------------------------------------------- connection to node 0

    def _start_link(self) -> None:
        self._link_child = self._pool.spawn(self._link.command, self._take_exit)
        self._link.started(self._link_child)
        self._link.order("", {MASTER: self._master}, {CONTROL: MASTER})
        self._timers.set("dial", 0.0, self._dial)

    def _dial(self) -> None:
        """Connect to node 0 and introduce this node, or try again later, until patience ends."""
        if self._channel is not None or self._is_over:
            return
        trouble = self._link.trouble
        if trouble.get("event") == "refused":
            self._fail(f"node 0 at {self._address} and this node do not meet: {printable(str(trouble['reason']))}")
            return
        if time.monotonic() > self._until:
            why = printable(str(trouble.get("reason", "it does not answer")))
            self._fail(f"node 0 at {self._address} was not there for {self._patience:g} s ({why}): {REMEDY}")
            return
        self._timers.set("dial", REDIAL_S, self._dial)
        if not self._link.is_listening:
            return
        end = socket.socket(socket.AF_UNIX)
        try:
            end.connect(str(self._shard_commands.folder / CONTROL))
            host, port = self._link.address
            hello = {"node": self._shard_commands.layout.node, "run": self._run, "host": host, "port": port}
            channel = Channel(end)
            channel.send(hello | {"time": time.time(), "identity": self._shard_commands.identity()})
        except (OSError, ChannelClosed):
            end.close()
            return
        self._channel = channel
        self._pool.selector.register(channel, 1, self)
        self._timers.set("beat", BEAT_S, self._beat)  # a node 0 that does not answer is noticed, too

    @property
    def _address(self) -> str:
        return f"{self._master[0]} port {self._master[1]}"

    def _take(self, message: Mapping[str, Any]) -> None:
        """Do as node 0 says."""
        if "welcome" in message:
            self._is_welcome = True
            self._launch = str(message["welcome"])
            self._log.info(f"node {self._shard_commands.layout.node} is let in by node 0 at {self._address}")
            self._timers.cancel("remind")
        elif "refused" in message:
            self._fail(f"node 0 at {self._address} refuses this node: {printable(str(message['refused']))}")
        elif "start" in message and not self._is_over:
            self._begin(int(message["group"]), message["peers"])
            self._wanted.append(str(message["start"]))
            self._timers.set("start", 0.0, self._start_wanted)
        elif "signal" in message and message.get("group") == self._group:
            self._signal(str(message["shard"]), int(message["signal"]))
        elif "end" in message:
            if message.get("code"):
                self._fail(f"node 0 has ended: {printable(str(message['end']))}")
                return
            self._log.info(f"node 0 ends the server: {printable(str(message['end']))}")
            self._is_over = True
            self._kill()

    def _beat(self) -> None:
        if self._channel is not None:
            self._timers.set("beat", BEAT_S, self._beat)
            try:
                self._channel.beat()
            except ChannelClosed as error:
                self._lose_contact(str(error))

    def _remind(self) -> None:
        if not self._is_welcome:
            why = self._link.trouble.get("reason")
            because = f" ({printable(str(why))})" if why else ""
            self._log.info(f"waits for node 0 at {self._address}{because}")
            self._timers.set("remind", REMIND_S, self._remind)

    def _hang_up(self) -> None:
        if self._channel is not None:
            self._pool.selector.unregister(self._channel)
            self._channel.close()
        self._channel = None
        self._timers.cancel("beat")

    def _lose_contact(self, why: str) -> None:
        """Connect again; a node that had shards ends them first."""
        self._hang_up()
        if self._is_over:
            return
        if self._is_welcome:
            self._is_welcome = False
            self._group = 0  # another launcher of node 0 counts groups anew
            self._until = time.monotonic() + self._patience
            self._log.warn(f"contact to node 0 is lost ({why}): its shards here are ended, and it is dialled again")
            self._kill()
            self._timers.set("remind", REMIND_S, self._remind)
        self._timers.set("dial", REDIAL_S, self._dial)

    # ------------------------------------------------------------------------------------------------- shards

    def _begin(self, group: int, peers: Mapping[str, Any]) -> None:
        """Prepare for a group; what is left of the one before is killed."""
        if group == self._group:
            return
        self._kill()
        self._group, self._told = group, set()
        commands, _ = self._shard_commands.group(group)
        self._commands = {command.name: command for command in commands if command.node is None}
        addresses = {int(node): (str(host), int(port)) for node, (host, port) in peers.items()}
        addresses[MASTER] = self._master  # as this node knows it
        self._link.order(self._launch, addresses, {CONTROL: MASTER} | self._shard_commands.layout.forwards(group))

    def _start_wanted(self) -> None:
        """Start the shards of this group once none of another group runs any more."""
        if any(child.is_running for child in self._pool.gone):
            self._timers.set("start", REAP_S, self._start_wanted)
            return
        for name in self._wanted:
            if name in self._commands:
                self._shards.append(self._pool.spawn(self._commands[name], self._take_exit))
        self._wanted = []

    def _signal(self, name: str, number: int) -> None:
        """Send it to a shard, as node 0 says; one that waits for its start has none."""
        self._told.add(name)
        if name in self._wanted:
            self._wanted.remove(name)
            self._send({"ended": name, "group": self._group, "code": -number})
        for shard in [shard for shard in self._shards if shard.name == name]:
            shard.signal(number)

    def _kill(self) -> None:
        """End all shards."""
        for shard in self._shards:
            shard.signal(signal.SIGKILL)
        self._pool.gone += self._shards
        self._shards, self._wanted = [], []

    def _take_exit(self, child: Child) -> None:
        """A process of this node has ended."""
        if child is self._pool.fork_server:
            self._pool.gone.append(child)
            self._pool.fork_server = None
        elif child is self._link_child and not self._is_over:
            if not self._link.is_listening:
                self._fail(printable(child.cause))
                return
            self._log.warn(f"link stopped: {printable(child.cause)}; it is started again")
            self._pool.gone.append(child)
            self._start_link()
        elif child in self._shards:
            self._shards.remove(child)
            self._pool.gone.append(child)
            self._report(child)

    def _report(self, shard: Child) -> None:
        if shard.name not in self._told:
            self._log.warn(f"{shard.title} has ended: {printable(shard.cause)}")
        self._send(
            {
                "ended": shard.name,
                "group": self._group,
                "code": shard.process.returncode or 0,
                "critical": shard.critical,
                "is_consequence": shard.is_consequence,
                "last": shard.cause,
            }
        )

    def _send(self, message: Mapping[str, Any]) -> None:
        """Tell node 0, if it is there."""
        if self._channel is not None:
            try:
                self._channel.send(message)
            except ChannelClosed as error:
                self._lose_contact(str(error))

    # ------------------------------------------------------------------------------------------------- end

    def _take_signal(self, number: int) -> None:
        if number in (signal.SIGCHLD, signal.SIGUSR1):
            return
        if self._is_over or number == signal.SIGQUIT:
            self._exit_code = 128 + number
            self._is_over = True
            self._kill()
            return
        name = signal.Signals(number).name
        self._log.info(f"{name}: this node leaves")
        if self._channel is not None:
            try:
                self._channel.send({"leaving": name})
            except ChannelClosed:
                pass
        self._is_over = True
        for shard in self._shards:
            shard.signal(signal.SIGTERM)
        self._timers.set("kill", self._stop_seconds, self._kill)

    def _fail(self, sentence: str) -> None:
        self.failure, self._exit_code = sentence, 1
        self._is_over = True
        self._hang_up()
        self._kill()
