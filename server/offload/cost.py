"""How long a step takes while weights stream, and how much of them should stay: FlexGen's cost model, for this engine.

The anchor is FlexGen (Sheng et al. 2023, arXiv 2303.06865, section 4.3): a step takes as long as the slower of bringing
weights and computing, because the next layer comes while one computes; the best policy is found by trying all of a
small set. What differs: rates are measured and not fitted, a step computes all of its sequences, and a step may have
prompts.

Of a mixture of experts a step multiplies with those that its tokens go to, each with its own part of them. In a layer
with a window no sequence looks at more keys than that. Rings and states are kept for as many sequences as a server's
warm-up keeps them for (`server/stepping/warmup.py`), however few run.

What the link and the layers did when is recorded beside it (`Times`), bounded. Moments are those of
`time.perf_counter`, which all processes of a machine share on Linux, so that the sender of a step can lay its own
moments beside these; of devices that work behind the host's back only the launches are known.

Plain numbers, no torch. Left out: what prompts' attention computes, a share of tokens ÷ (12 × width) of their products;
collectives; the sampler; and that reading and computing share a CPU's memory.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

SLOTS = 2  # layers that are on the device while they stream: one is computed with while the other one comes


@dataclass(frozen=True)
class Rates:
    """What was measured of a device, and of what brings weights to it.

    products: tokens in a step, ascending, and the seconds that each byte of the layers' weights, as they are stored,
    costs in a step of so many. head: likewise of the head, whose rows are the step's samples; empty: as the layers'.
    """

    link: float  # bytes/s
    products: Sequence[tuple[int, float]]
    head: Sequence[tuple[int, float]] = ()

    def seconds_per_byte(self, tokens: float) -> float:
        """Of the layers' weights, in a step of so many tokens."""
        return _between(self.products, tokens)

    def seconds_per_byte_of_head(self, sampled: float) -> float:
        """Of the head's weights, where so many sequences get a token."""
        return _between(self.head or self.products, sampled)

    def of_devices(self, count: int) -> Rates:
        """Those of so many devices that each have a part of every weight."""
        products, head = (
            [(size, seconds / count) for size, seconds in points] for points in (self.products, self.head)
        )
        return Rates(self.link * count, products, head)

    @property
    def memory(self) -> float:
        """Bytes/s at which a step of one token reads weights at best, and any step its keys and values."""
        return 1 / min(points[0][1] for points in (self.products, self.head) if points)


def _between(points: Sequence[tuple[int, float]], tokens: float) -> float:
    """Between measured points by straight lines; below the first as there, beyond the last in proportion."""
    if tokens <= 0:
        return 0.0
    sizes = [size for size, _ in points]
    right = bisect_right(sizes, tokens)
    if right == 0:
        return points[0][1]
    if right == len(sizes):
        return points[-1][1] * tokens / sizes[-1]
    (x0, y0), (x1, y1) = points[right - 1 : right + 1]
    return y0 + (y1 - y0) * (tokens - x0) / (x1 - x0)


