"""Mixtures of experts: every backend's products against one expert after the other, and what the host is asked."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import pytest
import torch
from torch import Tensor

from server.arch.spec import Activation, Scoring
from server.backends.cpu import CpuBackend, Kernels
from server.backends.cpu.device import CpuDevice
from server.backends.cpu.routing import KernelRouting
from server.backends.protocol import Backend, RouterRule
from server.backends.reference import ReferenceBackend
from server.backends.reference.router import choose
from server.layers.mlp import MoeMlp
from server.quantisation.rounding import int8_rows
from server.quantisation.stored import Quantise
from tests.combinations import all_pairs

EXPERTS, WIDTH, INNER, TOP_K = 5, 48, 32, 2
MakeBackend = Callable[[torch.dtype], Backend]
# Of the largest value: what rounding to a dtype may cost.
ROUNDING = {torch.float32: 1e-5, torch.bfloat16: 2e-2}


@pytest.fixture(params=["reference", "cpu"])
def make(request: pytest.FixtureRequest) -> MakeBackend:
    if request.param == "reference":
        return lambda dtype: ReferenceBackend(CpuDevice())
    return partial(CpuBackend, request.getfixturevalue("kernels"))


def random(*size: int, seed: int = 0) -> Tensor:
    return torch.randn(*size, generator=torch.Generator().manual_seed(seed))


BIASES = {
    "router_bias": random(EXPERTS, seed=11),
    "up_bias": random(EXPERTS, 2 * INNER, seed=12),
    "down_bias": random(EXPERTS, WIDTH, seed=13),
}


def mixture(
    backend: Backend, dtype: torch.dtype, quantise: Quantise | None = None, activation: Activation = Activation.SILU
) -> MoeMlp:
    """With biases where the gate is clamped, as gpt-oss has them."""
    biases = {name: bias.to(dtype) for name, bias in BIASES.items()} if activation is not Activation.SILU else {}
    up, down = random(EXPERTS, 2 * INNER, WIDTH, seed=1) / 7, random(EXPERTS, WIDTH, INNER, seed=2) / 6
    stored = [up.to(dtype), down.to(dtype)] if quantise is None else [map(quantise, up), map(quantise, down)]
    return MoeMlp(
        router=backend.linear(random(EXPERTS, WIDTH, seed=3).to(dtype)),
        routing=backend.routing(EXPERTS, TOP_K, renormalise=True),
        up=backend.grouped(stored[0], EXPERTS, is_gated=True),
        down=backend.grouped(stored[1], EXPERTS),
        activation=activation,
        **biases,
    )


def on_paper(x: Tensor, weights: Tensor, chosen: Tensor) -> Tensor:
    """Token by token and expert by expert, in float64, by the router's choice [T, k]."""
    up, down = random(EXPERTS, 2 * INNER, WIDTH, seed=1) / 7, random(EXPERTS, WIDTH, INNER, seed=2) / 6
    rows = []
    for token, own_weights, experts in zip(x.double(), weights.double(), chosen, strict=True):
        total = torch.zeros(WIDTH, dtype=torch.float64)
        for weight, expert in zip(own_weights, experts, strict=True):
            gate, value = (up[expert].double() @ token).chunk(2)
            total += weight * (down[expert].double() @ (torch.nn.functional.silu(gate) * value))
        rows.append(total)
    return torch.stack(rows)


@pytest.mark.parametrize("dtype", ROUNDING, ids=str)
@pytest.mark.parametrize("tokens", [1, 3, 40])
def test_a_mixture_is_the_weighted_sum_of_its_experts(make: MakeBackend, dtype: torch.dtype, tokens: int) -> None:
    x, mlp = random(tokens, WIDTH, seed=4).to(dtype), mixture(make(dtype), dtype)
    expected, found = on_paper(x, *mlp.routing.choose(mlp.router, x)), mlp(x).double()
    assert (expected - found).abs().max() <= ROUNDING[dtype] * expected.abs().max()


