"""From logits to token ids: vectorised over the rows of a step, and the same on every rank.

First come the biases of single tokens and what grammars allow (`logit_rules.py`), then penalties and warpers in TGI's
order: watermark, repetition penalty, frequency and presence penalty, temperature, top-k, top-p, min-p, typical-p. Each
touches only the rows that ask for it, so a request's tokens do not depend on its neighbours.

A token is drawn by the exponential race argmax(p / E) with E exponential noise, which needs no normalised
probabilities; the noise is a pure function of (seed, position, token id). Every rank works on its own part of the
vocabulary, and all know the same of the others' (`vocabulary.py`).

A `Sampler` is made for certain choices and does what they ask for, while a captured graph repeats every operator. So
`choose_captured` is one fixed computation of temperature, top-k and top-p, which most sampled requests ask for alone:
every row goes through all of it, by settings in a tensor that may be neutral, and gets the token that a `Sampler` gives
it. What sequences ask for may change without another capture.

Papers: repetition penalty, Keskar et al. 2019 (arXiv 1909.05858); top-p, Holtzman et al. 2019 (arXiv 1904.09751);
typical-p, Meister et al. 2022 (arXiv 2202.00666); min-p, Nguyen et al. 2024 (arXiv 2407.01082); watermark, Kirchenbauer
et al. 2023 (arXiv 2301.10226).

Shapes: R rows that get a token in this step, Vl this rank's part of the vocabulary, n candidates reported.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from typing import NamedTuple

import torch
from torch import Tensor

from server.backends.device import Device
from server.backends.reference.logits import MASK32, mix
from server.stepping.logit_rules import Allowed, Biases, History, HistoryTable, Masks, RecentTokens, TokenBiases
from server.stepping.vocabulary import Vocabulary

# Bounds beyond which nothing changes but overflows begin: logits (up to 2^10) that are penalised by one of these and
# then divided by the other stay below 2^110. At this temperature the smallest difference of two float32 logits, unless
# both are near 0, is thousands: the better one is certain. Powers of two, so that equals stay equal.
MIN_TEMPERATURE = 2.0**-40
MIN_REPETITION_PENALTY, MAX_REPETITION_PENALTY = 2.0**-60, 2.0**60


NO_BIASES = TokenBiases()


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
    presence_penalty: float = 0.0
    min_p: float = 0.0
    watermark: bool = False
    seed: int = 0
    top_n_tokens: int = 0
    biases: TokenBiases = NO_BIASES
    raw_logprobs: bool = False
    is_constrained: bool = False  # each step says which tokens it may get

    @property
    def needs_history(self) -> bool:
        """Whether the tokens so far matter beyond the last one."""
        return self.repetition_penalty != 1.0 or self.frequency_penalty != 0.0 or self.presence_penalty != 0.0

    @cached_property
    def is_plain(self) -> bool:
        """Whether it is the most likely token, and nothing else is wanted."""
        return not self.do_sample and self.is_simple

    @cached_property
    def is_simple(self) -> bool:
        """Whether temperature, top-k and top-p are all that a sample is drawn by, and nothing but a token is wanted."""
        has_other_warper = self.do_sample and (self.typical_p != 1.0 or self.min_p != 0.0)
        return not (has_other_warper or self.changes_scores or self.wants_raw or self.top_n_tokens)

    @cached_property
    def changes_scores(self) -> bool:
        """Whether logits change before they are warped."""
        return self.needs_history or self.watermark or self.is_constrained or bool(self.biases)

    @cached_property
    def wants_raw(self) -> bool:
        """Whether log-probabilities are asked for that differ from those of what the token is chosen by."""
        neutral = (1.0, 0, 1.0, 0.0, 1.0)
        warpers = (self.temperature, self.top_k, self.top_p, self.min_p, self.typical_p)
        return self.raw_logprobs and (self.changes_scores or (self.do_sample and warpers != neutral))


@dataclass(frozen=True)
class Watermark:
    """The share of the vocabulary that is favoured, and by how much."""

    gamma: float
    delta: float


class Chosen(NamedTuple):
    """The tokens of one step, on the device. Without candidates, none were asked for."""

    token_ids: Tensor  # [R] int64
    logprobs: Tensor  # [R] float32, after penalties and warpers but for rows that want raw ones
    top_ids: Tensor | None = None  # [R, n] int64, most likely first
    top_logprobs: Tensor | None = None  # [R, n] float32

    def downloaded(self, device: Device) -> Chosen:
        """The same on the host, complete once an event that is made afterwards has been reached."""
        token_ids, logprobs = device.download(self.token_ids), device.download(self.logprobs)
        if self.top_ids is None or self.top_logprobs is None:
            return Chosen(token_ids, logprobs)
        return Chosen(token_ids, logprobs, device.download(self.top_ids), device.download(self.top_logprobs))


class _Rows:
    """Some of a step's rows; where they are all of them, nothing is copied."""

    def __init__(self, wanted: Sequence[bool], device: Device):
        indices = [r for r, want in enumerate(wanted) if want]
        self._indices = device.upload(indices) if 0 < len(indices) < len(wanted) else None
        self.any = bool(indices)

    def take(self, tensor: Tensor) -> Tensor:
        """These rows of a tensor [R, ...]; the tensor itself where they are all."""
        return tensor if self._indices is None else tensor.index_select(0, self._indices)

    def put(self, tensor: Tensor, rows: Tensor) -> Tensor:
        """The tensor with these rows replaced, in place; `rows` where they are all."""
        return rows if self._indices is None else tensor.index_copy_(0, self._indices, rows)


