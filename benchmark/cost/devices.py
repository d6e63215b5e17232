"""Devices: accelerators by their data sheets, what fits into their memory, and what the machine at hand shows.

Data sheets are the same for every device, so that two compare. Ceilings are measured by the most favourable access that
there is, so that no server can be expected to beat it: one long read, and products of what is in registers already, or
on a GPU one large matrix product. The machine at hand is looked at from a process of its own that ends, so that nothing
of torch or a GPU stays while a server is measured. Torch is imported only when something is measured.
"""

from __future__ import annotations

import math
import re
import time
from argparse import Namespace
from collections.abc import Callable, Mapping
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass, replace
from functools import partial
from multiprocessing import get_context
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

from benchmark.cost.roofline import DATA_SHEET, MEASURED, Ceilings, Pipeline, ServedModel, Sums
from benchmark.cost.shapes import BLOCK_SIZE, DTYPE_BYTES, NamedShape
from benchmark.result import BenchError
from host.cgroups import available_bytes
from server.arch.footprint import LOGIT_BYTES, kept_state_bytes, least_step_bytes, num_spares, state_bytes, step_bytes
from server.arch.windows import largest_window, ring_for
from server.quantisation import sizes

if TYPE_CHECKING:
    import torch


RESERVED_BYTES = 2 * 10**9  # of a GPU, for its context, libraries and fragmentation
CPU_HEADROOM = 0.2  # of the memory that is free, left to other programs; as the server leaves it


@dataclass(frozen=True)
class DatasheetDevice:
    """One accelerator, or the whole of a CPU."""

    bytes_per_second: float
    flops_16: float  # dense matrix products in float16 or bfloat16
    flops_32: float
    memory_bytes: float
    is_cpu: bool = False  # its shards share it
    ops_int8: float = 0.0  # of products of int8; 0: as fast as in 16 bits
    ops_float8: float = 0.0  # of float8; 0: it has none, and multiplies in 16 bits
    link_bytes_per_second: float = math.inf  # from one to the others, in one direction
    source: str = DATA_SHEET

    def ceilings(self, served: ServedModel) -> Ceilings:
        """What those of this device that a model is split over can do at best for it; the ranks of a CPU share it."""
        ops = {"int8": self.ops_int8, "float8": self.ops_float8}.get(served.product_kind, 0.0)
        return replace(self.dense_ceilings(served.dtype, served.ranks), ops_8_per_second=ops)

    def dense_ceilings(self, dtype: str, num_shards: int) -> Ceilings:
        """The same of so many for a dtype, where nothing is quantised."""
        flops = self.flops_32 if dtype == "float32" else self.flops_16
        return Ceilings(self.bytes_per_second, flops, 1 if self.is_cpu else num_shards, source=self.source)

    def sums(self, served: ServedModel) -> Sums:
        """What a model's ranks tell each other takes at least; nothing where they share memory."""
        return Sums() if self.is_cpu else Sums.of(served, self.link_bytes_per_second)

    def free_bytes(self, weights: float, activations: float, num_shards: int) -> float:
        """Bytes that one shard may take for its KV cache, beside its weights."""
        if self.is_cpu:
            left = self.memory_bytes / num_shards - weights
            return min(left * (1 - CPU_HEADROOM), left - activations)
        return self.memory_bytes - RESERVED_BYTES - weights - activations


# NVIDIA's, without sparsity; memory as CUDA reports it; the link is NVLink's one direction, of the last two PCIe's.
# Those of 2020 have no float8.
DEVICES: Mapping[str, DatasheetDevice] = {
    "a100-40g": DatasheetDevice(
        1.555e12, 312e12, 19.5e12, 42.3e9, ops_int8=624e12, link_bytes_per_second=300e9,
    ),
    "a100-80g": DatasheetDevice(
        2.039e12, 312e12, 19.5e12, 85.0e9, ops_int8=624e12, link_bytes_per_second=300e9,
    ),
    "h100": DatasheetDevice(
        3.35e12, 989e12, 67e12, 85.0e9, ops_int8=1979e12, ops_float8=1979e12, link_bytes_per_second=450e9,
    ),
    "h200": DatasheetDevice(
        4.8e12, 989e12, 67e12, 150.1e9, ops_int8=1979e12, ops_float8=1979e12, link_bytes_per_second=450e9,
    ),
    "l4": DatasheetDevice(
        300e9, 121e12, 30.3e12, 23.6e9, ops_int8=242e12, ops_float8=242e12, link_bytes_per_second=32e9,
    ),
    "a6000": DatasheetDevice(
        768e9, 154.8e12, 38.7e12, 51.0e9, ops_int8=309.7e12, link_bytes_per_second=32e9,
    ),
}  # fmt: skip

