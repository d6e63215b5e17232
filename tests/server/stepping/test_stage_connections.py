"""What pipeline stages send each other, and what a stage is told of a neighbour that fails it."""

from __future__ import annotations

import os
import socket
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, suppress
from pathlib import Path

import pytest
import torch

from server.ranks.collectives import PeerLost
from server.stepping import pipeline
from server.stepping.pipeline import HEADER, HELLO, MAGIC, StageConnections, connect_stages

PATIENCE = 30.0  # for what comes
SHORT = 0.2  # for what does not
SOME = 2.0  # of a stage that gives up, after what comes to it before


@pytest.fixture
def folder() -> Iterator[Path]:
    """For sockets: short, which tmp_path is not."""
    with tempfile.TemporaryDirectory(prefix="ls-", dir="/tmp") as made:
        yield Path(made)


@pytest.fixture
def open_ends() -> Iterator[ExitStack]:
    with ExitStack() as stack:
        yield stack


def one_stage(ends: ExitStack, patience: float = PATIENCE) -> tuple[StageConnections, socket.socket, socket.socket]:
    """A stage, and its neighbours' ends: that of the stage before, and that of the one behind."""
    (before, incoming), (outgoing, behind) = socket.socketpair(), socket.socketpair()
    stage = StageConnections(incoming, outgoing, patience)
    for end in (before, behind):
        ends.enter_context(end)
    ends.callback(stage.close)
    return stage, before, behind


def descriptors() -> set[int]:
    return {int(name) for name in os.listdir("/proc/self/fd")}


def eventually(holds: Callable[[], bool]) -> bool:
    until = time.monotonic() + PATIENCE
    while not holds() and time.monotonic() < until:
        time.sleep(0.001)
    return holds()


def reach(end: socket.socket, path: str) -> None:
    """Connect once somebody listens there."""
    until = time.monotonic() + PATIENCE
    while end.connect_ex(path):
        assert time.monotonic() < until, "nobody listens"
        time.sleep(0.001)


def threads() -> list[str]:
    return [thread.name for thread in threading.enumerate() if thread.name.startswith("stage-")]


def test_tensors_arrive_in_order_with_their_shapes_and_types(open_ends: ExitStack) -> None:
    ends = [socket.socketpair() for _ in range(2)]
    first, last = (StageConnections(ends[n - 1][1], ends[n][0], PATIENCE) for n in range(2))
    open_ends.callback(first.close)
    open_ends.callback(last.close)
    sent = [torch.arange(6, dtype=torch.bfloat16).view(2, 3), torch.arange(8.0).view(2, 4)[:, ::2]]
    first.send(sent)
    first.send([torch.empty(0, 3)])
    last.send([torch.tensor([7, 9])])
    came = last.receive([((2, 3), torch.bfloat16), ((2, 2), torch.float32)])
    assert all(torch.equal(one, other) for one, other in zip(sent, came, strict=True))
    assert [(0, 3)] == [tuple(tensor.shape) for tensor in last.receive([((0, 3), torch.float32)])]
    assert [7, 9] == first.receive([((2,), torch.int64)])[0].tolist()


@pytest.mark.parametrize("cut_at", [0, 3, HEADER.size, HEADER.size + 5])
def test_a_stage_before_that_goes_is_named_after_what_it_sent(open_ends: ExitStack, cut_at: int) -> None:
    stage, before, _ = one_stage(open_ends)
    before.sendall(HEADER.pack(1, 8) + bytes(8) + (HEADER.pack(2, 8) + bytes(8))[:cut_at])
    before.close()
    assert [0] == stage.receive([((1,), torch.int64)])[0].tolist()
    for _ in range(2):  # whoever asks again hears the same
        with pytest.raises(PeerLost, match="pipeline stage before this one: the connection ended"):
            stage.receive([((1,), torch.int64)])


def test_a_stage_behind_that_goes_is_named(open_ends: ExitStack) -> None:
    stage, _, behind = one_stage(open_ends)
    behind.close()

    def is_refused() -> bool:
        try:
            stage.send([torch.zeros(1)])
        except PeerLost as error:
            return "lost contact with the pipeline stage behind this one" in str(error)
        return False

    assert eventually(is_refused)


def test_silence_is_noticed(open_ends: ExitStack) -> None:
    stage, before, _ = one_stage(open_ends, SHORT)
    before.sendall(HEADER.pack(1, 8) + bytes(7))  # a message that never ends is none
    with pytest.raises(PeerLost, match=r"before this one sent nothing for 0\.2 s"):
        stage.receive([((1,), torch.int64)])


