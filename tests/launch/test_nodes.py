"""Which node a launcher is: from its flags, or from what torchrun, Kubernetes and Slurm say; and what is refused."""

from __future__ import annotations

import re
import socket
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, cast

import pytest

from host.output import Output
from launch.commands.tls import read_command, write
from launch.errors import Refusal
from launch.flags import read_command_line
from launch.logs import Log
from launch.machine import plan_shards
from launch.node_links import Channel, ChannelClosed, LinkProcess
from launch.nodes import (  # fmt: skip
    Layout,
    Nodes,
    await_address,
    check_nodes,
    environment_of,
    first_difference,
    first_host,
    interface_of,
    node_warnings,
    own_address,
    plan_nodes,
)
from launch.remote_nodes import Node, RemoteNodes, RemoteShard
from launch.settings import Settings, read_settings


def read(argv: Sequence[str] = (), environ: Mapping[str, str] | None = None) -> Settings:
    """Settings alone, before anything is planned by them."""
    flags, unknown = read_command_line(argv)
    settings, problems = read_settings(flags, environ or {})
    assert [] == unknown + problems
    return settings


TORCHRUN = {
    "GROUP_WORLD_SIZE": "2", "GROUP_RANK": "1", "LOCAL_WORLD_SIZE": "1",
    "MASTER_ADDR": "10.1.0.1", "MASTER_PORT": "29500"
}  # fmt: skip
SLURM = {
    "SLURM_STEP_NUM_NODES": "4", "SLURM_NODEID": "3", "SLURM_STEP_NODELIST": "gpu[07-09,12],login1",
    "SLURM_STEP_TASKS_PER_NODE": "1(x4)",
}  # fmt: skip
LWS = {"LWS_GROUP_SIZE": "2", "LWS_WORKER_INDEX": "0", "LWS_LEADER_ADDRESS": "llm-0.llm.default"}


@pytest.mark.parametrize(
    ("flags", "environ", "nodes"),
    [
        ((), {}, Nodes()),
        (("--nnodes", "2", "--node-rank", "1", "--master-addr", "h"), {}, Nodes(2, 1, ("h", 29500))),
        ((), TORCHRUN, Nodes(2, 1, ("10.1.0.1", 29501), None, "torchrun")),
        (("--master-port", "4000"), TORCHRUN, Nodes(2, 1, ("10.1.0.1", 4000), None, "torchrun")),
        ((), SLURM, Nodes(4, 3, ("gpu07", 29500), None, "Slurm")),
        (("--tls-dir", "/t"), LWS, Nodes(2, 0, ("llm-0.llm.default", 29500), "/t", "LeaderWorkerSet")),
        (("--nnodes", "3", "--node-rank", "2", "--master-addr", "h"), SLURM, Nodes(3, 2, ("h", 29500))),
        ((), {"SLURM_NNODES": "2", "SLURM_NODEID": "0"}, Nodes()),  # an allocation, in which srun started nothing
        ((), LWS | {"LWS_GROUP_SIZE": "1"}, Nodes()),
    ],
)
def test_nodes_are_what_flags_or_the_platform_say(
    flags: tuple[str, ...], environ: dict[str, str], nodes: Nodes
) -> None:
    assert nodes == plan_nodes(read(list(flags), environ), environ)


@pytest.mark.parametrize(
    ("flags", "environ", "why"),
    [
        (("--node-rank", "1"), {}, "--node-rank is 1 and there is one node: give --nnodes"),
        (("--nnodes", "2"), {}, "--nnodes is 2: say which node this is by --node-rank, from 0 to 1"),
        (("--nnodes", "2", "--node-rank", "2", "--master-addr", "h"), {}, "--node-rank is 2 and --nnodes is 2"),
        (("--nnodes", "2", "--node-rank", "0"), {}, "give --master-addr, an address of node 0"),
        (
            (),
            TORCHRUN | {"LOCAL_WORLD_SIZE": "8"},
            "torchrun runs 8 processes on each node: start torchrun with --nproc",
        ),
        ((), SLURM | {"SLURM_STEP_TASKS_PER_NODE": "8(x4)"}, "start srun with --ntasks-per-node 1"),
        ((), TORCHRUN | {"GROUP_RANK": "x"}, "GROUP_RANK is 'x' in the environment, which is no number"),
    ],
)
def test_what_makes_no_nodes_is_refused(flags: tuple[str, ...], environ: dict[str, str], why: str) -> None:
    with pytest.raises(ValueError, match=re.escape(why)):
        plan_nodes(read(list(flags), environ), environ)


@pytest.mark.parametrize(
    ("hosts", "first"), [("a", "a"), ("a,b", "a"), ("n[1-4]", "n1"), ("n[07,09]-ib,m", "n07-ib"), ("x1,n[1-2]", "x1")]
)
def test_the_first_host_of_a_list_of_slurms(hosts: str, first: str) -> None:
    assert first == first_host(hosts)


REMOTE = Nodes(2, 0, ("10.0.0.1", 29500))


