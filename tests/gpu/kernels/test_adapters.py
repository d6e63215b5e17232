"""Adapted layers on a GPU: the cases of the interpreter in every dtype, graphs, and memory that comes and goes."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from server.backends.cuda.device import CudaDevice
from server.backends.protocol import LinearChange, LowRank
from tests.gpu.selection import DTYPES, GPU, NEEDS_GPU, first
from tests.server.backends.cuda.adapter_cases import (
    CASES,
    KINDS,
    LONG,
    MANY,
    MIXED,
    AdaptedCase,
    Both,
    check_adapted,
    check_neighbours,
    check_replays,
    check_unused_layers_cost_nothing,
)
from tests.server.backends.cuda.kernel_cases import MANY_SPLITS

pytestmark = NEEDS_GPU


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("case", [*CASES, LONG, MANY], ids=str)
def test_adapted_layers_equal_the_reference(case: AdaptedCase, dtype: torch.dtype) -> None:
    check_adapted(case, dtype, CudaDevice(0), processors=MANY_SPLITS)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_neighbours_change_nothing(dtype: torch.dtype) -> None:
    check_neighbours(dtype, CudaDevice(0))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_layers_that_no_adapter_of_the_step_changes_are_computed_as_ever(dtype: torch.dtype) -> None:
    check_unused_layers_cost_nothing(dtype, CudaDevice(0))


def capture(function: Callable[[], Tensor]) -> Callable[[], Tensor]:
    """A CUDA graph of what `function` computes."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        function()  # compiles
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        result = function()

    def replay() -> Tensor:
        graph.replay()
        return result

    return replay


@pytest.mark.parametrize("kind", first(list(KINDS), ["dense", "int4"]))
@pytest.mark.parametrize("rows", [MIXED, [1, 0, 2, 3]], ids=len)
def test_a_graph_computes_with_what_is_in_the_rows_when_it_is_replayed(rows: list[int], kind: str) -> None:
    check_replays(AdaptedCase(rows, kind, outputs=80), torch.bfloat16, CudaDevice(0), capture)


def test_what_leaves_a_row_is_kept_for_the_steps_that_were_launched_before() -> None:
    """While the GPU is busy, an adapter goes, others take its memory, and the step before still finds its own."""
    case = AdaptedCase([1] * 4, outputs=256, inputs=512, has_residual=False)
    both = Both(case, torch.bfloat16, CudaDevice(0))

    def change(number: int) -> LinearChange:
        """Adds `number` to every output of inputs that are 1."""
        down, up = torch.full((16, 512), number / 512), torch.full((256, 16), 1 / 16)
        staged = both.made.stage(LinearChange((LowRank(0, down.bfloat16(), up.bfloat16(), 1.0),)))
        assert staged.memory.is_pinned()
        return staged

    changes = [change(number) for number in range(64)]
    rows = torch.tensor(case.rows, device=GPU)
    both.asked[0].fill_(1.0)
    both.made.put(1, changes[0])
    base = both.found(rows, [1])  # compiles, too
    torch.cuda.synchronize()
    torch.cuda._sleep(1_000_000_000)
    found = []
    for one in changes:
        both.made.put(1, one)
        found.append(both.found(rows, [1]))
        both.made.put(1, None)
    assert not torch.cuda.current_stream().query()  # the host is ahead of all of it
    for number, y in enumerate(found):
        torch.testing.assert_close(base + number, y, atol=0.5, rtol=0)
