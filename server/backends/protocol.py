"""What a backend answers for: everything that a model computes with and that differs between devices.

A `Backend` is chosen once (`loading.py`) and handed down; nothing above it asks which device it runs on. The reference
backend (`reference/`) is stock torch, runs everywhere and defines correct; the others replace what they do faster and
inherit the rest. What a backend cannot do, it says in a sentence, before anything is computed.

Left out: how a layer is split over ranks (`server/layers/`), and which rows a step computes (`server/stepping/`).

Shapes: T tokens in the step, S sequences, R rows of logits, V vocabulary, N local heads, K local kv heads, H head dim,
B blocks, P tokens per block, W elements that a token's key or value takes in the cache (H where it is as computed), D
input features, F output features, E experts.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property, reduce
from typing import Any, Protocol

import torch
from torch import Tensor

from server.arch.recurrences import GatedDelta, Mamba2, ShortConv
from server.arch.spec import Activation, ArchSpec, Scoring
from server.backends.device import Device
from server.blocks import BLOCK_SIZE
from server.quantisation.kv import AS_COMPUTED, KvFormat
from server.quantisation.stored import Quantise, Stored
from server.ranks.collectives import Shard

OFFSET_BITS = BLOCK_SIZE.bit_length() - 1  # of a position: its place in a block
assert 1 << OFFSET_BITS == BLOCK_SIZE


@dataclass(frozen=True)
class Scores:
    """How queries are scored against keys. A decoder has one of these; an encoder-decoder has three."""

    scale: float
    slopes: tuple[float, ...] = ()  # the ALiBi slope of each local head; empty: no ALiBi
    cap: float = 0.0  # scores become cap * tanh(scores / cap); 0: they do not
    bias: Tensor | None = None  # [N, 2 D + 1] float32, added at distances -D … D of key minus query; beyond, the ends
    sinks: Tensor | None = None  # [N] float32, a score of each head beside its keys', whose value is 0
    rank: int = 0  # a key's first numbers, which are its value, and behind which it is rotated; 0: values are apart
    chunk: int = 0  # a query sees keys from the last multiple of it on, up to its own position; 0: from the first


@dataclass(frozen=True)
class Rotation:
    """The rotations of a step's tokens, the same for all layers that share a Rope."""

    cos: Tensor  # [T, 1, r / 2]
    sin: Tensor  # [T, 1, r / 2]
    interleaved: bool  # whether pairs are (0, 1), (2, 3), …; otherwise (0, r / 2), (1, r / 2 + 1), …


@dataclass(frozen=True)
class StepMeta:
    """Where the tokens of one step stand. Sequences that decode come first: their one query is their last token.

    The lists are on the host, for loops and slices; the tensors are on the device. A step that is captured in a graph
    has no `context_lengths`, because the host does not know them when the graph is replayed.
    """

    num_decodes: int  # of the S sequences, how many are at the front with one query each
    query_starts: list[int]  # [S + 1] sequence s owns tokens query_starts[s] … query_starts[s + 1] - 1 of the step
    context_lengths: list[int]  # [S] tokens that the sequence attends to after this step
    longest: int  # most queries of a sequence that does not decode, 0 where all do
    starts: Tensor  # [S + 1] int32: query_starts
    positions: Tensor  # [T] index of each token in its sequence
    visible: Tensor  # [T] keys that each token may see, from the sequence's first: up to itself, or its whole context
    prompt_lengths: Tensor  # [T] tokens of the prompt of each token's sequence
    owners: Tensor | None  # [T] sequence of each token; None where all decode: token s is that of sequence s
    block_tables: Tensor  # [S, longest] blocks of each sequence in order, padded with 0
    rows: Tensor | None = None  # [S] where recurrent layers keep each sequence's state; 0: nobody's
    ring_tables: Tensor | None = None  # [S, longest] as `block_tables`, in windowed layers' rings; None: there are none
    adapters: TokenAdapters | None = None  # which the tokens have; None: none has one
    rewind: Rewind | None = None  # what recurrent layers do beside advancing; None: nothing
    plans: dict[Any, Tensor] = field(default_factory=dict, init=False)  # what a backend makes once for all layers

    @cached_property
    def slots(self) -> Tensor:
        """[T] where each token's keys and values go: block * P + offset; -1, nowhere, for one that sees nothing."""
        index = self.positions >> OFFSET_BITS
        if self.owners is None:
            blocks = self.block_tables.gather(1, index.unsqueeze(1)).squeeze(1)
        else:
            blocks = self.block_tables[self.owners, index]
        slots = torch.add(self.positions & (BLOCK_SIZE - 1), blocks, alpha=BLOCK_SIZE)
        return torch.where(self.visible > 0, slots, -1)


