"""The backend that a server would choose on the first GPU."""

from __future__ import annotations

import torch

from server import backends
from server.backends import Backend


def gpu_backend(dtype: torch.dtype) -> Backend:
    """With kernels of its own where the GPU has room for their tiles."""
    return backends.choose(backends.open_device("cuda", rank=0, world_size=1), dtype)
