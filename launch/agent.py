"""The launcher of a node other than 0: it starts and ends shards as node 0's launcher tells it, and reports their ends.

It dials node 0 through its link until it is let in. While contact lasts, its shards live; when it is lost, they are
ended first, and node 0 is dialled again. So no device ever has shards of two groups. It serves nobody itself, and node
0 alone decides what a death means.
"""

from __future__ import annotations

import secrets
import signal
import socket
import time
from collections.abc import Mapping
from typing import Any

from launch.logs import Log, printable
from launch.node_links import BEAT_S, Linking, Talk, TalkEnded
from launch.pool import Pool
from launch.processes import Child
from launch.shards import Crew
from launch.timers import Timers
from server.link.config import CONTROL

REDIAL_S = 0.5
REAP_S = 0.02  # between looks at whether a killed group is gone
REMIND_S = 30.0  # between sentences on what is waited for
MASTER = 0


class Agent:
    """One run. After a failure, `failure` says why."""

    def __init__(
        self,
        crew: Crew,
        linking: Linking,
        environment: Mapping[str, str],
        log: Log,
        *,
        patience: float,
        master: tuple[str, int],
        stop_seconds: float = 10.0,
    ) -> None:
        """patience: seconds for node 0 to come, at the start and whenever contact is lost."""
        self.failure: str | None = None
        self._crew = crew
        self._linking = linking
        self._log = log
        self._patience = patience
        self._master = master
        self._stop_seconds = stop_seconds
        self._pool = Pool(environment, log)
        self._link: Child | None = None
        self._talk: Talk | None = None
        self._is_welcome = False
        self._run = secrets.token_hex(8)  # tells this launcher that comes again from another with its rank
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
        return [c for c in (self._pool.nursery, *self._shards, *self._pool.gone, self._link) if c is not None]

    def run(self, wakeup: int) -> int:
        """Serve node 0 until it says that this was it, a signal, or a failure. Returns the exit code."""
        pool = self._pool
        pool.selector.register(wakeup, 1)
        try:
            self._start_link()
            self._timers.set("remind", REMIND_S, self._remind)
            while not self._is_over or any(shard.is_running for shard in self._shards):
                for number in pool.wait(wakeup, self._timers.patience):
                    self._take_signal(number)
                for child, has_ended in pool.look(self._children):
                    if child is self._link:
                        self._linking.take(child)
                    if has_ended:
                        self._take_exit(child)
                self._timers.run()
        finally:
            self._hang_up()
            self._linking.end()
            for child in self._children:
                if child is not self._link or self.failure is not None:
                    child.signal(signal.SIGKILL)
            pool.close(self._children)
        return self._exit_code

    def read(self, _: int) -> bool:
        """Take what node 0 has said."""
        assert self._talk is not None, "it is registered as long as it is there"
        try:
            for message in self._talk.hear():
                self._take(message)
                if self._talk is None:
                    break
        except TalkEnded as error:
            self._lose_contact(str(error))
        except (KeyError, TypeError, ValueError, OverflowError):
            self._lose_contact("it sent an invalid message")
        return True

    # ---------------------------------------------------------------------------------------------- contact to node 0

    def _start_link(self) -> None:
        self._link = self._pool.spawn(self._linking.command, self._take_exit)
        self._linking.started(self._link)
        self._linking.order("", {MASTER: self._master}, {CONTROL: MASTER})
        self._timers.set("dial", 0.0, self._dial)

    def _dial(self) -> None:
        """Say who this is to node 0, if it answers; else try again, until patience ends."""
        if self._talk is not None or self._is_over:
            return
        trouble = self._linking.trouble
        if trouble.get("event") == "refused":
            self._fail(f"node 0 at {self._address} and this node do not meet: {printable(str(trouble['reason']))}")
            return
        if time.monotonic() > self._until:
            why = printable(str(trouble.get("reason", "it does not answer")))
            self._fail(f"node 0 at {self._address} was not there for {self._patience:g} s ({why}): {REMEDY}")
            return
        self._timers.set("dial", REDIAL_S, self._dial)
        if not self._linking.is_listening:
            return
        end = socket.socket(socket.AF_UNIX)
        try:
            end.connect(str(self._crew.folder / CONTROL))
            host, port = self._linking.address
            hello = {"node": self._crew.layout.node, "run": self._run, "host": host, "port": port}
            talk = Talk(end)
            talk.say(hello | {"time": time.time(), "identity": self._crew.identity()})
        except (OSError, TalkEnded):
            end.close()
            return
        self._talk = talk
        self._pool.selector.register(talk, 1, self)
        self._timers.set("beat", BEAT_S, self._beat)  # a node 0 that does not answer is noticed, too

    @property
    def _address(self) -> str:
        return f"{self._master[0]} port {self._master[1]}"

    def _take(self, message: Mapping[str, Any]) -> None:
        """Do as node 0 says."""
        if "welcome" in message:
            self._is_welcome = True
            self._launch = str(message["welcome"])
            self._log.info(f"node {self._crew.layout.node} is let in by node 0 at {self._address}")
            self._timers.cancel("remind")
        elif "refused" in message:
            self._fail(f"node 0 at {self._address} refuses this node: {printable(str(message['refused']))}")
        elif "start" in message:
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
        if self._talk is not None:
            self._timers.set("beat", BEAT_S, self._beat)
            try:
                self._talk.beat()
            except TalkEnded as error:
                self._lose_contact(str(error))

    def _remind(self) -> None:
        if not self._is_welcome:
            why = self._linking.trouble.get("reason")
            because = f" ({printable(str(why))})" if why else ""
            self._log.info(f"waits for node 0 at {self._address}{because}")
            self._timers.set("remind", REMIND_S, self._remind)

    def _hang_up(self) -> None:
        if self._talk is not None:
            self._pool.selector.unregister(self._talk)
            self._talk.close()
        self._talk = None
        self._timers.cancel("beat")

    def _lose_contact(self, why: str) -> None:
        """Whoever dialled in vain dials on; whoever had shards ends them first."""
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
        """Make ready for a group; what is left of the one before is killed."""
        if group == self._group:
            return
        self._kill()
        self._group, self._told = group, set()
        commands, _ = self._crew.group(group)
        self._commands = {command.name: command for command in commands if command.node is None}
        addresses = {int(node): (str(host), int(port)) for node, (host, port) in peers.items()}
        addresses[MASTER] = self._master  # as this node knows it
        self._linking.order(self._launch, addresses, {CONTROL: MASTER} | self._crew.layout.forwards(group))

    def _start_wanted(self) -> None:
        """Start what node 0 wants once nothing of another group runs any more."""
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
            self._say({"ended": name, "group": self._group, "code": -number})
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
        if child is self._pool.nursery:
            self._pool.gone.append(child)
            self._pool.nursery = None
        elif child is self._link and not self._is_over:
            if not self._linking.is_listening:
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
        self._say(
            {
                "ended": shard.name,
                "group": self._group,
                "code": shard.process.returncode or 0,
                "critical": shard.critical,
                "is_consequence": shard.is_consequence,
                "last": shard.cause,
            }
        )

    def _say(self, message: Mapping[str, Any]) -> None:
        """Tell node 0, if it is there."""
        if self._talk is not None:
            try:
                self._talk.say(message)
            except TalkEnded as error:
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
        if self._talk is not None:
            try:
                self._talk.say({"leaving": name})
            except TalkEnded:
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


REMEDY = (
    "start it with the same flags and --node-rank 0, compare --master-addr and --master-port on both nodes, or raise "
    "--node-timeout"
)
