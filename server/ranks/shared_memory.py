"""What ranks on CPUs exchange, through memory that all of them see: where they are processes of one machine.

Through gloo's sockets a sum of two ranks takes half a millisecond and more, and a decode step has two for each layer.
The memory has no name: rank 0 makes it, and the others open it as a descriptor of rank 0's process. How they meet in it
is said in `backends/cpu/ranks.cpp`. Left out: what has no kernel there, which goes through gloo as before.
"""

from __future__ import annotations

import ctypes
import logging
import mmap
import os
import secrets
from collections.abc import Callable, Mapping
from dataclasses import replace
from datetime import timedelta
from typing import Protocol

import torch
from torch import Tensor

from host.cgroups import cpu_quota
from host.topology import allowed_cpus
from server.ranks.collectives import LOAD_TIMEOUT, PeerLost, Shard
from server.ranks.host_sums import Collectives, Operation

log = logging.getLogger(__name__)

BUFFER_BYTES = 1 << 18  # of which each rank has two
PLACE_BYTES = 128  # `Place` of ranks.cpp
TOKEN_BYTES = 16  # behind the buffers: by these the others know the memory
PAUSES = 4000  # some 60 microseconds, in which a rank with a core of its own looks out for the others

Function = Callable[..., None]
Functions = Mapping[torch.dtype, Function]


class RankKernels(Protocol):
    """The compiled functions; their parameters are those of ranks.cpp."""

    @property
    def sum_ranks(self) -> Functions: ...

    @property
    def largest_of_ranks(self) -> Functions: ...

    @property
    def gather_ranks(self) -> Function: ...

    @property
    def broadcast_ranks(self) -> Function: ...


class _Meeting(ctypes.Structure):
    """`Meeting` of ranks.cpp."""

    _fields_ = (
        *((name, ctypes.c_long) for name in ("rank", "world")),
        ("memory", ctypes.c_void_p),
        ("size", ctypes.c_long),
        ("alive", ctypes.c_void_p),
        *((name, ctypes.c_long) for name in ("pauses", "patience", "step", "problem")),
    )


class SharedMemory:
    """`Collectives` of tensors on CPUs. others: for what has no kernel.

    memory: a mapping of `memory_bytes`, zeros at first; alive: for each rank a descriptor that can be read once it has
    ended, -1 for this one; pauses: how long it looks out before it sleeps.
    """

    def __init__(
        self, others: Collectives, kernels: RankKernels, rank: int, memory: mmap.mmap, alive: list[int], pauses: int
    ):
        self._others = others
        self._kernels = kernels
        self._memory = memory
        self._alive = (ctypes.c_int * len(alive))(*alive)
        address = ctypes.addressof(ctypes.c_char.from_buffer(memory))
        self._meeting = _Meeting(
            rank=rank,
            world=len(alive),
            memory=address,
            size=BUFFER_BYTES,
            alive=ctypes.addressof(self._alive),
            pauses=pauses,
        )
        self._at = ctypes.addressof(self._meeting)
        self._reductions = {"sum": kernels.sum_ranks, "max": kernels.largest_of_ranks, "min": {}}
        self._set_patience(LOAD_TIMEOUT)

    def all_reduce(self, tensor: Tensor, operation: Operation) -> None:
        function = self._reductions[operation].get(tensor.dtype)
        if function is None:
            return self._others.all_reduce(tensor, operation)
        whole = tensor.contiguous()
        function(self._at, whole.data_ptr(), whole.numel())
        self._raise_problem()
        _put(whole, tensor)

    def all_gather(self, gathered: Tensor, tensor: Tensor) -> None:
        own = tensor.contiguous()
        pointers = (ctypes.c_void_p * len(gathered))(*(part.data_ptr() for part in gathered))
        self._kernels.gather_ranks(self._at, own.data_ptr(), ctypes.addressof(pointers), own.nbytes)
        self._raise_problem()

    def broadcast(self, tensor: Tensor) -> None:
        whole = tensor.contiguous()
        self._kernels.broadcast_ranks(self._at, whole.data_ptr(), whole.nbytes)
        self._raise_problem()
        _put(whole, tensor)

    def barrier(self) -> None:
        self._kernels.gather_ranks(self._at, None, None, 0)
        self._raise_problem()

    def check(self) -> None:
        self._others.check()

    def wait_at_most(self, timeout: timedelta) -> None:
        self._others.wait_at_most(timeout)
        self._set_patience(timeout)

    def _set_patience(self, timeout: timedelta) -> None:
        self._meeting.patience = int(timeout.total_seconds() * 1e9)

    def _raise_problem(self) -> None:
        problem = self._meeting.problem
        if problem > 0:
            raise PeerLost(f"lost contact with another rank: rank {problem - 1} has ended")
        if problem:
            raise PeerLost(f"lost contact with another rank: timed out after {self._meeting.patience / 1e9:g} s")


