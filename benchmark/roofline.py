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
ROW_BYTES = 2**16  # what is read is so many bytes, or a multiple of them
PROBE_SECONDS = 0.15  # per operator: long enough for a few undisturbed repeats on a shared machine
MATRIX_SIZES = ((1024, 1024, 4096), (512, 2048, 8192))  # (rows, inputs, outputs): large enough to be compute bound
# A GPU would be done with those before the next launch: half a millisecond and more of work on an H200.
GPU_READ_BYTES = 2 * 2**30
GPU_MATRIX_SIZES = ((8192, 8192, 8192),)
FLOAT8_SINCE = (8, 9)  # compute capability


@dataclass(frozen=True)
class Ceilings:
    """What one device can do at best. Ranks that share a device share its ceilings."""

    bytes_per_second: float
    flops_per_second: float
    num_devices: int = 1
    ops_8_per_second: float = 0.0  # of products in 8 bits; 0: as fast as the others

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


@dataclass(frozen=True)
class BytesAndFlops:
    """Bytes that a step must move and operations that it must do, over all devices together.

    num_ops_8: of num_flops, those that are done in 8 bits.
    """

    num_bytes: float
    num_flops: float
    num_ops_8: float = 0.0

    def floor_ms(self, ceilings: Ceilings) -> float:
        """The slower of moving and computing, which may overlap completely; work is divided over the devices."""
        return 1000 * max(self._seconds(ceilings)) / ceilings.num_devices

    def bound_by(self, ceilings: Ceilings) -> str:
        """What the floor comes from: `bandwidth` where moving is slower, else `arithmetic`."""
        moving, computing = self._seconds(ceilings)
        return "bandwidth" if moving >= computing else "arithmetic"

    def plus(self, other: BytesAndFlops) -> BytesAndFlops:
        """What one step needs that does both."""
        return BytesAndFlops(
            self.num_bytes + other.num_bytes, self.num_flops + other.num_flops, self.num_ops_8 + other.num_ops_8
        )

    def times(self, count: int) -> BytesAndFlops:
        """What `count` such steps need."""
        return BytesAndFlops(self.num_bytes * count, self.num_flops * count, self.num_ops_8 * count)

    def _seconds(self, ceilings: Ceilings) -> tuple[float, float]:
        flops = self.num_flops - self.num_ops_8 * (1 - ceilings.eight_bit_share)
        return self.num_bytes / ceilings.bytes_per_second, flops / ceilings.flops_per_second


