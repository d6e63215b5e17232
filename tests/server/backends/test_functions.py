"""Functions of single numbers give each number one value, wherever in a tensor it stands."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from server.backends.reference.functions import softplus
from server.backends.reference.linear import ACTIVATIONS

FUNCTIONS = {activation.value: function for activation, function in ACTIVATIONS.items()} | {"softplus": softplus}


@pytest.mark.parametrize("function", FUNCTIONS.values(), ids=FUNCTIONS)
def test_a_number_has_one_value_alone_and_among_others(function: Callable[[Tensor], Tensor]) -> None:
    """Also far below 0, where a GELU is the difference of numbers that are nearly the same."""
    numbers = torch.linspace(-12, 12, 5003)
    assert torch.equal(function(numbers), torch.cat([function(number) for number in numbers.split(1)]))


@pytest.mark.parametrize("function", FUNCTIONS.values(), ids=FUNCTIONS)
@pytest.mark.parametrize("width", [1, 12, 24])
def test_a_rows_values_do_not_depend_on_other_rows(function: Callable[[Tensor], Tensor], width: int) -> None:
    rows = torch.randn(300, width, generator=torch.Generator().manual_seed(0)) * 3
    assert torch.equal(function(rows), torch.cat([function(row.unsqueeze(0)) for row in rows]))
