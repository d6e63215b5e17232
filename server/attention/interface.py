"""What every attention backend does, and what it is told about a step.

Shapes: T tokens in the step, S sequences, N local heads, K local kv heads, H head dim, B blocks, P tokens per block.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor


@dataclass(frozen=True)
class Scores:
    """How a model scores queries against keys; the same in all its layers."""

    scale: float
    slopes: tuple[float, ...] = ()  # ALiBi slope of each local head; empty: no ALiBi
    cap: float = 0.0  # scores become cap * tanh(scores / cap); 0: not


@dataclass(frozen=True)
class StepMeta:
    """Where the tokens of one step stand. Sequences that decode come first: their one query is their last token.

    The lists are on the host, for loops and slices; the tensors are on the device.
    """

    num_decodes: int  # of the S sequences, how many are at the front with one query each
    query_starts: list[int]  # [S + 1] sequence s owns tokens query_starts[s] … query_starts[s + 1] - 1 of the step
    context_lengths: list[int]  # [S] tokens that the sequence attends to after this step
    positions: Tensor  # [T] index of each token in its sequence
    prompt_lengths: Tensor  # [T] tokens of the prompt of each token's sequence
    slots: Tensor  # [T] where each token's keys and values go: block * P + offset
    block_tables: Tensor  # [S, longest] blocks of each sequence in order, padded with 0


class Attention(Protocol):
    """One rank's attention, stateless between calls: everything about a step is in `meta`."""

    name: str

    def write(self, kv: Tensor, k: Tensor, v: Tensor, meta: StepMeta) -> None:
        """Store the step's keys and values. kv: [2, B, K, P, H], changed in place; k, v: [T, K, H]."""

    def attend(self, q: Tensor, kv: Tensor, meta: StepMeta, window: int) -> Tensor:
        """Attend the step's queries to their sequences' keys up to their own position.

        q: [T, N, H]; window: tokens that a query sees, itself included, 0 for all; returns [T, N, H] in q's dtype.
        `write` was already called for this layer. Scores and softmax are float32 whatever the input dtype.
        """


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


def hidden_keys(distance: Tensor, window: int) -> Tensor:
    """Which keys a query must not see: later ones, and those before its window. distance: key minus query position."""
    later = distance > 0
    return later | (distance <= -window) if window else later