class Sampler:
    """The choices of R rows, prepared once for as long as the same sequences step together.

    A step uploads nothing and asks the device nothing: its indices and settings are uploaded here.
    """

    def __init__(self, choices: Sequence[TokenChoice], watermark: Watermark, device: Device, vocabulary: Vocabulary):
        self._device = device
        self._vocabulary = vocabulary
        self._watermark = watermark
        wanted = [c.biases for c in choices]
        self._biases = Biases(wanted, device, vocabulary) if any(wanted) else None
        self._raw = _RawLogprobs(choices, device, vocabulary) if any(c.wants_raw for c in choices) else None
        self._watermarked = _Rows([c.watermark for c in choices], device)
        self._penalised = _Rows([c.needs_history for c in choices], device)
        penalised = [c for c in choices if c.needs_history]
        bounded = [min(max(c.repetition_penalty, MIN_REPETITION_PENALTY), MAX_REPETITION_PENALTY) for c in penalised]
        self._repetition = self._column(bounded)
        self._frequency = self._column([c.frequency_penalty for c in penalised])
        presence = [c.presence_penalty for c in penalised]
        self._presence = self._column(presence) if any(presence) else None
        self._sampled = _Rows([c.do_sample for c in choices], device)
        drawn = [c for c in choices if c.do_sample]
        self._temperature = self._column([max(c.temperature, MIN_TEMPERATURE) for c in drawn])
        self._top_k = _Warper(self, drawn, "top_k", neutral=0, dtype=torch.int64)
        self._most_top_k = max((c.top_k for c in drawn), default=0)
        self._top_p = _Warper(self, drawn, "top_p", neutral=1.0)
        self._min_p = _Warper(self, drawn, "min_p", neutral=0.0)
        self._typical_p = _Warper(self, drawn, "typical_p", neutral=1.0)
        self._seed_low = self._column([c.seed & MASK32 for c in drawn], torch.int64)
        self._seed_high = self._column([c.seed >> 32 for c in drawn], torch.int64)
        self.top_n = max((c.top_n_tokens for c in choices), default=0)

    def __call__(
        self,
        logits: Tensor,
        positions: Tensor,
        previous: Tensor,
        histories: Sequence[History | None],
        recents: Sequence[RecentTokens | None] = (),
        allowed: Sequence[Allowed | None] = (),
    ) -> Chosen:
        """Choose one token for each row.

        logits: [R, Vl], used up; positions: [R] index that the new token will have in its sequence; previous: [R] the
        token before it; histories: of each row, None where no penalty asks for one; recents: of each row, None where
        no word of several tokens is banned. The new token is added to both. allowed: of each row, what its grammar
        allows, None where it has none.
        """
        raw = self._raw.keep(logits) if self._raw is not None else None
        masks = Masks(allowed, self._device, self._vocabulary) if any(one is not None for one in allowed) else None
        chosen = self._choose_biased(logits, positions, previous, histories, recents, masks)
        return chosen if self._raw is None or raw is None else self._raw.report(chosen, raw)

    def _choose_biased(
        self,
        logits: Tensor,
        positions: Tensor,
        previous: Tensor,
        histories: Sequence[History | None],
        recents: Sequence[RecentTokens | None],
        masks: Masks | None,
    ) -> Chosen:
        if self._biases is None:
            logits = logits if masks is None else masks.apply(logits.float())
            return self._choose(logits, positions, previous, histories)
        logits, recent = logits.float(), self._biases.recent(recents)
        unbiased = logits.clone() if masks is not None else None
        self._biases.add(logits, positions, recent)
        logits = logits if masks is None else masks.apply(logits, unbiased)
        chosen = self._choose(logits, positions, previous, histories)
        self._biases.append(recents, recent, chosen.token_ids)
        return chosen

    def _choose(
        self, logits: Tensor, positions: Tensor, previous: Tensor, histories: Sequence[History | None]
    ) -> Chosen:
        if self._watermarked.any or self._penalised.any or self._sampled.any or self.top_n:
            logits = logits.float()
        own = [history for history in histories if history is not None]
        history = HistoryTable.of(own) if own else None
        logits = self._penalise(self._add_watermark(logits, previous), history)
        rows = self._warp(self._sampled.take(logits)) if self._sampled.any else logits
        logits = self._sampled.put(logits, rows) if self._sampled.any else logits
        summary = self._vocabulary.summarise(logits, max(self.top_n, 1))
        token_ids, chosen = summary.top_ids[:, 0], summary.top_logits[:, 0]
        if self._sampled.any:
            draw = self._vocabulary.draw(rows, self._seed_low, self._seed_high, self._sampled.take(positions))
            token_ids = self._sampled.put(token_ids.clone(), draw.token_ids)
            chosen = self._sampled.put(chosen.clone(), draw.logits)
        if history is not None:
            new = self._penalised.take(token_ids).unsqueeze(1)
            history.see(new)
            history.count(new)
        logprobs = chosen - summary.log_totals.squeeze(1)
        if not self.top_n:
            return Chosen(token_ids, logprobs)
        return Chosen(token_ids, logprobs, summary.top_ids, summary.top_logits - summary.log_totals)

    def _add_watermark(self, logits: Tensor, previous: Tensor) -> Tensor:
        if not self._watermarked.any:
            return logits
        green = greenlist(self._watermarked.take(previous), self._vocabulary, self._watermark.gamma)
        rows = self._watermarked.take(logits) + green * self._watermark.delta
        return self._watermarked.put(logits, rows)

    def _penalise(self, logits: Tensor, history: HistoryTable | None) -> Tensor:
        if history is None:
            return logits
        rows = self._penalised.take(logits)
        penalised = torch.where(rows < 0, rows * self._repetition, rows / self._repetition)
        rows = torch.where(history.seen, penalised, rows)
        rows = rows - self._frequency * history.counts
        if self._presence is not None:
            rows = rows - self._presence * (history.counts > 0)
        return self._penalised.put(logits, rows)

    def _warp(self, logits: Tensor) -> Tensor:
        vocabulary = self._vocabulary
        logits = logits / self._temperature
        logits = self._top_k.apply(logits, partial(keep_top_k, vocabulary, most=self._most_top_k))
        logits = self._top_p.apply(logits, partial(keep_top_p, vocabulary))
        logits = self._min_p.apply(logits, partial(keep_min_p, vocabulary))
        return self._typical_p.apply(logits, partial(keep_typical, vocabulary))

    def _column(self, values: Sequence[float], dtype: torch.dtype = torch.float32) -> Tensor:
        return self._device.upload(values, dtype).unsqueeze(1)


