"""The machine: GPUs, the number of shards that they allow, and the port."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from launch import machine
from launch.errors import Refusal
from launch.flags import read_command_line
from launch.machine import bind, bind_beside, file_problems, is_on_loopback, plan_shards, visible_gpus
from launch.settings import read_settings


@pytest.mark.parametrize(
    ("environ", "expected"),
    [
        ({"CUDA_VISIBLE_DEVICES": "0,1,2,3"}, 4),
        ({"CUDA_VISIBLE_DEVICES": "GPU-8932f937,GPU-2b6a4f11"}, 2),
        ({"CUDA_VISIBLE_DEVICES": ""}, 0),
        ({"CUDA_VISIBLE_DEVICES": "-1"}, 0),
        ({"CUDA_VISIBLE_DEVICES": "0,-1,2"}, 1),
        ({"CUDA_VISIBLE_DEVICES": "0", "NVIDIA_VISIBLE_DEVICES": "0,1"}, 1),
        ({"HIP_VISIBLE_DEVICES": "0,1"}, 2),
        ({"CUDA_VISIBLE_DEVICES": "0", "HIP_VISIBLE_DEVICES": "0,1"}, 1),
        ({"NVIDIA_VISIBLE_DEVICES": "0,1"}, 2),
        ({"NVIDIA_VISIBLE_DEVICES": "all"}, 5),
        ({"NVIDIA_VISIBLE_DEVICES": "void"}, 5),
        ({}, 5),
    ],
)
def test_visible_gpus(environ: dict[str, str], expected: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "_installed_gpus", lambda: 5)
    assert expected == visible_gpus(environ)


def test_nvidia_smi_counts_gpus(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tool = tmp_path / "nvidia-smi"
    tool.write_text("#!/bin/sh\necho 'GPU 0: NVIDIA H200 (UUID: a)'\necho '  MIG 1g.18gb Device 0'\necho 'GPU 1: b'\n")
    monkeypatch.setenv("PATH", f"{tmp_path}:/bin:/usr/bin")
    assert 0 == visible_gpus({})  # not executable: as good as missing
    tool.chmod(0o755)
    assert 2 == visible_gpus({})


def shards(gpus: int, *argv: str) -> tuple[str, int] | str:
    flags, unknown = read_command_line(argv)
    settings, problems = read_settings(flags, {})
    assert not unknown + problems
    try:
        device, layout = plan_shards(settings, gpus)
        return device, layout.world_size
    except ValueError as error:
        return str(error)


MODEL = ("--model-id", "some/model")


@pytest.mark.parametrize(
    ("gpus", "argv", "expected"),
    [
        (4, (), ("cuda", 4)),
        (0, (), ("cpu", 1)),
        (4, ("--num-shard", "2"), ("cuda", 2)),
        (0, ("--num-shard", "2"), ("cpu", 2)),
        (4, ("--num-shard", "auto"), ("cuda", 4)),
        (5, ("--num-shard", "AUTO"), ("cuda", 4)),
        (4, ("--num-shard", "auto", "--pipeline-parallel", "2"), ("cuda", 4)),
        (1, ("--num-shard", "auto", "--pipeline-parallel", "2", "--device", "cpu"), ("cpu", 2)),
        (4, ("--sharded", "true"), ("cuda", 4)),
        (4, ("--sharded", "true", "--num-shard", "2"), ("cuda", 2)),
        (4, ("--sharded", "false"), ("cuda", 1)),
        (4, ("--sharded", "false", "--num-shard", "2"), ("cuda", 2)),
        (1, ("--num-shard", "4", "--all-reduce", "host"), ("cuda", 4)),
        (4, ("--device", "cpu"), ("cpu", 1)),
        (4, ("--device", "cpu", "--num-shard", "8"), ("cpu", 8)),
    ],
)
def test_number_of_shards(gpus: int, argv: tuple[str, ...], expected: tuple[str, int]) -> None:
    assert expected == shards(gpus, *MODEL, *argv)


@pytest.mark.parametrize(("nodes", "expected"), [(1, 1), (2, 2), (3, 2), (8, 8), (16, 8)])
def test_auto_is_a_shard_for_each_node_of_a_machine_without_gpus(
    nodes: int, expected: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("host.topology.nodes", lambda cpus: [{number} for number in range(nodes)])
    assert ("cpu", expected) == shards(0, *MODEL, "--num-shard", "auto")


@pytest.mark.parametrize(
    ("gpus", "argv", "expected"),
    [
        (1, ("--sharded", "true"), "--sharded is true but the number of visible GPUs is 1"),
        (0, ("--sharded", "true"), "--sharded is true but the number of visible GPUs is 0"),
        (4, ("--sharded", "true", "--num-shard", "1"), "--sharded is true but --num-shard is 1"),
        (1, ("--sharded", "true", "--num-shard", "auto"), "--sharded is true but --num-shard auto finds 1"),
        (
            3,
            ("--num-shard", "4"),
            "--num-shard is 4 but the number of visible GPUs is 3: give at most 2, or --device cpu, or "
            "--all-reduce host to have shards share a GPU, which is slow",
        ),
        (3, (), "3 GPUs are visible, which a model cannot be split over: give --num-shard 1, 2, 4 or 8"),
        (0, ("--device", "cuda"), "--device is cuda but no GPU is visible"),
    ],
)
def test_impossible_number_of_shards_is_refused(gpus: int, argv: tuple[str, ...], expected: str) -> None:
    message = shards(gpus, *MODEL, *argv)
    assert isinstance(message, str) and message.startswith(expected)


def test_embedded_model_runs_on_one_shard_of_many_gpus() -> None:
    assert ("cuda", 1) == shards(8)
    assert ("cuda", 8) == shards(8, "--sharded", "true")


def test_taken_port_is_named_with_the_remedy() -> None:
    with bind("127.0.0.1", 0) as first:
        first.listen()
        port = first.getsockname()[1]
        with pytest.raises(Refusal, match=f"port {port} is taken: stop the server that has it, or give another --port"):
            bind("127.0.0.1", port)


def test_port_is_taken_as_soon_as_another_launch_has_bound_it() -> None:
    with bind("127.0.0.1", 0) as first, pytest.raises(Refusal, match="is taken") as refusal:
        bind("127.0.0.1", first.getsockname()[1])
    assert 1 == refusal.value.code


def test_port_does_not_accept_before_it_listens() -> None:
    with bind("127.0.0.1", 0) as listener, pytest.raises(ConnectionRefusedError):
        socket.create_connection(listener.getsockname())


def serve_one(listener: socket.socket) -> None:
    """Let a client connect, and close first, so that the connection stays in TIME_WAIT on this side."""
    listener.listen()
    with listener, socket.create_connection(listener.getsockname()) as client:
        server, _ = listener.accept()
        server.close()
        assert b"" == client.recv(1)


def test_port_is_free_again_at_once_after_a_server_with_connections() -> None:
    with bind("127.0.0.1", 0) as holder:
        address = holder.getsockname()
        for _ in range(2):  # as after a router that was killed
            serve_one(bind_beside(holder))
    with bind(*address) as holder:
        serve_one(bind_beside(holder))


def test_port_may_have_had_another_program_s_connections() -> None:
    other = bind("127.0.0.1", 0)
    address = other.getsockname()
    other.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    serve_one(other)
    with bind(*address) as holder:
        bind_beside(holder).close()
        check_that_nobody_takes(holder)
        serve_one(bind_beside(holder))
        check_that_nobody_takes(holder)


AS_ANOTHER_USER = """
import json, os, socket, sys
family, address = json.loads(sys.argv[1])
os.setuid(65534)
for options in ((), (socket.SO_REUSEADDR,), (socket.SO_REUSEPORT,), (socket.SO_REUSEADDR, socket.SO_REUSEPORT)):
    with socket.socket(family) as squatter:
        for option in options:
            squatter.setsockopt(socket.SOL_SOCKET, option, 1)
        try:
            squatter.bind(tuple(address))
        except OSError:
            continue
    sys.exit(f"bound with {options}")