@pytest.mark.parametrize("dtype", ROUNDING, ids=str)
def test_biases_and_clamped_gates_are_as_published(make: MakeBackend, dtype: torch.dtype) -> None:
    x, mlp = 4 * random(40, WIDTH, seed=4).to(dtype), mixture(make(dtype), dtype, activation=Activation.CLAMPED_SWIGLU)
    up, down = random(EXPERTS, 2 * INNER, WIDTH, seed=1) / 7, random(EXPERTS, WIDTH, INNER, seed=2) / 6
    router = random(EXPERTS, WIDTH, seed=3).to(dtype).double()
    best = (x.double() @ router.t() + BIASES["router_bias"].to(dtype).double()).topk(TOP_K)
    expected = torch.zeros(len(x), WIDTH, dtype=torch.float64)
    for token, (weights, experts) in enumerate(zip(best.values.softmax(-1), best.indices, strict=True)):
        for weight, e in zip(weights, experts, strict=True):
            gate, linear = (up[e].double() @ x[token].double() + BIASES["up_bias"][e].double()).chunk(2)
            gate, linear = gate.clamp(max=7), linear.clamp(-7, 7)
            inner = (linear + 1) * gate * torch.sigmoid(1.702 * gate)
            expected[token] += weight * (down[e].double() @ inner + BIASES["down_bias"][e].double())
    found = mlp(x).double()
    assert (up.double() @ x.double().t()).abs().max() > 7  # so that something is clamped
    assert (expected - found).abs().max() <= ROUNDING[dtype] * expected.abs().max()


def test_the_router_takes_the_likeliest_experts(make: MakeBackend) -> None:
    x = random(12, WIDTH, seed=8)
    probabilities = (x.double() @ random(EXPERTS, WIDTH, seed=3).double().t()).softmax(dim=-1)
    mlp = mixture(make(torch.float32), torch.float32)
    weights, chosen = mlp.routing.choose(mlp.router, x)
    best = probabilities.topk(TOP_K)
    assert torch.equal(best.indices, chosen.long())
    torch.testing.assert_close((best.values / best.values.sum(dim=-1, keepdim=True)).float(), weights)


@pytest.mark.parametrize(("tokens", "renormalise", "dtype"), all_pairs((1, 9, 500), (True, False), ROUNDING))
def test_compiled_routes_are_those_of_stock_operators(
    kernels: Kernels, tokens: int, renormalise: bool, dtype: torch.dtype
) -> None:
    experts, x = 37, random(tokens, WIDTH).to(dtype)
    backend, bias = CpuBackend(kernels, dtype), random(experts, seed=2).to(dtype)
    router = backend.linear(random(experts, WIDTH, seed=1).to(dtype))
    stock = ReferenceBackend(CpuDevice()).routing(experts, 4, renormalise=renormalise)
    compiled = backend.routing(experts, 4, renormalise=renormalise)
    for expected, found in zip(stock.choose(router, x, bias), compiled.choose(router, x, bias), strict=True):
        torch.testing.assert_close(expected, found.to(expected.dtype), atol=1e-6, rtol=ROUNDING[dtype])
    expected, found = stock(router, x, bias), compiled(router, x, bias)
    assert torch.equal(expected.ends, found.ends)
    assert torch.equal(expected.spread(x), found.spread(x))
    y = random(4 * tokens, WIDTH, seed=3).to(dtype)
    torch.testing.assert_close(expected.combine(y), found.combine(y), atol=ROUNDING[dtype], rtol=0)


def test_of_equally_likely_experts_the_first_are_taken_even_where_some_are_no_numbers(kernels: Kernels) -> None:
    class Logits:
        def finest(self, x: Tensor, bias: Tensor | None) -> Tensor:
            return torch.tensor([[1.0, 2, 2, 1], [float("nan"), 0, float("nan"), 0], [float("nan")] * 4])

    routing = CpuBackend(kernels, torch.float32).routing(4, 3, renormalise=True)
    weights, chosen = routing.choose(Logits(), torch.empty(3, 1))  # type: ignore[arg-type]
    assert [[1, 2, 0], [1, 3, 0], [0, 0, 0]] == chosen.tolist()
    assert 1 == pytest.approx(weights[0].sum().item())
    assert [False, True, True] == weights.isnan().any(1).tolist()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize(("inputs", "outputs"), [(44, 30), (20, 12), (33, 7), (12, 10)])