@dataclass(frozen=True)
class ServedModel:
    """A shape in the dtype and format in which it is served."""

    shape: ModelShape
    dtype: str
    quantize: str | None = None
    kv_cache_dtype: str | None = None  # None: the model's
    on_cpu: bool = False  # where products of quantised weights are other ones

    def stages(self, count: int) -> list[ServedModel]:
        """Its pipeline stages. Raises ValueError where there are too few layers."""
        return [replace(self, shape=shape) for shape in self.shape.stages(count)]

    @property
    def kv_bytes_per_token(self) -> int:
        """Bytes of the keys and values of one token in all layers."""
        return self.shape.kv_bytes_per_token(self.dtype, self.kv_cache_dtype)

    @property
    def product_kind(self) -> str:
        """Of which numbers of 8 bits some of its products are, int8 or float8; empty: none are."""
        return self.shape.product_kind(self.dtype, self.quantize, on_cpu=self.on_cpu)

    def step_weight_bytes(self, tokens: int = 1) -> float:
        """Bytes of weights that a step over so many tokens reads once: all layers and the head, but not the embedding
        table, and of a mixture those experts that any of the tokens goes to."""
        return self.shape.step_weight_bytes(self.dtype, self.quantize, tokens)

    def step(self, *, tokens: int, attended: float, kv_read: float, sampled: int) -> BytesAndFlops:
        """What any step needs.

        tokens: computed in it. attended: keys that those tokens look at, together. kv_read: tokens whose keys and
        values come from the cache. sampled: sequences that get a token, so that they need logits.
        """
        shape = self.shape
        kv = (kv_read + tokens) * self.kv_bytes_per_token  # what is computed is also written
        matrices = 2 * shape.step_parameters * tokens + 2 * shape.head_parameters * sampled
        attention = 4 * shape.spec.num_layers * shape.spec.num_heads * shape.spec.head_dim * attended
        layers, head = shape.eight_bit_parameters(self.dtype, self.quantize, on_cpu=self.on_cpu)
        in_8_bits = 2 * layers * tokens + 2 * head * sampled
        return BytesAndFlops(self.step_weight_bytes(tokens) + kv, matrices + attention, in_8_bits)

    def encode(self, lengths: Sequence[int]) -> BytesAndFlops:
        """What an encoder-decoder adds to a step for prompts of these lengths: every token sees its whole prompt.

        A pipeline stage without the encoder multiplies what that says by its own layers' matrices.
        """
        shape, encoder, tokens = self.shape, self.shape.spec.encoder, sum(lengths)
        assert encoder is not None, "only an encoder-decoder encodes"
        pairs = sum(length**2 for length in lengths)
        layers = encoder.num_layers * shape.has_embedding
        attention = 4 * layers * encoder.num_heads * encoder.head_dim * pairs
        num_bytes = shape.encode_bytes(self.dtype, self.quantize) + tokens * self.kv_bytes_per_token
        in_8_bits, _ = shape.eight_bit_parameters(self.dtype, self.quantize, on_cpu=self.on_cpu, of_prompts=True)
        return BytesAndFlops(num_bytes, 2 * shape.encode_parameters * tokens + attention, 2 * in_8_bits * tokens)

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


