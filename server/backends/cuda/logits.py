# mypy: disable-error-code="import-untyped, import-not-found, no-untyped-def, untyped-decorator"
"""What sampling asks of the logits, in Triton kernels: each question reads them once, or once in each of eight passes.

Nothing is sorted, nothing of the vocabulary's size is written, and the host asks the device nothing, however many ranks
there are. Everything is the same from run to run, and on every rank: sums are added in a fixed order. Left out: more
candidates than fit in a program's registers, which are found by stock operators, and typical-p's entropy, which is one
sum of theirs.

Importing this module imports Triton, which a CPU server neither has nor needs. Not yet run on a GPU: the tests run the
kernels in Triton's interpreter and compile them for compute capability 9.0.

Shapes: R rows, V columns, P parts of a row, n best tokens.
"""

from __future__ import annotations

import torch
import triton
from torch import Tensor

from server.backends.cuda.kernels import logits as kernels
from server.backends.protocol import Gather, LogitSummary, TypicalBounds
from server.backends.reference.logits import StockLogits

# Candidates that one program compares: 16 for each thread of 8 warps.
MAX_CANDIDATES = 4096
MOST_WANTED = 2**31 - 1  # tokens: a larger number would be of another type, for which kernels are compiled again


class KernelLogits(StockLogits):
    """See `protocol.Logits`."""

    def summarise(self, logits: Tensor, n: int) -> LogitSummary:
        rows, width = logits.shape
        parts = triton.cdiv(width, kernels.PART)
        candidates = triton.next_power_of_2(parts * n)
        if candidates > MAX_CANDIDATES:
            return super().summarise(logits, n)
        assert logits.stride(1) == 1
        best, ids = logits.new_empty(rows, parts, n, dtype=torch.float32), _integers(logits, rows, parts, n)
        totals = best.new_empty(rows, parts)
        kernels.summarise_parts[(rows, parts)](
            logits, logits.stride(0), best, ids, totals, width, n, PART=kernels.PART, num_warps=kernels.PART_WARPS
        )
        summary = LogitSummary(
            torch.empty(rows, n, dtype=torch.int64, device=logits.device),
            best.new_empty(rows, n),
            best.new_empty(rows, 1),
        )
        kernels.summarise_rows[(rows,)](
            best,
            ids,
            totals,
            summary.top_logits,
            summary.top_ids,
            summary.log_totals,
            width,
            parts,
            n,
            PARTS=triton.next_power_of_2(parts),
            CANDIDATES=candidates,
        )
        return summary

    def race(self, logits: Tensor, seed_low: Tensor, seed_high: Tensor, positions: Tensor, first_id: int = 0) -> Tensor:
        rows, width = logits.shape
        parts = triton.cdiv(width, kernels.PART)
        assert logits.stride(1) == 1 and all(t.is_contiguous() for t in (seed_low, seed_high, positions))
        scores, columns = logits.new_empty(rows, parts, dtype=torch.float32), _integers(logits, rows, parts)
        kernels.race_parts[(rows, parts)](
            logits,
            logits.stride(0),
            seed_low,
            seed_high,
            positions,
            first_id,
            scores,
            columns,
            width,
            PART=kernels.PART,
            num_warps=kernels.PART_WARPS,
        )
        winners = torch.empty(rows, dtype=torch.int64, device=logits.device)
        kernels.race_rows[(rows,)](
            scores, columns, winners, width, parts, PARTS=triton.next_power_of_2(parts), num_warps=1
        )
        return winners

    def log_noise(self, seed_low: Tensor, seed_high: Tensor, positions: Tensor, token_ids: Tensor) -> Tensor:
        assert all(t.is_contiguous() for t in (seed_low, seed_high, positions, token_ids))
        noise = torch.empty_like(token_ids, dtype=torch.float32)
        kernels.noise_rows[(len(token_ids),)](seed_low, seed_high, positions, token_ids, noise, num_warps=1)
        return noise

    def top_k_threshold(self, logits: Tensor, k: Tensor, most: int, gather: Gather | None) -> Tensor:
        return _search(logits, None, None, k, min(most + 1, MOST_WANTED), gather)

    def top_p_threshold(self, logits: Tensor, p: Tensor, gather: Gather | None) -> Tensor:
        return _search(logits, logits, self._log_totals(logits, gather), p, 1.0, gather)

    def typical_bounds(self, logits: Tensor, mass: Tensor, gather: Gather | None) -> TypicalBounds:
        log_totals = self._log_totals(logits, gather)
        surprisal = log_totals - logits
        # 0 * inf where a warper removed a token.
        entropy = (surprisal * (-surprisal).exp()).nansum(dim=-1, keepdim=True)
        if gather is not None:
            entropy = torch.cat(gather(entropy), dim=-1).sum(dim=-1, keepdim=True)
        nearness = -(surprisal - entropy).abs()
        reach = -_search(nearness, logits, log_totals, mass, 1.0, gather)
        return TypicalBounds(log_totals, entropy, reach)

    def _log_totals(self, logits: Tensor, gather: Gather | None) -> Tensor:
        """The log of the sum of all ranks' exponentials, [R, 1]."""
        totals = self.summarise(logits, 1).log_totals
        return totals if gather is None else torch.cat(gather(totals), dim=-1).logsumexp(dim=-1, keepdim=True)


def _integers(logits: Tensor, *shape: int) -> Tensor:
    return torch.empty(shape, dtype=torch.int32, device=logits.device)


def _search(
    scores: Tensor,
    logits: Tensor | None,
    log_totals: Tensor | None,
    wanted: Tensor,
    everything: float,
    gather: Gather | None,
) -> Tensor:
    """The largest score [R, 1] such that the tokens that score no less are as many, or as probable, as is wanted.

    scores: [R, V] float32; logits: [R, V] float32, from which probabilities come, with log_totals [R, 1], or None to
    count tokens; wanted: [R, 1]; everything: from which on nothing is searched, and the score is minus infinity.
    """
    rows, width = scores.shape
    parts = triton.cdiv(width, kernels.SEARCH_PART)
    assert scores.stride(1) == 1 and scores.dtype == torch.float32 and wanted.is_contiguous()
    assert logits is None or (logits.stride(1) == 1 and logits.dtype == torch.float32)
    prefixes = _integers(scores, kernels.PASSES + 1, rows)
    dtype = torch.int32 if log_totals is None else torch.float32
    total = sums = torch.empty(parts, rows, kernels.CANDIDATES, dtype=dtype, device=scores.device)
    constants = {"C": kernels.CANDIDATES, "PARTS": triton.next_power_of_2(parts)}
    for index in range(kernels.PASSES):
        sums = torch.empty_like(sums)
        kernels.sum_parts[(rows, parts)](
            scores,
            scores.stride(0),
            logits,
            0 if logits is None else logits.stride(0),
            log_totals,
            wanted,
            everything,
            prefixes[index],
            total,
            sums,
            32 - kernels.BITS * (index + 1),
            width,
            len(total),
            **constants,
            BITS=kernels.BITS,
            PART=kernels.SEARCH_PART,
            TILE=kernels.SEARCH_TILE,
        )
        total = sums if gather is None else torch.cat(gather(sums))
        constants["PARTS"] = triton.next_power_of_2(len(total))
    thresholds = torch.empty(rows, 1, dtype=torch.float32, device=scores.device)
    kernels.finish[(rows,)](wanted, everything, prefixes[kernels.PASSES], total, thresholds, len(total), **constants)
    return thresholds
