"""The distribution that a request's tokens have, in Python's own numbers, and how well samples fit it.

Written a second time on purpose, from what the parameters mean, one row and one rule after another: what the sampler
does for a batch on its device is compared with it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch

from server.stepping.sampling import TokenChoice

NEVER = -math.inf
LEAST_EXPECTED = 5  # in a bin


def distribution(
    logits: Sequence[float],
    choice: TokenChoice,
    *,
    prompt: Sequence[int] = (),
    generated: Sequence[int] = (),
    favoured: Sequence[float] = (),
) -> list[float]:
    """The probability of each token behind `prompt` and `generated`. favoured: what a watermark adds, by token."""
    scores = _with_biases(logits, choice, prompt, generated)
    if choice.watermark:
        scores = [score + more for score, more in zip(scores, favoured, strict=True)]
    for token in {*prompt, *generated}:
        penalty = choice.repetition_penalty
        scores[token] = scores[token] * penalty if scores[token] < 0 else scores[token] / penalty
    for token in set(generated):
        scores[token] -= choice.frequency_penalty * generated.count(token) + choice.presence_penalty
    return _warped([score / choice.temperature for score in scores], choice)


def _with_biases(
    logits: Sequence[float], choice: TokenChoice, prompt: Sequence[int], generated: Sequence[int]
) -> list[float]:
    scores = list(logits)
    for token, bias in choice.biases.added:
        scores[token] += bias
    for word in choice.biases.banned_words:
        if tuple(generated[-(len(word) - 1) :]) == word[:-1]:
            scores[word[-1]] = NEVER
    if len(prompt) + len(generated) < choice.biases.first_end:
        for token in choice.biases.end_ids:
            scores[token] = NEVER
    return scores


def _warped(scores: list[float], choice: TokenChoice) -> list[float]:
    if choice.top_k:
        least = sorted(scores)[-choice.top_k]
        scores = [score if score >= least else NEVER for score in scores]
    if choice.top_p < 1:
        scores = _nearest(scores, choice.top_p, lambda p: -p)
    if choice.min_p:
        least = max(scores) + math.log(choice.min_p)
        scores = [score if score >= least else NEVER for score in scores]
    if choice.typical_p < 1:
        entropy = -sum(p * math.log(p) for p in probabilities(scores) if p)
        scores = _nearest(scores, choice.typical_p, lambda p: abs(-math.log(p) - entropy))
    return probabilities(scores)


def _nearest(scores: list[float], mass: float, distance: Callable[[float], float]) -> list[float]:
    """The scores of the nearest tokens that together have this mass; minus infinity for the others."""
    found = probabilities(scores)
    kept, reached = set(), 0.0
    for token in sorted((t for t, p in enumerate(found) if p), key=lambda token: distance(found[token])):
        if reached < mass:
            kept.add(token)
            reached += found[token]
    return [score if token in kept else NEVER for token, score in enumerate(scores)]


def probabilities(scores: Sequence[float]) -> list[float]:
    """softmax."""
    best = max(scores)
    weights = [math.exp(score - best) for score in scores]
    total = sum(weights)
    return [weight / total for weight in weights]


def fit(samples: Sequence[int], expected: Sequence[float]) -> float:
    """The probability that samples of this distribution fit it as badly as these, by Pearson's chi-square.

    Tokens that are expected less than LEAST_EXPECTED times share a bin. One that cannot be drawn at all makes it 0.
    """
    counts = torch.bincount(torch.tensor(samples), minlength=len(expected)).tolist()
    if any(count and not p for count, p in zip(counts, expected, strict=True)):
        return 0.0
    bins, rest = [], (0.0, 0.0)
    for p, count in sorted(zip(expected, counts, strict=True), reverse=True):
        rest = rest[0] + p * len(samples), rest[1] + count
        if rest[0] >= LEAST_EXPECTED:
            bins.append(rest)
            rest = 0.0, 0.0
    bins[-1] = bins[-1][0] + rest[0], bins[-1][1] + rest[1]
    statistic = sum((found - wanted) ** 2 / wanted for wanted, found in bins)
    freedom = max(len(bins) - 1, 1)
    half = torch.tensor([freedom / 2, statistic / 2], dtype=torch.float64)
    return float(torch.special.gammaincc(half[0], half[1]))
