"""What runs a model on a device: the reference in stock torch, and what is faster on CPUs and on NVIDIA GPUs.

`protocol.py` says what a backend answers for: attention, formats of linear layers, experts, norms, gates, logits,
graphs, how its device's memory is measured, and what it cannot do. `choose` takes the fastest one that can serve; its
`description` says why no faster one does. `reference/` runs everywhere and defines correct; `cpu/` (C++) and `cuda/`
(Triton) are subclasses that replace what they do faster and are tested against it. This is the one place where a
device is told apart from another.

* **CPUs.** C++ kernels keep one order of summation whatever else is in a step, so that tokens do not depend on
  neighbours even in bfloat16. Where there are matrix units (AMX), these compute all products of bfloat16, for one
  token as for thousands, because their order of summation differs from that of the vector units.
* **Integers on CPUs.** Where codes are integers, inputs are rounded to 8 bits, as the checkpoint says or by blocks of
  at most 128, and exact sums are scaled in float32: vector and matrix units give the same bits. Everything else, and
  all of float32, is expanded to a dense panel in the cache, bit for bit the dense layer of the same numbers.
* **GPUs.** A product of few rows is computed by cuBLAS or by a kernel of ours, whichever was faster when graphs were
  captured (`cuda/choice.py`), so that in bfloat16 tokens may differ from one start to the next. A quantised weight is
  packed for one kernel, which unpacks codes in registers. Where inputs are rounded too, torch's operators multiply
  where they were measured to be good (`cuda/shares.json`). What no kernel multiplies the reference computes, and the
  start-up table says why.
* **KV cache.** A backend may keep an order and bits of its own inside a block (`cpu/cache.h`,
  `cuda/kernels/cache.py`).

A backend of one's own is one class: `test_own_backend.py`.
"""

from __future__ import annotations

import torch

from host.cpu_kinds import AUTO, ROUNDED
from server.backends import cpu, cuda
from server.backends.cpu.device import CpuDevice
from server.backends.cuda.device import CudaDevice
from server.backends.device import Device
from server.backends.protocol import Backend
from server.backends.reference import ReferenceBackend
from server.blocks import ceil_divide

__all__ = ["Backend", "Device", "choose", "open_device"]


def open_device(wanted: str, rank: int, world_size: int, *, shares: bool = False) -> Device:
    """This rank's device. wanted: `auto`, `cuda` or `cpu`; shares: ranks share GPUs where there are fewer of them.

    Raises ValueError where there is no such device.
    """
    if wanted == "cpu" or (wanted == "auto" and not torch.cuda.is_available()):
        return CpuDevice()
    if not torch.cuda.is_available():
        raise ValueError("--device is cuda, but torch finds no usable GPU: install its driver or use --device cpu")
    if world_size > (count := torch.cuda.device_count()) and not shares:
        raise ValueError(
            f"--num-shard is {world_size}, but there are {count} GPUs: use --num-shard {count}, or --all-reduce host "
            "to have shards share a GPU, which is slow"
        )
    device = CudaDevice(rank % count, num_sharing=ceil_divide(world_size, count))
    device.activate()
    return device


def choose(
    device: Device,
    dtype: torch.dtype,
    *,
    disable_custom_kernels: bool = False,
    cpu_kernels: str = AUTO,
    cpu_inputs: str = ROUNDED,
) -> Backend:
    """The fastest backend for `device` that computes in `dtype`, or the reference when custom kernels are disabled.

    cpu_kernels: of which kind, on a CPU; cpu_inputs: what they do with inputs. Raises ValueError where there can be
    none of it.
    """
    if disable_custom_kernels:
        return ReferenceBackend(device, ["--disable-custom-kernels"])
    if isinstance(device, CudaDevice):
        return cuda.choose(device, dtype)
    return cpu.choose(dtype, kernels=cpu_kernels, inputs=cpu_inputs)