class _RawLogprobs:
    """Log-probabilities and candidates of the logits as the model gave them, for the rows that want them."""

    def __init__(self, choices: Sequence[TokenChoice], device: Device, vocabulary: Vocabulary):
        self._rows = _Rows([c.wants_raw for c in choices], device)
        self._vocabulary = vocabulary

    def keep(self, logits: Tensor) -> Tensor:
        """What `report` will need of logits [R, Vl], which may change then."""
        rows = self._rows.take(logits)
        return rows.clone() if rows is logits else rows

    def report(self, chosen: Chosen, raw: Tensor) -> Chosen:
        """The same tokens with what `raw` says of them."""
        token_ids = self._rows.take(chosen.token_ids)
        if chosen.top_ids is None or chosen.top_logprobs is None:
            logprobs = self._vocabulary.logprobs(raw, token_ids)
            return chosen._replace(logprobs=self._rows.put(chosen.logprobs, logprobs))
        best = self._vocabulary.summarise(raw, chosen.top_ids.shape[1])
        logprobs = self._vocabulary.logprobs(raw, token_ids, best.log_totals)
        return chosen._replace(
            logprobs=self._rows.put(chosen.logprobs, logprobs),
            top_ids=self._rows.put(chosen.top_ids.clone(), best.top_ids),  # the tokens may be its first column
            top_logprobs=self._rows.put(chosen.top_logprobs, best.top_logits - best.log_totals),
        )


