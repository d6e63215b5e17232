"""What the link and the layers did when, while weights stream: sums, and the latest spans of both for a picture.

Plain numbers, bounded. Moments are those of `time.perf_counter`, which all processes of a machine share on Linux, so
that the sender of a step can lay its own moments beside these. Left out: devices that work behind the host's back,
where the host knows when a layer was launched and not when it was computed.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import NamedTuple

MOST_SPANS = 8192  # of each kind: some 300 steps of a model of 24 layers, in less than 2 MB


class Span(NamedTuple):
    """Something that was done for one streamed layer, from one moment to another, in seconds."""

    layer: int  # among the streamed ones
    began_s: float
    ended_s: float


def _spans() -> deque[Span]:
    return deque(maxlen=MOST_SPANS)


@dataclass
class Times:
    """What streaming has cost so far, and the latest MOST_SPANS reads and computations."""

    bytes: int = 0  # asked for
    waited_s: float = 0.0  # by the thread that computes
    pass_bytes: int = 0  # that every step reads
    reads: deque[Span] = field(default_factory=_spans)
    computed: deque[Span] = field(default_factory=_spans)

    def forget(self) -> None:
        """Begin anew. What is being read at the moment counts when it is there."""
        self.bytes, self.waited_s = 0, 0.0
        self.reads.clear()
        self.computed.clear()


def busy_seconds(spans: Iterable[Span], since: float, until: float) -> float:
    """How much of the time between two moments lies within any span; spans may overlap."""
    total, reached = 0.0, since
    for span in sorted(spans, key=lambda span: span.began_s):
        began, ended = max(span.began_s, reached), min(span.ended_s, until)
        if ended > began:
            total += ended - began
            reached = ended
    return total