# Words that a driver's name for a device has, all of them: `NVIDIA H100 80GB HBM3`.
WORDS: Mapping[str, str] = {
    "a100-40g": "a100 40gb", "a100-80g": "a100 sxm4 80gb", "h100": "h100 80gb hbm3", "h200": "h200", "l4": "l4",
    "a6000": "a6000",
}  # fmt: skip


class DataSheet:
    """A gauge (`Gauge`) that reads a data sheet."""

    def __init__(self, ceilings: Ceilings):
        self.seen = [ceilings]

    def measure(self) -> Ceilings:
        """The same at any time."""
        return self.seen[0]


def known(name: str) -> DatasheetDevice | None:
    """The device that a driver calls so; None where there is no data sheet of it here.

    A part of a device that others have parts of (MIG) is none, nor is a card with less power of the same name (NVL).
    """
    words = set(re.split(r"[^a-z0-9]+", name.lower()))
    fitting = (DEVICES[key] for key, wanted in WORDS.items() if words.issuperset(wanted.split()))
    return None if words & {"mig", "nvl"} else next(fitting, None)


# --------------------------------------------------------------------------------------------------------------- memory


CAPTURED_FORMS = 3  # in which a server captures decode steps, each with the logits of its largest batch


CAPTURED_BATCH = 256  # sequences of the largest captured step


@dataclass(frozen=True)
class Capacity:
    """What the memory of a device holds when the model, or each pipeline stage, is split over `num_shard` shards.

    Of several stages: the most weights and KV that one has, and the tokens of the one with the least room.
    """

    num_shard: int
    weight_bytes_per_shard: int
    kv_bytes_per_token_per_shard: int
    kv_tokens: int  # that fit, at least 0
    max_batch_total_tokens: int  # that the server would infer
    problem: str | None  # why this split cannot be served
    state_bytes_per_sequence: int = 0  # and shard: the states of recurrent layers, the rings of windowed ones


def stored_as(named: NamedShape, quantize: str | None, head: str = "int8") -> str | None:
    """How the model's linear layers are stored, in words; None: dense. Raises BenchError for a contradiction."""
    stored = named.shape.stored
    if stored is None:
        return None if quantize is None else sizes.in_flight(quantize, head).description
    if quantize is not None and quantize not in stored.names:
        raise BenchError(
            f"--quantize is {quantize}, but {named.name} is quantised already, as {stored.description}: leave it out"
        )
    return stored.description


def least_capacity(
    pipe: Pipeline, device: DatasheetDevice, num_shard: int, args: Namespace, adapter_bytes: float = 0
) -> Capacity:
    """The tokens of the pipeline stage with the least room, and the most weights and KV that any stage has."""
    found = [capacity(stage, device, num_shard, args, adapter_bytes) for stage in pipe.stages]
    return replace(
        min(found, key=lambda stage: (stage.problem is None, stage.kv_tokens)),
        weight_bytes_per_shard=max(stage.weight_bytes_per_shard for stage in found),
        kv_bytes_per_token_per_shard=max(stage.kv_bytes_per_token_per_shard for stage in found),
        state_bytes_per_sequence=max(stage.state_bytes_per_sequence for stage in found),
    )


