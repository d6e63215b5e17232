"""The machine at hand: what computes, how much memory is free, and what it does at best.

Looked at from a process of its own that ends, so that nothing of torch or a GPU stays while a server is measured.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass, replace
from multiprocessing import get_context
from typing import Any, TypeVar

from benchmark.ceilings import Ceilings, Probe
from benchmark.devices import known
from benchmark.memory import free_host_bytes
from benchmark.report import BenchError
from benchmark.roofline import ServedModel

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


def look(kind: str) -> Machine:
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