@pytest.mark.parametrize(
    ("nodes", "layout", "flags", "why"),
    [
        (REMOTE, Layout(1, 2, 2), (), "there is no --tls-dir: make one with `lockstep tls FOLDER`"),
        (Nodes(2, 0, REMOTE.master, "/t"), Layout(2, 1, 2), (), "which NCCL and gloo cannot encrypt"),
        (REMOTE, Layout(1, 2, 2), ("--trust-network",), None),
        (Nodes(2, 0, REMOTE.master, "/t"), Layout(2, 1, 2), ("--trust-network",), None),
        (Nodes(2, 0, REMOTE.master, "/t"), Layout(1, 2, 2), (), None),
        (Nodes(2, 0, ("127.0.0.1", 1)), Layout(2, 1, 2), (), None),
        (
            Nodes(2, 0, ("127.0.0.1", 1)),
            Layout(2, 1, 2),
            ("--shard-uds-path", "/s"),
            "--shard-uds-path is for shards on",
        ),
    ],
)
def test_an_open_network_has_to_be_trusted(
    nodes: Nodes, layout: Layout, flags: tuple[str, ...], why: str | None
) -> None:
    settings = read(list(flags))
    if why is not None:
        with pytest.raises(ValueError, match=re.escape(why)):
            check_nodes(settings, nodes, layout)
        return
    check_nodes(settings, nodes, layout)
    is_open = "--trust-network" in flags
    assert is_open == bool(node_warnings(settings, nodes, layout))


def test_what_is_about_traffic_between_nodes_is_said_to_change_nothing_on_one() -> None:
    tls, trust = node_warnings(read(["--tls-dir", "/t", "--trust-network"]), Nodes(), Layout(1))
    assert tls.startswith("--tls-dir is about traffic between nodes, and there is one: clients are served plain HTTP")
    assert trust == "--trust-network is about traffic between nodes, and there is one"
    assert [] == node_warnings(read([]), Nodes(), Layout(1))


def test_shards_are_planned_over_all_nodes() -> None:
    assert ("cuda", Layout(8, 2, 2, 1)) == plan_shards(
        read(["--model-id", "x", "--pipeline-parallel", "2"]), 8, Nodes(2, 1)
    )
    with pytest.raises(ValueError, match="makes 2 shards, which 4 nodes"):
        plan_shards(read(["--num-shard", "2", "--device", "cpu"]), 0, Nodes(4, 1))
    with pytest.raises(
        ValueError, match="is 16, 8 on each of 2 nodes, but the number of visible GPUs is 4: give --num-shard 4"
    ):
        plan_shards(read(["--num-shard", "8", "--pipeline-parallel", "2"]), 4, Nodes(2, 1))


def test_sockets_of_other_nodes_are_forwarded() -> None:
    assert {"group-3/shard-1.sock": 1, "group-3/steps-1.sock": 1, "group-3/stage-1.sock": 1} == Layout(
        1, 2, 2
    ).forwards(3)
    assert {"group-3/stage-0.sock": 0} == Layout(1, 2, 2, 1).forwards(3)
    assert {"group-1/store-0.sock": 0} == Layout(2, 1, 2, 1).forwards(1)
    assert {} == Layout(2, 2).forwards(1)


def test_children_meet_where_the_nodes_do(monkeypatch: pytest.MonkeyPatch) -> None:
    settings = read([])
    assert "lo" == environment_of(settings, {}, Nodes(2, 0, ("127.0.0.1", 1)), "127.0.0.1")["GLOO_SOCKET_IFNAME"]
    monkeypatch.setattr("launch.nodes.interface_of", lambda address: {"10.0.0.1": "eth7"}[address])
    assert "eth7" == environment_of(settings, {}, REMOTE, "10.0.0.1")["NCCL_SOCKET_IFNAME"]
    assert "mine" == environment_of(settings, {"GLOO_SOCKET_IFNAME": "mine"}, REMOTE, "10.0.0.1")["GLOO_SOCKET_IFNAME"]


def test_a_name_that_is_not_known_yet_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("launch.nodes.RESOLVE_S", 0.01)
    known = iter([socket.gaierror(-2, "Name or service not known")] * 2)
    resolve = socket.getaddrinfo

    def later(host: str, *args: Any, **kwargs: Any) -> Any:
        if (error := next(known, None)) is not None:
            raise error
        return resolve("127.0.0.1", *args, **kwargs)

    monkeypatch.setattr(socket, "getaddrinfo", later)
    said: list[str] = []
    assert "127.0.0.1" == await_address(Nodes(2, 1, ("leader", 29500)), 10, said.append)
    assert ["no address is known of node 0, leader (Name or service not known): waits for one, 10 s at most"] == said
    known = iter([socket.gaierror(-2, "Name or service not known")] * 9)
    with pytest.raises(Refusal, match=r"leader .*, after 0 s: give --master-addr as an address"):
        await_address(Nodes(2, 0, ("leader", 29500)), 0, said.append)


