"""Where a model is cut into pipeline stages, against trying every way."""

from __future__ import annotations

from itertools import combinations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from server.arch.stages import cut

COSTS = st.lists(st.integers(0, 9).map(float), min_size=1, max_size=8)


def dearest(layers: list[float], head: float, ends: list[int]) -> float:
    """What the dearest stage costs where stages end so."""
    starts = [0, *ends[:-1]]
    costs = [sum(layers[start:end]) for start, end in zip(starts, ends, strict=True)]
    costs[-1] += head
    return max(costs)


@given(COSTS, st.integers(0, 30).map(float), st.integers(1, 4))
def test_no_other_way_is_cheaper_and_every_layer_is_somewhere(layers: list[float], head: float, count: int) -> None:
    if count > len(layers):
        with pytest.raises(ValueError, match=f"--pipeline-parallel is {count}, but the model has {len(layers)} layers"):
            cut(layers, head, count)
        return
    stages = cut(layers, head, count)
    assert list(range(len(layers))) == [layer for stage in stages for layer in stage.layers]
    assert all(stage.layers for stage in stages)
    assert [(n, count) for n in range(count)] == [(stage.index, stage.count) for stage in stages]
    ways = ([*inner, len(layers)] for inner in combinations(range(1, len(layers)), count - 1))
    found = dearest(layers, head, [stage.layers.stop for stage in stages])
    assert found == min(dearest(layers, head, ends) for ends in ways)


def test_a_layer_is_in_one_stage_with_that_whose_keys_it_uses() -> None:
    assert [range(2), range(2, 6)] == [stage.layers for stage in cut([1.0] * 6, head=1.0, count=2, bound={3, 4, 5})]
    with pytest.raises(ValueError, match=r"6 layers, of which 3 belong to those before them.*use .* 3 or less"):
        cut([1.0] * 6, head=1.0, count=4, bound={3, 4, 5})
