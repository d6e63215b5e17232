"""Sampling by temperature, top-k and top-p as one fixed computation, for steps that are captured.

A `Sampler` is made for certain choices and does what they ask for; a graph repeats every operator. So here every row
goes through all of it, with settings that may be neutral and lie in a tensor: what sequences ask for may change without
another capture. Most sampled requests ask for nothing else; for anything else the engine samples outside of the
graph. The tokens are those of a `Sampler`.

Shapes: S rows, Vl this rank's part of the vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from server.backends.reference.logits import MASK32
from server.stepping.sampling import MIN_TEMPERATURE, TokenChoice
from server.stepping.vocabulary import Vocabulary

# Rows of the settings: whether it is drawn at all, temperature, k, p, and the halves of the seed.
NUM_SETTINGS = 6


def settings_of(choices: Sequence[TokenChoice], size: int) -> list[list[float]]:
    """[NUM_SETTINGS, size] what `choose` reads, to be uploaded as float64; behind the choices, greedy rows fill up."""
    rows = [_row(choice) for choice in choices] + [_row(TokenChoice())] * (size - len(choices))
    return [list(column) for column in zip(*rows, strict=True)]


def _row(choice: TokenChoice) -> tuple[float, ...]:
    if not choice.do_sample:
        return 0, 1, 0, 1, 0, 0
    temperature = max(choice.temperature, MIN_TEMPERATURE)
    return 1, temperature, choice.top_k, choice.top_p, choice.seed & MASK32, choice.seed >> 32


def choose(vocabulary: Vocabulary, logits: Tensor, settings: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
    """The next token [S] of each row of logits [S, Vl], and its log-probability [S].

    settings: [NUM_SETTINGS, S] float64, see `settings_of`; positions: [S] that the tokens will have.
    """
    columns = settings.unsqueeze(2)
    is_drawn, temperature, p = settings[0] > 0, columns[1].float(), columns[3].float()
    k, low, high = columns[2].long(), columns[4].long(), columns[5].long()
    logits = logits.float() / temperature
    threshold = vocabulary.top_k_threshold(logits, torch.where(k > 0, k, vocabulary.size), vocabulary.size)
    logits = logits.masked_fill(logits < threshold, float("-inf"))
    # The sums of a p of 1 are rounded: they might leave out what is hardly likely.
    threshold = vocabulary.top_p_threshold(logits, p).masked_fill(p >= 1, float("-inf"))
    logits = logits.masked_fill(logits < threshold, float("-inf"))
    best = vocabulary.summarise(logits, 1)
    drawn = vocabulary.draw(logits, low, high, positions)
    token_ids = torch.where(is_drawn, drawn.token_ids, best.top_ids.squeeze(1))
    chosen = torch.where(is_drawn, drawn.logits, best.top_logits.squeeze(1))
    return token_ids, chosen - best.log_totals.squeeze(1)
