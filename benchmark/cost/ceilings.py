"""How fast a device can move bytes and multiply at best: what floors are held against, measured on the device.

The most favourable access there is, so that no server can be expected to beat it: one long read, and products of what
is in registers already, or on a GPU one large matrix product. Torch is imported only when something is measured.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any, Protocol

from benchmark.result import BenchError

if TYPE_CHECKING:
    import torch


READ_BYTES = 256 * 2**20  # far beyond any last-level cache that a process gets for itself
ROW_BYTES = 2**16  # what is read is so many bytes, or a multiple of them
PROBE_SECONDS = 0.15  # per operator: long enough for a few undisturbed repeats on a shared machine
# A GPU would be done with a CPU's share before the next launch: half a millisecond and more of work on an H200.
GPU_READ_BYTES = 2 * 2**30
GPU_MATRIX_SIZE = (8192, 8192, 8192)  # rows, inputs, outputs
UNITS_OF_A_THREAD = 16  # of arithmetic, of some tens of microseconds each: short enough to be left alone
FLOAT8_SINCE = (8, 9)  # compute capability
MEASURED, DATA_SHEET = "measured", "data sheet"  # where ceilings come from: what a share of the limit is a share of


@dataclass(frozen=True)
class Ceilings:
    """What one device can do at best. Ranks that share a device share its ceilings."""

    bytes_per_second: float
    flops_per_second: float
    num_devices: int = 1
    ops_8_per_second: float = 0.0  # of products in 8 bits; 0: as fast as the others
    source: str = MEASURED

    @property
    def eight_bit_share(self) -> float:
        """How long an operation in 8 bits takes, as a share of one in the model's dtype, which could stand for it."""
        return min(1.0, self.flops_per_second / self.ops_8_per_second) if self.ops_8_per_second else 1.0

    def best_of(self, other: Ceilings) -> Ceilings:
        """The higher of both in each figure."""
        return replace(
            self,
            bytes_per_second=max(self.bytes_per_second, other.bytes_per_second),
            flops_per_second=max(self.flops_per_second, other.flops_per_second),
            ops_8_per_second=max(self.ops_8_per_second, other.ops_8_per_second),
        )


# ---------------------------------------------------------------------------------------------------------- measurement


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
