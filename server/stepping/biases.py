"""What is added to the logits of single tokens before anything else: biases, words and ends that must not come (yet).

Sparse on purpose: a row that asks for three tokens pays for three, and one that asks for nothing pays nothing. Where
and what to add is uploaded once for as long as the same sequences step together. A word of several tokens is banned by
its last one, in steps whose tokens before were just generated: the device alone knows these in time, so it keeps them.

Shapes: R rows, Vl this rank's part of the vocabulary, W banned words of several tokens, P = MOST_WORD_TOKENS - 1.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import chain

import torch
from torch import Tensor

from server.backends.device import Device
from server.stepping.vocabulary import Vocabulary

MOST_WORD_TOKENS = 32  # of a banned word
ANY, NONE = -1, -2  # in place of a token: whatever stands there, and nothing


@dataclass(frozen=True)
class TokenBiases:
    """What one sequence asks for. The defaults are neutral."""

    added: tuple[tuple[int, float], ...] = ()  # (token, what is added to its logit), each token once
    banned_words: tuple[tuple[int, ...], ...] = ()  # of 2 to MOST_WORD_TOKENS tokens each
    end_ids: tuple[int, ...] = ()  # tokens that are not generated …
    first_end: int = 0  # … at positions of the sequence before this one

    def __bool__(self) -> bool:
        return bool(self.added or self.banned_words or self.end_ids)


class RecentTokens:
    """The last P tokens that one sequence generated; kept only for sequences with banned words of several tokens."""

    def __init__(self, generated: Sequence[int], device: Device):
        last = generated[-(MOST_WORD_TOKENS - 1) :]
        self.tokens = device.upload([NONE] * (MOST_WORD_TOKENS - 1 - len(last)) + [*last])
        self._device = device

    def extend(self, token_ids: Sequence[int]) -> None:
        """Note tokens that were generated, but not chosen here."""
        self.tokens = torch.cat([self.tokens, self._device.upload(token_ids)])[-(MOST_WORD_TOKENS - 1) :]

    @staticmethod
    def append(sequences: Sequence[RecentTokens], recent: Tensor, token_ids: Tensor) -> None:
        """Give each of S sequences its next token [S]; recent: [S, P] what they had."""
        for sequence, tokens in zip(sequences, torch.cat([recent[:, 1:], token_ids.unsqueeze(1)], 1), strict=True):
            sequence.tokens = tokens


class Biases:
    """The biases of R rows, prepared once for as long as the same sequences step together."""

    def __init__(self, biases: Sequence[TokenBiases], device: Device, vocabulary: Vocabulary):
        added = [((row, token), value) for row, wanted in enumerate(biases) for token, value in wanted.added]
        self._added = _Places.of([place for place, _ in added], device, vocabulary)
        self._values = device.upload([v for (_, t), v in added if vocabulary.has(t)], torch.float32)
        ends = [(row, token) for row, wanted in enumerate(biases) for token in wanted.end_ids]
        mine_ends = [(row, token) for row, token in ends if vocabulary.has(token)]
        self._ends = _Places.of(mine_ends, device, vocabulary)
        self._end_rows = device.upload([row for row, _ in mine_ends])
        self._first_ends = device.upload([biases[row].first_end for row, _ in mine_ends])
        with_words = [row for row, wanted in enumerate(biases) if wanted.banned_words]
        words = [(s, row, word) for s, row in enumerate(with_words) for word in biases[row].banned_words]
        mine = [(s, row, word) for s, row, word in words if vocabulary.has(word[-1])]
        self._words = _Places.of([(row, word[-1]) for _, row, word in mine], device, vocabulary)
        self._owners = device.upload([s for s, _, _ in mine])
        before = [[ANY] * (MOST_WORD_TOKENS - len(word)) + [*word[:-1]] for _, _, word in mine]
        self._before = device.upload(list(chain(*before))).view(len(mine), MOST_WORD_TOKENS - 1)
        self._with_words = device.upload(with_words)

    def add(self, logits: Tensor, positions: Tensor, recent: Tensor | None) -> None:
        """Change logits [R, Vl], float32, in place.

        positions: [R] that the new tokens will have; recent: [S, P] last tokens of the rows with words.
        """
        self._added.add(logits, self._values)
        if self._ends.any:
            is_early = positions.index_select(0, self._end_rows) < self._first_ends
            self._ends.add(logits, _minus_infinity_where(is_early))
        if recent is not None and self._words.any:
            follows = (self._before == ANY) | (self._before == recent.index_select(0, self._owners))
            self._words.add(logits, _minus_infinity_where(follows.all(dim=1)))

    def recent(self, sequences: Iterable[RecentTokens | None]) -> Tensor | None:
        """The last tokens [S, P] of the rows that have words; None where there are none."""
        own = [sequence.tokens for sequence in sequences if sequence is not None]
        return torch.stack(own) if own else None

    def append(self, sequences: Iterable[RecentTokens | None], recent: Tensor | None, token_ids: Tensor) -> None:
        """Note the tokens [R] that all rows got."""
        if recent is not None:
            own = [sequence for sequence in sequences if sequence is not None]
            RecentTokens.append(own, recent, token_ids.index_select(0, self._with_words))


def _minus_infinity_where(banned: Tensor) -> Tensor:
    return torch.zeros_like(banned, dtype=torch.float32).masked_fill(banned, float("-inf"))


class _Places:
    """Some elements of this rank's logits, [n] rows and columns."""

    def __init__(self, rows: Tensor, columns: Tensor):
        self._rows = rows
        self._columns = columns
        self.any = bool(len(rows))

    @classmethod
    def of(cls, places: Sequence[tuple[int, int]], device: Device, vocabulary: Vocabulary) -> _Places:
        """Those of (row, token) that are in this rank's part."""
        mine = [(row, token - vocabulary.start) for row, token in places if vocabulary.has(token)]
        return cls(device.upload([row for row, _ in mine]), device.upload([column for _, column in mine]))

    def add(self, logits: Tensor, values: Tensor) -> None:
        """Add values [n] to logits [R, Vl], in place; what comes twice is added twice."""
        if self.any:
            logits.index_put_((self._rows, self._columns), values, accumulate=True)