"""


def check_that_nobody_takes(holder: socket.socket) -> None:
    """Neither a launch of this user, nor another user, whom only root can play."""
    with pytest.raises(Refusal, match="is taken"):
        bind(*holder.getsockname()[:2])
    if os.geteuid() == 0:
        argument = json.dumps([holder.family, holder.getsockname()])
        subprocess.run([sys.executable, "-S", "-c", AS_ANOTHER_USER, argument], check=True, timeout=60)


@pytest.mark.parametrize("hostname", ["127.0.0.1", "localhost", "0.0.0.0", "::1", "::"])
def test_who_holds_a_port_takes_no_connection_and_lets_one_user_bind(hostname: str) -> None:
    if ":" in hostname and not socket.has_dualstack_ipv6():
        pytest.skip("no IPv6 here")
    with bind(hostname, 0) as holder:
        address = holder.getsockname()[:2]
        for _ in range(2):
            with bind_beside(holder) as listener:
                check_that_nobody_takes(holder)
                listener.listen()
                check_that_nobody_takes(holder)
                for _ in range(20):
                    with socket.create_connection(address, timeout=10), listener.accept()[0]:
                        pass
            check_that_nobody_takes(holder)
            with pytest.raises(ConnectionRefusedError):
                socket.create_connection(address)


def test_unknown_host_is_refused() -> None:
    with pytest.raises(Refusal, match=r"--hostname no\.such\.host\.invalid is no address of this machine"):
        bind("no.such.host.invalid", 0)


def test_address_of_another_machine_is_refused() -> None:
    with pytest.raises(Refusal, match=r"cannot listen on 192\.0\.2\.1 port 3000"):
        bind("192.0.2.1", 3000)


@pytest.mark.skipif(not socket.has_dualstack_ipv6(), reason="no IPv6 here")
def test_port_on_ipv6() -> None:
    with bind("::1", 0) as listener:
        assert socket.AF_INET6 == listener.family


@pytest.mark.parametrize(
    ("hostname", "expected"),
    [("127.0.0.1", True), ("127.3.2.1", True), ("localhost", True), ("::1", True), ("0.0.0.0", False), ("::", False)],
)
def test_who_can_reach_a_port(hostname: str, expected: bool) -> None:
    with bind(hostname, 0) as listener:
        assert expected is is_on_loopback(listener)


def problems_of(*words: str) -> list[str]:
    """What is wrong with the files of a launch."""
    return file_problems(read_settings(read_command_line(words)[0], {})[0])


@pytest.mark.parametrize(
    ("option", "content", "sentence"),
    [
        ("--api-keys-file", b"{", "is not JSON"),
        ("--tokenizer-config-path", b"{", "is not JSON"),
        ("--chat-template", b"\xff\xfe", "which is no text"),
        ("--chat-template", None, "which is no file: check the path"),
    ],
)
def test_files_that_the_router_could_not_use_are_found(
    option: str, content: bytes | None, sentence: str, tmp_path: Path
) -> None:
    path = tmp_path / "file"
    if content is not None:
        path.write_bytes(content)
    (problem,) = problems_of(option, str(path))
    assert sentence in problem and str(path) in problem


@pytest.mark.parametrize("name", ["x" * 300, "~nobody-at-all/x", "loop"])
def test_what_cannot_even_be_looked_at_is_one_sentence(name: str, tmp_path: Path) -> None:
    """Whatever the system says of it: the server whose router it is for runs on."""
    (tmp_path / "loop").symlink_to(tmp_path / "loop")
    given = name if name.startswith("~") else str(tmp_path / name)
    (problem,) = problems_of("--chat-template", given)
    assert problem.startswith(f"--chat-template is {given[:40]}") and ", which " in problem


def test_a_home_is_where_files_are_looked_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "template.jinja").write_text("{{ 1 }}")
    assert [] == problems_of("--chat-template", "~/template.jinja")
