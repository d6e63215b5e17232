"""The least time that a step can take: bytes that must move, and operations that must be done.

The arithmetic is pure and follows docs/roofline.md line by line; how fast a device can do both is in `ceilings.py` and
`devices.py`. Left out on purpose, because a perfect server could hide them: activations, the sampler, launches, and
what the ranks tell each other, which is counted apart (`sums.py`).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from benchmark.ceilings import Ceilings
from benchmark.shapes import ModelShape


@dataclass(frozen=True)
class BytesAndFlops:
    """Bytes that a step must move and operations that it must do, over all devices together.

    num_ops_8: of num_flops, those that are done in 8 bits.
    """

    num_bytes: float
    num_flops: float
    num_ops_8: float = 0.0

    def floor_ms(self, ceilings: Ceilings) -> float:
        """The slower of moving and computing, which may overlap completely; work is divided over the devices."""
        return 1000 * max(self._seconds(ceilings)) / ceilings.num_devices

    def bound_by(self, ceilings: Ceilings) -> str:
        """What the floor comes from: `bandwidth` where moving is slower, else `arithmetic`."""
        moving, computing = self._seconds(ceilings)
        return "bandwidth" if moving >= computing else "arithmetic"

    def plus(self, other: BytesAndFlops) -> BytesAndFlops:
        """What one step needs that does both."""
        return BytesAndFlops(
            self.num_bytes + other.num_bytes, self.num_flops + other.num_flops, self.num_ops_8 + other.num_ops_8
        )

    def times(self, count: float) -> BytesAndFlops:
        """What `count` such steps need."""
        return BytesAndFlops(self.num_bytes * count, self.num_flops * count, self.num_ops_8 * count)

    def _seconds(self, ceilings: Ceilings) -> tuple[float, float]:
        flops = self.num_flops - self.num_ops_8 * (1 - ceilings.eight_bit_share)
        return self.num_bytes / ceilings.bytes_per_second, flops / ceilings.flops_per_second


class Piece(NamedTuple):
    """Tokens of a sequence that a step computes: `length` of them, behind `done` that earlier steps have computed.

    times: how many sequences have such a piece. Of a layer with a window a token sees no more tokens than that, itself
    included; a window of 0 is none.
    """

    done: float
    length: int = 1
    times: float = 1

    @property
    def tokens(self) -> float:
        """That are computed."""
        return self.times * self.length

    def pairs(self, window: int) -> float:
        """Keys that those tokens look at, together: a single one also at itself, of several half do at each other."""
        if self.length == 1:
            return self.times * _within(self.done + 1, window)
        return self.times * (_area(self.done + self.length, window) - _area(self.done, window))

    def read(self, window: int) -> float:
        """Tokens of earlier steps whose keys and values come from the cache."""
        return self.times * (min(self.done, window - 1) if window else self.done)


def _within(tokens: float, window: int) -> float:
    return min(tokens, window) if window else tokens


def _area(tokens: float, window: int) -> float:
    """What so many tokens see, together, each all that are before it, or a window of those."""
    full = _within(tokens, window)
    return full**2 / 2 + (tokens - full) * full


def decode_pieces(batch_size: float, length: int, generated: float, windows: Iterable[int]) -> list[Piece]:
    """The decode steps of sequences of `length` tokens that get `generated`, as one mean step.

    Step i of generated - 1 sees length + i tokens. Between the windows what is seen grows evenly, so each stretch has
    its mean context, for its share of the steps.
    """
    num_steps = max(1, generated - 1)
    first: float = length + 1
    last = length + num_steps
    ends = sorted({last, *(window for window in windows if first <= window < last)})
    pieces = []
    for end in ends:
        pieces.append(Piece((first + end) / 2 - 1, 1, batch_size * (end - first + 1) / num_steps))
        first = end + 1
    return pieces


@dataclass(frozen=True)
class ServedModel:
    """A shape in the dtype and format in which it is served, by so many ranks."""

    shape: ModelShape
    dtype: str
    quantize: str | None = None
    kv_cache_dtype: str | None = None  # None: the model's
    on_cpu: bool = False  # where products of quantised weights are other ones
    ranks: int = 1  # that it, or each of its stages, is split over

    def stages(self, count: int) -> list[ServedModel]:
        """Its pipeline stages. Raises ValueError where there are too few layers."""
        return [replace(self, shape=shape) for shape in self.shape.stages(count)]

    @property
    def kv_copies(self) -> int:
        """Ranks that hold the same key-value head: several where there are more ranks than heads."""
        return max(1, self.ranks // self.shape.spec.num_kv_heads)

    @property
    def kv_bytes_per_token(self) -> int:
        """Bytes of the keys and values of one token in all layers, each head once."""
        return self.shape.kv_bytes_per_token(self.dtype, self.kv_cache_dtype)

    @property
    def kv_bytes(self) -> Mapping[int, int]:
        """Bytes of the keys and values of one token on all ranks, by the window of the layers that they are of."""
        one = self.kv_copies * self.shape.kv_bytes_per_layer(self.dtype, self.kv_cache_dtype)
        return {window: count * one for window, count in self.shape.windows.items()}

    @property
    def key_flops(self) -> Mapping[int, int]:
        """Operations of a token looking at one key, by the window of the layers in which it does."""
        one = 4 * self.shape.spec.num_heads * self.shape.spec.head_dim
        return {window: count * one for window, count in self.shape.windows.items()}

    @property
    def product_kind(self) -> str:
        """Of which numbers of 8 bits some of its products are, int8 or float8; empty: none are."""
        return self.shape.product_kind(self.dtype, self.quantize, on_cpu=self.on_cpu)

    def step_weight_bytes(self, tokens: float = 1) -> float:
        """Bytes of weights that a step over so many tokens reads once: all layers and the head, but not the embedding
        table, and of a mixture those experts that any of the tokens goes to. Copies of key-value heads are read too."""
        copies = self.shape.copied_kv_bytes(self.dtype, self.quantize, self.ranks)
        return self.shape.step_weight_bytes(self.dtype, self.quantize, tokens) + copies

    def step(self, pieces: Iterable[Piece], *, sampled: float) -> BytesAndFlops:
        """What any step needs.

        pieces: what it computes. sampled: sequences that get a token, so that they need logits.
        """
        shape, pieces = self.shape, list(pieces)
        tokens = sum(piece.tokens for piece in pieces)
        kv = sum(
            num_bytes * (tokens + sum(piece.read(window) for piece in pieces))  # what is computed is also written
            for window, num_bytes in self.kv_bytes.items()
        )
        attention = sum(
            flops * sum(piece.pairs(window) for piece in pieces) for window, flops in self.key_flops.items()
        )
        matrices = 2 * shape.step_parameters * tokens + 2 * shape.head_parameters * sampled
        layers, head = shape.eight_bit_parameters(self.dtype, self.quantize, on_cpu=self.on_cpu)
        in_8_bits = 2 * layers * tokens + 2 * head * sampled
        weights = self.step_weight_bytes(tokens)
        if not sampled:  # a chunk of a prompt that goes on
            weights -= shape.head_bytes(self.dtype, self.quantize)
        return BytesAndFlops(weights + kv, matrices + attention, in_8_bits)

    def encode(self, lengths: Sequence[int], times: float = 1) -> BytesAndFlops:
        """What an encoder-decoder adds to a step for prompts of these lengths: every token sees its whole prompt.

        times: how many prompts of each of these lengths there are.

        A pipeline stage without the encoder multiplies what that says by its own layers' matrices.
        """
        shape, encoder, tokens = self.shape, self.shape.spec.encoder, times * sum(lengths)
        assert encoder is not None, "only an encoder-decoder encodes"
        pairs = times * sum(length**2 for length in lengths)
        layers = encoder.num_layers * shape.has_embedding
        attention = 4 * layers * encoder.num_heads * encoder.head_dim * pairs
        num_bytes = shape.encode_bytes(self.dtype, self.quantize) + tokens * sum(self.kv_bytes.values())
        in_8_bits, _ = shape.eight_bit_parameters(self.dtype, self.quantize, on_cpu=self.on_cpu, of_prompts=True)
        return BytesAndFlops(num_bytes, 2 * shape.encode_parameters * tokens + attention, 2 * in_8_bits * tokens)

    def decode(self, batch_size: float, context: float) -> BytesAndFlops:
        """What a decode step of `batch_size` sequences needs that attend to `context` tokens, the new one included."""
        return self.step([Piece(context - 1, 1, batch_size)], sampled=batch_size)

    def mean_decode(self, batch_size: float, length: int, generated: float) -> BytesAndFlops:
        """What a decode step needs on average, of sequences that begin with `length` tokens and get `generated`."""
        return self.step(decode_pieces(batch_size, length, generated, self.shape.windows), sampled=batch_size)

    def prefill(self, batch_size: float, length: int) -> BytesAndFlops:
        """What a step over `batch_size` whole prompts of `length` tokens needs, with the first token of each.

        Attention is causal, so that a token looks at half of its prompt on average.
        """
        if self.shape.spec.encoder is not None:
            return self.encode([length], batch_size).plus(self.decode(batch_size, length + 1))
        return self.step([Piece(0, length, batch_size)], sampled=batch_size)


def mean_context(sequence_length: int, decode_length: int) -> float:
    """Mean context over the decode steps of one sequence: steps 1 … D-1 attend to S+1 … S+D-1 tokens."""
    return sequence_length + decode_length / 2
