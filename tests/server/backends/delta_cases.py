"""Steps of the gated delta rule, for kernels on every device."""

from __future__ import annotations

from itertools import accumulate

import torch
from torch import Tensor

from server.arch.spec import GatedDelta
from server.backends.protocol import DeltaRule, DeltaWeights, StepMeta
from server.backends.reference.delta import StockDelta

KIND = GatedDelta(num_heads=6, num_key_heads=3, key_dim=20, value_dim=64, conv=4)
ROWS = 6
Run = tuple[int, int, int]  # row, first position, tokens


def weights_of(kind: GatedDelta) -> DeltaWeights:
    chance = torch.Generator().manual_seed(2)

    def normal(*size: int) -> Tensor:
        return torch.randn(*size, generator=chance)

    return DeltaWeights(
        kind=kind,
        conv=normal(kind.channels, kind.conv),
        decay=normal(kind.num_heads).exp(),
        step_bias=normal(kind.num_heads),
        norm=normal(kind.value_dim),
        eps=1e-6,
    )


def meta_of(runs: list[Run], num_decodes: int = 0) -> StepMeta:
    starts = [0, *accumulate(count for _, _, count in runs)]
    positions = torch.tensor([first + i for _, first, count in runs for i in range(count)])
    nothing = torch.empty(0)
    return StepMeta(
        num_decodes=num_decodes,
        query_starts=starts,
        context_lengths=[],
        longest=0,
        starts=torch.tensor(starts, dtype=torch.int32),
        positions=positions,
        visible=positions + 1,
        prompt_lengths=nothing,
        owners=torch.tensor([s for s, (_, _, count) in enumerate(runs) for _ in range(count)]),
        block_tables=nothing,
        rows=torch.tensor([row for row, _, _ in runs]),
    )


def inputs_of(tokens: int, seed: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    chance = torch.Generator().manual_seed(seed)
    width = KIND.channels + KIND.num_heads * KIND.value_dim
    qkvz = torch.randn(tokens, width, generator=chance)
    return qkvz.to(dtype), torch.randn(tokens, 2 * KIND.num_heads, generator=chance).to(dtype)


def states() -> Tensor:
    """What is left of others, which no sequence may see."""
    return torch.full((ROWS, KIND.state_size), 7.0)


STEPS: list[tuple[list[Run], int]] = [
    ([(2, 0, 37), (4, 0, 1), (5, 0, 2)], 0),  # prompts: of three blocks, of one token, of fewer than the convolution's
    ([(4, 1, 1), (5, 2, 1), (2, 37, 21)], 2),  # decodes beside a later chunk
    ([(2, 58, 1), (4, 2, 1), (5, 3, 1)], 3),  # decodes alone
    ([(2, 59, 1), (3, 0, 18), (4, 3, 1)], 1),  # another sequence, and one that is extended by a token
]


def check_steps(rule: DeltaRule, dtype: torch.dtype) -> None:
    """A kernel's rule against stock operators, which keep states in an order of their own."""
    stock, kept = StockDelta(weights_of(KIND)), [states(), states()]
    for number, (runs, num_decodes) in enumerate(STEPS):
        meta = meta_of(runs, num_decodes)
        qkvz, ba = inputs_of(len(meta.positions), number, dtype)
        expected, got = (one(qkvz, ba, state, meta) for one, state in zip((stock, rule), kept, strict=True))
        atol, rtol = (1e-5, 1e-5) if dtype == torch.float32 else (2e-2, 1e-2)
        torch.testing.assert_close(expected, got, atol=atol, rtol=rtol)