def test_addresses_and_interfaces_are_this_machines() -> None:
    assert "127.0.0.1" == own_address(Nodes(2, 1, ("127.0.0.1", 29500)))
    assert "lo" == interface_of("127.0.0.1")
    assert interface_of("192.0.2.1") is None


def test_the_first_difference_is_named() -> None:
    assert first_difference({"a": 1}, {"a": 1, "b": 2}) is None
    assert ("b", 2, None) == first_difference({"a": 1, "b": 2}, {"a": 1})


def test_launchers_talk_in_lines_and_notice_silence(monkeypatch: pytest.MonkeyPatch) -> None:
    ours, theirs = socket.socketpair()
    one, other = Channel(ours), Channel(theirs)
    one.send({"a": 1})
    one.beat()
    assert [{"a": 1}] == other.receive()
    assert [] == other.receive()
    assert one.round_trip_s is None and other.round_trip_s is None
    assert [] == one.receive()  # the echo
    assert one.round_trip_s is not None and 0 < one.round_trip_s < 5
    known = one.round_trip_s
    other.send({"echo": 7, "a": 1})  # of no beat
    assert [] == one.receive() and known == one.round_trip_s
    monkeypatch.setattr("launch.node_links.SILENCE_S", -1.0)
    with pytest.raises(ChannelClosed, match="it was silent for"):
        other.beat()
    ours.setblocking(True)
    ours.sendall(b"no JSON\n")
    with pytest.raises(ChannelClosed, match="an invalid message"):
        other.receive()
    ours.sendall(b"x" * 70_000)
    with pytest.raises(ChannelClosed, match="an invalid message"):
        other.receive(), other.receive()
    one.close()
    with pytest.raises(ChannelClosed):
        while True:
            other.receive()
    other.close()


@pytest.mark.parametrize("number", [b"Infinity", b"-Infinity", b"NaN", b"1e999", b"1" + b"0" * 400])
def test_numbers_that_nothing_can_be_counted_with_end_a_channel(number: bytes) -> None:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        ours.sendall(b'{"node": ' + number + b', "time": 0}\n')
        with pytest.raises(ChannelClosed, match="an invalid message"):
            Channel(theirs).receive()


@pytest.mark.parametrize("code", [-1000, -(10**12), 10**12, None, "1"])
def test_a_shard_of_another_node_that_ends_as_no_process_does_has_a_cause(code: object, tmp_path: Path) -> None:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        node = Node(1, "run", "h", 1, Channel(ours), [])
        shard = RemoteShard(node, "shard-1", 1, Log(Output(2), as_json=False))
        node.shards.append(shard)
        nodes = RemoteNodes(tmp_path, cast(LinkProcess, None), cast(Layout, None), {}, shard._log, patience=1)
        nodes._take(node, {"ended": "shard-1", "group": 1, "code": code})
        assert 1 == shard.process.poll() and "exited with code 1" in shard.cause


def test_keys_are_for_their_owner_and_never_overwritten(tmp_path: Path) -> None:
    folder, days = read_command([str(tmp_path / "tls"), "--days", "30"])
    write(folder, days)
    assert {"ca.pem", "cert.pem", "key.pem"} == {path.name for path in folder.iterdir()}
    assert {0o600} == {path.stat().st_mode & 0o777 for path in folder.iterdir()}
    with pytest.raises(Refusal, match="is not empty, and keys are never overwritten"):
        write(folder, days)
    for wrong in ("0", "x", "40000", "-3"):
        with pytest.raises(Refusal, match=f"--days is {wrong}: give a whole number from 1 to 36500"):
            read_command([str(folder), "--days", wrong])


@pytest.mark.parametrize("nodes", [1, 2, 3, 4, 8])
@pytest.mark.parametrize("stages", [1, 2, 3, 4])
@pytest.mark.parametrize("shards", [1, 2, 4, 8])
def test_ranks_are_on_one_node_each_and_what_is_elsewhere_is_carried(shards: int, stages: int, nodes: int) -> None:
    if shards * stages % nodes:
        with pytest.raises(ValueError, match="make them a multiple"):
            Layout(shards, stages, nodes)
        return
    layouts = [Layout(shards, stages, nodes, node) for node in range(nodes)]
    assert list(range(shards * stages)) == [rank for node in range(nodes) for rank in layouts[0].ranks_of(node)]
    of_stage = [{layouts[0].node_of(stage * shards + n) for n in range(shards)} for stage in range(stages)]
    for layout in layouts:
        assert all(layout.node_of(rank) == node for node in range(nodes) for rank in layout.ranks_of(node))
        assert layout.splits_stages == any(len(found) > 1 for found in of_stage)
        assert layout.node not in layout.forwards(1).values()
    elsewhere = {f"group-1/shard-{rank}.sock" for rank in range(shards * stages) if layouts[0].node_of(rank)}
    assert elsewhere == {name for name in layouts[0].forwards(1) if "/shard-" in name}
