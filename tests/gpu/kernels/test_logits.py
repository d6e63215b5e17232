"""The kernels of logits on a GPU: what the interpreter checks, in every dtype and at a real vocabulary's size."""

from __future__ import annotations

import pytest
import torch

from tests.gpu.selection import GPU, NEEDS_GPU, first
from tests.server.backends.cuda.logit_cases import (
    KERNELS,
    WIDTHS,
    check_noise,
    check_race,
    check_summary,
    check_top_k,
    check_top_p,
    check_typical,
    logits_of,
)

pytestmark = NEEDS_GPU
SIZES = [*WIDTHS, 250_880]


@pytest.mark.parametrize("dtype", first([torch.bfloat16, torch.float16, torch.float32], [torch.bfloat16]), ids=str)
@pytest.mark.parametrize("width", SIZES)
@pytest.mark.parametrize("n", [1, 5, 20])
def test_summaries_equal_the_reference(width: int, n: int, dtype: torch.dtype) -> None:
    check_summary(logits_of(40, width, dtype).to(GPU), min(n, width))


@pytest.mark.parametrize("width", SIZES)
def test_races_are_won_by_the_same_tokens(width: int) -> None:
    check_race(torch.randn(40, width, generator=torch.Generator().manual_seed(2)).to(GPU), 125_440)


def test_the_noise_of_a_token_is_the_references() -> None:
    check_noise(torch.arange(0, 250_880, 26, device=GPU).unsqueeze(1))


@pytest.mark.parametrize("width", SIZES)
@pytest.mark.parametrize("spread", [4.0, 0.1], ids=["peaked", "flat"])
def test_warpers_keep_what_the_reference_keeps(width: int, spread: float) -> None:
    logits = logits_of(5, width, spread=spread).to(GPU)
    shares = torch.tensor([[0.01], [0.5], [0.9], [0.95], [0.999]], device=GPU)
    check_top_k(logits, torch.tensor([[1], [2], [40], [999], [5000]], device=GPU))
    check_top_p(logits, shares)
    check_typical(torch.randn(5, width, generator=torch.Generator().manual_seed(4)).to(GPU) * spread, shares)


def test_a_search_repeated_finds_the_same_to_the_last_bit() -> None:
    logits = torch.randn(1, 250_880, generator=torch.Generator().manual_seed(5)).to(GPU)  # where sums round
    p = torch.full((1, 1), 0.9, device=GPU)
    found = {KERNELS.top_p_threshold(logits, p, None).item() for _ in range(100)}
    assert 1 == len(found)
