"""Launchers of one server on several nodes: on loopback, or each in a network namespace (`machines.py`)."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Protocol

from tests.ports import free_port
from tests.running import Server, children_of, kill_group, start_launcher

PATIENCE_S = 300  # a bound of liveness


class Machine(Protocol):
    """Where a node runs."""

    address: str

    def command(self, argv: Sequence[str]) -> list[str]:
        """How `argv` is run there."""


class Loopback:
    """This machine, as all nodes of a trial."""

    address = "127.0.0.1"

    def command(self, argv: Sequence[str]) -> list[str]:
        """As it is."""
        return list(argv)


class Agent:
    """The launcher of a node other than 0, and what it has written."""

    def __init__(self, machine: Machine, *flags: str, env: dict[str, str] | None = None) -> None:
        command = machine.command((sys.executable, "launcher.py"))
        self.process = start_launcher("--device", "cpu", *flags, command=command, env=env)
        self.lines: list[str] = []
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        self.lines += self.process.stdout

    @property
    def output(self) -> str:
        """All so far."""
        return "".join(self.lines)

    @property
    def launcher(self) -> int:
        """Its process id: below `ip netns exec`, which becomes the launcher, the same."""
        return self.process.pid

    def shards(self) -> dict[int, int]:
        """Process ids by rank of the shards that run now."""
        return shards_of(self.launcher)

    def wait_for(self, words: str, seconds: float = PATIENCE_S) -> str:
        """All that it has written, once these words are among it."""
        until = time.monotonic() + seconds
        while words not in self.output:
            assert time.monotonic() < until and self.process.poll() is None, f"no {words!r} in {self.output}"
            time.sleep(0.02)
        return self.output

    def end(self, seconds: float = PATIENCE_S) -> tuple[int, str]:
        """Wait for its end: exit code, and all that it has written."""
        code = self.process.wait(seconds)
        self._reader.join(seconds)
        return code, self.output

    def kill(self) -> None:
        """SIGKILL to it, and with it to its children."""
        os.kill(self.launcher, signal.SIGKILL)
        self.process.wait(30)

    def close(self) -> None:
        """End whatever is left of it."""
        kill_group(self.process)


class Cluster(Server):
    """Node 0, ready when the `with` block begins, and the other nodes in `agents`."""

    def __init__(self, machines: Sequence[Machine], *flags: str) -> None:
        self.machines = machines
        self.node_flags = (*flags, *node_flags(len(machines), machines[0].address))
        self.agents: list[Agent] = []
        self._stack = ExitStack()
        super().__init__(
            *self.node_flags,
            "--node-rank",
            "0",
            command=machines[0].command((sys.executable, "launcher.py")),
        )

    def __enter__(self) -> Cluster:
        try:
            for rank in range(1, len(self.machines)):
                self.agents.append(self.agent(rank))
            super().__enter__()
        except BaseException as error:
            self._stack.close()
            raise AssertionError(f"{error}\n" + "\n".join(agent.output for agent in self.agents)) from error
        return self

    def __exit__(self, *error: object) -> None:
        try:
            if isinstance(error[1], Exception) and self.process.poll() is None:
                self.stop(signal.SIGQUIT)
                error[1].add_note(self.wait()[1])
                error[1].add_note("\n".join(agent.output for agent in self.agents))
            super().__exit__(*error)  # type: ignore[arg-type]
        finally:
            self._stack.close()

    def agent(self, rank: int) -> Agent:
        """Start the launcher of a node, in place of one that has ended if there was one."""
        agent = Agent(self.machines[rank], *self.node_flags, "--node-rank", str(rank))
        self._stack.callback(agent.close)
        return agent

    def shards(self) -> list[int]:
        """Process ids of the shards by rank, of all nodes, as soon as every one runs."""
        wanted = self._number_of("--num-shard") * self._number_of("--pipeline-parallel")
        until = time.monotonic() + PATIENCE_S
        while True:
            found = shards_of(self.process.pid)
            for agent in self.agents:
                found |= agent.shards()
            if sorted(found) == list(range(wanted)):
                return [found[rank] for rank in range(wanted)]
            assert time.monotonic() < until, f"of {wanted} shards {sorted(found)} run"
            time.sleep(0.02)


def node_flags(count: int, address: str) -> tuple[str, ...]:
    """What all launchers of a server are given."""
    return ("--nnodes", str(count), "--master-addr", address, "--master-port", str(free_port(address)))


def shards_of(launcher: int) -> dict[int, int]:
    """Process ids by rank of a launcher's shards that run now."""
    found = {}
    for pid in children_of(launcher):
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):
            _, name, state = re.split(r" ?[()] ?", Path(f"/proc/{pid}/stat").read_text())
            if name.startswith("shard-") and state[0] not in "ZX":
                found[int(name.removeprefix("shard-"))] = pid
    return found


def child_named(launcher: int, name: str) -> int:
    """The process id of a launcher's child by its name."""
    for pid in children_of(launcher):
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):
            if Path(f"/proc/{pid}/comm").read_text().strip() == name:
                return pid
    raise AssertionError(f"{launcher} has no child {name}")


@contextmanager
def certificates(folder: Path) -> Iterator[str]:
    """A folder of the cluster's certificates, as `lockstep tls` makes it."""
    made = subprocess.run(
        [sys.executable, "launcher.py", "tls", str(folder)],
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
        check=True,
    )
    assert "copy it to every node" in made.stdout
    yield str(folder)