def test_widths_need_not_be_whole_units_of_memory(dtype: torch.dtype, inputs: int, outputs: int) -> None:
    weights, x = random(3, outputs, inputs).to(dtype), random(6, inputs, seed=1).to(dtype)
    grouped = ReferenceBackend(CpuDevice()).grouped(weights, 3)
    found = grouped(x, torch.tensor([2, 2, 6], dtype=torch.int32))
    expected = torch.cat([x[:2].double() @ weights[0].double().t(), x[2:].double() @ weights[2].double().t()])
    assert (expected - found.double()).abs().max() <= 0.01 * expected.abs().max()


def test_a_residual_is_added_and_an_idle_expert_is_harmless(make: MakeBackend) -> None:
    x, base = random(2, WIDTH, seed=5), random(2, WIDTH, seed=6)  # two tokens leave one expert idle at least
    mlp = mixture(make(torch.float32), torch.float32)
    torch.testing.assert_close(base + mlp(x), mlp.branch(x).onto(base, with_bias=True))


@pytest.mark.parametrize("dtype", ROUNDING, ids=str)
def test_a_tokens_output_does_not_depend_on_its_batch(kernels: Kernels, dtype: torch.dtype) -> None:
    mlp, x = mixture(CpuBackend(kernels, dtype), dtype), random(40, WIDTH, seed=7).to(dtype)
    together = mlp(x)
    for count in (1, 7):
        assert torch.equal(together[:count], mlp(x[:count]))


def test_other_formats_give_nearly_the_same(make: MakeBackend) -> None:
    backend, x = make(torch.float32), random(12, WIDTH)
    dense, int8 = (mixture(backend, torch.float32, quantise)(x) for quantise in (None, int8_rows))
    assert 0 < (dense - int8).abs().mean() < 0.05 * dense.std()


def test_a_router_s_weights_do_not_depend_on_the_tokens_beside() -> None:
    logits = torch.randn(101, 3, generator=torch.Generator().manual_seed(0))
    rule = RouterRule(Scoring.SIGMOID)
    weights, chosen = choose(logits, 2, rule, renormalise=True)
    for count in range(1, len(logits)):
        fewer = choose(logits[:count], 2, rule, renormalise=True)
        assert torch.equal(weights[:count], fewer[0]) and torch.equal(chosen[:count], fewer[1])


@pytest.mark.parametrize("groups", [(1, 1), (4, 2), (8, 1)])
@pytest.mark.parametrize("has_bias", [True, False])
def test_kernels_choose_by_sigmoids_as_the_reference_does(
    kernels: Kernels, groups: tuple[int, int], has_bias: bool
) -> None:
    experts, tokens, top_k = 64, 300, 8
    bias = random(experts, seed=4) / 4 if has_bias else None
    rule = RouterRule(Scoring.SIGMOID, bias, *groups, scale=2.5)
    backend = CpuBackend(kernels, torch.float32)
    router, x = backend.linear(random(experts, WIDTH, seed=5) / 7), random(tokens, WIDTH, seed=6)
    for renormalise in (True, False):
        routing = backend.routing(experts, top_k, renormalise=renormalise, rule=rule)
        assert isinstance(routing, KernelRouting)
        weights, chosen = routing.choose(router, x)
        wanted = choose(router.finest(x, None), top_k, rule, renormalise=renormalise)
        assert torch.equal(wanted[1].int(), chosen)
        torch.testing.assert_close(wanted[0], weights, rtol=1e-6, atol=0)
        alone = [routing.choose(router, row) for row in x.split(1)]
        assert torch.equal(torch.cat([w for w, _ in alone]), weights)
        assert torch.equal(torch.cat([c for _, c in alone]), chosen)


def test_a_sigmoid_of_no_number_poisons_its_token_alone(kernels: Kernels) -> None:
    backend = CpuBackend(kernels, torch.float32)
    x = random(3, WIDTH, seed=7)
    x[1, 0] = float("nan")
    routing = backend.routing(EXPERTS, TOP_K, renormalise=True, rule=RouterRule(Scoring.SIGMOID))
    weights, chosen = routing.choose(backend.linear(random(EXPERTS, WIDTH, seed=3)), x)  # type: ignore[attr-defined]
    assert [False, True, False] == weights.isnan().all(dim=1).tolist() and not weights[[0, 2]].isnan().any()
    assert 0 <= chosen.min() and chosen.max() < EXPERTS
