"""What kernels make of logits, compared with the reference: for the interpreter and for a GPU."""

from __future__ import annotations

import torch
from torch import Tensor

from server.backends.cuda.logits import KernelLogits
from server.backends.reference.logits import StockLogits

STOCK, KERNELS = StockLogits(), KernelLogits()
# No multiple of a part; one part, and several.
WIDTHS = (7, 1000, 4097, 9001)


def logits_of(rows: int, width: int, dtype: torch.dtype = torch.float32, spread: float = 3.0, seed: int = 0) -> Tensor:
    """Rounded, so that many are equal."""
    generator = torch.Generator().manual_seed(seed)
    return (torch.randn(rows, width, generator=generator) * spread * 8).round().div(8).to(dtype)


def check_summary(logits: Tensor, n: int) -> None:
    """The same ids and values as the reference has, and the same sums but for rounding."""
    before = logits.clone()
    expected, found = STOCK.summarise(logits.float(), n), KERNELS.summarise(logits, n)
    assert torch.equal(before, logits)
    assert torch.equal(expected.top_logits, found.top_logits)
    is_one = expected.top_logits > float("-inf")
    assert torch.equal(expected.top_ids[is_one], found.top_ids[is_one])
    assert 0 <= int(found.top_ids.min()) and int(found.top_ids.max()) < logits.shape[1]
    torch.testing.assert_close(expected.log_totals, found.log_totals, atol=1e-5, rtol=1e-6)


def seeds(rows: int, device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
    """Halves of seeds and positions."""
    generator = torch.Generator().manual_seed(1)
    low, high = torch.randint(0, 2**32, (2, rows, 1), generator=generator).to(device)
    return low, high, torch.randint(0, 5000, (rows,), generator=generator).to(device)


def check_race(logits: Tensor, first_id: int = 0) -> None:
    """The token that the reference draws."""
    given = seeds(len(logits), logits.device)
    expected = STOCK.race(logits.float(), *given, first_id)
    assert torch.equal(expected, KERNELS.race(logits, *given, first_id))


def check_noise(token_ids: Tensor) -> None:
    """The noise of one token [R, 1] of each row, but for the rounding of its logarithm."""
    given = seeds(len(token_ids), token_ids.device)
    torch.testing.assert_close(
        STOCK.log_noise(*given, token_ids), KERNELS.log_noise(*given, token_ids), atol=1e-5, rtol=1e-5
    )


def kept(logits: Tensor, threshold: Tensor) -> Tensor:
    """Which tokens a threshold leaves."""
    return (logits >= threshold) & (logits > float("-inf"))


def check_top_k(logits: Tensor, k: Tensor) -> None:
    """The very tokens of the reference."""
    expected, found = (it.top_k_threshold(logits, k, int(k.max()), None) for it in (STOCK, KERNELS))
    assert torch.equal(kept(logits, expected), kept(logits, found))


def check_top_p(logits: Tensor, p: Tensor) -> None:
    """The smallest set of the most likely that reaches p, equals with it, by sums in float64."""
    threshold = KERNELS.top_p_threshold(logits, p, None)
    probabilities = logits.double().softmax(dim=-1)
    mass = lambda mask: (probabilities * mask).sum(dim=-1, keepdim=True)  # noqa: E731
    assert bool((mass(logits >= threshold) >= p.double() - 1e-5).all())
    assert bool((mass(logits > threshold) < p.double() + 1e-5).all())
    assert bool((logits == threshold).any(dim=-1).all())


def check_typical(logits: Tensor, mass: Tensor) -> None:
    """What the reference keeps, but for what stands at the edge."""
    bounds = [it.typical_bounds(logits, mass, None) for it in (STOCK, KERNELS)]
    torch.testing.assert_close(bounds[0].entropy, bounds[1].entropy, atol=1e-4, rtol=1e-5)
    surprisal = bounds[1].log_totals.double() - logits.double()
    distance = (surprisal - bounds[1].entropy.double()).abs()
    probabilities = (-surprisal).exp()
    within, nearer = (
        (probabilities * (distance <= bounds[1].reach.double() + edge)).sum(dim=-1, keepdim=True)
        for edge in (1e-4, -1e-4)
    )
    assert bool((within >= mass.double() - 1e-4).all()) and bool((nearer < mass.double() + 1e-4).all())
