"""Nodes as network namespaces of this machine, with addresses of their own on one bridge. Needs root and `ip`.

Node 0 is this machine itself at the bridge's address, so that clients reach it as ever; each other node is a namespace
behind a pair of virtual interfaces. A cable can be pulled (`cut`), be long or lose frames (`delays.py`).
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from tests.running import ROOT

MOST_NETWORKS = 100


def why_not() -> str | None:
    """Why there can be no namespaces here."""
    if os.geteuid():
        return "namespaces need root"
    if shutil.which("ip") is None:
        return "namespaces need the command ip (apt-get install iproute2)"
    if not os.path.exists("/dev/net/tun"):
        return "long cables need /dev/net/tun (modprobe tun)"
    return None


def run(*argv: str) -> None:
    """Run a command. Raises CalledProcessError."""
    subprocess.run(argv, check=True, capture_output=True, text=True, timeout=30)


@dataclass(frozen=True)
class Network:
    """What the nodes of one test are connected by, beside those of others."""

    number: int

    @property
    def bridge(self) -> str:
        """Its interface on this machine."""
        return f"lockstep{self.number}"

    def address(self, node: int) -> str:
        """A node's."""
        return f"10.213.{self.number}.{node + 1}"


@dataclass(frozen=True)
class Host:
    """Node 0: this machine at the bridge."""

    network: Network

    @property
    def address(self) -> str:
        """Its own, as other nodes see it."""
        return self.network.address(0)

    def command(self, argv: Sequence[str]) -> list[str]:
        """As it is."""
        return list(argv)


@dataclass(frozen=True)
class Namespace:
    """Another node."""

    network: Network
    index: int

    @property
    def name(self) -> str:
        """The namespace's."""
        return f"lockstep-{self.network.number}-{self.index}"

    @property
    def cable(self) -> str:
        """The interface at the bridge's end."""
        return f"{self.network.bridge}-{self.index}"

    @property
    def address(self) -> str:
        """Its own, as other nodes see it."""
        return self.network.address(self.index)

    def command(self, argv: Sequence[str]) -> list[str]:
        """Run it there; `ip` becomes the command."""
        return ["ip", "netns", "exec", self.name, *argv]

    def plug(self) -> None:
        """Connect it."""
        run("ip", "link", "set", self.cable, "up")

    def cut(self) -> None:
        """Pull the cable."""
        run("ip", "link", "set", self.cable, "down")


Nodes = list[Host | Namespace]


@contextmanager
def machines(count: int, delay_ms: float | None = None, *, loses_one_in: int = 0) -> Iterator[Nodes]:
    """So many nodes, node 0 first. delay_ms: what each cable takes in one direction, of a relay's; None: no relay.

    loses_one_in: how many frames there are for each that the relay loses, at random; 0: it loses none.
    """
    network = _new_network()
    others = [Namespace(network, index) for index in range(1, count)]
    relays: list[subprocess.Popen[str]] = []
    try:
        run("ip", "address", "add", f"{network.address(0)}/24", "dev", network.bridge)
        run("ip", "link", "set", network.bridge, "up")
        for node in others:
            run("ip", "netns", "add", node.name)
            if delay_ms is None:
                run("ip", "link", "add", node.cable, "type", "veth", "peer", "name", "eth0", "netns", node.name)
            else:
                relays.append(_relay(node, delay_ms, loses_one_in))
            run("ip", "link", "set", node.cable, "master", network.bridge)
            run(*node.command(["ip", "address", "add", f"{node.address}/24", "dev", "eth0"]))
            for interface in ("eth0", "lo"):
                run(*node.command(["ip", "link", "set", interface, "up"]))
            node.plug()
        yield [Host(network), *others]
    finally:
        for relay in relays:
            relay.kill()
            relay.communicate()
        for argv in (
            *(["ip", "netns", "delete", node.name] for node in others),
            *(["ip", "link", "delete", node.cable] for node in others),
            ["ip", "link", "delete", network.bridge],
        ):
            subprocess.run(argv, capture_output=True, timeout=30)  # what was not made


def _new_network() -> Network:
    """One that no other test has, with its bridge."""
    for number in range(MOST_NETWORKS):
        network = Network(number)
        if not subprocess.run(["ip", "link", "add", network.bridge, "type", "bridge"], capture_output=True).returncode:
            return network
    raise RuntimeError(f"there are {MOST_NETWORKS} networks of tests already, or bridges cannot be made")


def _relay(node: Namespace, delay_ms: float, loses_one_in: int) -> subprocess.Popen[str]:
    """A cable that takes so long, once it is there."""
    argv = [sys.executable, "-m", "tests.nodes.delays", node.cable, node.name, "eth0", str(delay_ms), str(loses_one_in)]
    relay = subprocess.Popen(argv, cwd=ROOT, stdout=subprocess.PIPE, text=True)
    assert relay.stdout is not None and relay.stdout.readline() == "ready\n"
    return relay