def _put(whole: Tensor, tensor: Tensor) -> None:
    if whole is not tensor:
        tensor.copy_(whole)


def join(shard: Shard, kernels: RankKernels | None, device: torch.device) -> Shard:
    """The same rank, of those that speak through shared memory where all of them can; each has to call this.

    device: the host.
    """
    if shard.world_size == 1:
        return shard
    shared, problem = _join(shard, kernels, device)
    if shared is None:
        log.info("All sums over the ranks go through gloo, none through shared memory: %s", problem)
        return shard
    log.info("Sums over the ranks go through shared memory")
    return replace(shard, collectives=shared)


def memory_bytes(world_size: int) -> int:
    """Of the whole memory, without the token behind it."""
    return world_size * (PLACE_BYTES + 2 * BUFFER_BYTES)


def _join(shard: Shard, kernels: RankKernels | None, device: torch.device) -> tuple[SharedMemory | None, str | None]:
    """What the ranks share; or nothing, and the problem of the first rank that has one."""
    problem = shard.first_problem(_what_is_missing(kernels), device)
    if problem or kernels is None:
        return None, problem
    memory, problem = _open_together(shard, device)
    if memory is None:
        return None, problem
    alive, problem = _watch(shard)
    problem = shard.first_problem(problem, device)
    if problem:
        for descriptor in alive:
            _close(descriptor)
        memory.close()
        return None, problem
    pauses = PAUSES if has_core_for_each(shard.sharing, len(allowed_cpus()), cpu_quota()) else 0
    return SharedMemory(shard.collectives, kernels, shard.rank, memory, alive, pauses), None


def has_core_for_each(ranks: int, cpus: int, quota: float | None) -> bool:
    """Whether who looks out takes no time from who is waited for. quota: CPUs that a cgroup leaves to all ranks."""
    return ranks <= (cpus if quota is None else min(cpus, quota))


def _what_is_missing(kernels: RankKernels | None) -> str | None:
    """Why this rank cannot, as far as it shows beforehand."""
    if kernels is None:
        return "there are no compiled kernels"
    wanted = ("memfd_create", "pidfd_open")  # which a Python that was built for an older system lacks
    return next((f"this Python has no os.{name}" for name in wanted if not hasattr(os, name)), None)


def _open_together(shard: Shard, device: torch.device) -> tuple[mmap.mmap | None, str | None]:
    """The memory, in every rank; or in none, and why."""
    size, made, place = memory_bytes(shard.world_size) + TOKEN_BYTES, -1, torch.zeros(2 + TOKEN_BYTES).long()
    memory, problem = None, None
    try:
        if shard.rank == 0:
            try:
                token = secrets.token_bytes(TOKEN_BYTES)
                made = os.memfd_create("lockstep-ranks", os.MFD_CLOEXEC)
                os.ftruncate(made, size)
                memory = mmap.mmap(made, size)
                memory[-TOKEN_BYTES:] = token
                place = torch.tensor([os.getpid(), made, *token])
            except OSError as error:
                problem = f"shared memory cannot be made: {error.strerror}"
        pid, descriptor, *token_bytes = shard.broadcast(place).tolist()
        if shard.rank and pid:
            memory, problem = _open(pid, descriptor, size, bytes(token_bytes))
        problem = shard.first_problem(problem, device)  # all have opened it, or not
    finally:
        _close(made)
    if problem and memory is not None:
        memory.close()
    return (None, problem) if problem else (memory, None)


def _open(pid: int, descriptor: int, size: int, token: bytes) -> tuple[mmap.mmap | None, str | None]:
    """Rank 0's memory, by its process; or why it is not to be had."""
    try:
        file = os.open(f"/proc/{pid}/fd/{descriptor}", os.O_RDWR | os.O_CLOEXEC)
        try:
            memory = mmap.mmap(file, size) if os.fstat(file).st_size == size else None
        finally:
            os.close(file)
    except (OSError, ValueError) as error:  # of a process that is on another machine, or that may not be looked at
        return None, f"rank 0's memory cannot be opened: {error}"
    if memory is None or memory[-TOKEN_BYTES:] != token:
        return None, "rank 0 is on another machine"
    return memory, None


def _watch(shard: Shard) -> tuple[list[int], str | None]:
    """A descriptor of each rank's process, -1 of this one's; those that were opened, and why one was not."""
    pids = torch.cat(shard.all_gather(torch.tensor([os.getpid()]))).tolist()
    alive: list[int] = []
    try:
        for rank, pid in enumerate(pids):
            alive.append(-1 if rank == shard.rank else os.pidfd_open(pid))
    except OSError as error:
        return alive, f"another rank's process cannot be watched: {error.strerror}"
    return alive, None


def _close(descriptor: int) -> None:
    if descriptor >= 0:
        os.close(descriptor)
