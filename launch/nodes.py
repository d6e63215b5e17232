"""Which node of how many this is, where node 0 is, and which ranks each node has.

Settings win; else torchrun, a LeaderWorkerSet of Kubernetes, and Slurm are recognised by the variables that they set
for each process, so that one command line does for all nodes.

Ranks are counted stage by stage, and nodes have equally many in that order: of 2 nodes with 2 stages of 4 ranks, node 0
has stage 0. A stage whose ranks are on several nodes sums its partial results over the network.
"""

from __future__ import annotations

import fcntl
import re
import socket
import struct
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from ipaddress import ip_address
from typing import Any

from launch.errors import Refusal
from launch.processes import child_environment
from launch.settings import Settings, flag

GET_ADDRESS = 0x8915  # SIOCGIFADDR of linux/sockios.h
RESOLVE_S = 1.0
ALONE = "localhost"  # master_addr unless it is given


@dataclass(frozen=True)
class Nodes:
    """The nodes of one launch, and this one among them."""

    count: int = 1
    index: int = 0
    master: tuple[str, int] = (ALONE, 29500)  # where node 0's link listens
    tls_dir: str | None = None
    said_by: str = ""  # the platform that this is known from

    @property
    def is_local(self) -> bool:
        """Whether all nodes are on this machine, as for a trial."""
        return _is_loopback(self.master[0])


@dataclass(frozen=True)
class Layout:
    """The ranks of one launch. Raises ValueError where nodes cannot have equally many."""

    num_shard: int  # ranks of a stage, over which its layers are split
    num_stages: int = 1
    num_nodes: int = 1
    node: int = 0  # this one

    def __post_init__(self) -> None:
        if self.world_size % self.num_nodes:
            raise ValueError(
                f"--num-shard {self.num_shard} times --pipeline-parallel {self.num_stages} makes {self.world_size} "
                f"shards, which {self.num_nodes} nodes (--nnodes) cannot have equally many of: make them a multiple"
            )

    @property
    def world_size(self) -> int:
        """All ranks."""
        return self.num_shard * self.num_stages

    @property
    def num_local(self) -> int:
        """Ranks of one node."""
        return self.world_size // self.num_nodes

    @property
    def splits_stages(self) -> bool:
        """Whether the ranks of a stage are on several nodes."""
        return bool(self.num_local % self.num_shard)

    def stage_of(self, rank: int) -> int:
        """A rank's pipeline stage."""
        return rank // self.num_shard

    def node_of(self, rank: int) -> int:
        """A rank's node."""
        return rank // self.num_local

    def ranks_of(self, node: int) -> range:
        """The ranks of a node."""
        return range(node * self.num_local, (node + 1) * self.num_local)

    def forwards(self, group: int) -> dict[str, int]:
        """The sockets of a group's shards on other nodes that those of this node dial, and the node of each."""
        found: dict[str, int] = {}
        for rank in range(self.world_size):
            names = ["shard", "steps"] if self.node == 0 else []  # of the router, and of rank 0, which are there
            found |= {f"group-{group}/{name}-{rank}.sock": self.node_of(rank) for name in names}
        for stage in range(self.num_stages if self.num_stages > 1 else 0):
            found[f"group-{group}/stage-{stage}.sock"] = self.node_of(stage * self.num_shard)
        for stage in range(self.num_stages if self.splits_stages else 0):
            found[f"group-{group}/store-{stage}.sock"] = self.node_of(stage * self.num_shard)
        return {name: node for name, node in found.items() if node != self.node}

    def __str__(self) -> str:
        shards = f"{self.world_size} shards" if self.world_size > 1 else "one shard"
        stages = f" in {self.num_stages} pipeline stages" if self.num_stages > 1 else ""
        nodes = f" on {self.num_nodes} nodes" if self.num_nodes > 1 else ""
        return shards + stages + nodes


@dataclass(frozen=True)
class Platform:
    """The environment variables by which a platform describes the nodes to a process."""

    name: str
    count: str
    index: str
    address: Callable[[Mapping[str, str]], str | None]
    per_node: str | None = None  # how many processes it starts on each node, which must be one
    remedy: str = ""  # where there are several
    port_after: str | None = None  # the variable of the platform's own port; ours is the next


