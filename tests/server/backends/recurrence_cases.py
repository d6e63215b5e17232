"""Steps of recurrences, for kernels on every device."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

from server.arch.recurrences import GatedDelta, GateNorm, Mamba2, Recurrence, ShortConv
from server.backends.protocol import Backend, DeltaWeights, MambaWeights, ShortConvWeights, StepMeta
from server.backends.reference.convolution import StockShortConv
from server.backends.reference.delta import StockDelta
from server.backends.reference.mamba import StockMamba

ROWS = 6
CPU = torch.device("cpu")
Run = tuple[int, int, int]  # row, first position, tokens
Rule = Callable[..., Tensor]  # inputs, state, meta → what comes out


def normal(*size: int) -> Tensor:
    return torch.randn(*size, generator=torch.Generator().manual_seed(sum(size)))


def delta_weights(kind: GatedDelta) -> DeltaWeights:
    heads = kind.num_heads
    conv, norm = normal(kind.channels, kind.conv), normal(kind.value_dim)
    return DeltaWeights(kind, conv, normal(heads).exp(), normal(heads + 1)[:heads], norm, eps=1e-6)


def short_conv_weights(kind: ShortConv) -> ShortConvWeights:
    bias = normal(kind.channels) if kind.bias else None
    return ShortConvWeights(kind, normal(kind.channels, kind.conv), bias)


def mamba_weights(kind: Mamba2) -> MambaWeights:
    heads, bias = kind.num_heads, normal(kind.channels) if kind.conv_bias else None
    decay, step_bias, skip = normal(3, heads).unbind()
    norm_size = kind.inner // kind.num_groups
    conv = normal(kind.channels, kind.conv)
    return MambaWeights(kind, conv, bias, decay.exp(), step_bias, skip, normal(kind.inner), norm_size)


@dataclass(frozen=True)
class Case:
    """A kind of recurrence, small; widths: of what it is given for a token; make: of a backend's rules, its own."""

    kind: Recurrence
    weights: Any
    widths: tuple[int, ...]
    stock: Callable[[Any], Rule]
    make: Callable[[Backend, Any], Rule]

    @property
    def states(self) -> Tensor:
        """What is left of others, which no sequence may see."""
        return torch.full((ROWS, self.kind.state_size), 7.0, device=self.device)

    @property
    def device(self) -> torch.device:
        """Where its weights are."""
        return self.weights.conv.device

    def on(self, device: torch.device) -> Case:
        """The same there."""
        tensors = {f.name: getattr(self.weights, f.name) for f in fields(self.weights)}
        moved = {name: tensor.to(device) for name, tensor in tensors.items() if isinstance(tensor, Tensor)}
        return replace(self, weights=replace(self.weights, **moved))

    def inputs(self, tokens: int, seed: int, dtype: torch.dtype = torch.float32) -> list[Tensor]:
        chance = torch.Generator().manual_seed(seed)
        return [torch.randn(tokens, width, generator=chance).to(self.device, dtype) for width in self.widths]


DELTA = GatedDelta(num_heads=6, num_key_heads=3, key_dim=20, value_dim=64, conv=4)
CONV = ShortConv(channels=300, conv=3, bias=True)
MAMBAS = {
    norm: Mamba2(
        num_heads=6, num_groups=groups, head_dim=64, key_dim=20, conv=4, eps=1e-5, norm=norm, conv_bias=groups > 1,
        scales=(0.5, 1.0, 1.0, 1.0, 2.0), least_step=0.3, most_step=1.5,
    )
    for norm, groups in zip(GateNorm, (1, 3, 2), strict=True)
}  # fmt: skip
CASES: dict[str, Case] = {
    **{
        f"Mamba-2, norm {norm.value}": Case(
            kind, mamba_weights(kind), (kind.step_width,), StockMamba, lambda backend, weights: backend.mamba(weights)
        )
        for norm, kind in MAMBAS.items()
    },
    "gated delta rule": Case(
        DELTA,
        delta_weights(DELTA),
        (DELTA.step_width, 2 * DELTA.num_heads),
        StockDelta,
        lambda backend, weights: backend.gated_delta(weights),
    ),
    "short convolution": Case(
        CONV,
        short_conv_weights(CONV),
        (CONV.step_width,),
        StockShortConv,
        lambda backend, weights: backend.short_conv(weights),
    ),
}


def meta_of(runs: list[Run], num_decodes: int = 0, device: torch.device = CPU) -> StepMeta:
    starts = [0, *accumulate(count for _, _, count in runs)]
    positions = torch.tensor([first + i for _, first, count in runs for i in range(count)], device=device)
    nothing = torch.empty(0, device=device)
    return StepMeta(
        num_decodes=num_decodes,
        query_starts=starts,
        context_lengths=[],
        longest=0,
        starts=torch.tensor(starts, dtype=torch.int32, device=device),
        positions=positions,
        visible=positions + 1,
        prompt_lengths=nothing,
        owners=torch.tensor([s for s, (_, _, count) in enumerate(runs) for _ in range(count)], device=device),
        block_tables=nothing,
        rows=torch.tensor([row for row, _, _ in runs], device=device),
    )


STEPS: list[tuple[list[Run], int]] = [
    ([(2, 0, 37), (4, 0, 1), (5, 0, 2)], 0),  # prompts: of three blocks, of one token, of fewer than the convolution's
    ([(4, 1, 1), (5, 2, 1), (2, 37, 21)], 2),  # decodes beside a later chunk
    ([(2, 58, 1), (4, 2, 1), (5, 3, 1)], 3),  # decodes alone
    ([(2, 59, 1), (3, 0, 18), (4, 3, 1)], 1),  # another sequence, and one that is extended by a token
]


def check_steps(case: Case, rule: Rule, dtype: torch.dtype) -> None:
    """A kernel's rule against stock operators, which keep states in an order of their own."""
    stock, kept = case.stock(case.weights), [case.states, case.states]
    for number, (runs, num_decodes) in enumerate(STEPS):
        meta = meta_of(runs, num_decodes, case.device)
        inputs = case.inputs(len(meta.positions), number, dtype)
        expected, got = (one(*inputs, state, meta) for one, state in zip((stock, rule), kept, strict=True))
        atol, rtol = (1e-5, 1e-5) if dtype == torch.float32 else (2e-2, 1e-2)
        torch.testing.assert_close(expected, got, atol=atol, rtol=rtol)


def check_cuts(case: Case, rule: Rule, cuts: list[int]) -> None:
    """A sequence that is cut into steps, beside another, against the same in one step."""
    inputs, beside = case.inputs(sum(cuts), 0), case.inputs(5, 9)
    whole = rule(*inputs, case.states, meta_of([(1, 0, sum(cuts))], device=case.device))
    state, first, parts = case.states, 0, []
    for number, count in enumerate(cuts):
        part = slice(first, first + count)
        both = (torch.cat([mine[part], other]) for mine, other in zip(inputs, beside, strict=True))
        meta = meta_of([(1, first, count), (2, 5 * number, 5)], device=case.device)
        parts.append(rule(*both, state, meta)[:count])
        first += count
    assert torch.equal(whole, torch.cat(parts))
