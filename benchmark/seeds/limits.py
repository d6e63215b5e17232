"""The best that a device could do of a document's work: what either side's figures are a share of.

The same arithmetic for the device at hand and for the document's, by data sheets; where there is none, of a CPU, by
what was measured, and then a share says so. The machine at hand is looked at from a process of its own that ends, so
that nothing of torch or a GPU stays while a server is measured.
"""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Callable, Mapping
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass, replace
from multiprocessing import get_context
from typing import Any, TypeVar

from benchmark.cost.ceilings import Ceilings, Probe
from benchmark.cost.devices import DEVICES, Capacity, DatasheetDevice, capacity, known
from benchmark.cost.roofline import ServedModel, ceiling_of
from benchmark.cost.shapes import BLOCK_SIZE
from benchmark.launch import free_host_bytes
from benchmark.result import BenchError
from benchmark.seeds.documents import Scale, Seed, answer_length, concurrency

MOST_SEQUENCES = 256  # at once, of a server whose load is not named


@dataclass(frozen=True)
class Limit:
    """A model on a device. free_bytes: of all devices together, before the weights are there."""

    served: ServedModel
    ceilings: Ceilings
    free_bytes: float

    @property
    def source(self) -> str:
        """Where the ceilings come from: what a share of this limit is a share of."""
        return self.ceilings.source

    def best_of(self, other: Limit) -> Limit:
        """The same with the higher ceilings of both."""
        return replace(self, ceilings=self.ceilings.best_of(other.ceilings))

    def step_ms(self, step: str, batch_size: int, sequence_length: int, decode_length: float) -> float:
        """The least milliseconds of a step of `latency`."""
        if step == "prefill":
            return self.served.prefill(batch_size, sequence_length).floor_ms(self.ceilings)
        one = self.served.mean_decode(batch_size, sequence_length, decode_length)
        return one.times(1 if step == "decode_token" else decode_length - 1).floor_ms(self.ceilings)

    def tokens_per_second(self, sequences: float, given: int, generated: float) -> float:
        """The most generated tokens a second of sequences that run together, so many as fit at their mean length."""
        weights = self.served.shape.weight_bytes(self.served.dtype, self.served.quantize)
        room = (self.free_bytes - weights) / (self.served.kv_bytes_per_token * (given + generated / 2))
        return ceiling_of(self.served, max(1.0, min(sequences, int(room))), given, generated, self.ceilings)

    def output_token_ms(self, given: int, generated: float) -> float:
        """The least milliseconds of a request that is alone, for each of its generated tokens."""
        prefill = self.step_ms("prefill", 1, given, generated)
        return (prefill + self.step_ms("decode_total", 1, given, generated)) / generated


def of_document(seed: Seed, num_shard: int) -> Limit:
    """The limit of the document's hardware, by its data sheet."""
    device = DEVICES[seed.device]
    served = ServedModel(seed.model(None).shape, seed.dtype, ranks=num_shard)
    return Limit(served, device.ceilings(served), device.memory_bytes * num_shard)


def percent(limit: float, measured: float | None, *, is_rate: bool) -> float | None:
    """The share of a limit that was reached. is_rate: of a rate; else of a time."""
    if not measured:
        return None
    return 100 * (measured / limit if is_rate else limit / measured)


def document_percents(seed: Seed, limit: Limit, row: Mapping[str, Any]) -> dict[str, Any]:
    """Which shares of its hardware's limit a row of the document reached, by figure. limit: `of_document`."""
    sizes: Mapping[str, Any] = seed.sweep
    if seed.kind == "latency":
        floor = limit.step_ms(row["step"], row["batch_size"], sizes["sequence_length"], sizes["decode_length"])
        mean = row["mean_ms"]
        return {"percent_of_limit": percent(floor, mean, is_rate=False), "floor_ms": floor, "limit": limit.source}
    if seed.kind == "serving":
        given, generated = row["input_length"], answer_length(row)
        most = limit.tokens_per_second(MOST_SEQUENCES, given, generated)
        least = limit.output_token_ms(given, generated)
        loaded = limit.tokens_per_second(concurrency(row), given, generated)
        return {
            "throughput_percent": percent(most, row["output_tokens_per_second"], is_rate=True),
            "loaded_throughput_percent": percent(loaded, row["output_tokens_per_second"], is_rate=True),
            "latency_percent": percent(least, row["latency_per_output_token_ms"], is_rate=False),
            "limit": limit.source,
        }
    sequences = row["num_gpu_batches"] * sizes["gpu_batch_size"]
    most = limit.tokens_per_second(sequences, sizes["input_length"], sizes["output_length"])
    return {"percent_of_limit": percent(most, row["total_tokens_per_second"], is_rate=True), "limit": limit.source}