@dataclass(frozen=True)
class Rewind:
    """How the states of recurrent layers go back to before guesses that were wrong, in a step with drafts.

    First some rows get the states that were kept, and the tokens that came since are computed again; then the states
    before this step's guesses are kept, and all other tokens computed. A part of the step is its tokens [n], and where
    these stand.
    """

    restored: tuple[Tensor, Tensor] | None  # rows that get states, and those that have them; None: no row does
    kept: tuple[Tensor, Tensor] | None  # likewise
    parts: Sequence[tuple[Tensor, StepMeta]]  # what is computed again, and the rest; empty where nothing is


class Attention(Protocol):
    """One rank's attention, stateless between calls: everything about a step is in `meta`.

    Where values are the first numbers of keys (`Scores.rank`), there are no others: kv is [1, B, K, P, W], heads are
    [T, N + K, H], and what comes out is [T, N, rank].
    """

    def write(self, kv: Tensor, k: Tensor, v: Tensor, meta: StepMeta) -> None:
        """Store the step's keys and values. kv: [2, B, K, P, W], changed in place; k, v: [T, K, H]."""

    def attend(self, q: Tensor, kv: Tensor, meta: StepMeta, window: int) -> Tensor:
        """Attend the step's queries to their sequences' keys, as far as they are visible.

        q: [T, N, H]; window: tokens that a query sees, itself included, 0 for all; returns [T, N, H] in q's dtype.
        Keys and values were already stored for this layer. Scores and softmax are float32 whatever the input dtype.
        """

    def attend_rotated(self, q: Tensor, kv: Tensor, rotation: Rotation | None, meta: StepMeta, window: int) -> Tensor:
        """As `attend`, of queries [T, N, H] that are rotated first, perhaps in place."""

    def self_attend(self, heads: Tensor, kv: Tensor, rotation: Rotation | None, meta: StepMeta, window: int) -> Tensor:
        """Rotate the step's queries and keys, store its keys and values, and attend its queries; returns [T, N, H].

        heads: [T, N + 2 K, H], queries, keys and values as one projection leaves them, perhaps changed in place; kv:
        [2, B, K, P, W], changed in place. Without a rotation, queries and keys are taken as they are. A decode sees its
        whole sequence: `visible` is one more than its position, or 0 in a row that no sequence fills. Else as `attend`.
        """


def split_heads(heads: Tensor, kv_heads: int) -> tuple[Tensor, Tensor, Tensor]:
    """heads [T, N + 2 K, H] → views of its queries [T, N, H], keys and values [T, K, H]."""
    return heads[:, : -2 * kv_heads], heads[:, -2 * kv_heads : -kv_heads], heads[:, -kv_heads:]


class Movable(Protocol):
    """Weights that may lie elsewhere from one step to the next."""

    @property
    def memory(self) -> Sequence[Tensor]:
        """The tensors that hold them, none twice; each may be given other memory (`Tensor.set_`). Empty: they stay."""

    def moved(self) -> None:
        """The tensors have other memory now."""


class LinearFormat(Movable, Protocol):
    """A stored weight [F, D] that can be applied, with what follows the product.

    A gated one is stored as [gate | up], [2 F, D], and yields activation(gate) * up.
    """

    @property
    def nbytes(self) -> int:
        """Memory that the weight takes."""

    def __call__(
        self, x: Tensor, bias: Tensor | None, activation: Activation | None = None, residual: Tensor | None = None
    ) -> Tensor:
        """x [T, D] → activation(x @ weightᵀ + bias) + residual, [T, F], in x's dtype."""

    def finest(self, x: Tensor, bias: Tensor | None) -> Tensor:
        """x [T, D] → x @ weightᵀ + bias, as exact as the product is known: float32, or rounded to x's dtype.

        [T, F]; of a gated one, [gate | up], [T, 2 F].
        """


