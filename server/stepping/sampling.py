"""From logits to token ids: vectorised over the rows of a step, and the same on every rank.

Penalties and warpers follow TGI's order: watermark, repetition penalty, frequency penalty, temperature, top-k, top-p,
typical-p. Each touches only the rows that ask for it, so a request's tokens do not depend on its neighbours.

A token is drawn by the exponential race argmax(p / E) with E exponential noise, which needs no normalised
probabilities; the noise is a pure function of (seed, position, token id). Every rank works on its own part of the
vocabulary, and all know the same of the others' (`vocabulary.py`).

Papers: repetition penalty, Keskar et al. 2019 (arXiv 1909.05858); top-p, Holtzman et al. 2019 (arXiv 1904.09751);
typical-p, Meister et al. 2022 (arXiv 2202.00666); watermark, Kirchenbauer et al. 2023 (arXiv 2301.10226).

Shapes: R rows that get a token in this step, Vl this rank's part of the vocabulary, n candidates reported.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from server.backends.protocol import Device
from server.backends.reference.logits import MASK32, mix
from server.stepping.vocabulary import Vocabulary

# Colder is greedy all the same, and logits must not overflow when they are divided by it.
MIN_TEMPERATURE = 1e-6


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


class Chosen(NamedTuple):
    """The tokens of one step, on the device. Without candidates, nobody asked for any."""

    token_ids: Tensor  # [R] int64
    logprobs: Tensor  # [R] float32, after penalties and warpers
    top_ids: Tensor | None = None  # [R, n] int64, most likely first
    top_logprobs: Tensor | None = None  # [R, n] float32

    def downloaded(self, device: Device) -> Chosen:
        """The same on the host, complete once an event that is made afterwards has been reached."""
        token_ids, logprobs = device.download(self.token_ids), device.download(self.logprobs)
        if self.top_ids is None or self.top_logprobs is None:
            return Chosen(token_ids, logprobs)
        return Chosen(token_ids, logprobs, device.download(self.top_ids), device.download(self.top_logprobs))


class History:
    """Which of this rank's tokens one sequence holds already; kept only for sequences whose penalties ask."""

    def __init__(self, prompt: Sequence[int], num_generated: int, vocabulary: Vocabulary, device: Device):
        self._start, self._width = vocabulary.start, vocabulary.width
        ids = device.upload(prompt)
        # One place more than this rank has tokens: there go those of the other ranks.
        self._seen = torch.zeros(self._width + 1, dtype=torch.bool, device=ids.device)
        self._counts = torch.zeros(self._width + 1, dtype=torch.float32, device=ids.device)
        self._seen[self._places(ids)] = True
        self.append(ids[len(ids) - num_generated :])

    @property
    def seen(self) -> Tensor:
        """Whether each of this rank's tokens is in the sequence, [Vl]."""
        return self._seen[: self._width]

    @property
    def counts(self) -> Tensor:
        """How often each of this rank's tokens was generated, [Vl] float32."""
        return self._counts[: self._width]

    def append(self, token_ids: Tensor) -> None:
        """Count generated tokens [n]."""
        places = self._places(token_ids)
        self._seen[places] = True
        self._counts.index_add_(0, places, torch.ones_like(token_ids, dtype=torch.float32))

    def _places(self, token_ids: Tensor) -> Tensor:
        places = token_ids - self._start
        return places.masked_fill((places < 0) | (places >= self._width), self._width)


