"""Pipeline stages within a step: what each takes from the stage before it and hands on to the next, and how it travels.

A later stage takes up what the one before hands on. The last one samples, and sends the tokens to the first, which
needs them for the sequences' next steps and for nothing else: so it waits for them only then, and meanwhile computes
steps of other sequences. All stages take the same steps in the same order, so that each knows what comes next on each
connection, how long it is, and whose tokens they are.

Messages are runs of bytes, over a socket for each pair of neighbours. A thread of each end reads ahead and another one
writes, so that a stage computes while its activations travel. Only the first rank of a stage takes part; it passes on
what came to the others of its stage. Sockets are unix sockets in the launch's private folder; where the next stage is
on another node, a link listens there and carries the bytes (`server/link/`).

Left out: NCCL between stages. Activations are small beside weights, and this way an untrusted network can carry them.

Shapes: T tokens in the step, E of prompts that an encoder reads, D model width, R sequences that get a token.
"""

from __future__ import annotations

import os
import queue
import socket
import struct
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from datetime import timedelta
from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor

from server.arch.stages import Stage
from server.backends.device import Device, Event
from server.ranks.collectives import COLLECTIVE_TIMEOUT, LOAD_TIMEOUT, PeerLost, Shard
from server.stepping.batch import Carried, Tables
from server.stepping.sequences import TokenRun

HEADER = struct.Struct("<QQ")  # the message's number, and its bytes
HELLO = struct.Struct("<8sII")  # of the dialling side: `MAGIC`, its stage, and how many there are
MAGIC = b"lockstep"
POLL_S = 0.05
PATIENCE_S = COLLECTIVE_TIMEOUT.total_seconds()
HELLO_S = 5.0  # for a neighbour that was dialled to answer: it may not listen yet, while a link between does


class Neighbours(Protocol):
    """The stages before and behind this one."""

    stage: Stage
    width: int  # D, of what stages hand on; 0: nothing
    dtype: torch.dtype  # likewise

    def take_tokens(self, runs: Sequence[TokenRun], tables: Tables) -> None:
        """Have the latest tokens of these sequences in the tables. Raises PeerLost.

        Those of drafts, which bring their tokens, are taken so that nothing that came waits for ever.
        """

    def carried(self, tokens: int, encoded: int = 0) -> Carried | None:
        """What the stage before hands on of so many tokens; None in the first stage. Raises PeerLost.

        encoded: tokens of the prompts that an encoder reads in the step.
        """

    def hand_on(self, carried: Carried, sampled: Sequence[TokenRun], rows: Tensor) -> None:
        """Give the next stage what this one made; the last one chooses the tokens of `sampled`, in `rows` [R]."""

    def give_tokens(self, token_ids: Tensor) -> None:
        """Tell the first stage the tokens [R] that this one, the last, has chosen."""

    def minimum(self, value: int) -> int:
        """The smallest `value` of all ranks of all stages, between steps, when no sequence goes on. Raises PeerLost.

        The first rank of each stage has the smallest of its stage.
        """

    def wait_at_most(self, timeout: timedelta) -> None:
        """From here on wait so long for what the stage before sends."""

    def close(self) -> None:
        """Let go of the neighbours."""


class NoNeighbours:
    """The neighbours of a model that is not cut. See `Neighbours`."""

    stage = Stage.whole(0)
    width = 0
    dtype = torch.float32

    def take_tokens(self, runs: Sequence[TokenRun], tables: Tables) -> None:
        """They are there."""

    def carried(self, tokens: int, encoded: int = 0) -> Carried | None:
        """There is no stage before."""
        return None

    def hand_on(self, carried: Carried, sampled: Sequence[TokenRun], rows: Tensor) -> None:
        """There is no next stage."""
        raise AssertionError("a model that is not cut is its own last stage")

    def give_tokens(self, token_ids: Tensor) -> None:
        """NoNeighbours else needs them."""

    def minimum(self, value: int) -> int:
        """That of the only stage."""
        return value

    def wait_at_most(self, timeout: timedelta) -> None:
        """Nobody is waited for."""

    def close(self) -> None:
        """There are none."""


