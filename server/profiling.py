"""Where the time of a step goes on one rank: torch's profiler, run on the thread that computes.

On a CPU the times are those of operators on that thread, on a GPU those of its kernels. What the profiler costs itself
lengthens short operators; shares matter more than sums.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch.profiler import ProfilerActivity, profile


@dataclass(frozen=True)
class OperatorTime:
    """One operator's calls and own time, without the operators that it called."""

    name: str
    calls: int
    self_ns: int


class StepProfiler:
    """Records operators between `start` and `stop`, both called on the thread that computes."""

    def __init__(self, device: torch.device):
        self._is_cuda = device.type == "cuda"
        self._profile: profile | None = None

    def start(self) -> None:
        """Begin anew; what an earlier `start` recorded is dropped."""
        self._close()
        activities = [ProfilerActivity.CPU, ProfilerActivity.CUDA] if self._is_cuda else [ProfilerActivity.CPU]
        self._profile = profile(activities=activities)
        self._profile.start()

    def stop(self, trace_path: str) -> list[OperatorTime]:
        """What was recorded, longest first. Raises ValueError when nothing was started."""
        recorded = self._close()
        if recorded is None:
            raise ValueError("no profile was started: start one before stopping it")
        if trace_path:
            recorded.export_chrome_trace(trace_path)
        attribute = "self_device_time_total" if self._is_cuda else "self_cpu_time_total"
        times = [OperatorTime(e.key, e.count, int(1000 * getattr(e, attribute))) for e in recorded.key_averages()]
        return sorted((t for t in times if t.self_ns), key=lambda time: -time.self_ns)

    def _close(self) -> profile | None:
        recorded, self._profile = self._profile, None
        if recorded is not None:
            recorded.stop()
        return recorded
