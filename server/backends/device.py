"""What a device is to its host. Each backend has a device (`protocol.py`).

A `Device` gives memory, events and copies. Beside it stand the means that all devices share: slots of the host's memory
for copies of KV blocks, memory of large pages, the exceptions that mean a lost device, and torch's profiler.

A slot holds one block: the keys and values of its tokens in all layers, in the bytes in which the cache stores them,
one part behind the other. The backend says where a block's bytes lie in a layer's cache (`Backend.block_parts`). The
router decides which block goes where, and the disk behind the host is `server/prefix/`.

Left out: running out of memory, for which torch has an exception of its own, and ranks that went away
(`server/ranks/collectives.py`).

Shapes: B blocks, E elements of a block in all parts, of which part i has E_i.
"""

from __future__ import annotations

import mmap
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import Any, Protocol

import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.profiler import profile

from server.ranks.host_sums import HostQueue

HOST = torch.device("cpu")  # where files are read
Values = Sequence[Any] | NDArray[Any]  # numbers, in lists of lists where they have more than one dimension


class Device(Protocol):
    """What a host and a device exchange, and how much memory there is."""

    torch_device: torch.device
    name: str  # as people know it
    kind: str  # for sentences: "this GPU"
    measures_memory: bool  # whether its memory is ours alone, so that what a step takes can be measured

    def activate(self) -> None:
        """Make it the device of the calling thread: every thread that computes calls this first."""

    def good_dtypes(self, cpu_kernels: str) -> set[torch.dtype]:
        """The dtypes that the device computes well. cpu_kernels: those for CPUs that are used, as `--cpu-kernels`."""

    def upload(self, values: Values, dtype: torch.dtype = torch.int64) -> Tensor:
        """The values as a tensor of their shape on the device, without waiting for what the device is computing."""

    def upload_tensor(self, tensor: Tensor) -> Tensor:
        """Likewise a host's tensor; itself where the device is the host."""

    def stage(self, tensor: Tensor) -> Tensor:
        """A host's tensor in memory that `bring` reads; itself where the device is the host. One thread calls this."""

    def bring(self, staged: Tensor) -> Tensor:
        """What `stage` gave as a tensor on the device, without waiting for what the device is computing.

        Where the device is the host it is the very same.
        """

    def download(self, tensor: Tensor) -> Tensor:
        """A copy on the host, complete once an `event` that is made afterwards has been reached."""

    def event(self) -> Event | None:
        """The end of all work so far; None where a call returns only when its work is done."""

    def empty_kv(self, size: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """Zeros for a KV cache."""

    def host_copies(self, parts: Sequence[Tensor], slots: int) -> HostCopies:
        """Room on the host for copies of so many blocks. parts: [B, n] each, which together hold a KV cache."""

    def slot(self, num_bytes: int) -> Tensor:
        """Memory of the device [N] uint8, of whole pages and aligned to them, for weights that come and go."""

    def link(self) -> Link | None:
        """What brings weights from the host; None where the host's memory is the device's."""

    def host_queue(self) -> HostQueue | None:
        """Functions of the host in the order of the device's work; None where a call returns when its work is done."""

    def free_bytes(self, *, fraction: float, world_size: int) -> int:
        """Memory that this rank may still take. fraction: share of a GPU's memory that we may use."""

    def left_bytes(self, *, fraction: float, world_size: int, kv_bytes: int) -> int:
        """Memory that this rank has left when its KV cache of `kv_bytes` is full."""

    def peak_bytes(self, step: Callable[[], object]) -> int:
        """Run `step`: what it needs beside what is allocated now; 0 where memory is not measured."""

    def clocks(self, action: Callable[[], object]) -> str:
        """Run `action`: the device's clocks and power meanwhile, for people; empty where they are not known."""

    def taken_bytes(self, action: Callable[[], object]) -> int:
        """Run `action`: by how much it lessens the free memory; 0 where memory is not measured."""

    def profiled(self) -> tuple[list[Any], str]:
        """What torch's profiler records (its activities), and which attribute of an operator's record is its time."""


class Event(Protocol):
    """A moment in a device's work."""

    def query(self) -> bool:
        """Whether the device has reached it."""

    def synchronize(self) -> None:
        """Wait until the device has reached it."""

    def elapsed_time(self, end: Any) -> float:
        """Milliseconds from here to another event, both of which the device has reached."""


class Link(Protocol):
    """Copies between the host and a device, beside what that computes."""

    def pinned(self, num_bytes: int) -> Tensor:
        """Memory of the host [N] uint8 that the device reads by itself."""

    def unpin(self, memory: Tensor) -> None:
        """Give back what `pinned` gave, once all copies from and to it have ended."""

    def copy(self, source: Tensor, target: Tensor, after: Any) -> Event:
        """Begin to copy between pinned memory and the device, either way, once that has reached the event `after`.

        Copies follow each other in the order in which they were begun. Returns the copy's end.
        """

    def order(self, event: Any) -> None:
        """Let what is computed from now on wait for an event."""


class HostCopies(ABC):
    """Slots 0 … num_slots - 1 on the host, and the cache whose blocks they hold copies of.

    parts: [B, E_i] each, views of the cache in one dtype; memory: bytes on the host, enough for all slots.
    """

    def __init__(self, parts: Sequence[Tensor], memory: Tensor, num_slots: int):
        ends = accumulate((part.shape[1] for part in parts), initial=0)
        self.parts = [(part, slice(*columns)) for part, columns in zip(parts, pairwise(ends), strict=True)]
        self.num_slots = num_slots
        self.slots = memory.view(parts[0].dtype).view(num_slots, -1)  # [num_slots, E]
        self.slot_bytes = self.slots[0].nbytes

    @property
    def address(self) -> int:
        """Where slot 0 begins in this process's memory; slot n is `n * slot_bytes` behind it."""
        return self.slots.data_ptr()

    @abstractmethod
    def save(self, blocks: Sequence[int], slots: Sequence[int]) -> None:
        """Copy the content of each block to a slot, behind all that the device has been told to do."""

    @abstractmethod
    def restore(self, slots: Sequence[int], blocks: Sequence[int]) -> None:
        """Copy the content of each slot to a block, before all that the device will be told to do."""

    @abstractmethod
    def close(self) -> None:
        """Let the device forget the host's memory, where it knows of it. Nothing is copied afterwards."""


def bytes_of_slots(parts: Sequence[Tensor], num_slots: int) -> int:
    """Memory that so many slots take."""
    return num_slots * sum(part[0].nbytes for part in parts)


PAGE_BYTES = 2**21


def map_pages(num_bytes: int) -> Tensor:
    """Fresh zeroed memory [N] uint8 of whole large pages, at least `num_bytes`, that starts with one."""
    rounded = -(-num_bytes // PAGE_BYTES) * PAGE_BYTES
    memory = mmap.mmap(-1, rounded + PAGE_BYTES, flags=mmap.MAP_PRIVATE)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        memory.madvise(mmap.MADV_HUGEPAGE)
    tensor = torch.frombuffer(memory, dtype=torch.uint8)
    first = -tensor.data_ptr() % PAGE_BYTES
    return alone(tensor[first : first + rounded])


def alone(tensor: Tensor) -> Tensor:
    """The same memory under a tensor that is no view: a view keeps its base alive, wherever it lies later."""
    return tensor if tensor._base is None else tensor.detach()


class CaptureFailed(RuntimeError):
    """A computation was not captured; the device is in order and computes it all the same."""


class DeviceLost(RuntimeError):
    """Nothing can be computed on the device any more, until a fresh process opens it."""


# What CUDA, HIP and Triton say when the work of a process is lost: from then on every call fails with the same words,
# until the process ends. CUDA's description of each says so; errors of memory, of capture and of single launches, which
# leave the device in order, are not among them.
LOST = (
    "illegal memory access",
    "device-side assert",
    "unspecified launch failure",
    "misaligned address",
    "illegal instruction",
    "hardware stack error",
    "invalid program counter",
    "operation not supported on global/shared address space",
    "uncorrectable ecc error",
    "uncorrectable nvlink error",
    "launch timed out and was terminated",
    "context is destroyed",
)


def lost_device(error: BaseException) -> DeviceLost | None:
    """The error in one sentence if it means that the device is lost, else None."""
    if isinstance(error, DeviceLost):
        return error
    text = str(error)
    if not isinstance(error, RuntimeError) or not any(phrase in text.lower() for phrase in LOST):
        return None
    cause = text.strip().splitlines()[0]
    return DeviceLost(f"the device is lost, and only a fresh start opens it again: {cause}")


@dataclass(frozen=True)
class OperatorTime:
    """One operator's calls and own time, without the operators that it called."""

    name: str
    calls: int
    self_ns: int


class StepProfiler:
    """Records operators between `start` and `stop`, both called on the thread that computes.

    Of a CPU these are operators on that thread, of a GPU its kernels. The profiler lengthens short operators: shares of
    the time matter more than sums.
    """

    def __init__(self, device: Device):
        self._activities, self._time_attribute = device.profiled()
        self._profile: profile | None = None

    def start(self) -> None:
        """Begin anew; what an earlier `start` recorded is dropped."""
        self._close()
        self._profile = profile(activities=self._activities)
        self._profile.start()

    def stop(self, trace_path: str) -> list[OperatorTime]:
        """What was recorded, longest first. Raises ValueError when nothing was started."""
        recorded = self._close()
        if recorded is None:
            raise ValueError("no profile was started: start one before stopping it")
        if trace_path:
            recorded.export_chrome_trace(trace_path)
        times = [
            OperatorTime(e.key, e.count, int(1000 * getattr(e, self._time_attribute))) for e in recorded.key_averages()
        ]
        return sorted((t for t in times if t.self_ns), key=lambda time: -time.self_ns)

    def _close(self) -> profile | None:
        recorded, self._profile = self._profile, None
        if recorded is not None:
            recorded.stop()
        return recorded