@dataclass(frozen=True)
class LowRank:
    """What an adapter adds to some outputs of a linear layer: scale * ((x @ downᵀ) @ upᵀ)."""

    first: int  # of the outputs [F] that the stored weight has, where `up` begins; of a gated one they are [gate | up]
    down: Tensor | None  # [r, D] in the model's dtype; None: x itself is multiplied by `up`
    up: Tensor  # [n, r], likewise
    scale: float


@dataclass(frozen=True)
class LinearChange:
    """What an adapter makes of a linear layer's product: gain * (x @ weightᵀ) + bias of the layer + parts + bias."""

    parts: tuple[LowRank, ...] = ()
    bias: Tensor | None = None  # [F] float32
    gain: Tensor | None = None  # [F] float32; None: ones

    @property
    def nbytes(self) -> int:
        """Memory that it takes."""
        tensors = [tensor for part in self.parts for tensor in (part.down, part.up)] + [self.bias, self.gain]
        return sum(tensor.nbytes for tensor in tensors if tensor is not None)


@dataclass(frozen=True)
class ExpertsChange:
    """What an adapter makes of a linear layer of each expert; None: nothing."""

    experts: tuple[LinearChange | None, ...]

    @property
    def nbytes(self) -> int:
        """Memory that it takes, where all experts' changes are stacked: as if each were as large as the largest."""
        return len(self.experts) * max((change.nbytes for change in self.experts if change is not None), default=0)


@dataclass(frozen=True)
class EmbeddingChange:
    """What an adapter makes of a row of a table: gain * row + scale * (the token's row of `down` @ up).

    Where `ids` names the token, `rows` has its row instead.
    """

    down: Tensor | None = None  # [Vl, r] in the model's dtype, Vl being this rank's tokens; None: nothing is added
    up: Tensor | None = None  # [r, E], likewise
    scale: float = 1.0
    gain: Tensor | None = None  # [E] float32; None: ones
    ids: Tensor | None = None  # [n] int64, ascending, among this rank's tokens
    rows: Tensor | None = None  # [n, E] in the model's dtype

    @property
    def nbytes(self) -> int:
        """Memory that it takes."""
        tensors = (self.down, self.up, self.gain, self.ids, self.rows)
        return sum(tensor.nbytes for tensor in tensors if tensor is not None)


@dataclass(frozen=True)
class NormChange:
    """What an adapter makes of a norm's output: gain * output + bias."""

    gain: Tensor | None = None  # [D] float32; None: ones
    bias: Tensor | None = None  # [D] float32; None: zeros

    @property
    def nbytes(self) -> int:
        """Memory that it takes."""
        return sum(tensor.nbytes for tensor in (self.gain, self.bias) if tensor is not None)


@dataclass
class TokenAdapters:
    """Which adapter each token of a pass has. Adapters lie in rows from 1 on; 0 is none.

    All adapted layers of a model share one, which says so of the pass that is computed at the moment.
    """

    rows: Tensor | None = None  # [T] int64; None: no token has one
    present: Sequence[int] = ()  # those rows, each once, as far as the host knows them: in a captured step it does not
    # What a backend has made of the rows, by its kind, once for all layers of the pass.
    made: dict[type[Any], Any] = field(default_factory=dict)

    def at(self, places: Tensor | slice) -> TokenAdapters:
        """The same of some of the tokens."""
        return TokenAdapters(None if self.rows is None else self.rows[places], self.present)

    @contextmanager
    def of(self, pass_adapters: TokenAdapters | None) -> Iterator[None]:
        """Say so of a pass within the block, and then that no token has one."""
        if pass_adapters is not None:
            self.rows, self.present, self.made = pass_adapters.rows, pass_adapters.present, pass_adapters.made
        try:
            yield
        finally:
            self.rows, self.present, self.made = None, (), {}


