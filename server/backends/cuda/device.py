"""A GPU as a device: it works behind the host's back, in the order in which it was told to.

NVIDIA's; AMD's too, which torch built for ROCm knows by the same names. What computes on each is another question,
which `choose` of this package answers.

A copy from ordinary memory makes the host wait until all earlier work of a GPU is done, and so undoes what it gained by
launching a step while another one is running; from pinned memory it takes its place among that work.
"""

from __future__ import annotations

import ctypes
import mmap
import subprocess
import threading
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.profiler import ProfilerActivity

from server.backends.device import HostCopies, Values, bytes_of_slots, map_pages

# What torch's allocator cannot use of its memory, between pieces that are taken, on top of a step's peak.
FRAGMENTATION = 0.1
# Memory that stays free beside weights, KV cache, graphs and the largest step: kernels that are loaded at their first
# use, workspaces of libraries and NCCL's buffers take it from the driver, where torch's allocator cannot make room.
HEADROOM_BYTES = 2**30
# Blocks that are gathered on the device at once on their way to or from the host; two copies of them are there.
STAGED_BYTES = 32 * 2**20
# Pinned memory for what is staged is taken in such pieces, of which torch's allocator has powers of two alone.
SLAB_BYTES, SLAB_UNIT = 16 * 2**20, 256
# What the driver's tool is asked of a GPU, and the time that it may take.
FIELDS = "clocks.sm,clocks.max.sm,clocks.mem,clocks.max.mem,power.draw,power.limit,temperature.gpu"
SENTENCE = "SM {} of {} MHz, memory {} of {} MHz, {} of {} W, {} C"
ANSWER_S = 5.0
HOST_FUNCTION = ctypes.CFUNCTYPE(None, ctypes.c_void_p)  # CUhostFn


