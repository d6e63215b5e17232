"""From logits to token ids: vectorised over the rows of a step, and the same on every rank.

Penalties and warpers follow TGI's order: watermark, repetition penalty, frequency penalty, temperature, top-k, top-p,
typical-p. Each touches only the rows that ask for it, so a request's tokens do not depend on its neighbours.

Randomness is a counter, not a generator: the noise of a candidate is a pure function of (seed, position, token id). So
a request can be replayed, moved or resumed with the same tokens, and no rank has to tell another what it drew. A token
is drawn by the exponential race argmax(p / E) with E exponential noise, which needs no normalised probabilities.

Papers: repetition penalty, Keskar et al. 2019 (arXiv 1909.05858); top-p, Holtzman et al. 2019 (arXiv 1904.09751);
typical-p, Meister et al. 2022 (arXiv 2202.00666); watermark, Kirchenbauer et al. 2023 (arXiv 2301.10226).

Shapes: R rows that get a token in this step, V vocabulary, n candidates reported.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Protocol

import torch
from torch import Tensor

from server.upload import upload

MASK32 = 0xFFFFFFFF


@dataclass(frozen=True)
class TokenChoice:
    """How one sequence's tokens are chosen. The defaults are neutral."""

    do_sample: bool = False
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    typical_p: float = 1.0
    repetition_penalty: float = 1.0
    frequency_penalty: float = 0.0
    watermark: bool = False
    seed: int = 0
    top_n_tokens: int = 0

    @property
    def needs_history(self) -> bool:
        """Whether the tokens so far matter beyond the last one."""
        return self.repetition_penalty != 1.0 or self.frequency_penalty != 0.0

    @property
    def is_plain(self) -> bool:
        """Whether it is the most likely token, and nothing else is wanted."""
        return not (self.do_sample or self.needs_history or self.watermark or self.top_n_tokens)


@dataclass(frozen=True)
class Watermark:
    """The share of the vocabulary that is favoured, and by how much."""

    gamma: float
    delta: float


@dataclass(frozen=True)
class Chosen:
    """The tokens of one step, on the device."""

    token_ids: Tensor  # [R] int64
    logprobs: Tensor  # [R] float32, after penalties and warpers
    top_ids: Tensor  # [R, n] int64, most likely first
    top_logprobs: Tensor  # [R, n] float32


@dataclass(frozen=True)
class Summary:
    """What is known of each row of logits."""

    top_ids: Tensor  # [R, n] int64, most likely first
    top_logits: Tensor  # [R, n] float32
    log_totals: Tensor  # [R, 1] float32, the log of the sum of all exponentials: a logit minus it is a log-probability


class Logits(Protocol):
    """What takes a pass over the whole vocabulary."""

    def summarise(self, logits: Tensor, n: int) -> Summary:
        """The n best tokens (at least 1) of logits [R, V] float32, which are not changed."""

    def race(self, logits: Tensor, seed_low: Tensor, seed_high: Tensor, positions: Tensor) -> Tensor:
        """Draw one token [R] of each row of logits [R, V] float32.

        seed_low, seed_high: [R, 1] halves of the seed, int64; positions: [R] int64.
        """


class StockLogits:
    """In torch operators: what defines correct."""

    def summarise(self, logits: Tensor, n: int) -> Summary:
        best, ids = logits.max(dim=-1, keepdim=True) if n == 1 else logits.topk(n, dim=-1)
        return Summary(ids, best, logits.logsumexp(dim=-1, keepdim=True))

    def race(self, logits: Tensor, seed_low: Tensor, seed_high: Tensor, positions: Tensor) -> Tensor:
        noise = exponential_noise(seed_low, seed_high, positions, logits.shape[1])
        return (logits - noise.log_()).argmax(dim=-1)


class History:
    """Which tokens one sequence holds already; kept only for sequences whose penalties ask."""

    def __init__(self, prompt: Sequence[int], num_generated: int, vocab_size: int, device: torch.device):
        ids = upload(prompt, device)
        self.seen = torch.zeros(vocab_size, dtype=torch.bool, device=device)
        self.seen[ids] = True
        self.counts = torch.zeros(vocab_size, dtype=torch.float32, device=device)
        self.append(ids[len(ids) - num_generated :])

    def append(self, token_ids: Tensor) -> None:
        """Count generated tokens [n]."""
        self.seen[token_ids] = True
        self.counts.index_add_(0, token_ids, torch.ones_like(token_ids, dtype=torch.float32))


