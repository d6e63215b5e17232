"""A step that was launched: the tokens that it will give, and how long it took.

On a GPU a step is launched and computed later. `Launched.finish` waits for it; until then its results are where the
device writes them.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from server.backends.device import Device, Event
from server.stepping.reporting import KnownLogprobs, Reported, counted
from server.stepping.sampling import Chosen
from server.stepping.sequences import SequenceState


@dataclass(frozen=True)
class StepResult:
    """What a step produced, on the host."""

    ids: list[int]
    token_ids: list[int]
    logprobs: list[float]
    top_ids: list[list[int]]
    top_logprobs: list[list[float]]
    prompt: dict[int, KnownLogprobs]  # of tokens that were known, by sequence
    forward_ns: int


class Clock:
    """The time from here to another event of a device: by its own clock, if it works behind the host's back."""

    def __init__(self, device: Device):
        self._began = device.event()
        self._began_ns = time.perf_counter_ns()

    def ns_until(self, end: Event | None) -> int:
        """Nanoseconds until `end`, which the device has reached; without one, until now."""
        if self._began is None or end is None:
            return time.perf_counter_ns() - self._began_ns
        return int(self._began.elapsed_time(end) * 1e6)


class Launched:
    """A step that the device is computing."""

    def __init__(
        self,
        sampled: list[SequenceState],
        chosen: Sequence[Chosen],
        prompt: dict[int, Reported],
        started: Clock,
        device: Device,
        check: Callable[[], None],
    ):
        """check: raises what went wrong where no call could, once the device has done the step."""
        self._sampled = sampled
        self._chosen = [part.downloaded(device) for part in chosen]
        self._prompt = {id: reported.downloaded(device) for id, reported in prompt.items()}
        self._started = started
        self._check = check
        self._done = device.event()

    @property
    def is_done(self) -> bool:
        """Whether `finish` waits for nothing."""
        return self._done is None or self._done.query()

    def finish(self) -> StepResult:
        """Wait for the device and read the tokens. Raises PeerLost, and what the device fails with."""
        if self._done is not None:
            self._done.synchronize()
        self._check()
        top_ids, top_logprobs = self._candidates()
        return StepResult(
            ids=[s.id for s in self._sampled],
            token_ids=[id for part in self._chosen for id in part.token_ids.tolist()],
            logprobs=[logprob for part in self._chosen for logprob in part.logprobs.tolist()],
            top_ids=top_ids,
            top_logprobs=top_logprobs,
            prompt={id: reported.read() for id, reported in self._prompt.items()},
            forward_ns=self._started.ns_until(self._done),
        )

    def _candidates(self) -> tuple[list[list[int]], list[list[float]]]:
        """The ids and log-probabilities of each sequence's candidates, as many as it asked for."""
        if not any(s.choice.top_n_tokens for s in self._sampled):
            return [[] for _ in self._sampled], [[] for _ in self._sampled]
        ids = [row for part in self._chosen for row in _rows(part.top_ids, part)]
        values = [row for part in self._chosen for row in _rows(part.top_logprobs, part)]
        counts = [counted(row, s.choice.top_n_tokens) for row, s in zip(values, self._sampled, strict=True)]
        rows = list(zip(ids, values, counts, strict=True))
        return [ids[:n] for ids, _, n in rows], [values[:n] for _, values, n in rows]


def _rows(candidates: Tensor | None, part: Chosen) -> list[list[Any]]:
    """A list for each sequence of the part, empty where it has no candidates."""
    return [[] for _ in range(len(part.token_ids))] if candidates is None else candidates.tolist()