def first_host(hosts: str) -> str:
    """The first of Slurm's list of hosts: `gpu[03-07,12],login1` begins with gpu03."""
    found = re.match(r"([^,\[]+)(?:\[([^,\]-]+)[^\]]*\]([^,\[]*))?", hosts)
    return "".join(part or "" for part in found.groups()) if found else hosts


PLATFORMS = (
    Platform(
        name="torchrun",
        count="GROUP_WORLD_SIZE",
        index="GROUP_RANK",
        address=lambda environ: environ.get("MASTER_ADDR"),
        per_node="LOCAL_WORLD_SIZE",
        remedy="start torchrun with --nproc-per-node 1: the launcher starts a node's shards itself",
        port_after="MASTER_PORT",
    ),
    Platform(
        name="LeaderWorkerSet",
        count="LWS_GROUP_SIZE",
        index="LWS_WORKER_INDEX",
        address=lambda environ: environ.get("LWS_LEADER_ADDRESS"),
    ),
    Platform(
        name="Slurm",
        count="SLURM_STEP_NUM_NODES",  # of what srun started; those of an allocation alone say nothing of this process
        index="SLURM_NODEID",
        address=lambda environ: first_host(environ.get("SLURM_STEP_NODELIST", "")) or None,
        per_node="SLURM_STEP_TASKS_PER_NODE",
        remedy="start srun with --ntasks-per-node 1: the launcher starts a node's shards itself",
    ),
)


def plan_nodes(settings: Settings, environ: Mapping[str, str]) -> Nodes:
    """The nodes of this launch. Raises ValueError in one sentence."""
    values, sources = settings.values, settings.sources
    count, index, address, port = (values[name] for name in ("nnodes", "node_rank", "master_addr", "master_port"))
    platform = None
    if sources["nnodes"] == "default" and (platform := _platform(environ)) is not None:
        count, found = (_number(environ, name) for name in (platform.count, platform.index))
        index = found if index is None else index
        if platform.address(environ) and sources["master_addr"] == "default":
            address = platform.address(environ)
        if platform.port_after and sources["master_port"] != "flag":
            port = _number(environ, platform.port_after) + 1 if platform.port_after in environ else port
    if count == 1:
        if index:
            raise ValueError(f"--node-rank is {index} and there is one node: give --nnodes, the number of nodes")
        return Nodes()
    if index is None:
        raise ValueError(f"--nnodes is {count}: say which node this is by --node-rank, from 0 to {count - 1}")
    if index >= count:
        raise ValueError(f"--node-rank is {index} and --nnodes is {count}: give a --node-rank from 0 to {count - 1}")
    if address == ALONE and platform is None and sources["master_addr"] == "default":
        raise ValueError(f"--nnodes is {count}: give --master-addr, an address of node 0 that all nodes reach")
    return Nodes(count, index, (address, port), values["tls_dir"], platform.name if platform else "")


def _platform(environ: Mapping[str, str]) -> Platform | None:
    """The platform that started this process as one of several nodes."""
    for platform in PLATFORMS:
        if platform.index in environ and environ.get(platform.count, "1") != "1":
            number = environ.get(platform.per_node, "1") if platform.per_node else "1"
            if not re.fullmatch(r"1(\(x\d+\))?", number):
                raise ValueError(f"{platform.name} runs {number} processes on each node: {platform.remedy}")
            return platform
    return None


def _number(environ: Mapping[str, str], name: str) -> int:
    text = environ[name]
    if not (text.isascii() and text.isdigit()):
        raise ValueError(f"{name} is {text!r} in the environment, which is no number: give --nnodes and --node-rank")
    return int(text)


