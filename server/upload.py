"""From Python values to a tensor on the device, without waiting for what the device is computing.

A copy from ordinary memory makes the host wait until all earlier work of a GPU is done, and so undoes what it gained by
launching a step while another one is running; from pinned memory it takes its place among that work.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor


def upload(values: Sequence[Any], device: torch.device, dtype: torch.dtype = torch.int64) -> Tensor:
    """The values as a tensor of their shape."""
    return torch.tensor(values, dtype=dtype, pin_memory=device.type == "cuda").to(device, non_blocking=True)