class AdaptedLinear(LinearFormat, Protocol):
    """A `LinearFormat` whose product is another one for tokens that have adapters, as `TokenAdapters` says."""

    @property
    def is_capturable(self) -> bool:
        """Whether a captured step computes what is in the rows now, though they were empty when it was captured."""

    def stage(self, change: LinearChange) -> LinearChange:
        """The same on the host, as `put` takes it without waiting: called beforehand, beside what is computed."""

    def put(self, row: int, change: LinearChange | None) -> None:
        """What is computed from now on is changed so by the adapter in `row`. None: not at all.

        Waits neither for what is being computed nor for a copy of what was staged.
        """


# The largest numbers of all ranks, of tensors that all have in one shape.
Maximum = Callable[[Tensor], Tensor]


class MakeLinear(Protocol):
    """Stores the weight [F, D] of a linear layer, or this rank's part of it, so that it can be applied.

    maximum: over the ranks, where each has a part of the inputs.
    """

    def __call__(self, weight: Stored, *, is_gated: bool = False, maximum: Maximum | None = None) -> LinearFormat: ...


class GroupedLinear(Movable, Protocol):
    """The same linear layer of E experts, applied to tokens that are sorted by expert."""

    @property
    def nbytes(self) -> int:
        """Memory that all experts' weights take."""

    def __call__(
        self, x: Tensor, ends: Tensor, activation: Activation | None = None, bias: Tensor | None = None
    ) -> Tensor:
        """x [T, D] → activation(x @ weightᵀ + bias) [T, F]; expert e owns the rows ends[e - 1] … ends[e] - 1.

        ends: [E] int32, ascending; the last is T. bias: [E, F]. Where the weights are gated, what comes out is
        activation(gate) * up, or [gate | up] where there is no activation, and bias is [E, 2 F].
        """


class AdaptedExperts(GroupedLinear, Protocol):
    """A `GroupedLinear` whose product is another one for tokens that have adapters.

    The `TokenAdapters` that say so are of the sorted tokens.
    """

    @property
    def is_capturable(self) -> bool:
        """As of an `AdaptedLinear`."""

    def stage(self, change: ExpertsChange) -> ExpertsChange:
        """As of an `AdaptedLinear`."""

    def put(self, row: int, change: ExpertsChange | None) -> None:
        """From now on the adapter in `row` changes the layer so. None: not at all."""


@dataclass(frozen=True)
class RouterRule:
    """How a router chooses and weighs experts. See `spec.Moe`."""

    scoring: Scoring = Scoring.SOFTMAX
    bias: Tensor | None = None  # [E] float32, added to scores for choosing alone
    num_groups: int = 1
    top_groups: int = 1
    group_best: int = 2
    scale: float = 1.0
    tolerance: float = 0.0
    expert_scales: Tensor | None = None  # [E] float32, by which the chosen experts' weights are multiplied

    @property
    def is_softmax_alone(self) -> bool:
        """Whether the best of a softmax are chosen and weighed by it."""
        is_whole = self.bias is None and self.expert_scales is None and self.top_groups == self.num_groups
        return self.scoring is Scoring.SOFTMAX and is_whole and self.scale == 1.0


SOFTMAX = RouterRule()


class Routes(Protocol):
    """Where a step's tokens go in a mixture of experts: pairs of a token and an expert, sorted by expert."""

    @property
    def ends(self) -> Tensor:
        """Behind the last pair of each expert, [E] int32."""

    def spread(self, x: Tensor) -> Tensor:
        """Of tokens x [T, D], that of each pair [T * k, D]."""

    def weighed(self, x: Tensor) -> Tensor:
        """The same of tokens x [T, D], each pair's multiplied by its weight."""

    def total(self, y: Tensor) -> Tensor:
        """As `combine`, of what needs no weights any more."""

    def combine(self, y: Tensor) -> Tensor:
        """What the experts made of the pairs [T * k, D] → the weighted sum for each token, [T, D] in y's dtype."""


