"""What adapted layers on a GPU are checked on, in the interpreter and on a GPU: against stock operators in float32.

The modules under test are imported by the checks, not here: see `kernel_cases.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from server.arch.spec import Activation
from server.backends.cpu.device import CpuDevice
from server.backends.device import Device
from server.backends.protocol import LinearChange, LinearFormat, LowRank, TokenAdapters
from server.backends.reference.adapters import StockAdapted
from server.backends.reference.linear import DenseFormat, stock_gate
from server.backends.reference.quantised import QuantisedFormat
from tests.server.backends.cuda.kernel_cases import MANY_SPLITS, ONE_SPLIT
from tests.server.backends.cuda.linear_cases import close, products
from tests.server.backends.cuda.quantised_cases import INT8, WeightCase

NUM_ROWS = 7
# How weights may be stored; None: dense.
KINDS: dict[str, WeightCase | None] = {
    "dense": None,
    "int4": WeightCase("int4", zero="each", group=32),
    "int8": WeightCase("int8", bits=8, group=0, kind="signed"),
    "nf4": WeightCase("nf4", group=64, has_levels=True),
    "w8a8": WeightCase("w8a8", bits=8, group=0, kind="signed", inputs=INT8),
}


@dataclass(frozen=True)
class AdaptedCase:
    """A layer, and the row of each token's adapter. kind: of `KINDS`."""

    rows: Sequence[int]
    kind: str = "dense"
    outputs: int = 140  # that the weight has
    inputs: int = 192
    activation: Activation | None = None
    is_gated: bool = False
    has_residual: bool = True

    @property
    def features(self) -> int:
        """Outputs that come out."""
        return self.outputs // 2 if self.is_gated else self.outputs


# Every change, none, two of the same, and two rows in which nothing is.
MIXED = [3, 0, 1, 2, 4, 5, 1, 6, 7]
# One token, few, more than a tile of one adapter; tails, gates, ways to store.
CASES = [
    AdaptedCase([1]),
    AdaptedCase([0], activation=Activation.SILU),
    AdaptedCase(MIXED, activation=Activation.GELU),
    AdaptedCase(MIXED, is_gated=True, activation=Activation.SILU),
    AdaptedCase([2, 2, 1] * 9, outputs=70, inputs=77),
    AdaptedCase([4, 3, 2, 1], outputs=74, inputs=77, is_gated=True, activation=Activation.CLAMPED_SWIGLU),
    AdaptedCase([2, 0, 1], "int4", activation=Activation.GELU),
    AdaptedCase([2, 3, 1], "int8", is_gated=True, activation=Activation.SILU),
    AdaptedCase([2, 3, 1], "nf4", outputs=70, has_residual=False),
    AdaptedCase([2, 3, 1], "w8a8", outputs=80, has_residual=False),
]
# Inputs that are divided over several programs, and so many tokens that none are.
LONG = AdaptedCase([1, 0], inputs=2200, outputs=40)
MANY = AdaptedCase([*[1] * 150, *[0, 5, 3] * 50], outputs=40, inputs=77, has_residual=False)


def changes(outputs: int, inputs: int, dtype: torch.dtype, seed: int = 0) -> dict[int, LinearChange]:
    """By row: several parts, gains and biases, rows in place of the weight's, parts above each other, and nothing."""
    noise = torch.Generator().manual_seed(seed)
    randn = partial(torch.randn, generator=noise)

    def part(first: int, count: int, rank: int, scale: float) -> LowRank:
        down, up = (randn(rank, inputs) / inputs**0.5).to(dtype), (randn(count, rank) / rank**0.5).to(dtype)
        return LowRank(first, down, up, scale)

    def whole(first: int, count: int) -> LowRank:
        return LowRank(first, None, (randn(count, inputs) / inputs**0.5).to(dtype), 1.0)

    half, few = outputs // 2, outputs // 3
    replaced = torch.ones(outputs)
    replaced[3 : 3 + few] = 0
    return {
        1: LinearChange((part(0, half, 4, 0.5), part(half, outputs - half, 19, 2.0))),
        2: LinearChange((part(5, few, 40, 1.5),), randn(outputs), torch.rand(outputs, generator=noise)),
        3: LinearChange((whole(3, few),), None, replaced),
        4: LinearChange((part(0, outputs, 130, 0.25), part(half, 9, 1, 1.0), whole(outputs - 7, 7))),
        5: LinearChange((), randn(outputs)),
        6: LinearChange(),
    }


def layers(case: AdaptedCase, dtype: torch.dtype, device: torch.device, processors: int) -> tuple[Any, LinearFormat]:
    """A layer of the backend, and the same in stock operators and float32."""
    from server.backends.cuda.linear import CudaDense
    from server.backends.cuda.quantised import CudaQuantised

    shared: dict[str, Any] = {"is_gated": case.is_gated, "gate": stock_gate, "products": products(device, processors)}
    stored = KINDS[case.kind]
    if stored is not None:
        weight = replace(stored, num_inputs=case.inputs).weight(device, case.outputs)
        exact = QuantisedFormat(weight.to(torch.device("cpu")), None, is_gated=case.is_gated)
        return CudaQuantised(weight, dtype, **shared), exact
    dense = (torch.randn(case.outputs, case.inputs, generator=torch.Generator().manual_seed(1)) / case.inputs**0.5).to(
        dtype
    )
    return CudaDense(dense.to(device), **shared), DenseFormat(dense.float(), is_gated=case.is_gated)


