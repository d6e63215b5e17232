"""The least time that a step can take: bytes that must move, operations that must be done, and how fast the device can.

Two halves. The arithmetic (`ServedModel`, `BytesAndFlops`) is pure and follows docs/roofline.md line by line. The
measurement (`Probe`) finds the device's own ceilings with the most favourable access there is, one long read and one
large matrix product, so that no server can be expected to beat it. Torch is imported only when something is measured.

Left out on purpose, because a perfect server could hide them: activations, the sampler, launches, collectives.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any

from benchmark.shapes import ModelShape

if TYPE_CHECKING:
    import torch

READ_BYTES = 256 * 2**20  # far beyond any last-level cache that a process gets for itself
PROBE_SECONDS = 0.15  # per operator: long enough for a few undisturbed repeats on a shared machine
MATRIX_SIZES = ((1024, 1024, 4096), (512, 2048, 8192))  # (rows, inputs, outputs): large enough to be compute bound
# A GPU would be done with those before the next launch: half a millisecond and more of work on an H200.
GPU_READ_BYTES = 2 * 2**30
GPU_MATRIX_SIZES = ((8192, 8192, 8192),)


@dataclass(frozen=True)
class Ceilings:
    """What one device can do at best. Ranks that share a device share its ceilings."""

    bytes_per_second: float
    flops_per_second: float
    num_devices: int = 1

    def best_of(self, other: Ceilings) -> Ceilings:
        """The higher of both in each figure."""
        return replace(
            self,
            bytes_per_second=max(self.bytes_per_second, other.bytes_per_second),
            flops_per_second=max(self.flops_per_second, other.flops_per_second),
        )


@dataclass(frozen=True)
class BytesAndFlops:
    """Bytes that a step must move and operations that it must do, over all devices together."""

    num_bytes: float
    num_flops: float

    def floor_ms(self, ceilings: Ceilings) -> float:
        """The slower of moving and computing, which may overlap completely; work is divided over the devices."""
        return 1000 * max(self._seconds(ceilings)) / ceilings.num_devices

    def bound_by(self, ceilings: Ceilings) -> str:
        """What the floor comes from: `bandwidth` where moving is slower, else `arithmetic`."""
        moving, computing = self._seconds(ceilings)
        return "bandwidth" if moving >= computing else "arithmetic"

    def plus(self, other: BytesAndFlops) -> BytesAndFlops:
        """What one step needs that does both."""
        return BytesAndFlops(self.num_bytes + other.num_bytes, self.num_flops + other.num_flops)

    def times(self, count: int) -> BytesAndFlops:
        """What `count` such steps need."""
        return BytesAndFlops(self.num_bytes * count, self.num_flops * count)

    def _seconds(self, ceilings: Ceilings) -> tuple[float, float]:
        return self.num_bytes / ceilings.bytes_per_second, self.num_flops / ceilings.flops_per_second


@dataclass(frozen=True)
class ServedModel:
    """A shape in the dtype and format in which it is served."""

    shape: ModelShape
    dtype: str
    quantize: str | None = None

    @property
    def step_weight_bytes(self) -> int:
        """Weights that every step reads once, whatever its batch: all layers and the head, not the embedding table."""
        return self.shape.step_weight_bytes(self.dtype, self.quantize)

    def step(self, *, tokens: int, attended: float, kv_read: float, sampled: int) -> BytesAndFlops:
        """What any step needs.

        tokens: computed in it. attended: keys that those tokens look at, together. kv_read: tokens whose keys and
        values come from the cache. sampled: sequences that get a token, so that they need logits.
        """
        shape = self.shape
        kv = (kv_read + tokens) * shape.kv_bytes_per_token(self.dtype)  # what is computed is also written
        matrices = 2 * shape.step_parameters * tokens + 2 * shape.head_parameters * sampled
        attention = 4 * shape.spec.num_layers * shape.spec.num_heads * shape.spec.head_dim * attended
        return BytesAndFlops(self.step_weight_bytes + kv, matrices + attention)

    def encode(self, lengths: Sequence[int]) -> BytesAndFlops:
        """What an encoder-decoder adds to a step for prompts of these lengths: every token sees its whole prompt."""
        shape, encoder, tokens = self.shape, self.shape.spec.encoder, sum(lengths)
        assert encoder is not None, "only an encoder-decoder encodes"
        pairs = sum(length**2 for length in lengths)
        attention = 4 * encoder.num_layers * encoder.num_heads * encoder.head_dim * pairs
        num_bytes = shape.encode_bytes(self.dtype, self.quantize) + tokens * shape.kv_bytes_per_token(self.dtype)
        return BytesAndFlops(num_bytes, 2 * shape.encode_parameters * tokens + attention)

    def decode(self, batch_size: int, context: float) -> BytesAndFlops:
        """What a decode step of `batch_size` sequences needs that attend to `context` tokens, the new one included."""
        return self.step(
            tokens=batch_size, attended=batch_size * context, kv_read=batch_size * (context - 1), sampled=batch_size
        )

    def prefill(self, batch_size: int, length: int) -> BytesAndFlops:
        """What a step over `batch_size` whole prompts of `length` tokens needs, with the first token of each.

        Attention is causal, so that a token looks at half of its prompt on average.
        """
        if self.shape.spec.encoder is not None:
            return self.encode([length] * batch_size).plus(self.decode(batch_size, length + 1))
        return self.step(tokens=batch_size * length, attended=batch_size * length**2 / 2, kv_read=0, sampled=batch_size)


def mean_context(sequence_length: int, decode_length: int) -> float:
    """Mean context over the decode steps of one sequence: steps 1 … D-1 attend to S+1 … S+D-1 tokens."""
    return sequence_length + decode_length / 2


# ------------------------------------------------------------------------------------------------------ measurement


class Probe:
    """Measures the ceilings of the device that the shards use, again and again.

    A ceiling is the best that the device shows at the time: on a machine that is shared with others a median tells how
    disturbed it was, not what it can do, and would put floors above what is possible. So each measurement takes the
    best of its repeats; and because the bandwidth of a shared machine can double from one minute to the next, `measure`
    is called before and after everything that is held against it.
    """

    def __init__(self, device: str, dtype: str, *, threads: int, num_devices: int, step_weight_bytes: int) -> None:
        """threads: of all shards together. step_weight_bytes: weights that a step reads on one device; as much is read
        here, because a model that fits into a cache has that cache's bandwidth for its ceiling."""
        import torch

        self.seen: list[Ceilings] = []
        self._device = torch.device("cpu" if device == "cpu" else "cuda")
        self._num_devices = num_devices
        self._threads = threads
        is_cpu = self._device.type == "cpu"
        num_bytes = max(2**16, min(READ_BYTES if is_cpu else GPU_READ_BYTES, step_weight_bytes))
        # One thread alone reads a small buffer faster than several that wait for each other on a busy machine.
        self._reads: list[Callable[[], float]] = [
            partial(self._best_seconds, r, n) for r in _readers(num_bytes, self._device) for n in (1, threads)
        ]
        # A CPU without arithmetic in float16 may compute in float32 instead.
        dtypes = ("float16", "float32") if dtype == "float16" and is_cpu else (dtype,)
        sizes = MATRIX_SIZES if is_cpu else GPU_MATRIX_SIZES
        products = [_product(size, getattr(torch, d), self._device) for size in sizes for d in dtypes]
        self._products: list[Callable[[], float]] = [partial(self._seconds_per_flop, product) for product in products]
        self._num_bytes = num_bytes // 4 * 4

    def measure(self) -> Ceilings:
        """Measure once more: about a second at first, later what was fastest then, a third of a second."""
        seconds, self._reads = _fastest(self._reads)
        seconds_per_flop, self._products = _fastest(self._products)
        self.seen.append(Ceilings(self._num_bytes / seconds, 1 / seconds_per_flop, self._num_devices))
        return self.seen[-1]

    @property
    def best(self) -> Ceilings:
        """The highest of everything that was measured so far; at least one measurement is needed."""
        best = self.seen[0]
        for ceilings in self.seen:
            best = best.best_of(ceilings)
        return best

    def _seconds_per_flop(self, product: _Product) -> float:
        return self._best_seconds(product.run, self._threads) / product.num_flops

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
    """Reductions that read a buffer once and write nothing; which is fastest differs between machines."""
    import torch

    buffer = torch.ones(num_bytes // 4, dtype=torch.float32, device=device)
    return [buffer.sum, buffer.view(torch.int32).amax]


def _product(sizes: tuple[int, int, int], dtype: torch.dtype, device: torch.device) -> _Product:
    """One large linear layer, in the way that is fastest on the device: on a CPU with its weight packed beforehand."""
    import torch

    rows, inputs, outputs = sizes
    x = torch.randn(rows, inputs, device=device).to(dtype)
    weight = torch.randn(outputs, inputs, device=device).to(dtype)
    num_flops = 2 * rows * inputs * outputs
    packable = device.type == "cpu" and torch.backends.mkldnn.enabled and dtype != torch.float16
    if not packable:
        return _Product(lambda: torch.nn.functional.linear(x, weight), num_flops)
    packed = torch.ops.mkldnn._reorder_linear_weight(weight, rows)
    return _Product(lambda: torch.ops.mkldnn._linear_pointwise(x, packed, None, "none", [], ""), num_flops)


def describe(seen: list[Ceilings]) -> str:
    """The measured ceilings as a sentence of the report, with how much they moved."""
    reads = [ceilings.bytes_per_second / 1e9 for ceilings in seen]
    products = [ceilings.flops_per_second / 1e12 for ceilings in seen]
    device = "device" if seen[0].num_devices == 1 else f"each of {seen[0].num_devices} devices"
    return (
        f"Ceilings of the {device}: reads {max(reads):.1f} GB/s, matrix products {max(products):.3g} TFLOP/s: the best "
        f"of {len(seen)} measurements, which gave {min(reads):.1f} to {max(reads):.1f} GB/s and "
        f"{min(products):.3g} to {max(products):.3g} TFLOP/s. Floors are explained in docs/roofline.md."
    )