# --------------------------------------------------------------------------------------------------------------- memory


def require_room(seed: Seed, scale: Scale, machine: Machine, dtype: str, num_shard: int) -> None:
    """Refuse what the free memory cannot hold, before anything is loaded. Raises BenchError with what would fit."""
    tokens, prefill, sequences = _needed(seed, scale)
    found = _capacity(seed, scale.layers, machine, dtype, num_shard, prefill, sequences)
    if found.kv_tokens >= tokens:
        return
    whole = scale.layers or seed.num_layers
    fitting = (
        n
        for n in range(whole - 1, 0, -1)
        if _capacity(seed, n, machine, dtype, num_shard, prefill, sequences).kv_tokens >= tokens
    )
    most = next(fitting, None)
    remedy = f"give --layers {most}, which fits" if most else "give --quick, or smaller sizes"
    weights = found.weight_bytes_per_shard * num_shard / 1e9
    cache = tokens * found.kv_bytes_per_token_per_shard * num_shard / 1e9
    each = "" if machine.is_cpu else f" on each of {num_shard} GPUs" if num_shard > 1 else " on the GPU"
    kept = "a fifth is left to others" if machine.is_cpu else "a step's activations take some"
    raise BenchError(
        f"{seed.title} needs {weights:.1f} GB for {whole} layers and {cache:.1f} GB for keys and values of {tokens} "
        f"tokens, and {machine.free_bytes / 1e9:.1f} GB are free{each}, of which {kept}: {remedy}"
    )


def _needed(seed: Seed, scale: Scale) -> tuple[int, int, int]:
    """Tokens that the KV cache must hold at once, of the largest prefill, and sequences."""
    if seed.kind == "latency":
        batch, given = max(scale.several("batch_size")), scale.one("sequence_length")
        return batch * _whole(given + scale.one("decode_length")), batch * given, batch
    if seed.kind == "serving":
        longest = max(scale.several("input_length")) + max(scale.several("output_length"))
        return _whole(longest), 4096, scale.streams
    sequences = max(scale.several("num_gpu_batches")) * scale.one("gpu_batch_size")
    given = scale.one("input_length")
    return sequences * _whole(given + scale.one("output_length")), sequences * given, sequences


def _whole(tokens: int) -> int:
    """Tokens of whole blocks."""
    return -(-tokens // BLOCK_SIZE) * BLOCK_SIZE


def _capacity(
    seed: Seed, layers: int | None, machine: Machine, dtype: str, num_shard: int, prefill: int, sequences: int
) -> Capacity:
    served = ServedModel(seed.model(layers).shape, dtype, on_cpu=machine.is_cpu)
    device = DatasheetDevice(1.0, 1.0, 1.0, machine.free_bytes, machine.is_cpu)
    limits = Namespace(max_batch_prefill_tokens=prefill, max_concurrent_requests=sequences, max_total_tokens=1)
    return capacity(served, device, num_shard, limits)


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
    return Machine("cpu", 1, free_host_bytes(), threads)


def _measure(device: str, dtype: str, threads: int, num_devices: int, read: int, product_kind: str) -> Ceilings:
    probe = Probe(
        device, dtype, threads=threads, num_devices=num_devices, step_weight_bytes=read, product_kind=product_kind
    )
    for _ in range(3):
        probe.measure()
    return probe.best