@dataclass
class Both:
    """A layer of the backend and the reference's, both adapted, and what they are asked."""

    case: AdaptedCase
    dtype: torch.dtype
    device: Device
    processors: int = ONE_SPLIT

    def __post_init__(self) -> None:
        from server.backends.cuda.adapters import CudaAdapted

        layer, exact = layers(self.case, self.dtype, self.device.torch_device, self.processors)
        self.tokens = TokenAdapters()
        is_gated = self.case.is_gated
        self.made = CudaAdapted(layer, NUM_ROWS, self.tokens, self.device, self.dtype, is_gated=is_gated)
        self.exact = StockAdapted(exact, self.tokens, CpuDevice(), stock_gate if is_gated else None)
        self.asked = self.inputs(2)

    def inputs(self, seed: int) -> tuple[Tensor, Tensor, Tensor | None]:
        """x, bias and residual, on the device."""
        noise, case, count = torch.Generator().manual_seed(seed), self.case, len(self.case.rows)
        sizes = ((count, case.inputs), (case.outputs,), (count, case.features))
        x, bias, residual = (
            torch.randn(*size, generator=noise).to(self.device.torch_device, self.dtype) for size in sizes
        )
        return x, bias, residual if case.has_residual else None

    def put(self, by_row: Mapping[int, LinearChange | None]) -> None:
        """Into both."""
        for row, change in by_row.items():
            self.made.put(row, change)
            self.exact.put(row, change)

    def expected(self, rows: Sequence[int]) -> Tensor:
        """What the reference makes of what is asked."""
        x, bias, residual = (None if t is None else t.cpu().float() for t in self.asked)
        assert x is not None
        with self.tokens.of(TokenAdapters(torch.tensor(rows), sorted(set(rows) - {0}))):
            return self.exact(x, bias, self.case.activation, residual)

    def found(self, rows: Tensor, present: Sequence[int]) -> Tensor:
        """What the backend makes of it. present: empty as in a captured step."""
        x, bias, residual = self.asked
        with self.tokens.of(TokenAdapters(rows, present)):
            y: Tensor = self.made(x, bias, self.case.activation, residual)
        assert y.dtype == self.dtype
        return y

    def check(self, found: Tensor, rows: Sequence[int]) -> None:
        """Inputs that are rounded to codes may be on the other side of a half where they are computed in 16 bits."""
        close(self.expected(rows), found.cpu(), self.dtype)


def check_adapted(case: AdaptedCase, dtype: torch.dtype, device: Device, *, processors: int = ONE_SPLIT) -> None:
    """As the reference, where the host knows the adapters, and, for the head, where it does not."""
    both = Both(case, dtype, device, processors)
    both.put(changes(case.outputs, case.inputs, dtype))
    rows = torch.tensor(case.rows, device=device.torch_device)
    both.check(both.found(rows, sorted(set(case.rows) - {0})), case.rows)
    x, bias, _ = both.asked
    with both.tokens.of(TokenAdapters(rows)):
        logits = both.made.finest(x, bias)
    assert logits.dtype in (torch.float32, dtype)
    with both.tokens.of(TokenAdapters(rows.cpu(), sorted(set(case.rows) - {0}))):
        close(both.exact.finest(x.cpu().float(), bias.cpu().float()), logits.cpu(), dtype)


def check_neighbours(dtype: torch.dtype, device: Device) -> None:
    """A token gets the same, to the last bit, whatever the others have."""
    case = AdaptedCase([2, 0, 1, 2, 3, 0], outputs=40)
    both = Both(case, dtype, device)
    both.put(changes(case.outputs, case.inputs, dtype))
    together = both.found(torch.tensor(case.rows, device=device.torch_device), [])
    for row in (0, 1, 2):
        rows = [row] * len(case.rows)
        alone = both.found(torch.tensor(rows, device=device.torch_device), [])
        for token, own in enumerate(case.rows):
            if own == row:
                assert torch.equal(together[token], alone[token]), (row, token)


# Captures what is computed without arguments: a replay of it.
Capture = Callable[[Callable[[], Tensor]], Callable[[], Tensor]]


def check_replays(case: AdaptedCase, dtype: torch.dtype, device: Device, capture: Capture) -> None:
    """A captured layer computes with what is in the rows, and in its inputs, when it is replayed."""
    both = Both(case, dtype, device)
    rows = torch.zeros(len(case.rows), dtype=torch.int64, device=device.torch_device)
    replay = capture(lambda: both.found(rows, []))
    first, second = (changes(case.outputs, case.inputs, dtype, seed) for seed in (0, 1))
    moves: list[tuple[Mapping[int, LinearChange | None], Sequence[int]]] = [
        ({row: first[row] for row in (1, 2, 3)}, case.rows),
        ({1: second[1], 2: None, 3: second[4]}, case.rows[::-1]),  # others in the same rows
    ]
    for seed, (by_row, wanted) in enumerate(moves):
        both.put(by_row)
        rows.copy_(torch.tensor(wanted))
        for here, other in zip(both.asked, both.inputs(10 + seed), strict=True):
            if here is not None and other is not None:
                here.copy_(other)
        both.check(replay(), wanted)
    assert both.made.is_capturable


def check_unused_layers_cost_nothing(dtype: torch.dtype, device: Device) -> None:
    """Without adapters, or with those of other layers, the layer's own code runs, to the last bit."""
    case = AdaptedCase([2, 0, 0], activation=Activation.GELU, outputs=40)
    both = Both(case, dtype, device, MANY_SPLITS)
    both.put({1: changes(case.outputs, case.inputs, dtype)[1]})
    x, bias, residual = both.asked
    expected = both.made._layer(x, bias, case.activation, residual)
    assert torch.equal(expected, both.made(x, bias, case.activation, residual))
    rows = torch.tensor(case.rows, device=device.torch_device)
    assert torch.equal(expected, both.found(rows, [2]))
    assert not torch.equal(expected, both.found(rows // 2, [1]))
