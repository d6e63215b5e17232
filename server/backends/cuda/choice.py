"""Which of several ways to compute the same takes the least time on this GPU, found out before anything is served.

cuBLAS and the kernel for few rows are each the faster one for some shapes, and only the GPU can tell for which. So each
shape is timed once, in the run that precedes a capture, and never again: neither inside a capture, which would break,
nor in a step of a request, which then takes the usual way. The usual way is kept unless another one is clearly faster,
so that noise does not decide, and a restart seldom decides otherwise. Without a clock the usual way is always taken:
then a restart gives the same tokens in bfloat16 too.

Ranks do not agree on what they choose, and need not where each computes its own part of a sum, which all of them then
receive. What all ranks must compute alike, such as a mixture's router, is not chosen (`linear.py`).

Which way is usual for products in 8 bits is data. `shares.json` beside this has, for each of torch's operators, the
share of the limit (of memory or of arithmetic, whichever binds) that it reached for a shape and a number of rows;
`lockstep-bench products --write` measures and writes it. An operator that reaches 70 % of the limit is the usual way;
otherwise our kernel is, and the operator is only tried where times are measured. Until the first run on a GPU the file
is empty.
"""

from __future__ import annotations

import json
import math
import statistics
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import torch

from server.backends.cuda.graph import CudaGraphCapture
from server.backends.device import lost_device
from server.backends.protocol import Computation

# Another way must take less than this share of the usual one's time.
CLEARLY_FASTER = 0.95
RUNS = 9
# How long the GPU is kept busy while the host launches what is timed: more than the launches of all its kernels take.
HEAD_START_CYCLES = 500_000
GOOD_SHARE = 0.7  # of the limit
SHARES_FILE = Path(__file__).with_name("shares.json")
# Computes something once; its results do not matter.
Trial = Callable[[], object]


@dataclass(frozen=True)
class Alternatives:
    """What is chosen among, for people. product: what is computed; ways: their names; num_bytes: that each reads."""

    product: str
    ways: Sequence[str]
    num_bytes: int


class Chooser:
    """Chooses among ways to compute something, by their times. clock: None never to measure.

    refusals: what a way raises that cannot compute something, of torch and of the compiler of kernels. Where that is
    not the usual way, another one is taken. found: a sentence about each choice.
    """

    def __init__(self, clock: Clock | None, refusals: tuple[type[Exception], ...] = (RuntimeError,)):
        self._clock = clock
        self._refusals = refusals
        self._is_measuring = False
        self._chosen: dict[Hashable, int] = {}
        self.found: list[str] = []

    @property
    def is_capturing(self) -> bool:
        """Whether what is computed now is captured, or precedes its capture."""
        return self._is_measuring

    @contextmanager
    def measuring(self) -> Iterator[None]:
        """Measure what is asked for the first time inside: no request waits for it."""
        before, self._is_measuring = self._is_measuring, True
        try:
            yield
        finally:
            self._is_measuring = before

    def choose(
        self, key: Hashable, trials: Callable[[], Sequence[Trial]], asked: Callable[[], Alternatives] | None = None
    ) -> int:
        """Which of the ways takes the least time; 0, the usual one, as long as that is not known.

        key: tells apart what takes different times; trials: makes one for each way, the usual one first; asked: the
        same for people.
        """
        if key in self._chosen:
            return self._chosen[key]
        if self._clock is None or not self._is_measuring or not self._clock.can_time():
            return 0
        usual, *others = trials()
        times = [self._clock(usual), *(self._time(self._clock, other) for other in others)]
        fastest = min(range(len(times)), key=times.__getitem__)
        self._chosen[key] = fastest if times[fastest] < CLEARLY_FASTER * times[0] else 0
        if asked is not None:
            self.found.append(_sentence(asked(), times, self._chosen[key]))
        return self._chosen[key]

    def _time(self, clock: Clock, trial: Trial) -> float:
        """How long a trial takes, in milliseconds; for ever where it refuses. Raises what means a lost device."""
        try:
            return clock(trial)
        except self._refusals as error:
            if lost_device(error) is not None:
                raise
            return math.inf


def _sentence(asked: Alternatives, times: Sequence[float], chosen: int) -> str:
    """times: of each way, in milliseconds. Nothing was in the GPU's caches: so GB/s are those of its memory."""
    took = ["refuses" if time == math.inf else f"{time * 1e3:.1f} us" for time in times]
    ways = [f"{name} {taken}" for name, taken in zip(asked.ways, took, strict=True)]
    rate = asked.num_bytes / 1e6 / times[chosen] if times[chosen] else 0.0  # a clock may see nothing of it
    others = ways[:chosen] + ways[chosen + 1 :]
    return f"{asked.product}: {ways[chosen]}, {rate:.0f} GB/s" + (f" ({', '.join(others)})" if others else "")


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


class MeasuredCapture(CudaGraphCapture):
    """Captures graphs; what the runs before a capture compute for the first time is measured."""

    def __init__(self, sizes: Sequence[int], stream: torch.cuda.Stream, chooser: Chooser):
        super().__init__(sizes, stream)
        self._chooser = chooser

    def __call__(self, function: Computation) -> Computation:
        with self._chooser.measuring():
            return super().__call__(function)


@dataclass(frozen=True)
class MeasuredShare:
    """One product, timed."""

    operator: str
    features: int
    inputs: int
    rows: int
    share: float  # of the limit, 0 … 1


@dataclass(frozen=True)
class Shares:
    """All that was measured of one kind of GPU."""

    measured: tuple[MeasuredShare, ...] = field(default=())

    @classmethod
    def read(cls, path: Path = SHARES_FILE) -> Shares:
        """Raises ValueError where the file is damaged."""
        try:
            rows: list[dict[str, Any]] = json.loads(path.read_text())
            return cls(tuple(MeasuredShare(**row) for row in rows))
        except (OSError, TypeError, ValueError) as error:
            raise ValueError(f"{path} cannot be read: {error}; write it again with lockstep-bench products") from None

    def write(self, path: Path = SHARES_FILE) -> None:
        """One line for each product."""
        lines = ",\n".join(f"  {json.dumps(vars(row))}" for row in self.measured)
        path.write_text(f"[\n{lines}\n]\n" if lines else "[]\n")

    def is_good(self, operator: str, features: int, inputs: int, rows: int) -> bool:
        """Whether the measured product that is most like this one reached enough; without any, no."""
        of_operator = [row for row in self.measured if row.operator == operator]
        if not of_operator:
            return False
        wanted = (features, inputs, max(rows, 1))
        nearest = min(of_operator, key=lambda row: _distance((row.features, row.inputs, row.rows), wanted))
        return nearest.share >= GOOD_SHARE


def _distance(one: tuple[int, int, int], other: tuple[int, int, int]) -> float:
    return sum(abs(math.log2(a / b)) for a, b in zip(one, other, strict=True))