class StageNeighbours:
    """The `Neighbours` of one rank of a stage. connections: of the stage's first rank, which passes on what comes."""

    def __init__(
        self,
        stage: Stage,
        shard: Shard,
        connections: StageConnections | None,
        device: Device,
        dtype: torch.dtype,
        width: int,
    ) -> None:
        assert (connections is not None) == (shard.rank == 0)
        self.stage = stage
        self._shard = shard
        self._connections = connections
        self._device = device
        self.dtype = dtype
        self.width = width
        self._due: deque[tuple[frozenset[int], Tensor]] = deque()  # tokens that will come: sequences, and their rows

    def take_tokens(self, runs: Sequence[TokenRun], tables: Tables) -> None:
        wanted = {run.sequence.id for run in runs}
        last = max((n for n, (ids, _) in enumerate(self._due, 1) if not wanted.isdisjoint(ids)), default=0)
        for _ in range(last):
            _, rows = self._due.popleft()
            [token_ids] = self._receive([((len(rows),), torch.int64)])
            tables.keep(rows, token_ids)

    def carried(self, tokens: int, encoded: int = 0) -> Carried | None:
        if self.stage.is_first:
            return None
        counts = [tokens, encoded] if encoded else [tokens]
        return Carried(*self._receive([((count, self.width), self.dtype) for count in counts]))

    def hand_on(self, carried: Carried, sampled: Sequence[TokenRun], rows: Tensor) -> None:
        self._send([carried.hidden] if carried.encoded is None else [carried.hidden, carried.encoded])
        if self.stage.is_first and sampled:
            self._due.append((frozenset(run.sequence.id for run in sampled), rows.clone()))

    def give_tokens(self, token_ids: Tensor) -> None:
        self._send([token_ids])

    def minimum(self, value: int) -> int:
        while self._due:  # of sequences that are forgotten
            _, rows = self._due.popleft()
            self._receive([((len(rows),), torch.int64)])
        if self._connections is not None:
            for _ in range(self.stage.count - 1):  # what the farthest stage has comes last
                self._connections.send([torch.tensor([value])])
                [message] = self._connections.receive([((1,), torch.int64)])
                value = min(value, *message.tolist())
        return self._shard.minimum(value, self._device.torch_device)

    def wait_at_most(self, timeout: timedelta) -> None:
        if self._connections is not None:
            self._connections.patience = timeout.total_seconds()

    def close(self) -> None:
        if self._connections is not None:
            self._connections.close()

    def _send(self, tensors: Sequence[Tensor]) -> None:
        if self._connections is not None:
            copies = [self._device.download(tensor) for tensor in tensors]
            self._connections.send(copies, self._device.event())

    def _receive(self, parts: Sequence[tuple[tuple[int, ...], torch.dtype]]) -> list[Tensor]:
        """The next message, on the device of every rank of this stage."""
        if self._connections is not None:
            tensors = [self._device.upload_tensor(tensor) for tensor in self._connections.receive(parts)]
        else:
            device = self._device.torch_device
            tensors = [torch.empty(shape, dtype=dtype, device=device) for shape, dtype in parts]
        for tensor in tensors:
            self._shard.broadcast(tensor)
        return tensors


class StageConnections:
    """One stage's connections to its neighbours. Raises PeerLost in `receive` and `send` once a neighbour is gone.

    patience: seconds that `receive` waits; until all are warm one stage may load from a slower disk, or capture more.
    activate: `Device.activate`, for the thread that waits for what the device computes. What fails in a thread ends
    both connections, so that this stage and its neighbours notice at once.
    """

    def __init__(
        self,
        incoming: socket.socket,
        outgoing: socket.socket,
        patience: float = LOAD_TIMEOUT.total_seconds(),
        activate: Callable[[], None] | None = None,
    ) -> None:
        self.patience = patience
        self._sockets = (incoming, outgoing)
        self._activate = activate
        self._num_sent = self._num_received = 0
        self._outbox: queue.SimpleQueue[tuple[Sequence[Tensor], Event | None] | None] = queue.SimpleQueue()
        self._inbox: queue.SimpleQueue[tuple[int, bytearray] | OSError] = queue.SimpleQueue()
        self._loss: OSError | None = None
        for target, name in ((self._write, "stage-send"), (self._read, "stage-receive")):
            threading.Thread(target=target, name=name, daemon=True).start()

    def send(self, tensors: Sequence[Tensor], ready: Event | None = None) -> None:
        """Have a message sent, of tensors on the host that are not changed any more. ready: when they hold it all."""
        if self._loss is not None:
            raise _lost("behind", self._loss)
        self._outbox.put((tensors, ready))

    def receive(self, parts: Sequence[tuple[tuple[int, ...], torch.dtype]]) -> list[Tensor]:
        """The tensors of the next message, of these shapes and dtypes, on the host. Waits for it."""
        try:
            message = self._inbox.get(timeout=self.patience)
        except queue.Empty:
            raise PeerLost(f"the pipeline stage before this one sent nothing for {self.patience:g} s") from None
        if isinstance(message, OSError):
            self._inbox.put(message)  # for the next call
            raise _lost("before", message) if self._loss is None else _lost("behind", self._loss)
        number, data = message
        self._num_received += 1
        sizes = [_num_bytes(shape, dtype) for shape, dtype in parts]
        if (number, len(data)) != (self._num_received, sum(sizes)):
            raise RuntimeError(
                f"pipeline stages are out of step: message {number} has {len(data)} bytes, where {sum(sizes)} of "
                f"message {self._num_received} were due"
            )
        pieces = torch.frombuffer(data, dtype=torch.uint8).split(sizes) if data else [torch.empty(0, dtype=torch.uint8)]
        return [piece.view(dtype).view(shape) for piece, (shape, dtype) in zip(pieces, parts, strict=True)]

    def close(self) -> None:
        """End both connections; the neighbours notice."""
        self._outbox.put(None)
        self._hang_up()
        for end in self._sockets:
            end.close()

    def _hang_up(self) -> None:
        for end in self._sockets:
            with suppress(OSError):  # of one that is closed or has lost its neighbour
                end.shutdown(socket.SHUT_RDWR)

    def _write(self) -> None:
        try:
            if self._activate is not None:
                self._activate()
            while (message := self._outbox.get()) is not None:
                tensors, ready = message
                if ready is not None:
                    ready.synchronize()
                self._num_sent += 1
                parts = [tensor.contiguous().view(torch.uint8).flatten().numpy().data for tensor in tensors]
                self._sockets[1].sendall(HEADER.pack(self._num_sent, sum(map(len, parts))))
                for part in parts:
                    self._sockets[1].sendall(part)
        except OSError as error:
            self._loss = error
        except RuntimeError as error:  # of the device, while its tensors were waited for
            self._loss = OSError(str(error))
        finally:
            self._hang_up()

    def _read(self) -> None:
        try:
            while True:
                number, num_bytes = HEADER.unpack(_exactly(self._sockets[0], HEADER.size))
                self._inbox.put((number, _exactly(self._sockets[0], num_bytes)))
        except (MemoryError, OverflowError):
            self._inbox.put(OSError(f"it announced a message of {num_bytes} bytes"))
        except OSError as error:
            self._inbox.put(error)
        finally:
            self._hang_up()


