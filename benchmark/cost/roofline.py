"""The least time that a step can take: bytes that must move, operations that must be done, and what ranks must tell.

The arithmetic is pure; how fast a device can do both is in `devices.py`. Left out of a floor,
because a perfect server could hide them: activations, the sampler and launches.

A step that computes `t` tokens, which together attend to `k` keys, reads `r` tokens' keys and values from the cache
and samples for `s` sequences, needs

    bytes      = W + h + (r + t)*kv
    operations = 2*P*t + 4*a*k + 2*H*s

* `P`, `H`: parameters of the layers and of the head. `W`, `h`: their bytes as stored, with scales and zeros; weights
  are read once whatever the batch. The input embedding is not counted, a tied head is. A step that samples for nobody
  reads no head.
* `kv`: bytes of a token's keys and values in the cache's format. `a`: layers x heads x head size. Attention
  multiplies each query with each key and each probability with each value: 2 + 2 operations per head feature.
* Decode of `b` sequences in a context of `c`: t = s = b, k = b*c, r = b*(c - 1). A run of D tokens after S has D - 1
  such steps, with a mean context of S + D/2. Prefill of `b` prompts of S: t = b*S, k = b*S*S/2 (causal), r = 0, s =
  b. A mixed step is the sum of its parts, with the weights counted once.
* A mixture: `P` has the experts of one token; a step over `t` tokens reads the experts that any of them goes to, of E
  with k per token on average E*(1 - (1 - k/E)**t), as if each token went to any of them.
* A sliding window of w, or chunks of so many: in that layer a token sees w tokens at most, itself included.
* More ranks than key-value heads: each head is on several, which all read its keys, values and matrices.
* Operations are in 8 bits, whose peak is another one, where the product is of such numbers: on a GPU where inputs are
  rounded too, on a CPU wherever codes are integers.
* An encoder-decoder: `P` leaves out the encoder and the matrices for keys and values of its output. Those E
  parameters of E' bytes are read in a step with new prompts, which adds E' + b*S*kv bytes and 2*E*b*S + 4*a'*b*S*S
  operations (a': the encoder's a) to one decode step.

What ranks tell each other is counted apart. A rank has part of every layer, of the table of words and of the head:
what attention and mlp add is summed over the ranks, the table's rows are summed up from where they are, and of the
logits each rank tells the best of its own. Left out: thresholds of top-p and the like, eight more exchanges of a
step.

With pipeline stages, a step of one micro-batch goes through all stages and links, and its tokens go back to the first
stage before its next step can begin: that round is the least that a token takes. Meanwhile the stages compute other
micro-batches, so that with enough of them the slowest stage, or the slowest link, says how long a round takes (GPipe,
Huang et al. 2019, arXiv 1811.06965). Left out: what a link's processes cost, below a tenth of a millisecond.
"""

from __future__ import annotations

import argparse
import math
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import NamedTuple

from benchmark import options
from benchmark.cost.shapes import DTYPE_BYTES, ModelShape, kv_bytes
from benchmark.result import BenchError
from router.config import MOST_MICRO_BATCHES
from server.arch.footprint import state_bytes
from server.arch.spec import ArchSpec, KvHeads, Residual

MEASURED, DATA_SHEET = "measured", "data sheet"  # where ceilings come from: what a share of the limit is a share of


