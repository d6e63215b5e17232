"""What every attention backend does, and what it is told about a step.

Shapes: T tokens in the step, S sequences, N local heads, K local kv heads, H head dim, B blocks, P tokens per block.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from server.layers.position import Rotation


@dataclass(frozen=True)
class Scores:
    """How queries are scored against keys. A decoder has one of these; an encoder-decoder has three."""

    scale: float
    slopes: tuple[float, ...] = ()  # ALiBi slope of each local head; empty: no ALiBi
    cap: float = 0.0  # scores become cap * tanh(scores / cap); 0: not
    bias: Tensor | None = None  # [N, 2 D + 1] float32, added at distances -D … D of key minus query; beyond, the ends


@dataclass(frozen=True)
class StepMeta:
    """Where the tokens of one step stand. Sequences that decode come first: their one query is their last token.

    The lists are on the host, for loops and slices; the tensors are on the device.
    """

    num_decodes: int  # of the S sequences, how many are at the front with one query each
    query_starts: list[int]  # [S + 1] sequence s owns tokens query_starts[s] … query_starts[s + 1] - 1 of the step
    context_lengths: list[int]  # [S] tokens that the sequence attends to after this step
    longest: int  # most queries of a sequence that does not decode, 0 where all do
    starts: Tensor  # [S + 1] int32: query_starts
    positions: Tensor  # [T] index of each token in its sequence
    visible: Tensor  # [T] keys that each token may see, from the sequence's first: up to itself, or its whole context
    prompt_lengths: Tensor  # [T] tokens of the prompt of each token's sequence
    slots: Tensor  # [T] where each token's keys and values go: block * P + offset
    block_tables: Tensor  # [S, longest] blocks of each sequence in order, padded with 0


class Attention(Protocol):
    """One rank's attention, stateless between calls: everything about a step is in `meta`."""

    def write(self, kv: Tensor, k: Tensor, v: Tensor, meta: StepMeta) -> None:
        """Store the step's keys and values. kv: [2, B, K, P, H], changed in place; k, v: [T, K, H]."""

    def place(self, heads: Tensor, kv: Tensor, rotation: Rotation | None, meta: StepMeta) -> Tensor:
        """Rotate the step's queries and keys, store its keys and values; returns the queries [T, N, H].

        heads: [T, N + 2 K, H], queries, keys and values as one projection leaves them, perhaps changed in place; kv:
        [2, B, K, P, H], changed in place. Without a rotation, queries and keys are taken as they are.
        """

    def attend(self, q: Tensor, kv: Tensor, meta: StepMeta, window: int) -> Tensor:
        """Attend the step's queries to their sequences' keys, as far as they are visible.

        q: [T, N, H]; window: tokens that a query sees, itself included, 0 for all; returns [T, N, H] in q's dtype.
        Keys and values were already stored for this layer. Scores and softmax are float32 whatever the input dtype.
        """


class MakeAttention(Protocol):
    """A backend: makes an `Attention` for each way of scoring that a model has."""

    name: str

    def __call__(self, scores: Scores) -> Attention: ...


def write_slots(kv: Tensor, k: Tensor, v: Tensor, slots: Tensor) -> None:
    """Scatter k and v [T, K, H] into kv [2, B, K, P, H] at `slots` [T], block * P + offset."""
    _, _, kv_heads, block_size, head_dim = kv.shape
    heads = torch.arange(kv_heads, device=kv.device)
    rows = (slots // block_size * kv_heads * block_size + slots % block_size).unsqueeze(
        1
    ) + heads * block_size  # [T, K]
    flat = kv.view(2, -1, head_dim)
    flat[0].index_copy_(0, rows.flatten(), k.flatten(0, 1))
    flat[1].index_copy_(0, rows.flatten(), v.flatten(0, 1))


def split_heads(heads: Tensor, kv_heads: int) -> tuple[Tensor, Tensor, Tensor]:
    """heads [T, N + 2 K, H] → views of its queries [T, N, H], keys and values [T, K, H]."""
    return heads[:, : -2 * kv_heads], heads[:, -2 * kv_heads : -kv_heads], heads[:, -kv_heads:]


def place_heads(heads: Tensor, kv: Tensor, rotation: Rotation | None, slots: Tensor) -> Tensor:
    """`Attention.place` in stock operators, into `slots` [T]."""
    kv_heads = kv.shape[2]
    turned, v = heads[:, :-kv_heads], heads[:, -kv_heads:]  # queries and keys, and what no position turns
    if rotation is not None:
        turned = rotation(turned)
    write_slots(kv, turned[:, -kv_heads:], v, slots)
    return turned[:, :-kv_heads]


def distances(meta: StepMeta, tokens: slice, length: int, window: int) -> tuple[Tensor, Tensor]:
    """How far keys 0 … length-1 are from the step's `tokens` (key minus query), and which they must not see.

    Both [n, length]: hidden are keys that are not visible, and those before the window.
    """
    keys = torch.arange(length, device=meta.positions.device)
    distance = keys - meta.positions[tokens].unsqueeze(1)
    hidden = keys >= meta.visible[tokens].unsqueeze(1)
    return distance, hidden | (distance <= -window) if window else hidden


def score_bias(scores: Scores, distance: Tensor) -> Tensor | None:
    """What is added to the scores at `distance` [n, L] for each local head: [N, n, L], None for nothing."""
    if scores.slopes:
        return torch.tensor(scores.slopes, device=distance.device).view(-1, 1, 1) * distance
    if scores.bias is not None:
        reach = scores.bias.shape[1] // 2
        return scores.bias[:, distance.clamp(-reach, reach) + reach]
    return None
