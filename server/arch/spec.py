"""What a model looks like: a frozen description without behaviour.

A family (see `families/`) turns a checkpoint's `config.json` into an `ArchSpec`; `server/model/` builds the model from
it. Families differ here by values and variants, never by code. Nothing in this module knows about tensors
or files; `validate` is pure arithmetic, so an impossible split is refused before a byte of weights is read.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import Enum
from typing import Any

from server.arch.recurrences import Recurrence

SHARD_COUNTS = (1, 2, 4, 8)
MOST_POSITIONS = 2**31 - 1  # of a sequence


class Residual(Enum):
    """How a layer's attention A and mlp M, its norms and its residual connections are wired.

    PRE:                 x += A(norm(x));  x += M(norm(x))
    PRE_CROSS:           x += A(norm(x));  x += C(norm(x));  x += M(norm(x)), with C attending to an encoder's output
    PRE_NORMED:          n = norm(x); x = n + A(n);  n = norm(x); x = n + M(n)
    POST:                x = norm(x + A(x));  x = norm(x + M(x))
    SANDWICH:            x += norm(A(norm(x)));  x += norm(M(norm(x)))
    SANDWICH_MIXED:      x += norm(A(norm(x)));  x += norm(norm(S(norm(x))) + norm(E(norm(x)))), with M's two parts: S,
                         which all tokens go to, and E, its experts, each with norms of its own
    OUTPUT_NORMED:       x += norm(A(x));  x += norm(M(x))
    PARALLEL_ONE_NORM:   n = norm(x); x += A(n) + M(n)
    PARALLEL_TWO_NORMS:  x += A(norm_1(x)) + M(norm_2(x))
    ONE_BRANCH:          x += B(norm(x)), B being the only one of both that a layer has
    """

    PRE = "pre"
    PRE_CROSS = "pre_cross"
    PRE_NORMED = "pre_normed"
    POST = "post"
    SANDWICH = "sandwich"
    SANDWICH_MIXED = "sandwich_mixed"
    OUTPUT_NORMED = "output_normed"
    PARALLEL_ONE_NORM = "parallel_one_norm"
    PARALLEL_TWO_NORMS = "parallel_two_norms"
    ONE_BRANCH = "one_branch"


class Activation(Enum):
    """The function between the matrices of an mlp.

    SIGMOID is no mlp's: it makes gates of other things.
    RELU_SQUARED is the square of what RELU gives (So et al. 2021, arXiv 2109.08668).
    CLAMPED_SWIGLU is of gated ones alone: g * sigmoid(1.702 g) * (u + 1), with g the gate of at most 7, and u the other
    half within ± 7 (OpenAI 2025, arXiv 2508.10925).
    """

    GELU = "gelu"
    GELU_TANH = "gelu_tanh"
    RELU = "relu"
    RELU_SQUARED = "relu_squared"
    SIGMOID = "sigmoid"
    SILU = "silu"
    CLAMPED_SWIGLU = "clamped_swiglu"


@dataclass(frozen=True)
class LayerNormSpec:
    """Mean and variance normalisation (Ba et al. 2016, arXiv 1607.06450)."""

    eps: float
    bias: bool = True


@dataclass(frozen=True)
class RmsNormSpec:
    """Normalisation by the root mean square (Zhang and Sennrich 2019, arXiv 1910.07467)."""

    eps: float
    unit_offset: bool = False  # the weight is stored as its distance from 1


@dataclass(frozen=True)
class Alibi:
    """A bias on attention scores that falls linearly with distance (Press et al. 2021, arXiv 2108.12409)."""

    max_bias: float = 8.0  # the last head's slope is 2 to minus this
    scale: float = 1.0  # what all slopes are multiplied by


@dataclass(frozen=True)
class Learned:
    """A table of position vectors added to the embedding."""

    size: int  # positions that the model supports
    offset: int = 0  # rows in front of the table that belong to no position


@dataclass(frozen=True)
class LinearScaling:
    """Positions divided by `factor` (Chen et al. 2023, arXiv 2306.15595)."""

    factor: float


@dataclass(frozen=True)
class DynamicScaling:
    """A base that grows once positions exceed those of training ("dynamic NTK")."""

    factor: float
    trained_positions: int


@dataclass(frozen=True)
class Llama3Scaling:
    """Low frequencies divided by `factor`, high ones kept, those between blended (Llama 3.1)."""

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    trained_positions: int


@dataclass(frozen=True)
class YarnScaling:
    """Frequencies blended by how often they turn within the trained positions (Peng et al. 2023, arXiv 2309.00071)."""

    factor: float
    trained_positions: int
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    truncate: bool = True
    magnitude: float | None = None  # what cos and sin are multiplied by; None: 0.1 ln(factor) + 1


@dataclass(frozen=True)
class ProportionalScaling:
    """Only the fastest pairs of features turn, as fast as if all did; frequencies are divided by `factor` (Gemma 4)."""

    num_pairs: int  # that turn
    factor: float = 1.0


@dataclass(frozen=True)
class LongScaling:
    """One divisor for each frequency, from a list for short and one for long sequences (LongRoPE, arXiv 2402.13753)."""

    short: tuple[float, ...]
    long: tuple[float, ...]
    trained_positions: int
    magnitude: float  # what cos and sin are multiplied by


Scaling = LinearScaling | DynamicScaling | Llama3Scaling | YarnScaling | LongScaling | ProportionalScaling


@dataclass(frozen=True)
class Rope:
    """Rotation of queries and keys by an angle that grows with the position (Su et al. 2021, arXiv 2104.09864)."""

    theta: float
    dim: int  # leading features of each head that are rotated
    interleaved: bool = False  # pairs are (0, 1), (2, 3), …; otherwise (0, dim/2), (1, dim/2 + 1), …
    scaling: Scaling | None = None


@dataclass(frozen=True)
class Bucketed:
    """A learned bias on attention scores for each head and bucket of distances (Raffel et al. 2019, arXiv 1910.10683).

    Half of the buckets hold one distance each, the others grow with it, up to `max_distance`. In a bidirectional stack
    half of them are for keys behind the query.
    """

    num_buckets: int
    max_distance: int
    bidirectional: bool


Position = Alibi | Bucketed | Learned | Rope


@dataclass(frozen=True)
class Dense:
    """Two matrices: width → activation → model width."""

    width: int
    activation: Activation


@dataclass(frozen=True)
class Gated:
    """Three matrices: activation(gate(x)) * up(x) → model width (Shazeer 2020, arXiv 2002.05202)."""

    width: int
    activation: Activation
    in_scale: float = 1.0  # what x is multiplied by
    out_scale: float = 1.0  # what the last matrix is given is multiplied by


class Scoring(Enum):
    """How a router's logits become the scores of experts, by which they are chosen and weighted.

    SOFTMAX:       over all experts
    SIGMOID:       each for itself (arXiv 2412.19437)
    SPARSE_MIXER:  one after the other, by a softmax over those left that are nearly as good (arXiv 2409.12136)
    """

    SOFTMAX = "softmax"
    SIGMOID = "sigmoid"
    SPARSE_MIXER = "sparse_mixer"


@dataclass(frozen=True)
class Moe:
    """A mixture of mlps, of which each token takes the `top_k` that a router likes best (arXiv 2101.03961)."""

    num_experts: int
    top_k: int
    width: int  # of one expert
    activation: Activation
    renormalise: bool  # whether the chosen experts' weights sum to 1
    bias: bool = False  # whether each matrix of an expert has one
    router_bias: bool = False
    scoring: Scoring = Scoring.SOFTMAX
    choice_bias: bool = False  # a number for each expert that is added to its score for choosing alone
    num_groups: int = 1  # of neighbouring experts, of which each token goes to the `top_groups` best
    top_groups: int = 1
    group_best: int = 2  # of a group's experts, how many of the best tell by their sum how good it is
    scale: float = 1.0  # what the chosen experts' weights are multiplied by
    tolerance: float = 0.0  # of SPARSE_MIXER: how much worse, of its size, a logit may be
    shared_width: int = 0  # of an mlp that all tokens go to; 0: none
    gated: bool = True  # whether experts, and what all tokens go to, are `Gated`
    shared_gate: bool = False  # whether what it gives is multiplied by the sigmoid of a number made of its input
    expert_scale: bool = False  # whether each expert's weight is multiplied by a number of its own
    weighs_inputs: bool = False  # experts' inputs are multiplied by their weights, and not what they give
    router_norm: bool = False  # whether the router reads the residual stream, behind a norm of its own


Mlp = Dense | Gated | Moe


@dataclass(frozen=True)
class QueryScale:
    """Queries at position p are multiplied by 1 + growth * ln(1 + floor((p + offset) / period)), for long sequences."""

    growth: float
    period: int
    offset: int = 0


@dataclass(frozen=True)
class Latent:
    """Attention over compressed keys and values (DeepSeek-AI 2024, arXiv 2405.04434).

    A token keeps one row for all heads: `rank` numbers of which every head's key and value are linear functions, and
    behind them a key that positions rotate. So a head scores both parts of its query against the row, once the first
    one is multiplied into the latent space, and what it attends to in that space is multiplied back.
    """

    rank: int
    rope_dim: int  # of a query, or the row, what is rotated
    key_dim: int  # of a head's query, what is not
    value_dim: int
    query_rank: int = 0  # queries are made from so many numbers that are compressed likewise; 0: as elsewhere
    eps: float = 1e-6  # of the norms behind the compression

    @property
    def width(self) -> int:
        """Numbers that a token keeps."""
        return self.rank + self.rope_dim

    @property
    def query_dim(self) -> int:
        """Numbers of a head's query."""
        return self.key_dim + self.rope_dim

    @property
    def compressed(self) -> int:
        """Numbers of a token that every rank computes: of its queries, of its row."""
        return self.query_rank + self.width

    def parameters(self, hidden: int, num_heads: int) -> int:
        """Of all its matrices, for a model of that width."""
        queries = num_heads * self.query_dim * (self.query_rank or hidden)
        values = num_heads * (self.key_dim + self.value_dim) * self.rank
        return self.compressed * hidden + queries + values + num_heads * self.value_dim * hidden


