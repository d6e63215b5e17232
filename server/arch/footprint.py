"""What a model takes beside what is known to the byte, estimated from its shape before it is loaded.

The server asks when its first layer is there, the benchmark before there is a server; so there is no torch here.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence

from server.arch.recurrences import Recurrence
from server.arch.spec import ArchSpec, Gated, LayerSpec, Mlp, Moe
from server.blocks import BLOCK_SIZE

# What a step holds at once for each token, as far as that can be said before the profile run: copies of the residual
# stream, and of what a layer's widest products give.
STREAM_COPIES, STEP_COPIES = 6, 3
# Rows whose logits are looked at together: 128 rows of BLOOM's 250,880 are 128 MB, and sampling takes several times
# that: float32, and what sorting takes.
LOGIT_ROWS, LOGIT_BYTES = 128, 12
# Prompt tokens of a step that a CPU has room for in any case: with fewer, one is mostly the reading of weights.
LEAST_PREFILL_TOKENS = 256
STATE_ITEMSIZE = 4  # bytes of a number of a recurrent layer's state
MOST_SPARES = 8  # sequences with states that have guesses at once: where more decode, guesses gain little
BLOCKS_OF_STATE = 64  # that a kept state takes where no layer has tokens, whose blocks hold nothing else


def step_bytes(spec: ArchSpec, prefill_tokens: int, itemsize: int, world_size: int = 1) -> int:
    """Memory of one rank's largest step, which has so many prompt tokens. itemsize: of a number."""
    recurrent = max((kind.step_width for kind in spec.recurrences), default=0)
    head_dim = max(spec.kv_heads(layer).dim for layer in spec.layers)
    widest = max(_products(layer.mlp) for layer in spec.layers) + max(3 * spec.num_heads * head_dim, recurrent)
    given = 2 * spec.num_layers * spec.per_layer_inputs.dim if spec.per_layer_inputs else 0
    activations = (STREAM_COPIES * spec.hidden_size + STEP_COPIES * widest // world_size + given) * itemsize
    return prefill_tokens * activations + LOGIT_BYTES * LOGIT_ROWS * spec.vocab_size


def least_step_bytes(spec: ArchSpec, prefill_tokens: int, itemsize: int, world_size: int = 1) -> int:
    """The same of the smallest step that `prefill_tokens` may become; an encoder reads its prompts whole."""
    tokens = prefill_tokens if spec.encoder is not None else min(prefill_tokens, LEAST_PREFILL_TOKENS)
    return step_bytes(spec, tokens, itemsize, world_size)


def layer_sizes(spec: ArchSpec) -> list[int]:
    """Parameters in the matrices of every layer, in the order in which they are loaded: an encoder's first."""
    encoder = [] if spec.encoder is None else layer_sizes(spec.encoder)
    return [*encoder, *_sizes(spec)]


def expert_sizes(spec: ArchSpec) -> dict[float, int]:
    """Of these, those of all experts, by the share of them that a token goes to; empty without mixtures of experts."""
    found: dict[float, int] = defaultdict(int)
    for mlp in (layer.mlp for layer in spec.layers):
        if isinstance(mlp, Moe) and mlp.top_k < mlp.num_experts:
            found[mlp.top_k / mlp.num_experts] += mlp.num_experts * (2 + mlp.gated) * mlp.width * spec.hidden_size
    return dict(found)


def seen_by_window(spec: ArchSpec, kept: Sequence[int]) -> dict[int, int]:
    """Bytes of a token's keys and values that all layers look at, by their windows: tokens that a query sees, itself
    included; 0: all. kept: bytes of each layer that keeps them."""
    found: Counter[int] = Counter()
    sizes, own = [0] * spec.num_layers, iter(kept)
    for index, layer in enumerate(spec.layers):
        if layer.attends:
            sizes[index] = sizes[index - layer.kv_from] if layer.kv_from else next(own)
            found[layer.reach] += sizes[index]
    return dict(found)


def state_bytes(spec: ArchSpec, world_size: int = 1) -> int:
    """What a sequence's states take on one of so many ranks, of all recurrent layers."""
    return sum(STATE_ITEMSIZE * kind.part(world_size).state_size for kind in spec.recurrences)


def num_spares(sequences: int) -> int:
    """How many states there are beside those of so many sequences, for some that may have to go back."""
    return min(sequences, MOST_SPARES)


def kept_state_bytes(state_bytes: int) -> int:
    """A token's share of a block, where no layer attends and blocks hold kept states of this size."""
    numbers = state_bytes // STATE_ITEMSIZE
    return STATE_ITEMSIZE * -(-numbers // (BLOCKS_OF_STATE * BLOCK_SIZE))


def _sizes(spec: ArchSpec) -> Iterator[int]:
    cross = 2 * spec.hidden_size * (spec.num_heads + spec.num_kv_heads) * spec.head_dim if spec.encoder else 0
    given = 2 * spec.hidden_size * spec.per_layer_inputs.dim if spec.per_layer_inputs else 0
    return (_mixer(spec, layer) + cross + _mlp(layer, spec.hidden_size) + given for layer in spec.layers)


def _mixer(spec: ArchSpec, layer: LayerSpec) -> int:
    if layer.latent is not None:
        return layer.latent.parameters(spec.hidden_size, spec.num_heads)
    recurrence = recurrence_size(layer.recurrence, spec.hidden_size) if layer.recurrence is not None else 0
    return _attention(spec, layer) * layer.attends + recurrence


def _attention(spec: ArchSpec, layer: LayerSpec) -> int:
    heads = spec.kv_heads(layer)
    queries, keys = spec.num_heads * heads.dim, heads.count * heads.dim
    of_keys = 0 if layer.kv_from else (2 - layer.keys_are_values) * keys
    return spec.hidden_size * ((2 + spec.attention_gate) * queries + of_keys)


def recurrence_size(kind: Recurrence, hidden: int) -> int:
    """Parameters of a recurrent layer in a model of this width."""
    return sum(outputs * inputs for outputs, inputs in kind.linears(hidden).values()) + kind.parameters_beside(hidden)


def _mlp(layer: LayerSpec, hidden: int) -> int:
    mlp = layer.mlp
    if mlp is None:
        return 0
    if isinstance(mlp, Moe):
        each = 2 + mlp.gated  # matrices
        return (mlp.num_experts * (each * mlp.width + 1) + each * mlp.shared_width + mlp.shared_gate) * hidden
    return hidden * mlp.width * (3 if isinstance(mlp, Gated) else 2)


def _products(mlp: Mlp | None) -> int:
    """Columns of what an mlp's first matrices give for a token."""
    if mlp is None:
        return 0
    if isinstance(mlp, Moe):
        return (1 + mlp.gated) * (mlp.top_k * mlp.width + mlp.shared_width)
    return mlp.width * (2 if isinstance(mlp, Gated) else 1)
