"""The kernels of logits on a CPU, in Triton's interpreter: run by `test_triton.py`, in a process of its own.

bfloat16 is left out: the interpreter computes on its bit patterns.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor

from server.backends.cuda.kernels import logits as kernels
from server.backends.reference.logits import StockLogits
from server.ranks.collectives import Shard
from tests.combinations import all_pairs, by_turns
from tests.server.backends.cuda import logit_ranks
from tests.server.backends.cuda.interpreted_cases import inside, quick_calls
from tests.server.backends.cuda.logit_cases import (
    KERNELS,
    WIDTHS,
    check_noise,
    check_race,
    check_summary,
    check_top_k,
    check_top_p,
    check_typical,
    kept,
    logits_of,
)

__all__ = ["inside", "quick_calls"]

# numpy, which interprets, says what a GPU leaves unsaid.
pytestmark = [
    pytest.mark.filterwarnings(f"ignore:{what}:RuntimeWarning")
    for what in ("overflow encountered", "divide by zero encountered", "invalid value encountered")
]


@pytest.fixture
def large_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    """A search's parts in one tile: the interpreter takes as long for each."""
    monkeypatch.setattr(kernels, "SEARCH_TILE", kernels.SEARCH_PART)


def with_removed(logits: Tensor) -> Tensor:
    """Columns of padding at the end, and most of the first row removed."""
    logits[:, -3:] = float("-inf")
    logits[0, 2:] = float("-inf")
    return logits


@pytest.mark.parametrize(("width", "n", "dtype"), all_pairs(WIDTHS, (1, 2, 5), (torch.float32, torch.float16)))
def test_summaries_equal_the_reference(width: int, n: int, dtype: torch.dtype) -> None:
    check_summary(with_removed(logits_of(3, width, dtype)), n)


@pytest.mark.parametrize(("rows", "n"), [(1, 20), (12, 1), (2, 13)])
def test_summaries_of_many_rows_and_many_tokens(rows: int, n: int) -> None:
    check_summary(logits_of(rows, 4500), n)


def test_more_candidates_than_a_program_compares_are_found_all_the_same() -> None:
    check_summary(logits_of(1, 9001), 2000)


def test_rows_may_lie_apart() -> None:
    check_summary(logits_of(3, 5000)[:, 100:4700], 3)
    check_race(logits_of(3, 5000)[:, 100:4700])


@pytest.mark.parametrize(("width", "first_id"), by_turns(WIDTHS, (0, 125440)))
def test_races_are_won_by_the_same_tokens(width: int, first_id: int) -> None:
    check_race(with_removed(torch.randn(5, width, generator=torch.Generator().manual_seed(2))), first_id)


def test_the_noise_of_a_token_is_the_references() -> None:
    check_noise(torch.arange(0, 250_880, 10_000).unsqueeze(1))


def test_races_of_many_rows() -> None:
    check_race(torch.zeros(10, 700))


def test_draws_follow_the_distribution() -> None:
    probabilities = torch.tensor([0.5, 0.25, 0.15, 0.1])
    rows = 60  # each takes a while to interpret; that every token is the reference's says more
    low = torch.arange(rows).unsqueeze(1)
    drawn = KERNELS.race(probabilities.log().expand(rows, -1), low, torch.zeros_like(low), torch.full((rows,), 5))
    found = torch.bincount(drawn, minlength=4) / rows
    torch.testing.assert_close(found, probabilities, atol=0.2, rtol=0)


@pytest.mark.parametrize("width", WIDTHS)
def test_top_k_keeps_what_the_reference_keeps(width: int, large_tiles: None) -> None:
    k = torch.tensor([[1], [40], [3000]])
    check_top_k(with_removed(logits_of(len(k), width)), k)


def test_top_k_of_equals_keeps_all(large_tiles: None) -> None:
    check_top_k(torch.zeros(1, 4100), torch.tensor([[3]]))


