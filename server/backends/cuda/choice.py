"""Which of several ways to compute the same takes the least time on this GPU, found out before anything is served.

cuBLAS and the kernel for few rows are each the faster one for some shapes, and nobody knows for which but the GPU. So
each shape is timed once, in the run that precedes a capture, and never again: neither inside a capture, which would
break, nor in a step that somebody waits for, which then takes the usual way. The usual way is kept unless another one
is clearly faster, so that noise does not decide, and a restart seldom decides otherwise. Without a clock the usual way
is always taken: then a restart gives the same tokens in bfloat16 too.

Ranks do not agree on what they choose, and need not where each computes its own part of a sum, which all of them then
receive. What all ranks must compute alike, such as a mixture's router, is not chosen (`linear.py`).
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Protocol

import torch

from server.backends.cuda.graph import CudaGraphCapture
from server.backends.protocol import Computation

# Another way must take less than this share of the usual one's time.
CLEARLY_FASTER = 0.95
RUNS = 9
# How long the GPU is kept busy while the host launches what is timed: more than the launches of all its kernels take.
HEAD_START_CYCLES = 500_000

# Computes something once; its results do not matter.
Trial = Callable[[], object]


class Clock(Protocol):
    """Times what a device computes."""

    def can_time(self) -> bool:
        """Whether the current stream computes what it is told, rather than noting it in a graph."""

    def __call__(self, trial: Trial) -> float:
        """How long the trial takes, in milliseconds."""


class EventClock:
    """Times what a GPU computes, in milliseconds, each time with nothing in its caches. Not yet run on a GPU."""

    def __init__(self, device: torch.device):
        self._device = device

    def can_time(self) -> bool:
        return not torch.cuda.is_current_stream_capturing()

    def __call__(self, trial: Trial) -> float:
        trial()  # compiles, and allocates
        cache_bytes = torch.cuda.get_device_properties(self._device).L2_cache_size
        evicting = torch.empty(2 * cache_bytes, dtype=torch.int8, device=self._device)
        return statistics.median(self._once(trial, evicting) for _ in range(RUNS))

    def _once(self, trial: Trial, evicting: torch.Tensor) -> float:
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        evicting.zero_()
        torch.cuda._sleep(HEAD_START_CYCLES)
        start.record()
        trial()
        end.record()
        end.synchronize()
        return start.elapsed_time(end)


@dataclass(frozen=True)
class Asked:
    """What is chosen among, for people. product: what is computed; ways: their names; num_bytes: that each reads."""

    product: str
    ways: Sequence[str]
    num_bytes: int


class Chooser:
    """Chooses among ways to compute something, by their times. clock: None never to measure.

    found: a sentence about each choice.
    """

    def __init__(self, clock: Clock | None):
        self._clock = clock
        self._is_measuring = False
        self._chosen: dict[Hashable, int] = {}
        self.found: list[str] = []

    @contextmanager
    def measuring(self) -> Iterator[None]:
        """Measure what is asked for the first time inside: nobody waits for it."""
        before, self._is_measuring = self._is_measuring, True
        try:
            yield
        finally:
            self._is_measuring = before

    def choose(
        self, key: Hashable, trials: Callable[[], Sequence[Trial]], asked: Callable[[], Asked] | None = None
    ) -> int:
        """Which of the ways takes the least time; 0, the usual one, as long as nobody knows.

        key: tells apart what takes different times; trials: makes one for each way, the usual one first; asked: the
        same for people.
        """
        if key in self._chosen:
            return self._chosen[key]
        if self._clock is None or not self._is_measuring or not self._clock.can_time():
            return 0
        times = [self._clock(trial) for trial in trials()]
        fastest = min(range(len(times)), key=times.__getitem__)
        self._chosen[key] = fastest if times[fastest] < CLEARLY_FASTER * times[0] else 0
        if asked is not None:
            self.found.append(_sentence(asked(), times, self._chosen[key]))
        return self._chosen[key]


def _sentence(asked: Asked, times: Sequence[float], chosen: int) -> str:
    """times: of each way, in milliseconds. Nothing was in the GPU's caches: so GB/s are those of its memory."""
    ways = [f"{name} {time * 1e3:.1f} us" for name, time in zip(asked.ways, times, strict=True)]
    rate = asked.num_bytes / 1e6 / times[chosen] if times[chosen] else 0.0  # a clock may see nothing of it
    others = ways[:chosen] + ways[chosen + 1 :]
    return f"{asked.product}: {ways[chosen]}, {rate:.0f} GB/s" + (f" ({', '.join(others)})" if others else "")


class MeasuredCapture(CudaGraphCapture):
    """Captures graphs; what the runs before a capture compute for the first time is measured."""

    def __init__(self, sizes: Sequence[int], stream: torch.cuda.Stream, chooser: Chooser):
        super().__init__(sizes, stream)
        self._chooser = chooser

    def __call__(self, function: Computation) -> Computation:
        with self._chooser.measuring():
            return super().__call__(function)
