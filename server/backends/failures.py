"""What an exception of a device means for the process: a graph less, or a device that is lost.

Left out: running out of memory, which torch names itself, and peers that went away (`server/ranks/distributed.py`).
"""

from __future__ import annotations

# What CUDA, HIP and Triton say when the work of a process is lost: from then on every call fails with the same words,
# until the process ends. CUDA's description of each says so; errors of memory, of capture and of single launches, which
# leave the device in order, are not among them.
LOST = (
    "illegal memory access",
    "device-side assert",
    "unspecified launch failure",
    "misaligned address",
    "illegal instruction",
    "hardware stack error",
    "invalid program counter",
    "operation not supported on global/shared address space",
    "uncorrectable ecc error",
    "uncorrectable nvlink error",
    "launch timed out and was terminated",
    "context is destroyed",
)


class CaptureFailed(RuntimeError):
    """A computation was not captured; the device is in order and computes it all the same."""


class DeviceLost(RuntimeError):
    """Nothing can be computed on the device any more, until a fresh process opens it."""


def lost_device(error: BaseException) -> DeviceLost | None:
    """The error in one sentence if it means that the device is lost, else None."""
    if isinstance(error, DeviceLost):
        return error
    text = str(error)
    if not isinstance(error, RuntimeError) or not any(phrase in text.lower() for phrase in LOST):
        return None
    cause = text.strip().splitlines()[0]
    return DeviceLost(f"the device is lost, and only a fresh start opens it again: {cause}")
