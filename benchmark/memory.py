"""Memory: what is free of the host's, and the most that processes ever held of it and of GPUs."""

from __future__ import annotations

import subprocess
from collections.abc import Sequence
from pathlib import Path

from benchmark.launch import peak_memory


def free_host_bytes() -> int:
    """What programs can have without taking it from others, as the kernel estimates it. Linux only."""
    lines = dict(line.split(":", 1) for line in Path("/proc/meminfo").read_text().splitlines())
    return int(lines["MemAvailable"].split()[0]) * 1024


def peak_host_memory(pids: Sequence[int]) -> int:
    """Bytes of all processes together (VmHWM of each). Raises BenchError when one is gone."""
    return sum(peak_memory(pid) for pid in pids)


def peak_gpu_memory(pids: Sequence[int]) -> int | None:
    """Bytes on all GPUs together, as the driver reports at the end; None where it does not tell."""
    command = ["nvidia-smi", "--query-compute-apps=pid,used_memory", "--format=csv,noheader,nounits"]
    try:
        listing = subprocess.run(command, capture_output=True, text=True, timeout=20, check=True).stdout
        used = {int(pid): int(mib) * 2**20 for pid, mib in (line.split(",") for line in listing.splitlines())}
    except (OSError, subprocess.SubprocessError, ValueError):
        return None
    return sum(used[pid] for pid in pids) if used.keys() >= set(pids) else None