class Sampler:
    """The choices of R rows, prepared once for as long as the same sequences step together."""

    def __init__(self, choices: Sequence[TokenChoice], watermark: Watermark, device: torch.device, logits: Logits):
        self._device = device
        self._logits = logits
        self._watermark = watermark
        self._watermarked = self._rows([c.watermark for c in choices])
        self._penalised = [r for r, c in enumerate(choices) if c.needs_history]
        self._repetition = self._column([choices[r].repetition_penalty for r in self._penalised])
        self._frequency = self._column([choices[r].frequency_penalty for r in self._penalised])
        self._sampled = self._rows([c.do_sample for c in choices])
        drawn = [c for c in choices if c.do_sample]
        self._temperature = self._column([c.temperature for c in drawn])
        self._top_k = _Warper(self, drawn, "top_k", neutral=0)
        self._most_top_k = max((c.top_k for c in drawn), default=0)
        self._top_p = _Warper(self, drawn, "top_p", neutral=1.0)
        self._typical_p = _Warper(self, drawn, "typical_p", neutral=1.0)
        self._seed_low = self._column([c.seed & MASK32 for c in drawn], torch.int64)
        self._seed_high = self._column([c.seed >> 32 for c in drawn], torch.int64)
        self.top_n = max((c.top_n_tokens for c in choices), default=0)

    def __call__(
        self, logits: Tensor, positions: Tensor, previous: Tensor, histories: Sequence[History | None]
    ) -> Chosen:
        """Choose one token for each row.

        logits: [R, V] float32, used up; positions: [R] index that the new token will have in its
        sequence; previous: [R] the token before it; histories: of each row, None where no penalty asks for one.
        """
        self._add_watermark(logits, previous)
        self._penalise(logits, histories)
        if self._sampled is not None:
            logits[self._sampled] = self._warp(logits[self._sampled])
        summary = self._logits.summarise(logits, max(self.top_n, 1))
        token_ids = summary.top_ids[:, 0].clone()
        if self._sampled is not None:
            rows, at = logits[self._sampled], positions[self._sampled]
            token_ids[self._sampled] = self._logits.race(rows, self._seed_low, self._seed_high, at)
        logprobs = logits.gather(1, token_ids.unsqueeze(1)) - summary.log_totals
        top_ids, top_logits = summary.top_ids[:, : self.top_n], summary.top_logits[:, : self.top_n]
        return Chosen(token_ids, logprobs.squeeze(1), top_ids, top_logits - summary.log_totals)

    def _add_watermark(self, logits: Tensor, previous: Tensor) -> None:
        if self._watermarked is not None:
            green = _greenlist(previous[self._watermarked], logits.shape[1], self._watermark.gamma)
            logits[self._watermarked] += green * self._watermark.delta

    def _penalise(self, logits: Tensor, histories: Sequence[History | None]) -> None:
        if not self._penalised:
            return
        own = [history for r in self._penalised if (history := histories[r]) is not None]
        rows = logits[self._penalised]
        penalised = torch.where(rows < 0, rows * self._repetition, rows / self._repetition)
        rows = torch.where(torch.stack([history.seen for history in own]), penalised, rows)
        logits[self._penalised] = rows - self._frequency * torch.stack([history.counts for history in own])

    def _warp(self, logits: Tensor) -> Tensor:
        logits = logits / self._temperature
        logits = self._top_k.apply(logits, partial(keep_top_k, most=self._most_top_k))
        logits = self._top_p.apply(logits, keep_top_p)
        return self._typical_p.apply(logits, keep_typical)

    def _rows(self, wanted: Sequence[bool]) -> Tensor | None:
        """Indices of the rows that are wanted, None when there are none."""
        rows = [r for r, want in enumerate(wanted) if want]
        return upload(rows, self._device) if rows else None

    def _column(self, values: Sequence[float], dtype: torch.dtype = torch.float32) -> Tensor:
        return upload(values, self._device, dtype).unsqueeze(1)