@dataclass(frozen=True)
class Ceilings:
    """What one device can do at best. Ranks that share a device share its ceilings."""

    bytes_per_second: float
    flops_per_second: float
    num_devices: int = 1
    ops_8_per_second: float = 0.0  # of products in 8 bits; 0: as fast as the others
    source: str = MEASURED

    @property
    def eight_bit_share(self) -> float:
        """How long an operation in 8 bits takes, as a share of one in the model's dtype, which could stand for it."""
        return min(1.0, self.flops_per_second / self.ops_8_per_second) if self.ops_8_per_second else 1.0

    def best_of(self, other: Ceilings) -> Ceilings:
        """The higher of both in each figure."""
        return replace(
            self,
            bytes_per_second=max(self.bytes_per_second, other.bytes_per_second),
            flops_per_second=max(self.flops_per_second, other.flops_per_second),
            ops_8_per_second=max(self.ops_8_per_second, other.ops_8_per_second),
        )


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
    def kv_bytes_per_token(self) -> int:
        """Bytes of the keys and values of one token in all layers, each head once."""
        return self.shape.kv_bytes_per_token(self.dtype, self.kv_cache_dtype)

    @cached_property
    def kv_bytes(self) -> Mapping[int, int]:
        """Bytes of the keys and values of one token on all ranks, by the window of the layers that look at them."""
        return self._by_window(self._kv_bytes)

    @cached_property
    def kept_bytes(self) -> int:
        """Bytes of the keys and values of one token on all ranks, in all layers that keep them."""
        return sum(self.kept_by_window.values())

    @cached_property
    def kept_by_window(self) -> Mapping[int, int]:
        """The same by the sliding windows of these layers; 0: none."""
        found: Counter[int] = Counter()
        for layer in self.shape.spec.layers:
            if (heads := self.shape.spec.cached(layer)) is not None:
                found[layer.window] += self._kv_bytes(heads)
        return dict(found)

    @cached_property
    def key_flops(self) -> Mapping[int, int]:
        """Operations of a token looking at one key, by the window of the layers in which it does."""
        spec, latent = self.shape.spec, self.shape.spec.layers[0].latent
        return self._by_window(lambda heads: 2 * spec.num_heads * (heads.dim + (latent.rank if latent else heads.dim)))

    def _kv_bytes(self, heads: KvHeads) -> int:
        """In one layer. Where there are more ranks than heads, several hold the same one."""
        copies = max(1, self.ranks // heads.count)
        return copies * kv_bytes(heads, self.dtype, self.kv_cache_dtype)

    def _by_window(self, number: Callable[[KvHeads], int]) -> Mapping[int, int]:
        """The sum of a number of each layer that attends, by its window."""
        found: Counter[int] = Counter()
        for layer, heads in self.shape.attending:
            found[layer.reach] += number(heads)
        return dict(found)

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
        kv = self.kept_bytes * tokens + sum(
            num_bytes * sum(piece.read(window) for piece in pieces) for window, num_bytes in self.kv_bytes.items()
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
        states = 2 * state_bytes(shape.spec) * sum(piece.times for piece in pieces)  # read and written
        return BytesAndFlops(weights + kv + states, matrices + attention, in_8_bits)

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
        num_bytes = shape.encode_bytes(self.dtype, self.quantize) + tokens * self.kept_bytes
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


def ceiling_of(served: ServedModel, sequences: float, given: int, generated: float, ceilings: Ceilings) -> float:
    """The most generated tokens per second of so many sequences at a time, by whatever steps.

    For each `generated` tokens of every sequence the weights are read that often at least, by one step of its prompts
    and those in which it decodes, or by as many that do both; only bytes and operations of all of them bound the time.
    """
    prefill = served.prefill(sequences, given)
    decodes = served.mean_decode(sequences, given, generated).times(generated - 1)
    return 1000 * sequences * generated / prefill.plus(decodes).floor_ms(ceilings)


def mean_context(sequence_length: int, decode_length: int) -> float:
    """Mean context over the decode steps of one sequence: steps 1 … D-1 attend to S+1 … S+D-1 tokens."""
    return sequence_length + decode_length / 2


# -------------------------------------------------------------------------------------------------------- between ranks


SUM_SECONDS = 5e-6  # of the smallest exchange between GPUs of one machine: the messages there and back
SUMS_OF_A_LAYER: Mapping[Residual, int] = {
    Residual.PRE_CROSS: 3,
    Residual.SANDWICH_MIXED: 3,  # both parts of the mixture are normalised before they meet
    Residual.PARALLEL_ONE_NORM: 1,  # attention and mlp can be summed together
    Residual.PARALLEL_TWO_NORMS: 1,
}
CANDIDATE_BYTES = 12  # of a sequence from each rank: a value, a token, and the log of the sum of all exponentials


@dataclass(frozen=True)
class Sums:
    """Exchanges of a model's ranks, in seconds: by what they are for. Nothing by default, as of one rank."""

    step_s: float = 0.0  # of any step, however little it computes
    token_s: float = 0.0  # of each token in it besides
    choice_s: float = 0.0  # of a step in which any sequence gets a token
    sampled_s: float = 0.0  # of each of those
    encode_s: float = 0.0  # of a step with prompts for an encoder
    encoded_s: float = 0.0  # of each token of those

    @classmethod
    def of(cls, served: ServedModel, bytes_per_second: float) -> Sums:
        """Those of a model, or of one of its pipeline stages, over links of this speed.

        A sum moves 2 (N - 1) / N of its bytes from every rank to the others, in whichever order (Patarasuk and Yuan
        2009); candidates go to each of the others.
        """
        shape, others = served.shape, served.ranks - 1
        if not others:
            return cls()
        row_s = 2 * others / served.ranks * DTYPE_BYTES[served.dtype] / bytes_per_second  # of each feature
        spec, table = shape.spec, int(shape.has_embedding)
        width = (spec.embed_dim or spec.hidden_size) + shape.inputs_width
        tables = table * (1 + (shape.inputs_width > 0))
        encoder = spec.encoder if shape.has_embedding else None
        return cls(
            step_s=(_of_layers(spec) + tables) * SUM_SECONDS,
            token_s=(_of_layers(spec) * spec.hidden_size + table * width) * row_s,
            choice_s=shape.has_head * SUM_SECONDS,
            sampled_s=shape.has_head * others * CANDIDATE_BYTES / bytes_per_second,
            encode_s=(_of_layers(encoder) + 1) * SUM_SECONDS if encoder else 0.0,
            encoded_s=(_of_layers(encoder) * encoder.hidden_size + width) * row_s if encoder else 0.0,
        )

    def seconds(self, tokens: float, sampled: float, encoded: float = 0) -> float:
        """What the exchanges of a step take. encoded: tokens of prompts that its encoder reads."""
        found = self.step_s + self.token_s * tokens
        found += self.choice_s + self.sampled_s * sampled if sampled else 0.0
        return found + (self.encode_s + self.encoded_s * encoded if encoded else 0.0)


def _of_layers(spec: ArchSpec) -> int:
    return spec.num_layers * SUMS_OF_A_LAYER.get(spec.residual, 2)


# ---------------------------------------------------------------------------------------------- between pipeline stages


TOKEN_BYTES = 8  # of a token that goes back to the first stage


def add_pipeline_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options of a pipeline."""
    group = parser.add_argument_group("pipeline stages, each on its own devices")
    group.add_argument(
        "--pipeline-parallel", type=options.positive, default=1, metavar="N", help="as in the server (1)"
    )
    group.add_argument(
        "--micro-batches", type=options.positive, metavar="N", help="as in the server (as many as there are stages)"
    )
    group.add_argument(
        "--link-ms", type=options.number(at_least=0), default=0.0, metavar="MS",
        help="latency between stages, half of a ping's round trip (0)",
    )  # fmt: skip
    group.add_argument(
        "--link-gbit", type=options.number(above=0), metavar="GBIT",
        help="bandwidth of a link in Gbit/s (default: unlimited)",
    )  # fmt: skip


@dataclass(frozen=True)
class Pipeline:
    """The stages of a model with the links between them; one stage has none."""

    stages: tuple[ServedModel, ...]
    micro_batches: int = 1
    link_ms: float = 0.0
    link_bytes_per_ms: float = math.inf

    def split(self, ranks: int) -> Pipeline:
        """The same where each stage is split over so many ranks."""
        return replace(self, stages=tuple(replace(stage, ranks=ranks) for stage in self.stages))

    def without_links(self) -> Pipeline:
        """The same over links that take no time."""
        return replace(self, link_ms=0.0, link_bytes_per_ms=math.inf)

    def sentence(self) -> str:
        """What was assumed, for people."""
        carries = "" if math.isinf(self.link_bytes_per_ms) else f" and carry {self.link_bytes_per_ms * 8e-6:g} Gbit/s"
        return (
            f"{len(self.stages)} pipeline stages, each on its own devices, for {self.micro_batches} micro-batches "
            f"that take turns; weights and KV are those of the stage that has most of them. Links take "
            f"{self.link_ms:g} ms in each direction{carries}; where all of a round takes longer than the slowest stage "
            "for all micro-batches, more of those fill the gap."
        )

    def lanes(self, batch_size: int) -> int:
        """Micro-batches that a batch is divided into."""
        return min(self.micro_batches, batch_size)

    def links_ms(self, batch_size: int, tokens: int) -> tuple[float, float]:
        """What all links of a round take, and for how long the busiest one is taken, by one micro-batch of a step.

        batch_size: its sequences. tokens: that each of them has in the step.
        """
        if len(self.stages) == 1:
            return 0.0, 0.0
        first = self.stages[0]
        given = sum(stage.shape.inputs_width for stage in self.stages[1:]) / max(1, len(self.stages) - 1)
        hidden = batch_size * tokens * (first.shape.spec.hidden_size + given) * DTYPE_BYTES[first.dtype]
        if first.shape.spec.encoder is not None and tokens > 1:  # the prompt's states go along with the first token's
            hidden += batch_size * first.shape.spec.hidden_size * DTYPE_BYTES[first.dtype]
        taken = hidden / self.link_bytes_per_ms
        back = batch_size * TOKEN_BYTES / self.link_bytes_per_ms
        return len(self.stages) * self.link_ms + (len(self.stages) - 1) * taken + back, taken

    def decode_ms(self, stages_ms: Sequence[float], batch_size: int) -> float:
        """The time between two tokens of a sequence. stages_ms: each stage's, for one micro-batch."""
        lanes = self.lanes(batch_size)
        links, taken = self.links_ms(-(-batch_size // lanes), 1)
        return max(sum(stages_ms) + links, lanes * max(*stages_ms, taken))

    def prefill_ms(self, stages_ms: Sequence[float], batch_size: int, length: int) -> float:
        """The time until the last of `batch_size` prompts has its first token. stages_ms: as for `decode_ms`."""
        lanes = self.lanes(batch_size)
        links, taken = self.links_ms(-(-batch_size // lanes), length)
        return sum(stages_ms) + links + (lanes - 1) * max(*stages_ms, taken)


def pipeline(args: argparse.Namespace, served: ServedModel) -> Pipeline:
    """What the options say of a model. Raises BenchError."""
    count = args.pipeline_parallel
    useless = ["--micro-batches"] * (args.micro_batches is not None) + ["--link-ms"] * (args.link_ms > 0)
    useless += ["--link-gbit"] * (args.link_gbit is not None)
    if count == 1 and useless:
        raise BenchError(f"{useless[0]} says something of pipeline stages, and --pipeline-parallel is 1: raise it")
    micro_batches = args.micro_batches or min(count, MOST_MICRO_BATCHES)
    if micro_batches > MOST_MICRO_BATCHES:
        raise BenchError(f"--micro-batches is {micro_batches}, and a server has {MOST_MICRO_BATCHES} at most")
    try:
        parts = served.stages(count)
    except ValueError as error:
        raise BenchError(str(error)) from None
    bytes_per_ms = math.inf if args.link_gbit is None else args.link_gbit * 1e9 / 8 / 1000
    return Pipeline(tuple(parts), micro_batches, args.link_ms, bytes_per_ms)