def gpu_read_bytes(free: int) -> int:
    """How much a probe reads on a GPU with so many bytes free: a server's KV cache may have left little beside it."""
    return max(READ_BYTES, min(GPU_READ_BYTES, free // 4))


class Probe:
    """Measures the ceilings of the device that the shards use, again and again.

    A ceiling is the best that the device shows at the time: on a machine that is shared with others a median tells how
    disturbed it was, not what it can do, and would put floors above what is possible. So each measurement takes the
    best of its repeats; and because the bandwidth of a shared machine can double from one minute to the next, `measure`
    is called before and after everything that is held against it.
    """

    def __init__(
        self,
        device: str,
        dtype: str,
        *,
        threads: int,
        num_devices: int,
        step_weight_bytes: int,
        product_kind: str = "",
    ) -> None:
        """threads: of all shards together. step_weight_bytes: weights that a step reads on one device; as much is read
        here, because a model that fits into a cache has that cache's bandwidth for its ceiling. product_kind:
        of which numbers of 8 bits products are measured too, int8 or float8."""
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
        # A CPU without arithmetic in float16 may compute in float32 instead, and must where oneDNN has no bfloat16.
        dtypes = ("float16", "float32") if dtype == "float16" and is_cpu else (dtype,)
        if is_cpu and dtype == "bfloat16" and not torch.ops.mkldnn._is_mkldnn_bf16_supported():
            dtypes = ("float32",)
        sizes = MATRIX_SIZES if is_cpu else GPU_MATRIX_SIZES
        products = [_product(size, getattr(torch, d), self._device) for size in sizes for d in dtypes]
        self._products: list[Callable[[], float]] = [partial(self._seconds_per_flop, product) for product in products]
        makers = {"int8": _product_of_int8, "float8": _product_of_float8}
        products = [makers[product_kind](size, self._device) for size in sizes] if product_kind else []
        self._products_8: list[Callable[[], float]] = [partial(self._seconds_per_flop, product) for product in products]
        self._num_bytes = num_bytes

    def measure(self) -> Ceilings:
        """Measure once more: about a second at first, later what was fastest then, a third of a second."""
        seconds, self._reads = _fastest(self._reads)
        seconds_per_flop, self._products = _fastest(self._products)
        ops_8_per_second = 0.0
        if self._products_8:
            seconds_per_op, self._products_8 = _fastest(self._products_8)
            ops_8_per_second = 1 / seconds_per_op
        self.seen.append(Ceilings(self._num_bytes / seconds, 1 / seconds_per_flop, self._num_devices, ops_8_per_second))
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
    """What reads a buffer once and writes next to nothing; which is fastest differs between machines.

    A product with a vector reads several rows at once: on some CPUs one run of addresses alone is no faster than two
    thirds of what the memory gives.
    """
    import torch

    buffer = torch.ones(num_bytes // 4, dtype=torch.float32, device=device)
    rows = buffer.view(-1, ROW_BYTES // 4)
    return [buffer.sum, buffer.view(torch.int32).amax, partial(torch.mv, rows, rows[0].clone())]


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


def _product_of_float8(sizes: tuple[int, int, int], device: torch.device) -> _Product:
    """One large linear layer of float8 numbers, or of bfloat16 where the GPU has no float8."""
    import torch

    if device.type == "cuda" and torch.cuda.get_device_capability(device) < FLOAT8_SINCE:
        return _product(sizes, torch.bfloat16, device)
    rows, inputs, outputs = sizes
    x = torch.randn(rows, inputs, device=device).to(torch.float8_e4m3fn)
    weight = torch.randn(outputs, inputs, device=device).to(torch.float8_e4m3fn)
    one = torch.ones((), device=device)
    num_ops = 2 * rows * inputs * outputs
    return _Product(lambda: torch._scaled_mm(x, weight.t(), one, one, out_dtype=torch.bfloat16), num_ops)


def _product_of_int8(sizes: tuple[int, int, int], device: torch.device) -> _Product:
    """One large linear layer of int8 numbers: oneDNN's on a CPU, cuBLAS's on a GPU."""
    import torch

    rows, inputs, outputs = sizes
    x = torch.randint(0, 127, (rows, inputs), dtype=torch.int8, device=device)
    weight = torch.randint(-127, 127, (outputs, inputs), dtype=torch.int8, device=device)
    num_ops = 2 * rows * inputs * outputs
    if device.type != "cpu":
        return _Product(lambda: torch._int_mm(x, weight.t()), num_ops)
    packed = torch.ops.onednn.qlinear_prepack(weight, [rows, inputs])
    scales, zeros, unsigned = torch.ones(outputs), torch.zeros(outputs, dtype=torch.int64), x.view(torch.uint8)
    multiply = torch.ops.onednn.qlinear_pointwise
    rest: tuple[Any, ...] = (scales, zeros, None, 1.0, 0, torch.float32, "none", [], "")
    return _Product(lambda: multiply(unsigned, 1.0, 0, packed, *rest), num_ops)


def describe(seen: list[Ceilings]) -> str:
    """The measured ceilings as a sentence of the report, with how much they moved."""
    reads = [ceilings.bytes_per_second / 1e9 for ceilings in seen]
    products = [ceilings.flops_per_second / 1e12 for ceilings in seen]
    eights = max(ceilings.ops_8_per_second for ceilings in seen) / 1e12
    in_8_bits = f", in 8 bits {eights:.3g} TOP/s" if eights else ""
    device = "device" if seen[0].num_devices == 1 else f"each of {seen[0].num_devices} devices"
    return (
        f"Ceilings of the {device}: reads {max(reads):.1f} GB/s, matrix products {max(products):.3g} TFLOP/s"
        f"{in_8_bits}: the best "
        f"of {len(seen)} measurements, which gave {min(reads):.1f} to {max(reads):.1f} GB/s and "
        f"{min(products):.3g} to {max(products):.3g} TFLOP/s. Floors are explained in docs/roofline.md."
    )