def connect_stages(
    index: int, paths: Sequence[str], patience: float = PATIENCE_S, activate: Callable[[], None] | None = None
) -> StageConnections:
    """Meet the neighbours of stage `index`. Raises PeerLost for one that never comes.

    paths: where each stage listens. patience: seconds to wait for them. activate: see `StageConnections`. The stage's
    own socket is there for its owner alone, and only until its neighbour has come.
    """
    until = time.monotonic() + patience
    path = paths[index]
    Path(path).unlink(missing_ok=True)
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(path)
        os.chmod(path, 0o600)
        listener.listen()
        came: list[socket.socket] = []
        before = (index - 1) % len(paths)
        accepting = threading.Thread(target=_accept, args=(listener, before, len(paths), until, came), daemon=True)
        accepting.start()
        outgoing: socket.socket | None = None
        try:
            outgoing = _dial(paths[(index + 1) % len(paths)], index, len(paths), until)
        finally:
            accepting.join(max(0.0, until - time.monotonic()) + HELLO_S)
            Path(path).unlink(missing_ok=True)
            if outgoing is None and came:
                came[0].close()  # the stage before notices at once
    if not came:
        outgoing.close()
        raise PeerLost(f"pipeline stage {before} did not come within {patience:g} s")
    return StageConnections(came[0], outgoing, activate=activate)


def _accept(listener: socket.socket, before: int, count: int, until: float, came: list[socket.socket]) -> None:
    """Let the stage before in, once it has answered: a link may bring a connection that it has given up meanwhile."""
    while not came and (left := until - time.monotonic()) > 0:
        listener.settimeout(left)
        with suppress(OSError):
            end, _ = listener.accept()
            end.settimeout(HELLO_S)
            try:
                if bytes(_exactly(end, HELLO.size)) == HELLO.pack(MAGIC, before, count):
                    end.sendall(MAGIC)
                    end.settimeout(min(max(until - time.monotonic(), POLL_S), 2 * HELLO_S))
                    if bytes(_exactly(end, len(MAGIC))) == MAGIC:
                        end.settimeout(None)
                        came.append(end)
            finally:
                if not came:
                    end.close()


def _dial(path: str, index: int, count: int, until: float) -> socket.socket:
    """A connection to the next stage, once it answers. Raises PeerLost."""
    while True:
        end = socket.socket(socket.AF_UNIX)
        end.settimeout(HELLO_S)
        try:
            end.connect(path)
            end.sendall(HELLO.pack(MAGIC, index, count))
            if bytes(_exactly(end, len(MAGIC))) == MAGIC:
                end.sendall(MAGIC)  # that this side is still there: a link may deliver what it had given up
                end.settimeout(None)
                return end
            problem = OSError("the listener is not a pipeline stage")
        except OSError as error:
            problem = error
        end.close()
        if time.monotonic() > until:
            raise PeerLost(f"pipeline stage {(index + 1) % count} does not answer: {problem}")
        time.sleep(POLL_S)


def _exactly(end: socket.socket, num_bytes: int) -> bytearray:
    """So many bytes. Raises ConnectionError where the connection ends before."""
    data = bytearray(num_bytes)
    view, filled = memoryview(data), 0
    while filled < num_bytes:
        count = end.recv_into(view[filled:])
        if not count:
            raise ConnectionResetError("the connection ended")
        filled += count
    return data


def _num_bytes(shape: Sequence[int], dtype: torch.dtype) -> int:
    return torch.Size(shape).numel() * dtype.itemsize


def _lost(where: str, error: OSError) -> PeerLost:
    return PeerLost(f"lost contact with the pipeline stage {where} this one: {error}")
