"""Which way a product is computed, chosen by an injected clock."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from server.backends.cuda.choice import Alternatives, Chooser, EventClock, MeasuredCapture, Trial
from server.backends.cuda.graph import CudaGraphCapture
from server.backends.protocol import Computation


class FakeClock:
    """Trials are names here, and take the times that are given for them."""

    def __init__(self, **times: float):
        self.times = times
        self.is_capturing = False
        self.timed: list[str] = []

    def can_time(self) -> bool:
        return not self.is_capturing

    def __call__(self, trial: Trial) -> float:
        name = str(trial())
        self.timed.append(name)
        return self.times[name]


def trials(*names: str) -> Callable[[], list[Trial]]:
    return lambda: [lambda name=name: name for name in names]  # type: ignore[misc]


def test_the_fastest_way_is_chosen_and_measured_once() -> None:
    clock = FakeClock(usual=3.0, slow=5.0, fast=1.0)
    chooser = Chooser(clock)
    with chooser.measuring():
        assert 2 == chooser.choose("a shape", trials("usual", "slow", "fast"))
        assert 2 == chooser.choose("a shape", trials("usual", "slow", "fast"))
        assert 0 == chooser.choose("another shape", trials("fast", "usual"))
    assert ["usual", "slow", "fast", "fast", "usual"] == clock.timed
    assert 2 == chooser.choose("a shape", trials("usual", "slow", "fast"))  # when served, too


def test_what_was_measured_is_told_once_with_its_share_of_memory() -> None:
    chooser = Chooser(FakeClock(usual=0.05, fast=0.025, equal=0.05))
    asked = Alternatives("1 x 4096 x 12288 bfloat16", ["cuBLAS", "kernel 16x64x128"], 100_000_000)
    with chooser.measuring():
        for _ in range(2):
            chooser.choose("a shape", trials("usual", "fast"), lambda: asked)
        chooser.choose("another", trials("usual", "equal"), lambda: replace(asked, product="a head"))
    assert [
        "1 x 4096 x 12288 bfloat16: kernel 16x64x128 25.0 us, 4000 GB/s (cuBLAS 50.0 us)",
        "a head: cuBLAS 50.0 us, 2000 GB/s (kernel 16x64x128 50.0 us)",
    ] == chooser.found


def test_the_usual_way_is_kept_unless_another_one_is_clearly_faster() -> None:
    chooser = Chooser(FakeClock(usual=1.0, other=0.97))
    with chooser.measuring():
        assert 0 == chooser.choose("a shape", trials("usual", "other"))


def refuse(sentence: str) -> object:
    raise RuntimeError(sentence)


def test_a_way_that_refuses_is_not_taken_and_costs_nothing_else() -> None:
    chooser = Chooser(FakeClock(usual=0.05))
    asked = Alternatives("a shape", ["kernel", "torch._scaled_mm"], 100_000_000)
    with chooser.measuring():
        ways: list[Trial] = [lambda: "usual", lambda: refuse("not for this GPU")]
        assert 0 == chooser.choose("a shape", lambda: ways, lambda: asked)
        assert ["a shape: kernel 50.0 us, 2000 GB/s (torch._scaled_mm refuses)"] == chooser.found
        with pytest.raises(RuntimeError, match="the usual way"):  # beside which there may be none
            chooser.choose("b", lambda: [lambda: refuse("the usual way"), lambda: "usual"])
        with pytest.raises(RuntimeError, match="illegal memory access"):
            chooser.choose("c", lambda: [lambda: "usual", lambda: refuse("CUDA error: an illegal memory access")])


def test_nothing_is_measured_while_serving_nor_inside_a_capture() -> None:
    clock = FakeClock(usual=3.0, fast=1.0)
    chooser = Chooser(clock)
    assert 0 == chooser.choose("a shape", trials("usual", "fast"))
    clock.is_capturing = True
    with chooser.measuring():
        assert 0 == chooser.choose("a shape", trials("usual", "fast"))
    assert [] == clock.timed
    clock.is_capturing = False
    with chooser.measuring():  # what had to do without is measured when it can be
        assert 1 == chooser.choose("a shape", trials("usual", "fast"))


def test_without_a_clock_the_usual_way_is_taken() -> None:
    chooser = Chooser(None)
    with chooser.measuring():
        assert 0 == chooser.choose("a shape", trials("usual", "fast"))


def test_a_capture_measures_what_it_runs_and_nothing_afterwards(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = FakeClock(usual=3.0, fast=1.0)
    chooser = Chooser(clock)

    def run_then_capture(capture: CudaGraphCapture, function: Computation) -> Computation:
        function()
        clock.is_capturing = True
        function()
        clock.is_capturing = False
        return function

    monkeypatch.setattr(torch.cuda, "graph_pool_handle", lambda: (0, 0))
    monkeypatch.setattr(CudaGraphCapture, "__call__", run_then_capture)
    chosen: list[int] = []

    def step(shape: str = "captured") -> tuple[torch.Tensor, ...]:
        chosen.append(chooser.choose(shape, trials("usual", "fast")))
        return ()

    replay = MeasuredCapture([1], SimpleNamespace(), chooser)(step)
    replay()
    step("seen first when served")
    assert [1, 1, 1, 0] == chosen
    assert ["usual", "fast"] == clock.timed


def test_a_capture_that_fails_leaves_nothing_measuring(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = FakeClock(usual=3.0, fast=1.0)
    chooser = Chooser(clock)

    def fail(capture: CudaGraphCapture, function: Computation) -> Computation:
        raise RuntimeError("out of memory")

    monkeypatch.setattr(torch.cuda, "graph_pool_handle", lambda: (0, 0))
    monkeypatch.setattr(CudaGraphCapture, "__call__", fail)
    with pytest.raises(RuntimeError):
        MeasuredCapture([1], SimpleNamespace(), chooser)(tuple)
    assert 0 == chooser.choose("a shape", trials("usual", "fast"))
    assert [] == clock.timed


def test_gpus_are_not_timed_inside_a_capture(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = EventClock(torch.device("cuda", 0))
    for is_capturing in (False, True):
        monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda answer=is_capturing: answer)
        assert clock.can_time() != is_capturing


@pytest.mark.parametrize(("has_grouped_mm", "expected"), [(True, "torch"), (False, "kernel")])
def test_experts_never_take_a_product_that_asks_the_host(
    has_grouped_mm: bool, expected: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    from server.backends.cuda import linear

    monkeypatch.setattr(linear, "multiply_rows", lambda *args, **kwargs: "kernel")
    monkeypatch.setattr(linear.GroupedDense, "__call__", lambda *args: "torch")
    products = linear.Products(chooser := Chooser(None), has_grouped_mm=has_grouped_mm)
    products.workspace = lambda device: None  # type: ignore[assignment, method-assign, return-value]
    weights = torch.zeros(2, 8, 16, dtype=torch.bfloat16)
    experts = linear.CudaGrouped(weights, 2, gate=None, products=products)  # type: ignore[arg-type]
    x, ends = torch.zeros(100, 16, dtype=torch.bfloat16), torch.tensor([50, 100])
    assert expected == experts(x, ends)
    with chooser.measuring():  # and no graph has torch's
        assert "kernel" == experts(x, ends)
