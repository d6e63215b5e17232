"""Recurrences on a GPU: the cases of the interpreter, and what they have at each step when captured."""

from __future__ import annotations

import pytest
import torch

from tests.gpu.gpu_backend import gpu_backend
from tests.gpu.selection import DTYPES, GPU, NEEDS_GPU
from tests.server.backends.recurrence_cases import CASES, Case, Rule, check_cuts, check_steps, meta_of

pytestmark = NEEDS_GPU


def rule_of(case: Case, dtype: torch.dtype = torch.float32) -> Rule:
    """As the chosen backend makes it, with kernels."""
    rule = case.make(gpu_backend(dtype), case.weights)
    assert type(rule) is not case.stock
    return rule


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_recurrences_equal_the_operators(case: Case, dtype: torch.dtype) -> None:
    case = case.on(GPU)
    check_steps(case, rule_of(case, dtype), dtype)


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_cuts_and_neighbours_change_no_bit(case: Case) -> None:
    case = case.on(GPU)
    check_cuts(case, rule_of(case), [1, 3, 2])


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_a_captured_decode_follows_its_states(case: Case) -> None:
    """Each replay goes on from what the one before has left."""
    case = case.on(GPU)
    rule, meta = rule_of(case), meta_of([(2, 5, 1), (0, 9, 1)], 2, GPU)
    inputs = case.inputs(2, 0)
    expected_state, state = case.states, case.states
    rule(*inputs, case.states, meta)  # compiles
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = rule(*inputs, state, meta)
    for _ in range(20):
        expected = rule(*inputs, expected_state, meta)
        graph.replay()
        assert torch.equal(expected, found) and torch.equal(expected_state, state)
