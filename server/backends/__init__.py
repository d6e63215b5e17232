"""What runs a model on a device: the reference in stock torch, and what is faster on CPUs and on NVIDIA GPUs.

`protocol.py` says what a backend answers for. `choose` takes the fastest one that can serve; its `description` says why
no faster one does. The one place where a device is told apart from another.
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
