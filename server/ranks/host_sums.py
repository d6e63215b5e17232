"""What ranks on GPUs exchange, through the memory of their host: for ranks that share a GPU, which NCCL refuses.

A collective becomes three pieces of work in the device's order: a copy to the host, a function of the host's that
meets the other ranks there, and a copy back. The host waits for none of them, and a CUDA graph holds them as it holds
kernels (CUDA C++ Programming Guide, "Host Functions"), so that steps are computed and captured as over NCCL. That is
right and slow: each sum costs two copies and a turn of Python. It is for trying tensor parallelism on one GPU.

Left out: what a failed meeting did to the numbers. They are wrong from there on; `check` says so before any token is
read.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import timedelta
from functools import partial
from typing import Literal, Protocol

import torch
from torch import Tensor

# Of the host's memory, through which tensors go in pieces.
STAGED_BYTES = 16 * 2**20
WORD_BYTES = 16  # to which pieces are aligned

Operation = Literal["sum", "max", "min"]


class Collectives(Protocol):
    """What ranks do together, all of them in the same order. Each may raise PeerLost."""

    def all_reduce(self, tensor: Tensor, operation: Operation) -> None:
        """The sum, the largest or the smallest of all ranks' numbers, in place."""

    def all_gather(self, gathered: Tensor, tensor: Tensor) -> None:
        """The ranks' equally shaped tensors, one behind the other, into one that has a dimension more in front."""

    def broadcast(self, tensor: Tensor) -> None:
        """Rank 0's tensor in place of every rank's."""

    def barrier(self) -> None:
        """Wait until every rank is here."""

    def check(self) -> None:
        """Raises what went wrong in collectives that were begun behind the host's back, once they have ended."""

    def wait_at_most(self, timeout: timedelta) -> None:
        """From here on wait so long for other ranks."""


class HostQueue(Protocol):
    """Functions of the host in the order of a device's work."""

    def memory(self, num_bytes: int) -> Tensor:
        """Memory of the host [N] uint8, for as long as the process lives, which the device copies from and to."""

    def call(self, function: Callable[[], None]) -> None:
        """Let it run behind all work that was launched before and before what is launched later; graphs hold it.

        It runs on a thread of its own, raises nothing, and asks nothing of the device. It is kept as long as this is.
        """

    def synchronize(self) -> None:
        """Wait until all of it has been done."""


class HostCollectives:
    """`Collectives` of tensors on a device, done by others for tensors on the host."""

    def __init__(self, others: Collectives, queue: HostQueue, world_size: int, staged_bytes: int = STAGED_BYTES):
        self._others = others
        self._queue = queue
        self._share = staged_bytes // (world_size + 1) // WORD_BYTES * WORD_BYTES  # one to give, and all to take
        self._memory = queue.memory(self._share * (world_size + 1))
        self._calls: dict[tuple[str, torch.dtype, int], Callable[[], None]] = {}
        self._barrier = partial(self._try, others.barrier)
        self._failure: Exception | None = None

    def all_reduce(self, tensor: Tensor, operation: Operation) -> None:
        self._in_place(tensor, operation, lambda staged: self._others.all_reduce(staged, operation))

    def broadcast(self, tensor: Tensor) -> None:
        self._in_place(tensor, "broadcast", self._others.broadcast)

    def all_gather(self, gathered: Tensor, tensor: Tensor) -> None:
        rows, begin = gathered.view(len(gathered), tensor.numel()), 0
        for own in self._pieces(tensor.reshape(-1)):
            given = self._staged(own)
            behind = self._memory[self._share : self._share + len(gathered) * own.nbytes]
            taken = behind.view(own.dtype).view(len(gathered), len(own))
            given.copy_(own, non_blocking=True)
            self._call("gather", own, partial(self._others.all_gather, taken, given))
            rows[:, begin : begin + len(own)].copy_(taken, non_blocking=True)
            begin += len(own)

    def barrier(self) -> None:
        self._queue.call(self._barrier)
        self._queue.synchronize()
        self.check()

    def check(self) -> None:
        if self._failure is not None:
            raise self._failure

    def wait_at_most(self, timeout: timedelta) -> None:
        self._others.wait_at_most(timeout)

    def _in_place(self, tensor: Tensor, name: str, meet: Callable[[Tensor], None]) -> None:
        whole = tensor.contiguous()
        for piece in self._pieces(whole.view(-1)):
            staged = self._staged(piece)
            staged.copy_(piece, non_blocking=True)
            self._call(name, piece, partial(meet, staged))
            piece.copy_(staged, non_blocking=True)
        if whole is not tensor:
            tensor.copy_(whole)

    def _pieces(self, flat: Tensor) -> Sequence[Tensor]:
        return flat.split(self._share // flat.itemsize)

    def _staged(self, piece: Tensor) -> Tensor:
        """Where a piece is on the host: the same for all of its size, as one is behind the other."""
        return self._memory[: piece.nbytes].view(piece.dtype)

    def _call(self, name: str, piece: Tensor, meet: Callable[[], None]) -> None:
        """In the queue: one function for all pieces of a size, since it is kept."""
        key = (name, piece.dtype, len(piece))
        self._queue.call(self._calls.setdefault(key, partial(self._try, meet)))

    def _try(self, meet: Callable[[], None]) -> None:
        """Nothing after the first failure: ranks that meet no more would wait for each other, call after call."""
        if self._failure is not None:
            return
        try:
            with torch.inference_mode():
                meet()
        except Exception as error:  # it would reach no caller
            self._failure = error