def capacity(
    served: ServedModel, device: DatasheetDevice, num_shard: int, args: Namespace, adapter_bytes: float = 0
) -> Capacity:
    """How many tokens of KV cache fit beside the weights of one split. adapter_bytes: that each device keeps free."""
    shape = served.shape
    weights = shape.weight_bytes(served.dtype, served.quantize) // num_shard
    weights += shape.padding_bytes(served.quantize, num_shard)
    weights += shape.copied_bytes(served.dtype, served.quantize, num_shard)
    kv_bytes, state = kept_bytes(replace(served, ranks=num_shard), args.max_batch_prefill_tokens, args.max_total_tokens)
    free = device.free_bytes(weights, _step_bytes(served, device, num_shard, args), num_shard) - adapter_bytes
    # One state is nobody's, and some are kept beside; of the free memory, states and rings have at most half.
    count = args.max_concurrent_requests
    states = min(max(0, free) // 2, (count + bool(shape.spec.recurrences) * (1 + num_spares(count))) * state)
    tokens = max(0, int((free - states) // (max(1, kv_bytes) * BLOCK_SIZE)) * BLOCK_SIZE)
    blocks = -(-args.max_total_tokens // BLOCK_SIZE) + (shape.spec.encoder is not None)  # which has blocks of its own
    useful = args.max_concurrent_requests * blocks * BLOCK_SIZE
    problem = shape.split_problem(num_shard)
    if problem is None and not tokens:
        beside = f" and {adapter_bytes / 1e9:.2f} GB for adapters" if adapter_bytes else ""
        problem = (
            f"{weights / 1e9:.2f} GB of weights a shard{beside} leave no room for a KV cache with {num_shard} shards"
        )
    return Capacity(num_shard, weights, kv_bytes, tokens, min(tokens, useful), problem, state)


def kept_bytes(served: ServedModel, prefill_tokens: int, total_tokens: int) -> tuple[int, int]:
    """What a rank keeps of each token in the KV cache, and of each sequence beside it.

    prefill_tokens: of the largest step; total_tokens: of the longest sequence.
    """
    spec, ranks, by_window = served.shape.spec, served.ranks, served.kept_by_window
    ring = ring_for(largest_window(spec), prefill_tokens, total_tokens)
    if ring is None:
        states = state_bytes(spec, ranks)
        return served.kept_bytes // ranks or kept_state_bytes(states), states
    ringed = sum(num_bytes for window, num_bytes in by_window.items() if window) // ranks
    # Where all layers have rings, blocks are as large as one layer's and hold copies.
    paged = by_window[0] if 0 in by_window else served.kept_bytes // sum(map(bool, map(spec.cached, spec.layers)))
    return paged // ranks, BLOCK_SIZE * ring.num_blocks * ringed


def _step_bytes(served: ServedModel, device: DatasheetDevice, num_shard: int, args: Namespace) -> float:
    """Bytes of the largest prompt step, and of the decode steps that a GPU keeps captured: most of it their logits."""
    spec, itemsize = served.shape.spec, DTYPE_BYTES[served.dtype]
    if device.is_cpu:
        return least_step_bytes(spec, args.max_batch_prefill_tokens, itemsize, num_shard)
    captured = min(CAPTURED_BATCH, args.max_concurrent_requests)
    logits: int = CAPTURED_FORMS * captured * LOGIT_BYTES * spec.vocab_size
    prompts = step_bytes(spec, args.max_batch_prefill_tokens, itemsize, num_shard)
    return prompts + logits


# -------------------------------------------------------------------------------------------------- the machine at hand


Found = TypeVar("Found")


@dataclass(frozen=True)
class Machine:
    """device: `cpu`, or the GPU's name. free_bytes: of each device. threads: of the CPU."""

    device: str
    num_devices: int
    free_bytes: float
    threads: int

    @property
    def is_cpu(self) -> bool:
        """Whether models run on the CPU."""
        return self.device == "cpu"

    @property
    def most_shards(self) -> int:
        """Shards that each have a GPU, or a core, of their own."""
        return self.threads if self.is_cpu else self.num_devices


def machine_at_hand(kind: str) -> Machine:
    """This machine. kind: auto, cuda or cpu. Raises BenchError where there is no such device."""
    return _aside(_look, kind)


def ceilings_of(machine: Machine, served: ServedModel, num_shard: int) -> Ceilings:
    """What the devices of so many shards do at best for a model, by their data sheet, or else measured now."""
    served = replace(served, ranks=num_shard)
    if sheet := known(machine.device):
        return sheet.ceilings(served)
    num_devices = 1 if machine.is_cpu else num_shard
    read = int(served.step_weight_bytes()) // num_devices
    return _aside(_measure, machine.device, served.dtype, machine.threads, num_devices, read, served.product_kind)


def _aside(function: Callable[..., Found], *arguments: Any) -> Found:
    """What the function returns in a process of its own."""
    try:
        with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as pool:
            return pool.submit(function, *arguments).result()
    except BrokenProcessPool:
        raise BenchError("the process that looks at the machine has died: free some memory and try again") from None


def _look(kind: str) -> Machine:
    import torch

    threads = torch.get_num_threads()
    if kind == "cuda" and not torch.cuda.is_available():
        raise BenchError("--device is cuda, and this machine shows no GPU: give cpu, or leave it out")
    if kind != "cpu" and torch.cuda.is_available():
        name, count = torch.cuda.get_device_name(), torch.cuda.device_count()
        return Machine(name, count, min(torch.cuda.mem_get_info(n)[0] for n in range(count)), threads)
    return Machine("cpu", 1, available_bytes(), threads)


def _measure(device: str, dtype: str, threads: int, num_devices: int, read: int, product_kind: str) -> Ceilings:
    probe = Probe(
        device, dtype, threads=threads, num_devices=num_devices, step_weight_bytes=read, product_kind=product_kind
    )
    for _ in range(3):
        probe.measure()
    return probe.best


# ---------------------------------------------------------------------------------------------------- measured ceilings


READ_BYTES = 256 * 2**20  # far beyond any last-level cache that a process gets for itself
ROW_BYTES = 2**16  # what is read is so many bytes, or a multiple of them
PROBE_SECONDS = 0.15  # per operator: long enough for a few undisturbed repeats on a shared machine
# A GPU would be done with a CPU's share before the next launch: half a millisecond and more of work on an H200.
GPU_READ_BYTES = 2 * 2**30
GPU_MATRIX_SIZE = (8192, 8192, 8192)  # rows, inputs, outputs
UNITS_OF_A_THREAD = 16  # of arithmetic, of some tens of microseconds each: short enough to be left alone


def gpu_read_bytes(free: int) -> int:
    """How much a probe reads on a GPU with so many bytes free: a server's KV cache may have left little beside it."""
    return max(READ_BYTES, min(GPU_READ_BYTES, free // 4))


class Gauge(Protocol):
    """What tells a device's ceilings whenever it is asked: `Probe`, or `devices.DataSheet`."""

    seen: list[Ceilings]  # so far

    def measure(self) -> Ceilings: ...


class Probe:
    """Measures the ceilings of the device that the shards use, again and again.

    A ceiling is the best that the device shows at the time: on a machine that is shared with others a median tells how
    disturbed it was, not what it can do, and would put floors above what is possible. So each measurement takes the
    best of its repeats; and because the bandwidth of a shared machine can double from one minute to the next, `measure`
    is called before and after everything that is held against it.
    """

    def __init__(
        self, device: str, dtype: str, *, threads: int, num_devices: int, step_weight_bytes: int, product_kind: str = ""
    ) -> None:
        """threads: of all shards together. step_weight_bytes: weights that a step reads on one device; as much is read
        here, because a model that fits into a cache has that cache's bandwidth for its ceiling. product_kind:
        of which numbers of 8 bits products are measured too, int8 or float8. Raises BenchError on a CPU for which
        nothing can be compiled."""
        import torch

        self.seen: list[Ceilings] = []
        self._device = torch.device("cpu" if device == "cpu" else "cuda")
        self._num_devices = num_devices
        self._threads = threads
        is_cpu = self._device.type == "cpu"
        most = READ_BYTES if is_cpu else gpu_read_bytes(torch.cuda.mem_get_info(self._device)[0])
        num_bytes = max(ROW_BYTES, min(most, step_weight_bytes) // ROW_BYTES * ROW_BYTES)
        # One thread alone reads a small buffer faster than several that wait for each other on a busy machine.
        self._reads: list[Callable[[], float]] = [
            partial(self._best_seconds, r, n) for r in _readers(num_bytes, self._device) for n in (1, threads)
        ]
        self._multiply = self._multiplier(dtype)
        self._multiply_8 = self._multiplier(product_kind) if product_kind else None
        self._num_bytes = num_bytes

    def measure(self) -> Ceilings:
        """Measure once more: about a second at first, later what was fastest then, a third of a second."""
        seconds, self._reads = _fastest(self._reads)
        ops_8 = 0.0 if self._multiply_8 is None else self._multiply_8()
        self.seen.append(Ceilings(self._num_bytes / seconds, self._multiply(), self._num_devices, ops_8))
        return self.seen[-1]

    @property
    def best(self) -> Ceilings:
        """The highest of everything that was measured so far; at least one measurement is needed."""
        best = self.seen[0]
        for ceilings in self.seen:
            best = best.best_of(ceilings)
        return best

    def _multiplier(self, kind: str) -> Callable[[], float]:
        """What measures how many operations a second products of a kind of numbers are."""
        if self._device.type == "cpu":
            return _in_registers(kind, self._threads)
        product = _large_product(kind, self._device)
        return lambda: product.num_flops / self._best_seconds(product.run, self._threads)

    def _best_seconds(self, run: Callable[[], object], threads: int) -> float:
        self._set_threads(threads)
        return best_seconds(run, self._device)

    def _set_threads(self, threads: int) -> None:
        if self._device.type == "cpu":
            import torch

            torch.set_num_threads(threads)


def best_seconds(run: Callable[[], object], device: torch.device) -> float:
    """The shortest of as many repeats as fit into the time, at least three, after one that does not count."""
    run()
    best, repeats, stop = float("inf"), 0, time.perf_counter() + PROBE_SECONDS
    while repeats < 3 or time.perf_counter() < stop:
        _synchronise(device)
        started = time.perf_counter()
        run()
        _synchronise(device)
        best, repeats = min(best, time.perf_counter() - started), repeats + 1
    return best


def _synchronise(device: torch.device) -> None:
    if device.type == "cuda":
        import torch

        torch.cuda.synchronize()


def _fastest(ways: list[Callable[[], float]]) -> tuple[float, list[Callable[[], float]]]:
    """The shortest time that one of `ways` measures, and that way alone."""
    times = [way() for way in ways]
    return min(times), [ways[times.index(min(times))]]


@dataclass(frozen=True)
class _Product:
    run: Callable[[], object]
    num_flops: int


def _readers(num_bytes: int, device: torch.device) -> list[Callable[[], Any]]:
    """What reads a buffer once and writes next to nothing; which is fastest differs between machines.

    A product with a vector reads several rows at once: on some CPUs one run of addresses alone is no faster than two
    thirds of what the memory gives.
    """
    import torch

    buffer = torch.ones(num_bytes // 4, dtype=torch.float32, device=device)
    rows = buffer.view(-1, ROW_BYTES // 4)
    return [buffer.sum, buffer.view(torch.int32).amax, partial(torch.mv, rows, rows[0].clone())]


def _in_registers(kind: str, threads: int) -> Callable[[], float]:
    """What measures products of a kind of numbers on so many cores, by loops that read nothing (`peak.cpp`).

    Raises BenchError where they can neither be compiled nor are shipped.
    """
    from server.backends.cpu import load
    from server.backends.cpu.build import BuildError

    try:
        kernels = load()
    except BuildError as error:
        raise BenchError(f"the CPU's arithmetic is measured by compiled loops, and there are none: {error}") from None

    def measure() -> float:
        best, repeats, stop = 0.0, 0, time.perf_counter() + PROBE_SECONDS
        while repeats < 3 or time.perf_counter() < stop:
            best = max(best, kernels.operations_per_second(kind, UNITS_OF_A_THREAD, threads))
            repeats += 1
        return best

    return measure


def _large_product(kind: str, device: torch.device, size: tuple[int, int, int] = GPU_MATRIX_SIZE) -> _Product:
    """One large linear layer of numbers of a kind: a dtype, int8, or float8 where the GPU has it, else bfloat16."""
    import torch

    from server.backends.cuda import FLOAT8_SINCE

    rows, inputs, outputs = size
    num_ops = 2 * rows * inputs * outputs
    if kind == "int8":
        codes = torch.randint(0, 127, (rows, inputs), dtype=torch.int8, device=device)
        weights = torch.randint(-127, 127, (outputs, inputs), dtype=torch.int8, device=device)
        return _Product(lambda: torch._int_mm(codes, weights.t()), num_ops)
    has_float8 = device.type != "cuda" or torch.cuda.get_device_capability(device) >= FLOAT8_SINCE
    if kind == "float8" and has_float8:
        x = torch.randn(rows, inputs, device=device).to(torch.float8_e4m3fn)
        weight = torch.randn(outputs, inputs, device=device).to(torch.float8_e4m3fn)
        one = torch.ones((), device=device)
        return _Product(lambda: torch._scaled_mm(x, weight.t(), one, one, out_dtype=torch.bfloat16), num_ops)
    dtype = getattr(torch, "bfloat16" if kind == "float8" else kind)
    x, weight = (
        torch.randn(rows, inputs, device=device).to(dtype),
        torch.randn(outputs, inputs, device=device).to(dtype),
    )
    return _Product(lambda: torch.nn.functional.linear(x, weight), num_ops)


def describe(seen: list[Ceilings]) -> str:
    """The ceilings as a sentence of the report; of measured ones, how much they moved."""
    reads = [ceilings.bytes_per_second / 1e9 for ceilings in seen]
    products = [ceilings.flops_per_second / 1e12 for ceilings in seen]
    eights = max(ceilings.ops_8_per_second for ceilings in seen) / 1e12
    in_8_bits = f", in 8 bits {eights:.3g} TOP/s" if eights else ""
    device = "device" if seen[0].num_devices == 1 else f"each of {seen[0].num_devices} devices"
    limits = f"reads {max(reads):.1f} GB/s, matrix products {max(products):.3g} TFLOP/s{in_8_bits}"
    if seen[0].source != MEASURED:
        return (
            f"Ceilings of the {device} by its {seen[0].source}: {limits}. Floors are explained in docs/benchmarking.md."
        )
    return (
        f"Ceilings of the {device}: {limits}: the best "
        f"of {len(seen)} measurements, which gave {min(reads):.1f} to {max(reads):.1f} GB/s and "
        f"{min(products):.3g} to {max(products):.3g} TFLOP/s. Floors are explained in docs/benchmarking.md."
    )