@dataclass(frozen=True)
class KvHeads:
    """Heads of keys and values, and the features of each, which a head of queries has too."""

    count: int
    dim: int
    rows: int = 2  # that a token keeps for each head: key and value, or one that is both


@dataclass(frozen=True)
class LayerSpec:
    """What may differ between the layers of one model."""

    mlp: Mlp | None  # None: only attention, or what stands in its place
    position: Position | None  # None: attention knows no order but that of what is visible
    window: int = 0  # tokens that a query sees, itself included; 0: all
    chunk: int = 0  # sequences are cut into chunks of so many tokens, and a query sees its own alone; 0: they are not
    sinks: bool = False  # whether each head has a score beside the keys', which takes its share of the weights
    query_scale: QueryScale | None = None
    attends: bool = True
    recurrence: Recurrence | None = None  # what has a state, in attention's place or beside it
    latent: Latent | None = None  # how keys and values are compressed; None: they are not
    kv_heads: KvHeads | None = None  # where they are not the model's
    keys_are_values: bool = False  # values are what the matrix of keys gives, before norm and rotation
    kv_from: int = 0  # how many layers before it keeps the keys and values that it attends to; 0: it has its own
    num_inputs: int = 1  # vectors of the model's width side by side that queries, keys and values are made of

    @property
    def reach(self) -> int:
        """Tokens that a query sees at most, itself included; 0: all."""
        return min(self.window or self.chunk, self.chunk or self.window)