@dataclass(frozen=True)
class Sizes:
    """What a model's parts take, in bytes."""

    layers: float  # the weights of all layers, as they are stored
    num_layers: int
    head: float
    kv_per_token: float  # that the KV cache keeps
    largest: float = 0.0  # of the layers; 0: they are alike
    experts: Mapping[float, float] = field(default_factory=dict)  # of `layers`, by the share that a token goes to
    # Of a token's keys and values, by the window of the layers that look at them; 0: they see all; None: all do.
    windows: Mapping[int, float] | None = None
    states: float = 0.0  # of a sequence, which each of its steps reads and writes
    rings: float = 0.0  # of a sequence

    @property
    def slots(self) -> float:
        """Memory through which layers stream."""
        return SLOTS * max(self.largest, self.layers / self.num_layers)

    @property
    def seen(self) -> Mapping[int, float]:
        """`windows`, whether there are any or not."""
        return {0: self.kv_per_token} if self.windows is None else self.windows

    def kv_bytes(self, sequences: float, length: float) -> float:
        """Keys, values and states that so many sequences look at, of so many tokens each."""
        seen = ((min(length, window) if window else length, num_bytes) for window, num_bytes in self.seen.items())
        return sequences * (2 * self.states + sum(tokens * num_bytes for tokens, num_bytes in seen))

    def beside_tokens(self, sequences: int) -> float:
        """States and rings of so many sequences; one state more is nobody's."""
        return (sequences + bool(self.states)) * self.states + sequences * self.rings

    def sequences_in(self, memory: float, most: int) -> int:
        """How many of `most` sequences have states and rings in so many bytes, of which these take at most half."""
        each = self.states + self.rings
        return min(most, max(0, int(memory / 2 // each) - 1)) if each else most


@dataclass(frozen=True)
class StepCost:
    """How long a step takes of which so many bytes stream."""

    sizes: Sizes
    rates: Rates
    streamed: float  # bytes that every step brings

    def seconds(self, *, tokens: float, sampled: float, kv_bytes: float) -> float:
        """tokens: computed in the step; sampled: that get logits; kv_bytes: keys and values that are read."""
        if not tokens:
            return 0.0
        return max(self.streamed / self.rates.link, self.computing(tokens=tokens, sampled=sampled, kv_bytes=kv_bytes))

    def computing(self, *, tokens: float, sampled: float, kv_bytes: float) -> float:
        """The same if all weights were there."""
        dense = self.sizes.layers - sum(self.sizes.experts.values())
        products = dense * self.rates.seconds_per_byte(tokens) + self._experts(tokens)
        head = self.sizes.head * self.rates.seconds_per_byte_of_head(sampled)
        return products + head + kv_bytes / self.rates.memory

    def _experts(self, tokens: float) -> float:
        """Products with the experts that any of the tokens goes to, which divide the tokens' choices evenly."""
        seconds = 0.0
        for share, num_bytes in self.sizes.experts.items():
            read = share_read(share, tokens)
            if read:
                seconds += read * num_bytes * self.rates.seconds_per_byte(tokens * share / read)
        return seconds


def share_read(share: float, tokens: float) -> float:
    """Which share of the experts `tokens` tokens are expected to go to, each to `share` of them at random."""
    return 1 - float((1 - share) ** tokens)


@dataclass(frozen=True)
class Room:
    """Memory of one rank, and what its limits want of it. kv_tokens: a size that the cache must have; 0: none."""

    memory: float  # bytes for layers that stay, slots, and keys and values
    longest: int  # tokens of the longest sequence
    sequences: int  # at once at most
    kv_tokens: int = 0

    @property
    def useful_tokens(self) -> int:
        """More keys and values could never be used."""
        return self.kv_tokens or self.sequences * self.longest


@dataclass(frozen=True)
class Choice:
    """How much stays, and what comes of it."""

    resident: float  # bytes of layers that stay on the device
    kv_tokens: int  # that there is room for
    sequences: int  # of the longest kind at once
    step_s: float  # of a decode step of so many, half through their lengths
    streams: bool

    @property
    def tokens_per_second(self) -> float:
        """Decoded by all sequences together."""
        return self.sequences / self.step_s


def choose(sizes: Sizes, rates: Rates, room: Room) -> Choice | None:
    """The best of all numbers of layers that stay; None where not even one sequence fits beside none of them.

    Best is what decodes most tokens a second with a full cache, of equals what streams least.
    """
    found: Choice | None = None
    for count in range(sizes.num_layers, -1, -1):
        choice = _choice(sizes, rates, room, count)
        if choice is not None and (found is None or choice.tokens_per_second > found.tokens_per_second * (1 + 1e-9)):
            found = choice
    return found


def _choice(sizes: Sizes, rates: Rates, room: Room, count: int) -> Choice | None:
    """What comes of `count` layers that stay; None where nothing can run beside them."""
    streams = count < sizes.num_layers
    resident = sizes.layers * count / sizes.num_layers
    left = room.memory - resident - sizes.slots * streams
    with_states = sizes.sequences_in(left, room.sequences)
    kv_tokens = int(min(room.useful_tokens, (left - sizes.beside_tokens(with_states)) / sizes.kv_per_token))
    if not with_states or kv_tokens < max(room.longest, room.kv_tokens):
        return None
    sequences = min(with_states, kv_tokens // room.longest)
    cost = StepCost(sizes, rates, sizes.layers - resident)
    seconds = cost.seconds(tokens=sequences, sampled=sequences, kv_bytes=sizes.kv_bytes(sequences, room.longest / 2))
    return Choice(resident, kv_tokens, sequences, seconds, streams)


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