@pytest.mark.parametrize(("number", "num_bytes"), [(1, 9), (1, 0), (2, 8), (0, 8)])
def test_a_message_out_of_step_is_refused(open_ends: ExitStack, number: int, num_bytes: int) -> None:
    stage, before, _ = one_stage(open_ends)
    before.sendall(HEADER.pack(number, num_bytes) + bytes(num_bytes))
    with pytest.raises(RuntimeError, match=f"message {number} has {num_bytes} bytes, where 8 of message 1 were due"):
        stage.receive([((1,), torch.int64)])


def test_a_message_that_no_memory_holds_is_a_loss(open_ends: ExitStack) -> None:
    stage, before, _ = one_stage(open_ends)
    before.sendall(HEADER.pack(1, 2**64 - 1))
    with pytest.raises(PeerLost, match=f"before this one: it announced a message of {2**64 - 1} bytes"):
        stage.receive([((1,), torch.int64)])


def test_closing_ends_a_blocked_writer_and_gives_descriptors_back() -> None:
    at_first = descriptors()
    with ExitStack() as ends:
        stage, before, behind = one_stage(ends)
        stage.send([torch.zeros(1 << 22)])  # more than a socket holds
        assert HEADER.size == len(behind.recv(HEADER.size, socket.MSG_WAITALL))  # it writes
        stage.close()
        assert b"" == before.recv(1)
        with suppress(ConnectionResetError):
            while behind.recv(1 << 20):
                pass
    assert eventually(lambda: not threads())
    assert at_first == descriptors()


# --------------------------------------------------------------------------------------------------------- greetings


def meeting(folder: Path, count: int) -> list[str]:
    return [f"{folder}/stage-{index}.sock" for index in range(count)]


@pytest.mark.parametrize("count", [2, 3])
def test_neighbours_meet_and_leave_no_sockets(folder: Path, count: int) -> None:
    at_first, paths, rings = descriptors(), meeting(folder, count), dict[int, StageConnections]()
    joining = [
        threading.Thread(target=lambda n=n: rings.update({n: connect_stages(n, paths, PATIENCE)}))  # type: ignore[misc]
        for n in range(count)
    ]
    for thread in joining:
        thread.start()
    for thread in joining:
        thread.join()
    assert [] == list(folder.iterdir())
    for index, one in rings.items():
        one.send([torch.tensor([index])])
    assert all((n - 1) % count == one.receive([((1,), torch.int64)])[0].item() for n, one in rings.items())
    for one in rings.values():
        one.close()
    assert eventually(lambda: not threads())
    assert at_first == descriptors()


def test_neighbours_that_never_come_are_named(folder: Path) -> None:
    at_first = descriptors()
    with pytest.raises(PeerLost, match=r"pipeline stage 2 does not answer: .*No such file"):
        connect_stages(1, meeting(folder, 3), SHORT)
    assert [] == list(folder.iterdir())
    assert at_first == descriptors()


def test_strangers_are_not_let_in(folder: Path) -> None:
    hellos = [HELLO.pack(b"somebody", 0, 3), HELLO.pack(MAGIC, 2, 3), HELLO.pack(MAGIC, 0, 2), MAGIC]
    paths, at_first, refused = meeting(folder, 3), descriptors(), list[bytes]()
    with socket.socket(socket.AF_UNIX) as behind:
        behind.bind(paths[2])
        behind.listen()

        def welcome() -> None:
            end, _ = behind.accept()
            with end:
                end.recv(HELLO.size)
                end.sendall(MAGIC)
                end.recv(len(MAGIC))

        def pretend() -> None:
            for hello in hellos:
                with socket.socket(socket.AF_UNIX) as stranger:
                    reach(stranger, paths[1])
                    stranger.sendall(hello)
                    stranger.shutdown(socket.SHUT_WR)
                    assert b"" == stranger.recv(len(MAGIC))
                refused.append(hello)

        others = [threading.Thread(target=target) for target in (welcome, pretend)]
        for thread in others:
            thread.start()
        with pytest.raises(PeerLost, match="pipeline stage 0 did not come within 2 s"):
            connect_stages(1, paths, SOME)
        for thread in others:
            thread.join()
    assert hellos == refused
    assert at_first == descriptors()