@dataclass(frozen=True)
class PerLayerInputs:
    """What each layer is given of a token, beside the residual stream (Gemma 3n): `dim` numbers.

    They are a row of a table of its own and a projection of the token's embedding, normalised. Behind its mlp, a layer
    adds norm(projection(activation(gate(x)) * inputs)).
    """

    dim: int
    vocab_size: int  # rows of the table
    activation: Activation


@dataclass(frozen=True)
class ArchSpec:
    """One decoder, or encoder. Sizes are those of the whole model, before it is split over ranks.

    kv heads and head size are as in the cache: with compressed keys and values, one of the row's width.
    """

    vocab_size: int
    hidden_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    norm: LayerNormSpec | RmsNormSpec
    residual: Residual
    layers: tuple[LayerSpec, ...]
    tied_head: bool  # the output head is the embedding
    qkv_bias: bool = False
    attention_out_bias: bool = False
    mlp_bias: bool = False
    head_bias: bool = False
    unit_head: bool = False  # the head's rows are scaled to length 1
    embed_norm: bool = False  # a norm between the embedding and the first layer
    embed_scale: float = 1.0  # what the embedding is multiplied by
    rounds_embed_scale: bool = False  # to the model's dtype first
    embed_dim: int = 0  # width of the embedding where it is not the model's; a matrix maps one to the other
    per_layer_inputs: PerLayerInputs | None = None
    layer_scale: bool = False  # the residual stream is multiplied by a number of each layer behind it
    final_norm: bool = True
    qk_norm: bool = False  # each head's queries and keys are normalised (in the model's kind of norm)
    qk_row_norm: bool = False  # a token's queries of all heads are normalised together, and so are its keys
    late_qk_norm: bool = False  # as `qk_norm`, but behind the rotation, where there is one
    plain_qk_norm: bool = False  # the norms of queries and keys have no weights
    v_norm: bool = False  # each head's values are divided by their root mean square
    attention_gate: bool = False  # attention's output is multiplied by a gate's sigmoid; it has a role, or rows of q
    qkv_clip: float = 0.0  # queries, keys and values are clamped to ± this; 0: not
    scale: float = 0.0  # what attention scores are multiplied by; 0: 1 / sqrt(head_dim)
    attended_scale: float = 1.0  # what attention's output is multiplied by
    score_cap: float = 0.0  # scores become cap * tanh(scores / cap); 0: not
    logit_cap: float = 0.0  # likewise the logits
    head_scale: float = 1.0  # what the last hidden states are multiplied by before the head
    max_positions: int = 0  # longest sequence; 0: no limit of its own
    encoder: ArchSpec | None = None  # of an encoder-decoder: it shares the embedding, and this is the decoder
    num_predictors: int = 0  # layers beside these that predict further tokens, and that the checkpoint may have
    decoder_start: int = 0  # of an encoder-decoder: the token that every generation starts from

    @property
    def num_layers(self) -> int:
        """Layers of this stack."""
        return len(self.layers)

    @property
    def predictor(self) -> LayerSpec:
        """A layer that predicts further tokens: it is as the last one that attends."""
        return next(layer for layer in reversed(self.layers) if layer.attends)

    @property
    def recurrences(self) -> list[Recurrence]:
        """Those of the layers that have a state."""
        return [layer.recurrence for layer in self.layers if layer.recurrence is not None]

    def kv_heads(self, layer: LayerSpec) -> KvHeads:
        """Those that a layer attends to."""
        if layer.latent is not None:
            return KvHeads(1, layer.latent.width, rows=1)
        return layer.kv_heads or KvHeads(self.num_kv_heads, self.head_dim)

    def cached(self, layer: LayerSpec) -> KvHeads | None:
        """What a layer keeps of each token; None: nothing."""
        return self.kv_heads(layer) if layer.attends and not layer.kv_from else None

    @property
    def is_scaled(self) -> bool:
        """Whether inputs of layers are multiplied where the model multiplies what comes out, which biases tell."""
        mlps = [mlp for layer in self.layers if isinstance(mlp := layer.mlp, Gated)]
        return self.attended_scale != 1.0 or any(mlp.in_scale != 1.0 or mlp.out_scale != 1.0 for mlp in mlps)

    @property
    def attention_scale(self) -> float:
        """What attention scores are multiplied by."""
        return self.scale or self.head_dim**-0.5

    @property
    def alibi(self) -> Alibi | None:
        """The model's ALiBi, which all layers share, if it has one."""
        return next((layer.position for layer in self.layers if isinstance(layer.position, Alibi)), None)

    @property
    def buckets(self) -> Bucketed | None:
        """The model's bucketed bias, which all layers share, if it has one."""
        return next((layer.position for layer in self.layers if isinstance(layer.position, Bucketed)), None)