class Sampler:
    """The choices of R rows, prepared once for as long as the same sequences step together."""

    def __init__(self, choices: Sequence[TokenChoice], watermark: Watermark, device: Device, vocabulary: Vocabulary):
        self._device = device
        self._vocabulary = vocabulary
        self._watermark = watermark
        self._watermarked = self._rows([c.watermark for c in choices])
        self._penalised = [r for r, c in enumerate(choices) if c.needs_history]
        self._repetition = self._column([choices[r].repetition_penalty for r in self._penalised])
        self._frequency = self._column([choices[r].frequency_penalty for r in self._penalised])
        self._sampled = self._rows([c.do_sample for c in choices])
        drawn = [c for c in choices if c.do_sample]
        self._temperature = self._column([max(c.temperature, MIN_TEMPERATURE) for c in drawn])
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

        logits: [R, Vl] float32, used up; positions: [R] index that the new token will have in its
        sequence; previous: [R] the token before it; histories: of each row, None where no penalty asks for one.
        """
        self._add_watermark(logits, previous)
        self._penalise(logits, histories)
        if self._sampled is not None:
            logits[self._sampled] = self._warp(logits[self._sampled])
        summary = self._vocabulary.summarise(logits, max(self.top_n, 1))
        token_ids, chosen = summary.top_ids[:, 0].clone(), summary.top_logits[:, 0].clone()
        if self._sampled is not None:
            rows, at = logits[self._sampled], positions[self._sampled]
            draw = self._vocabulary.draw(rows, self._seed_low, self._seed_high, at)
            token_ids[self._sampled], chosen[self._sampled] = draw.token_ids, draw.logits
        logprobs = chosen - summary.log_totals.squeeze(1)
        if not self.top_n:
            return Chosen(token_ids, logprobs)
        return Chosen(token_ids, logprobs, summary.top_ids, summary.top_logits - summary.log_totals)

    def _add_watermark(self, logits: Tensor, previous: Tensor) -> None:
        if self._watermarked is not None:
            green = greenlist(previous[self._watermarked], self._vocabulary, self._watermark.gamma)
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
        vocabulary = self._vocabulary
        logits = logits / self._temperature
        logits = self._top_k.apply(logits, partial(keep_top_k, vocabulary, most=self._most_top_k))
        logits = self._top_p.apply(logits, partial(keep_top_p, vocabulary))
        return self._typical_p.apply(logits, partial(keep_typical, vocabulary))

    def _rows(self, wanted: Sequence[bool]) -> Tensor | None:
        """Indices of the rows that are wanted, None when there are none."""
        rows = [r for r, want in enumerate(wanted) if want]
        return self._device.upload(rows) if rows else None

    def _column(self, values: Sequence[float], dtype: torch.dtype = torch.float32) -> Tensor:
        return self._device.upload(values, dtype).unsqueeze(1)


class _Warper:
    """One warper's values for the rows that do not leave it neutral."""

    def __init__(self, sampler: Sampler, choices: Sequence[TokenChoice], name: str, neutral: float):
        values = [getattr(c, name) for c in choices]
        self._rows = sampler._rows([value != neutral for value in values])
        self._values = sampler._column([value for value in values if value != neutral])

    def apply(self, logits: Tensor, keep: Callable[[Tensor, Tensor], Tensor]) -> Tensor:
        """`keep(logits, values)` on this warper's rows of logits [R, Vl], in place."""
        if self._rows is not None:
            logits[self._rows] = keep(logits[self._rows], self._values)
        return logits


def keep_top_k(vocabulary: Vocabulary, logits: Tensor, k: Tensor, most: int) -> Tensor:
    """Remove what scores below the k-th best; ties stay. logits [R, Vl], k [R, 1], none above `most`."""
    threshold = vocabulary.top_k_threshold(logits, k.long(), most)
    return logits.masked_fill(logits < threshold, float("-inf"))


def keep_top_p(vocabulary: Vocabulary, logits: Tensor, p: Tensor) -> Tensor:
    """Keep the most likely tokens whose probabilities reach p, at least one; ties stay. logits [R, Vl], p [R, 1]."""
    threshold = vocabulary.top_p_threshold(logits, p)
    return logits.masked_fill(logits < threshold, float("-inf"))


def keep_typical(vocabulary: Vocabulary, logits: Tensor, mass: Tensor) -> Tensor:
    """Keep the tokens whose surprisal is nearest the entropy until they reach `mass`. logits [R, Vl], mass [R, 1]."""
    bounds = vocabulary.typical_bounds(logits, mass)
    distance = ((bounds.log_totals - logits) - bounds.entropy).abs()
    return logits.masked_fill(distance > bounds.reach, float("-inf"))


def greenlist(previous: Tensor, vocabulary: Vocabulary, gamma: float) -> Tensor:
    """[R, Vl] True for the share `gamma` of the vocabulary that the previous token [R] favours."""
    tokens = torch.arange(vocabulary.start, vocabulary.start + vocabulary.width, device=previous.device)
    bits = mix(mix(tokens) ^ (previous.unsqueeze(1) * 15485863) & MASK32)
    return bits < int(gamma * 2**32)
