"""Where the time of a step goes on one rank: torch's profiler, run on the thread that computes.

On a CPU the times are those of operators on that thread, on a GPU those of its kernels. What the profiler costs itself
lengthens short operators; shares matter more than sums.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch.profiler import profile

from server.backends.device import Device


@dataclass(frozen=True)
class OperatorTime:
    """One operator's calls and own time, without the operators that it called."""

    name: str
    calls: int
    self_ns: int


class StepProfiler:
    """Records operators between `start` and `stop`, both called on the thread that computes."""

    def __init__(self, device: Device):
        self._activities, self._time_attribute = device.profiled()
        self._profile: profile | None = None

    def start(self) -> None:
        """Begin anew; what an earlier `start` recorded is dropped."""
        self._close()
        self._profile = profile(activities=self._activities)
        self._profile.start()

    def stop(self, trace_path: str) -> list[OperatorTime]:
        """What was recorded, longest first. Raises ValueError when nothing was started."""
        recorded = self._close()
        if recorded is None:
            raise ValueError("no profile was started: start one before stopping it")
        if trace_path:
            recorded.export_chrome_trace(trace_path)
        times = [
            OperatorTime(e.key, e.count, int(1000 * getattr(e, self._time_attribute))) for e in recorded.key_averages()
        ]
        return sorted((t for t in times if t.self_ns), key=lambda time: -time.self_ns)

    def _close(self) -> profile | None:
        recorded, self._profile = self._profile, None
        if recorded is not None:
            recorded.stop()
        return recorded