def with_layers(spec: ArchSpec, **changes: Any) -> ArchSpec:
    """The spec with these fields changed in every layer."""
    return replace(spec, layers=tuple(replace(layer, **changes) for layer in spec.layers))


def with_rope_scaling(spec: ArchSpec, kind: str, factor: float) -> ArchSpec:
    """The spec with its rotations scaled, `linear` or `dynamic`, and room for sequences that are `factor` as long.

    Where layers with a window have a rotation of their own (Gemma 3), that one stays, as it does in transformers.

    Raises ValueError for a model without rotary positions.
    """
    ropes = {layer.position for layer in spec.layers if isinstance(layer.position, Rope)}
    if not ropes:
        raise ValueError(
            "--rope-scaling and --rope-factor are for models with rotary position embeddings, which this one does not "
            "have: leave them out"
        )
    if kind == "dynamic" and any(rope.dim <= 2 for rope in ropes):
        raise ValueError("--rope-scaling dynamic needs more than 2 rotated features of a head: use linear")
    if kind == "dynamic" and any(isinstance(rope.scaling, ProportionalScaling) for rope in ropes):
        raise ValueError("--rope-scaling dynamic is not for rotations of some features among others: use linear")
    scaling = LinearScaling(factor) if kind == "linear" else DynamicScaling(factor, spec.max_positions)
    layers = tuple(
        replace(layer, position=_scaled(layer.position, scaling))
        if isinstance(layer.position, Rope) and (len(ropes) == 1 or not layer.window)
        else layer
        for layer in spec.layers
    )
    return replace(spec, layers=layers, max_positions=min(int(spec.max_positions * factor), MOST_POSITIONS))