def test_top_k_of_signed_zeros_and_extremes(large_tiles: None) -> None:
    logits = torch.tensor([[0.0, -0.0, 1e-40, -1e-40, 3e38, -3e38, float("-inf")]]).expand(4, -1).contiguous()
    check_top_k(logits, torch.tensor([[1], [3], [4], [7]]))


@pytest.mark.parametrize(("width", "spread"), by_turns(WIDTHS, (4.0, 0.1)))
def test_top_p_keeps_the_smallest_set_that_reaches_p(width: int, spread: float, large_tiles: None) -> None:
    p = torch.tensor([[0.01], [0.9], [0.999]])
    check_top_p(with_removed(logits_of(len(p), width, spread=spread)), p)


def test_a_row_that_wants_everything_keeps_all_beside_others() -> None:
    logits = logits_of(3, 4100)
    for wanted, search in [
        (torch.tensor([[50], [4101], [4100]]), lambda k: KERNELS.top_k_threshold(logits, k, 4100, None)),
        (torch.tensor([[0.9], [1.0], [0.5]]), lambda p: KERNELS.top_p_threshold(logits, p, None)),
    ]:
        expected = search(wanted)
        assert float("-inf") == expected[1] and all(expected[[0, 2]] > float("-inf"))


def test_a_client_may_want_more_tokens_than_an_integer_counts() -> None:
    logits = logits_of(1, 100)
    threshold = KERNELS.top_k_threshold(logits, torch.tensor([[2**32 - 1]]), 2**32 - 1, None)
    assert float("-inf") == threshold.item()


def test_a_search_in_tiles_as_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernels, "SEARCH_PART", 3 * kernels.SEARCH_TILE)
    logits = torch.randn(1, 900, generator=torch.Generator().manual_seed(3)) * 4
    check_top_k(logits, torch.tensor([[50]]))
    check_top_p(logits, torch.tensor([[0.9]]))


@pytest.mark.parametrize("width", [7, 4097])
def test_typical_p_keeps_what_is_nearest_the_entropy(width: int, large_tiles: None) -> None:
    mass = torch.tensor([[0.05], [0.5], [0.99]])
    logits = torch.randn(len(mass), width, generator=torch.Generator().manual_seed(4)) * 3
    logits[0, 2:] = float("-inf")
    check_typical(logits, mass)


def test_logits_of_the_coldest_temperature_and_the_largest_penalty(large_tiles: None) -> None:
    """What the sampler's bounds let through: one token is left, and it is the best."""
    logits = torch.tensor([[5.0, 5.0000005, -5.0, 4.9999995, 0.001, -0.001, 0.0, float("-inf")]]) * 2.0**107
    logits = logits.repeat(4, 1)
    check_summary(logits, 3)
    check_race(logits)
    least = torch.full((4, 1), 1.2e-38)
    for p in (least, least + 0.9, least + 0.9999):
        check_top_k(logits, torch.full((4, 1), 3))
        assert (1,) == tuple(kept(logits, KERNELS.top_p_threshold(logits, p, None)).sum(dim=-1).unique())
        bounds = KERNELS.typical_bounds(logits, p, None)
        distance = ((bounds.log_totals - logits) - bounds.entropy).abs()
        assert (distance <= bounds.reach).tolist() == [[id == 1 for id in range(8)]] * 4


@pytest.mark.kernels
def test_ranks_agree_to_the_last_bit_and_choose_what_one_chooses(tmp_path: Path) -> None:
    first, second = logit_ranks.on_ranks(2, tmp_path / "rendezvous")
    assert first == second
    alone = logit_ranks.sample(StockLogits(), Shard())
    assert (alone.token_ids, alone.top_ids) == (first.token_ids, first.top_ids)
    torch.testing.assert_close(torch.tensor(alone.logprobs), torch.tensor(first.logprobs), atol=1e-5, rtol=1e-5)