@pytest.mark.parametrize("is_closed", [True, False])
def test_a_connection_that_was_given_up_is_not_the_neighbour(
    folder: Path, monkeypatch: pytest.MonkeyPatch, is_closed: bool
) -> None:
    """A link may deliver it late: the stage before has dialled again, and would find nobody.

    Nor is one waited for whose end never comes, since its node is without power.
    """
    monkeypatch.setattr(pipeline, "HELLO_S", 0.5)
    paths, ends = meeting(folder, 2), ExitStack()
    given_up, met = threading.Event(), threading.Event()

    def give_up() -> None:
        with socket.socket(socket.AF_UNIX) as late:
            reach(late, paths[1])
            late.sendall(HELLO.pack(MAGIC, 0, 2))
            given_up.set()
            if is_closed:
                time.sleep(0.3)  # in which it is still open between the links, and nobody reads it
            else:
                met.wait(PATIENCE)

    def come() -> None:
        ends.callback(connect_stages(1, paths, PATIENCE).close)

    coming, giving_up = threading.Thread(target=come), threading.Thread(target=give_up)
    giving_up.start()
    coming.start()
    assert given_up.wait(PATIENCE)
    ends.callback(connect_stages(0, paths, PATIENCE).close)
    coming.join()
    assert not met.is_set()
    met.set()
    giving_up.join()
    ends.close()


def test_what_answers_as_no_stage_is_none(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pipeline, "POLL_S", SHORT)
    paths = meeting(folder, 3)
    with socket.socket(socket.AF_UNIX) as behind:
        behind.bind(paths[2])
        behind.listen()

        def answer() -> None:
            with suppress(OSError):  # once it is shut down
                while True:
                    end, _ = behind.accept()
                    with end:
                        end.recv(HELLO.size)
                        end.sendall(b"sshd 1.0")

        answering = threading.Thread(target=answer)
        answering.start()
        try:
            with pytest.raises(PeerLost, match="stage 2 does not answer: the listener is not a pipeline stage"):
                connect_stages(1, paths, SHORT)
        finally:
            behind.shutdown(socket.SHUT_RDWR)
            answering.join()


def test_a_stage_that_gives_up_sends_those_away_that_came(folder: Path) -> None:
    paths, came = meeting(folder, 3), list[bytes]()

    def come() -> None:
        with socket.socket(socket.AF_UNIX) as end:
            reach(end, paths[1])
            end.settimeout(PATIENCE)
            end.sendall(HELLO.pack(MAGIC, 0, 3))
            came.append(end.recv(len(MAGIC)))
            end.sendall(MAGIC)
            came.append(end.recv(1))

    coming = threading.Thread(target=come)
    coming.start()
    with pytest.raises(PeerLost, match="pipeline stage 2 does not answer") as found:
        connect_stages(1, paths, SOME)
    coming.join()
    assert [MAGIC, b""] == came
    assert found.tb is not None  # what the error's frames hold has not been collected


def test_a_device_that_fails_while_a_message_is_waited_for_is_a_loss(open_ends: ExitStack) -> None:
    class Failed:
        def synchronize(self) -> None:
            raise RuntimeError("the device failed")

    stage, before, behind = one_stage(open_ends)
    stage.send([torch.zeros(1)], Failed())  # type: ignore[arg-type]
    for neighbour in (before, behind):
        neighbour.settimeout(PATIENCE)
        assert neighbour.recv(1) == b""  # both notice at once
    with pytest.raises(PeerLost, match="the device failed"):
        stage.receive([((1,), torch.float32)])
    with pytest.raises(PeerLost, match="the device failed"):
        stage.send([torch.zeros(1)])


def test_the_thread_that_waits_for_a_device_has_made_it_current(open_ends: ExitStack) -> None:
    """CUDA keeps a current device for each thread, and would otherwise open the first GPU."""
    said: list[tuple[str, str]] = []

    class Ready:
        def synchronize(self) -> None:
            said.append(("waits", threading.current_thread().name))

    (before, incoming), (outgoing, behind) = socket.socketpair(), socket.socketpair()
    for end in (before, behind):
        open_ends.enter_context(end)
    stage = StageConnections(
        incoming, outgoing, PATIENCE, lambda: said.append(("current", threading.current_thread().name))
    )
    open_ends.callback(stage.close)
    stage.send([torch.zeros(1)], Ready())  # type: ignore[arg-type]
    assert eventually(lambda: len(said) == 2)
    assert said == [("current", "stage-send"), ("waits", "stage-send")]