def _scaled(rope: Rope, scaling: LinearScaling | DynamicScaling) -> Rope:
    if isinstance(rope.scaling, ProportionalScaling):
        return replace(rope, scaling=replace(rope.scaling, factor=scaling.factor))
    return replace(rope, scaling=scaling)


def with_residual_scale(spec: ArchSpec, scale: float) -> ArchSpec:
    """The spec with all that attention and mlps add to the residual stream multiplied by `scale`.

    The whole stream is divided by it instead, which norms do not notice, but for their eps.
    """
    assert spec.residual in (Residual.PRE, Residual.SANDWICH), "each branch begins with a norm"
    norm = replace(spec.norm, eps=spec.norm.eps / scale**2)
    return replace(spec, norm=norm, embed_scale=spec.embed_scale / scale)


def validate(spec: ArchSpec, world_size: int) -> None:
    """Raise ValueError with every reason why `spec` cannot be split over `world_size` ranks, and what can."""
    if problems := _split_problems(spec, world_size):
        possible = [str(n) for n in SHARD_COUNTS if not _split_problems(spec, n)]
        raise ValueError(f"{'; '.join(problems)}; use --num-shard {' or '.join(possible)}")


def _split_problems(spec: ArchSpec, world_size: int) -> list[str]:
    mlps = [layer.mlp for layer in spec.layers if layer.mlp is not None]
    shared = {mlp.shared_width for mlp in mlps if isinstance(mlp, Moe)}
    attends = any(layer.attends for layer in spec.layers)
    sizes = {
        "attention heads": {spec.num_heads} if attends else set(),
        "mlp columns": {mlp.width for mlp in mlps} | shared,
    }
    for kind in spec.recurrences:
        for what, size in kind.divided.items():
            sizes.setdefault(what, set()).add(size)
    problems = [
        f"the model has {size} {what}, which --num-shard {world_size} does not divide"
        for what, values in sizes.items()
        for size in sorted(values)
        if size % world_size
    ]
    counts = {spec.kv_heads(layer).count for layer in spec.layers if layer.attends}
    problems += [
        f"the model has {count} key-value heads, which do not fit --num-shard {world_size}"
        for count in sorted(counts)
        if count % world_size and world_size % count
    ]
    return problems