def check_nodes(settings: Settings, nodes: Nodes, layout: Layout) -> None:
    """Raise ValueError where traffic between nodes would be unprotected and no setting allows that.

    Also for --shard-uds-path: links forward sockets of the launch's own folder only.
    """
    if nodes.count > 1 and settings.values["shard_uds_path"]:
        raise ValueError("--shard-uds-path is for shards on one node: leave it out, or --nnodes")
    if nodes.count == 1 or nodes.is_local or settings.values["trust_network"]:
        return
    if nodes.tls_dir is None:
        raise ValueError(
            f"--master-addr is {nodes.master[0]} and there is no --tls-dir: make one with `lockstep tls FOLDER` and "
            "copy it to every node, or give --trust-network if this network is private"
        )
    if layout.splits_stages:
        raise ValueError(
            f"--num-shard is {layout.num_shard} with {layout.num_local} shards on each node, so that shards add up "
            "numbers over the network, which NCCL and gloo cannot encrypt: use --pipeline-parallel with as many stages "
            "as nodes, or say --trust-network where the network is encrypted or nobody else's"
        )


def node_warnings(settings: Settings, nodes: Nodes, layout: Layout) -> list[str]:
    """Warnings on unprotected traffic, and on settings of traffic that there is none of."""
    if nodes.count == 1:
        consequences = {
            "tls_dir": ": clients are served plain HTTP, and for HTTPS a proxy stands before the server",
            "trust_network": "",
            "node_timeout": "",
        }
        return [
            f"{flag(name)} is about traffic between nodes, and there is one{consequence}"
            for name, consequence in consequences.items()
            if settings.sources[name] != "default"
        ]
    if nodes.is_local or (nodes.tls_dir and not layout.splits_stages):
        return []
    what = "sums over the shards of a stage" if nodes.tls_dir else "commands, activations and the model's tokens"
    return [f"--trust-network: {what} go over the network unencrypted; anyone who reaches it can read and forge them"]


def environment_of(settings: Settings, environ: Mapping[str, str], nodes: Nodes, address: str) -> dict[str, str]:
    """The environment of the children: gloo and NCCL meet on this machine alone, or where the nodes do.

    address: this node's, if there are several.
    """
    if nodes.count == 1:
        return child_environment(environ, settings.values["master_addr"] in ("localhost", "127.0.0.1", "::1"))
    child = child_environment(environ, nodes.is_local)
    if not nodes.is_local and (interface := interface_of(address)) is not None:
        for name in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"):
            child.setdefault(name, interface)
    return child


def interface_of(address: str) -> str | None:
    """The network interface that has an address, as far as the kernel tells of IPv4."""
    for _, name in socket.if_nameindex():
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe, suppress(OSError):
            request = struct.pack("256s", name.encode()[:15])
            if socket.inet_ntoa(fcntl.ioctl(probe.fileno(), GET_ADDRESS, request)[20:24]) == address:
                return name
    return None


def await_address(nodes: Nodes, seconds: float, report: Callable[[str], None]) -> str:
    """`own_address`, once the name of node 0 is known: a platform may still be starting it. Raises Refusal."""
    until, has_said = time.monotonic() + seconds, False
    while True:
        try:
            return own_address(nodes)
        except OSError as error:
            why = f"no address is known of node 0, {nodes.master[0]} ({error.strerror or error})"
        if time.monotonic() > until:
            raise Refusal([f"{why}, after {seconds:g} s: give --master-addr as an address"], 1)
        if not has_said:
            report(f"{why}: waits for one, {seconds:g} s at most")
            has_said = True
        time.sleep(RESOLVE_S)


def own_address(nodes: Nodes) -> str:
    """The address of this node from which node 0 is reached. Raises OSError."""
    host, port = nodes.master
    family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)[0]
    if nodes.index == 0:
        return str(address[0])
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        probe.connect(address)  # sends nothing
        return str(probe.getsockname()[0])


def _is_loopback(host: str) -> bool:
    if host == ALONE:
        return True
    try:
        return ip_address(host).is_loopback
    except ValueError:
        return False


def first_difference(own: Mapping[str, Any], other: Mapping[str, Any]) -> tuple[str, Any, Any] | None:
    """(name, ours, theirs) of the first thing in which two nodes disagree."""
    for name in own:
        if own[name] != other.get(name):
            return name, own[name], other.get(name)
    return None