class CudaDevice:
    """See `device.Device`. Not yet run on a GPU."""

    kind = "this GPU"
    measures_memory = True

    def __init__(self, index: int, num_sharing: int = 1):
        """num_sharing: ranks that have this GPU."""
        self.torch_device = torch.device("cuda", index)
        self._num_sharing = num_sharing
        self._slab = torch.empty(0, dtype=torch.uint8)  # what is left of the last one
        self.name = torch.cuda.get_device_name(self.torch_device)

    def activate(self) -> None:
        torch.cuda.set_device(self.torch_device)  # which CUDA keeps for each thread; others launch on the first GPU
        # Parts of a sum that cuBLAS splits are float32 too, as our kernels' are.
        torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = False
        torch.backends.cuda.matmul.allow_fp16_reduced_precision_reduction = False

    def good_dtypes(self, cpu_kernels: str) -> set[torch.dtype]:
        good = {torch.float32, torch.float16}
        if torch.cuda.is_bf16_supported(including_emulation=False):
            good.add(torch.bfloat16)
        return good

    def upload(self, values: Values, dtype: torch.dtype = torch.int64) -> Tensor:
        # Torch refuses to make a pinned tensor of an array at once.
        return self.upload_tensor(torch.tensor(values, dtype=dtype))

    def upload_tensor(self, tensor: Tensor) -> Tensor:
        return tensor.pin_memory().to(self.torch_device, non_blocking=True)

    def stage(self, tensor: Tensor) -> Tensor:
        self.activate()  # the thread is not one that computes
        taken = -(-tensor.nbytes // SLAB_UNIT) * SLAB_UNIT
        if taken > len(self._slab):
            self._slab = torch.empty(max(taken, SLAB_BYTES), dtype=torch.uint8, pin_memory=True)
        memory, self._slab = self._slab[: tensor.nbytes], self._slab[taken:]
        return memory.view(tensor.dtype).view(tensor.shape).copy_(tensor)

    def bring(self, staged: Tensor) -> Tensor:
        return staged.to(self.torch_device, non_blocking=True)

    def download(self, tensor: Tensor) -> Tensor:
        host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
        return host.copy_(tensor, non_blocking=True)

    def event(self) -> torch.cuda.Event:
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def empty_kv(self, size: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        return torch.zeros(size, dtype=dtype, device=self.torch_device)

    def slot(self, num_bytes: int) -> Tensor:
        whole = -(-num_bytes // mmap.PAGESIZE) * mmap.PAGESIZE
        return torch.empty(whole, dtype=torch.uint8, device=self.torch_device)

    def link(self) -> CudaLink:
        return CudaLink(self.torch_device)

    def host_queue(self) -> CudaHostQueue:
        return CudaHostQueue(self.torch_device)

    def host_copies(self, parts: Sequence[Tensor], slots: int) -> HostCopies:
        return PinnedCopies(parts, slots, self)

    def free_bytes(self, *, fraction: float, world_size: int) -> int:
        return self._unused_bytes(fraction) - HEADROOM_BYTES

    def left_bytes(self, *, fraction: float, world_size: int, kv_bytes: int) -> int:
        return max(0, self._unused_bytes(fraction))

    def _unused_bytes(self, fraction: float) -> int:
        torch.cuda.empty_cache()
        free, total = torch.cuda.mem_get_info(self.torch_device)
        return int(free - (1 - fraction) * total) // self._num_sharing

    def peak_bytes(self, step: Callable[[], object]) -> int:
        torch.cuda.reset_peak_memory_stats(self.torch_device)
        before = torch.cuda.memory_allocated(self.torch_device)
        step()
        torch.cuda.synchronize(self.torch_device)
        return int((torch.cuda.max_memory_allocated(self.torch_device) - before) * (1 + FRAGMENTATION))

    def clocks(self, action: Callable[[], object]) -> str:
        return clocks_during(f"GPU-{torch.cuda.get_device_properties(self.torch_device).uuid}", action)

    def taken_bytes(self, action: Callable[[], object]) -> int:
        torch.cuda.empty_cache()
        before, _ = torch.cuda.mem_get_info(self.torch_device)
        action()
        torch.cuda.synchronize(self.torch_device)
        torch.cuda.empty_cache()
        return max(0, before - torch.cuda.mem_get_info(self.torch_device)[0]) // self._num_sharing  # all of them do so

    def profiled(self) -> tuple[list[Any], str]:
        return [ProfilerActivity.CPU, ProfilerActivity.CUDA], "self_device_time_total"


def clocks_during(gpu: str, action: Callable[[], object]) -> str:
    """Run `action`: the clocks and the power of this GPU (its UUID) meanwhile; empty where they are not known.

    The driver's own tool is asked, as torch needs a package of its own for them. A GPU that is throttled explains
    what no kernel does.
    """
    told: list[str] = []
    is_over = threading.Event()
    asking = threading.Thread(target=_ask, args=(gpu, is_over, told), daemon=True)
    asking.start()
    try:
        action()
    finally:
        is_over.set()
        asking.join(ANSWER_S)
    return told[len(told) // 2] if told else ""


def _ask(gpu: str, is_over: threading.Event, told: list[str]) -> None:
    """Again and again, until it is over; what is answered afterwards is not told."""
    command = ["nvidia-smi", "-i", gpu, f"--query-gpu={FIELDS}", "--format=csv,noheader,nounits"]
    while not is_over.is_set():
        try:
            answer = subprocess.run(command, capture_output=True, text=True, timeout=ANSWER_S, check=True).stdout
        except (OSError, subprocess.SubprocessError):
            return
        values = [value.strip() for value in answer.split(",")]
        if len(values) != len(FIELDS.split(",")):
            return
        if not is_over.is_set():
            told.append(SENTENCE.format(*values))


def registered(num_bytes: int) -> Tensor:
    """At least so many pinned bytes on the host. Torch's allocator of such memory would round up to a power of two."""
    memory = map_pages(num_bytes)
    torch.cuda.check_error(int(torch.cuda.cudart().cudaHostRegister(memory.data_ptr(), memory.nbytes, 0)))
    return memory


def unregister(memory: Tensor) -> None:
    """Make what `registered` gave ordinary memory again, once nothing copies to or from it any more."""
    torch.cuda.check_error(int(torch.cuda.cudart().cudaHostUnregister(memory.data_ptr())))


class CudaLink:
    """See `device.Link`: a stream of its own, so that copies and kernels run beside each other."""

    def __init__(self, device: torch.device):
        self._device = device
        self._stream = torch.cuda.Stream(device)

    def pinned(self, num_bytes: int) -> Tensor:
        return registered(num_bytes)

    def unpin(self, memory: Tensor) -> None:
        self._stream.synchronize()
        unregister(memory)

    def copy(self, source: Tensor, target: Tensor, after: torch.cuda.Event) -> torch.cuda.Event:
        self._stream.wait_event(after)
        with torch.cuda.stream(self._stream):
            target.copy_(source, non_blocking=True)
            end = torch.cuda.Event()
            end.record(self._stream)
        return end

    def order(self, event: torch.cuda.Event) -> None:
        torch.cuda.current_stream(self._device).wait_event(event)


class CudaHostQueue:
    """See `host_sums.HostQueue`: `cuLaunchHostFunc` of the driver, which torch does not offer. Not yet run on a GPU.

    All that waits for the device meanwhile must have left Python's lock to the thread that runs the functions: torch
    and Triton do so around their calls of CUDA.
    """

    def __init__(self, device: torch.device):
        self._device = device
        self._launch = ctypes.CDLL("libcuda.so.1").cuLaunchHostFunc
        self._launch.argtypes = (ctypes.c_void_p, HOST_FUNCTION, ctypes.c_void_p)
        self._functions: list[Callable[[], None]] = []
        self._numbers: dict[Callable[[], None], int] = {}
        self._run = HOST_FUNCTION(lambda number: self._functions[number or 0]())  # a null pointer comes as None

    def memory(self, num_bytes: int) -> Tensor:
        return registered(num_bytes)

    def call(self, function: Callable[[], None]) -> None:
        if function not in self._numbers:
            self._numbers[function] = len(self._functions)
            self._functions.append(function)
        stream = torch.cuda.current_stream(self._device).cuda_stream
        if error := self._launch(stream, self._run, self._numbers[function]):
            raise RuntimeError(f"CUDA error: cuLaunchHostFunc gave {error}")

    def synchronize(self) -> None:
        torch.cuda.synchronize(self._device)


class PinnedCopies(HostCopies):
    """Copies that take their place among the device's work. Not yet run on a GPU.

    A block's parts, two for each layer, are gathered on the device first: one copy for each block crosses the bus.
    """

    def __init__(self, parts: Sequence[Tensor], num_slots: int, device: CudaDevice):
        num_bytes = bytes_of_slots(parts, num_slots)
        self._memory = registered(num_bytes)
        super().__init__(parts, self._memory[:num_bytes], num_slots)
        self._device = device
        self._most = max(1, STAGED_BYTES // self.slot_bytes)

    def save(self, blocks: Sequence[int], slots: Sequence[int]) -> None:
        for some in self._pieces(len(blocks)):
            index = self._device.upload(list(blocks[some]))
            gathered = torch.cat([part.index_select(0, index) for part, _ in self.parts], dim=1)  # [n, E]
            for slot, block in zip(slots[some], gathered, strict=True):
                self.slots[slot].copy_(block, non_blocking=True)

    def restore(self, slots: Sequence[int], blocks: Sequence[int]) -> None:
        for some in self._pieces(len(blocks)):
            index = self._device.upload(list(blocks[some]))
            size = (len(blocks[some]), self.slots.shape[1])
            staged = torch.empty(size, dtype=self.slots.dtype, device=self.parts[0][0].device)  # [n, E]
            for slot, block in zip(slots[some], staged, strict=True):
                block.copy_(self.slots[slot], non_blocking=True)
            for part, columns in self.parts:
                part.index_copy_(0, index, staged[:, columns])

    def close(self) -> None:
        torch.cuda.synchronize(self._device.torch_device)
        unregister(self._memory)

    def _pieces(self, count: int) -> list[slice]:
        return [slice(first, first + self._most) for first in range(0, count, self._most)]
