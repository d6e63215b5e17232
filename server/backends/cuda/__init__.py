"""The backend for NVIDIA GPUs: Triton kernels for all but the matrix products of many rows, and CUDA graphs of decodes.

Importing this package imports neither Triton nor anything else that a CPU server lacks; making a `CudaBackend` does.
Not yet run on a GPU.
"""

from __future__ import annotations

import importlib.util

import torch

from server.backends.cuda.device import CudaDevice
from server.backends.reference import ReferenceBackend

# The first compute capability with matrix units for bfloat16. All since then give a program 99 KiB of shared memory.
LEAST_CAPABILITY = (8, 0)
# The first that computes in float8.
FLOAT8_SINCE = (8, 9)


def choose(device: CudaDevice, dtype: torch.dtype) -> ReferenceBackend:
    """The fastest backend for this GPU. torch built for ROCm calls AMD's GPUs by the name of NVIDIA's, `cuda`."""
    if torch.version.hip is not None:
        why = f"the GPU kernels are for NVIDIA GPUs, and torch is built for AMD's (ROCm {torch.version.hip})"
        return ReferenceBackend(device, [why])
    capability = torch.cuda.get_device_capability(device.torch_device)
    if capability < LEAST_CAPABILITY:
        version = ".".join(map(str, capability))
        return ReferenceBackend(device, [f"the GPU kernels need compute capability 8.0, and this GPU has {version}"])
    if importlib.util.find_spec("triton") is None:
        return ReferenceBackend(device, ["the GPU kernels are not used: Triton is not installed (pip install triton)"])
    from server.backends.cuda.backend import CudaBackend

    return CudaBackend(device, dtype)