class _Warper:
    """One warper's values for the rows that do not leave it neutral."""

    def __init__(
        self,
        sampler: Sampler,
        choices: Sequence[TokenChoice],
        name: str,
        neutral: float,
        dtype: torch.dtype = torch.float32,
    ):
        values = [getattr(c, name) for c in choices]
        self._rows = _Rows([value != neutral for value in values], sampler._device)
        self._values = sampler._column([value for value in values if value != neutral], dtype)

    def apply(self, logits: Tensor, keep: Callable[[Tensor, Tensor], Tensor]) -> Tensor:
        """`keep(logits, values)` on this warper's rows of logits [R, Vl], perhaps in place."""
        return self._rows.put(logits, keep(self._rows.take(logits), self._values)) if self._rows.any else logits


def keep_top_k(vocabulary: Vocabulary, logits: Tensor, k: Tensor, most: int) -> Tensor:
    """Remove what scores below the k-th best; ties stay. logits [R, Vl], k [R, 1] int64, none above `most`."""
    threshold = vocabulary.top_k_threshold(logits, k, most)
    return logits.masked_fill(logits < threshold, float("-inf"))


def keep_top_p(vocabulary: Vocabulary, logits: Tensor, p: Tensor) -> Tensor:
    """Keep the most likely tokens whose probabilities reach p, at least one; ties stay. logits [R, Vl], p [R, 1]."""
    threshold = vocabulary.top_p_threshold(logits, p)
    return logits.masked_fill(logits < threshold, float("-inf"))


def keep_min_p(vocabulary: Vocabulary, logits: Tensor, p: Tensor) -> Tensor:
    """Keep the tokens that are at least p times as likely as the best one. logits [R, Vl], p [R, 1] in (0, 1]."""
    threshold = vocabulary.best(logits) + p.log()
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


# Rows of the settings: whether it is drawn at all, temperature, k, p, and the halves of the seed.
NUM_SETTINGS = 6


def settings_of(choices: Sequence[TokenChoice], size: int) -> list[list[float]]:
    """[NUM_SETTINGS, size] for `choose_captured`, to be uploaded as float64; greedy rows fill up behind the choices."""
    rows = [_row(choice) for choice in choices] + [_row(TokenChoice())] * (size - len(choices))
    return [list(column) for column in zip(*rows, strict=True)]


def _row(choice: TokenChoice) -> tuple[float, ...]:
    if not choice.do_sample:
        return 0, 1, 0, 1, 0, 0
    temperature = max(choice.temperature, MIN_TEMPERATURE)
    return 1, temperature, choice.top_k, choice.top_p, choice.seed & MASK32, choice.seed >> 32


def choose_captured(
    vocabulary: Vocabulary, logits: Tensor, settings: Tensor, positions: Tensor
) -> tuple[Tensor, Tensor]:
    """The next token [R] of each row of logits [R, Vl], and its log-probability [R].

    settings: [NUM_SETTINGS, R] float64, see `settings_of`; positions: [R] that the tokens will have.
    """
    columns = settings.unsqueeze(2)
    is_drawn, temperature, p = settings[0] > 0, columns[1].float(), columns[3].float()
    k, low, high = columns[2].long(), columns[4].long(), columns[5].long()
    logits = logits.float() / temperature
    threshold = vocabulary.top_k_threshold(logits, torch.where(k > 0, k, vocabulary.size + 1), vocabulary.size)
    logits = logits.masked_fill(logits < threshold, float("-inf"))
    # The sums of a p of 1 are rounded: they might leave out what is hardly likely.
    threshold = vocabulary.top_p_threshold(logits, p).masked_fill(p >= 1, float("-inf"))
    logits = logits.masked_fill(logits < threshold, float("-inf"))
    best = vocabulary.summarise(logits, 1)
    drawn = vocabulary.draw(logits, low, high, positions)
    token_ids = torch.where(is_drawn, drawn.token_ids, best.top_ids.squeeze(1))
    chosen = torch.where(is_drawn, drawn.logits, best.top_logits.squeeze(1))
    return token_ids, chosen - best.log_totals.squeeze(1)