class Routing(Protocol):
    """Sends each token to the k experts that a router likes best."""

    def choose(self, router: LinearFormat, x: Tensor, bias: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """The weights and the numbers of each token's experts, both [T, k], from x [T, D] and the router [E, D].

        bias: [E], of the router.
        """

    def __call__(self, router: LinearFormat, x: Tensor, bias: Tensor | None = None) -> Routes:
        """The routes of tokens x [T, D]."""


@dataclass(frozen=True)
class DeltaWeights:
    """What one rank's gated delta rule has beside matrices, C being the channels of its heads, N its heads."""

    kind: GatedDelta  # this rank's part
    conv: Tensor  # [C, tokens] float32, the latest token last
    decay: Tensor  # [N] float32: how fast each memory fades
    step_bias: Tensor  # [N] float32, added to what a token says of that
    norm: Tensor  # [value_dim] float32
    eps: float


@dataclass(frozen=True)
class ShortConvWeights:
    """What one rank's short convolution has beside matrices, C being its channels."""

    kind: ShortConv  # this rank's part
    conv: Tensor  # [C, tokens] float32, the latest token last
    bias: Tensor | None = None  # [C] float32, added to what is convolved


class ConvRule(Protocol):
    """One rank's short convolution. Its sums are the same however a sequence is divided into steps."""

    def __call__(self, bcx: Tensor, state: Tensor, meta: StepMeta) -> Tensor:
        """c * convolved(b * x) of the step's tokens, [T, C] in the dtype of bcx [T, 3 C].

        state: [rows, state_size] float32, as of a `DeltaRule`.
        """


@dataclass(frozen=True)
class MambaWeights:
    """What one rank's Mamba-2 has beside matrices, C being the channels of its heads, N its heads, P a head's size."""

    kind: Mamba2  # this rank's part
    conv: Tensor  # [C, tokens] float32, the latest token last, multiplied by the channels' scales
    conv_bias: Tensor | None  # [C] float32
    decay: Tensor  # [N] float32: how fast each memory fades
    step_bias: Tensor  # [N] float32, added to a token's steps
    skip: Tensor  # [N] float32: the measure in which x is added to what is read
    norm: Tensor  # [N * P] float32, multiplied by the scale of what comes out; by that alone where there is no norm
    norm_size: int  # channels that are normalised together, on all ranks
    sum_over_ranks: Callable[[Tensor], Tensor] | None = None  # where other ranks have some of these


class MambaRule(Protocol):
    """One rank's Mamba-2. Its sums are the same however a sequence is divided into steps."""

    def __call__(self, zxbcdt: Tensor, state: Tensor, meta: StepMeta) -> Tensor:
        """What the step's tokens read, normalised and gated: [T, N * P] in the dtype of zxbcdt.

        zxbcdt: [T, step_width], [gates | channels | steps]; state: [rows, state_size] float32, as of a `DeltaRule`.
        """


class DeltaRule(Protocol):
    """One rank's gated delta rule. Its sums are the same however a sequence is divided into steps."""

    def __call__(self, qkvz: Tensor, ba: Tensor, state: Tensor, meta: StepMeta) -> Tensor:
        """What the step's tokens read, gated: [T, N * value_dim] in the dtype of qkvz.

        qkvz: [T, C + N * value_dim], channels before the convolution, then gates; ba: [T, 2 N], how much each memory is
        corrected, then how much it fades, before their functions; state: [rows, state_size] float32, of which
        `meta.rows` are read and written. A sequence at position 0 starts from zeros, whatever its row holds.
        """


class Norm(ABC):
    """Normalises alone, or behind the addition of a layer's output to the residual stream."""

    # Whether adding in `add` costs less than adding what follows a matrix product to the product.
    absorbs_addition: bool = False

    @abstractmethod
    def __call__(self, x: Tensor) -> Tensor:
        """x [..., D] → normalised [..., D]."""

    def add(self, x: Tensor, summand: Summand) -> tuple[Tensor, Tensor]:
        """x [T, D] and what is added to it → their sum and the sum normalised."""
        total = summand.onto(x)
        return total, self(total)

    def normalise_heads(self, key_norm: Norm, heads: Tensor, kv_heads: int) -> Tensor:
        """heads [T, N + 2 K, H] → queries normalised by this norm, keys by `key_norm`, and values; maybe in place."""
        q, k, v = split_heads(heads, kv_heads)
        return torch.cat([self(q), key_norm(k), v], dim=1)


@dataclass(frozen=True)
class Summand:
    """What waits to be added to the residual stream, already summed over all ranks."""

    deltas: tuple[Tensor, ...]  # one or two, [T, D] each
    biases: tuple[Tensor, ...] = ()  # up to two, [D] each
    norm: Norm | None = None  # by which the sum of these is normalised first

    def onto(self, x: Tensor) -> Tensor:
        """x [T, D] + the summand."""
        parts = (*self.deltas, *self.biases)
        return reduce(torch.add, parts, x) if self.norm is None else x + self.norm(reduce(torch.add, parts))


@dataclass(frozen=True)
class LogitSummary:
    """What is known of each row of logits."""

    top_ids: Tensor  # [R, n] int64, most likely first
    top_logits: Tensor  # [R, n] float32
    log_totals: Tensor  # [R, 1] float32, the log of the sum of all exponentials: a logit minus it is a log-probability


@dataclass(frozen=True)
class TypicalBounds:
    """What typical-p keeps: tokens whose surprisal is at most `reach` away from the entropy."""

    log_totals: Tensor  # [R, 1]
    entropy: Tensor  # [R, 1]
    reach: Tensor  # [R, 1]


# From this rank's tensor to those of all ranks, equally shaped, in the order of the ranks.
Gather = Callable[[Tensor], list[Tensor]]


class Logits(Protocol):
    """What takes a pass over the whole vocabulary.

    Logits are [R, V], float32 or a model's dtype, and not changed; what is found is as of the same logits in float32.
    Where ranks divide a vocabulary, V is this rank's part of it, and `gather` exchanges a few numbers of each row; all
    find the same, to the last bit, because they compute it from what all have gathered. None: there is one rank.
    """

    def summarise(self, logits: Tensor, n: int) -> LogitSummary:
        """The n best tokens (at least 1) of logits [R, V].

        Of equal logits the smaller id is the more likely, whatever n is. A candidate of minus infinity stands for none.
        """

    def race(self, logits: Tensor, seed_low: Tensor, seed_high: Tensor, positions: Tensor, first_id: int = 0) -> Tensor:
        """Draw one token [R] of each row of logits [R, V]: the index of its column.

        seed_low, seed_high: [R, 1] halves of the seed, int64; positions: [R] int64; first_id: the token of column 0,
        for noise belongs to a token and not to a column.
        """

    def log_noise(self, seed_low: Tensor, seed_high: Tensor, positions: Tensor, token_ids: Tensor) -> Tensor:
        """What `race` takes from the logits of one token [R, 1] of each row, to compare what is left: [R, 1]."""

    def top_k_threshold(self, logits: Tensor, k: Tensor, most: int, gather: Gather | None) -> Tensor:
        """The k-th best logit [R, 1] of all ranks' float32 logits, or any below it where they are no more than k.

        k: [R, 1] int64, above `most` only where that is so.
        """

    def top_p_threshold(self, logits: Tensor, p: Tensor, gather: Gather | None) -> Tensor:
        """The least likely logit [R, 1] that belongs to the most likely tokens whose probabilities reach p [R, 1].

        logits: float32. Sums are rounded: a token at which the probabilities reach p but for that may go or stay. A p
        of 1 may be reached by some, or keep all.
        """

    def typical_bounds(self, logits: Tensor, mass: Tensor, gather: Gather | None) -> TypicalBounds:
        """What typical-p keeps of float32 logits: the tokens nearest the entropy until they reach `mass` [R, 1]."""


# A computation without parameters. What a captured one returns is overwritten by the next call of any captured one.
Computation = Callable[[], tuple[Tensor, ...]]


class GraphCapture(Protocol):
    """Captures computations as graphs, which a device then replays without Python's share of the work.

    A computation is captured once: it is run with its inputs in fixed places, and every operation is noted with its
    addresses. A replay reads those inputs anew and writes the same results. On NVIDIA GPUs that is a CUDA graph, on
    CPUs a recording of kernel calls.
    """

    # Batch sizes to capture, ascending, a smaller batch being filled up; empty: each as it comes, up to any size.
    sizes: tuple[int, ...]
    # Prompt tokens of mixed steps to capture, ascending, fewer being filled up; empty: only decodes are captured.
    prompt_tokens: tuple[int, ...]
    # Whether capturing is the first computation; else it needs inputs that do no harm, and may compute several times.
    computes: bool

    def __call__(self, function: Computation) -> Computation:
        """A replay of `function`; its first call gives the results of the first computation."""


class Backend(Protocol):
    """How everything that a model is made of is computed on one device."""

    name: str
    device: Device
    logits: Logits

    @property
    def description(self) -> str:
        """What computes, and why nothing faster does, for the start-up table."""

    def attention(self, scores: Scores, cache: KvFormat = AS_COMPUTED) -> Attention:
        """Attention for one way of scoring, over a cache in this format."""

    def block_parts(self, kv: Tensor, cache: KvFormat, head_dim: int) -> list[Tensor]:
        """Views [B, n] of a layer's cache [1 or 2, B, K, P, W], which it fills: row b of each is of block b."""

    def linear(self, weight: Stored, *, is_gated: bool = False, maximum: Maximum | None = None) -> LinearFormat:
        """A linear layer's weight. See `MakeLinear`."""

    def rounding(self, quantise: Quantise) -> Quantise:
        """The same rounding of weights while they are loaded, maybe a faster one."""

    def adapted(self, layer: LinearFormat, num_rows: int, tokens: TokenAdapters, *, is_gated: bool) -> AdaptedLinear:
        """A linear layer for tokens that have adapters in rows 1 … num_rows. is_gated: as `linear` was told."""

    def adapted_experts(
        self, layer: GroupedLinear, num_rows: int, tokens: TokenAdapters, *, is_gated: bool
    ) -> AdaptedExperts:
        """The same of experts. tokens: sorted as the layer is given them."""

    def norm(self, weight: Tensor, bias: Tensor | None, eps: float, *, is_centred: bool) -> Norm:
        """LayerNorm over weight's features where `is_centred`, else RMSNorm."""

    def grouped(
        self, weights: Iterable[Stored], count: int, *, is_gated: bool = False, maximum: Maximum | None = None
    ) -> GroupedLinear:
        """The weights [F, D] of `count` experts; each is asked for when it is stored."""

    def routing(self, num_experts: int, top_k: int, *, renormalise: bool, rule: RouterRule = SOFTMAX) -> Routing:
        """For a mixture of so many experts; renormalise: whether the weights of the chosen ones sum to 1."""

    def why_not_captured(self, spec: ArchSpec, quantised: str | None, world_size: int) -> str | None:
        """Why decode steps of such a model cannot be captured in graphs; None: they can.

        quantised: the name of the format that its linear layers are quantised in; None: they are dense.
        """

    def gated_delta(self, weights: DeltaWeights) -> DeltaRule:
        """The gated delta rule of a recurrent layer."""

    def short_conv(self, weights: ShortConvWeights) -> ConvRule:
        """The short convolution of a recurrent layer."""

    def mamba(self, weights: MambaWeights) -> MambaRule:
        """The Mamba-2 of a recurrent layer."""

    def joined(self, shard: Shard) -> Shard:
        """The same rank, maybe with faster ways to reach the others. All ranks call this."""

    def measured_products(self) -> Sequence[str]:
        """Which way each product is computed that was measured, for people; none where none was."""

    def num_compilations(self) -> int:
        """Kernels that were compiled since the start."""

    def graph_capture(self, sizes: Sequence[int] | None) -> GraphCapture:
        """A fresh capture, for a model of which nothing is said by `why_not_captured`.

        sizes: batch sizes to capture, ascending, where the backend captures them beforehand; None for its own choice.
        """