class _Warper:
    """One warper's values for the rows that do not leave it neutral."""

    def __init__(self, sampler: Sampler, choices: Sequence[TokenChoice], name: str, neutral: float):
        values = [getattr(c, name) for c in choices]
        self._rows = sampler._rows([value != neutral for value in values])
        self._values = sampler._column([value for value in values if value != neutral])

    def apply(self, logits: Tensor, keep: Callable[[Tensor, Tensor], Tensor]) -> Tensor:
        """`keep(logits, values)` on this warper's rows of logits [R, V], in place."""
        if self._rows is not None:
            logits[self._rows] = keep(logits[self._rows], self._values)
        return logits


def keep_top_k(logits: Tensor, k: Tensor, most: int) -> Tensor:
    """Remove what scores below the k-th best; ties stay. logits [R, V], k [R, 1], none above `most`."""
    k = k.long().clamp(max=logits.shape[1])
    best = logits.topk(min(most, logits.shape[1]), dim=-1).values
    return logits.masked_fill(logits < best.gather(1, k - 1), float("-inf"))


def keep_top_p(logits: Tensor, p: Tensor) -> Tensor:
    """Keep the most likely tokens whose probabilities reach p, at least one. logits [R, V], p [R, 1]."""
    ascending, order = logits.sort(dim=-1)
    removed = ascending.softmax(dim=-1).cumsum(dim=-1) <= 1 - p
    removed[:, -1] = False
    return logits.masked_fill(removed.scatter(1, order, removed), float("-inf"))


def keep_typical(logits: Tensor, mass: Tensor) -> Tensor:
    """Keep the tokens whose surprisal is nearest the entropy until they reach `mass`. logits [R, V], mass [R, 1]."""
    surprisal = -logits.log_softmax(dim=-1)
    probabilities = (-surprisal).exp()
    entropy = (surprisal * probabilities).nansum(dim=-1, keepdim=True)  # 0 * inf where a warper removed a token
    distance, order = (surprisal - entropy).abs().sort(dim=-1)
    before = probabilities.gather(1, order).cumsum(dim=-1) < mass
    last = before.sum(dim=-1, keepdim=True).clamp(max=logits.shape[1] - 1)
    removed = distance > distance.gather(1, last)
    return logits.masked_fill(removed.scatter(1, order, removed), float("-inf"))


def exponential_noise(seed_low: Tensor, seed_high: Tensor, positions: Tensor, vocab_size: int) -> Tensor:
    """Exp(1) noise [R, V], a pure function of (seed, position, token id).

    seed_low, seed_high: [R, 1] halves of the 64-bit seed; positions: [R].
    """
    key = _mix(seed_low ^ _mix(seed_high ^ _mix(positions.unsqueeze(1))))
    tokens = torch.arange(vocab_size, device=positions.device)
    bits = _mix(_mix((tokens * 0x9E3779B9) & MASK32 ^ key) ^ _mix(key + 1))
    # Small values decide the race, and float32 is fine-grained near 0: hence -log(1 - u), not -log(u).
    uniform = (bits.to(torch.float32) + 0.5) * 2.0**-32
    return torch.log1p(-uniform).neg_()


def _greenlist(previous: Tensor, vocab_size: int, gamma: float) -> Tensor:
    """[R, V] True for the share `gamma` of the vocabulary that the previous token [R] favours."""
    tokens = torch.arange(vocab_size, device=previous.device)
    bits = _mix(_mix(tokens) ^ (previous.unsqueeze(1) * 15485863) & MASK32)
    return bits < int(gamma * 2**32)


def _mix(x: Tensor) -> Tensor:
    """A bijection of 32 bits with full avalanche (Ellis's lowbias32 constants), on int64 tensors."""
    x = x & MASK32
    x = ((x ^ (x >> 16)) * 0x7FEB352D) & MASK32
    x = ((x ^ (x >> 15)) * 0x846CA68B) & MASK32
    return x ^ (x >> 16)
