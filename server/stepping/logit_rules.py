"""Rules of single requests for logits, before warpers: penalties' histories, biases of tokens, and what grammars allow.

A history says which tokens a sequence holds already, and how often each was generated: penalties ask for it.

Biases are added to the logits of single tokens; so are words and ends that must not come, or not yet. They are sparse:
a row that asks for three tokens pays for three, and one that asks for nothing pays nothing. Where and what to add is
uploaded once for as long as the same sequences step together. A word of several tokens is banned by its last one, in
steps whose tokens before were just generated: only the device knows these in time, so it keeps them.

What a grammar allows is found beside the router, from the text so far, and a shard is told for each step. A rank makes
the logits of its other tokens minus infinity. Equal masks, as sequences inside a string share them, cross the wire once
and are unpacked once. A grammar counts more than biases, banned words and `min_tokens`: where these leave nothing of
what it allows, they do not count in that step.

Shapes: R rows, S sequences that step together, V vocabulary, Vl this rank's part of it, W banned words of several
tokens, P = MOST_WORD_TOKENS - 1, U different masks in bits.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from copy import copy
from dataclasses import dataclass
from itertools import chain

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from server.backends.device import Device
from server.stepping.vocabulary import Vocabulary

MOST_WORD_TOKENS = 32  # of a banned word
ANY, NONE = -1, -2  # in place of a token: whatever stands there, and nothing
NEVER = float("-inf")


class History:
    """Which of this rank's tokens one sequence holds already; kept only for sequences whose penalties ask."""

    def __init__(self, prompt: Sequence[int], num_generated: int, vocabulary: Vocabulary, device: Device):
        ids = device.upload(prompt)
        self._table = HistoryTable.empty(1, vocabulary, ids.device)
        self._row = 0
        self._table.see(ids.unsqueeze(0))
        self._table.count(ids[len(ids) - num_generated :].unsqueeze(0))
        self._device = device

    def add(self, token_ids: Sequence[int]) -> None:
        """Note tokens that were generated, but not chosen here."""
        self._table.add_to(self._row, self._device.upload(token_ids))

    def fork(self, token_ids: Sequence[int]) -> History:
        """The history behind these tokens, which this one does not note; it leaves the others' table for its own."""
        if self._table.num_rows > 1:
            self._table, self._row = self._table.copy_of(self._row), 0
        fork = copy(self)
        fork._table = self._table.copy_of(0)
        fork.add(token_ids)
        return fork


class HistoryTable:
    """The histories of sequences that step together: a row of each, in one tensor, so that no step gathers them.

    Rows move to a table of their own when others join them; what was there before is not read again.
    """

    def __init__(self, seen: Tensor, counts: Tensor, start: int):
        self._seen = seen  # [S, Vl + 1] bool; one place more than this rank has tokens: there go the other ranks'
        self._counts = counts  # [S, Vl + 1] float32
        self._start = start

    @classmethod
    def empty(cls, rows: int, vocabulary: Vocabulary, device: torch.device) -> HistoryTable:
        """Of sequences without tokens."""
        seen = torch.zeros(rows, vocabulary.width + 1, dtype=torch.bool, device=device)
        return cls(seen, torch.zeros_like(seen, dtype=torch.float32), vocabulary.start)

    @classmethod
    def of(cls, histories: Sequence[History]) -> HistoryTable:
        """The table whose rows are these histories, made if they do not stand together yet."""
        table = histories[0]._table
        rows = [(history._table, history._row) for history in histories]
        if rows == [(table, row) for row in range(table.num_rows)]:
            return table
        seen = torch.stack([table._seen[row] for table, row in rows])
        table = cls(seen, torch.stack([table._counts[row] for table, row in rows]), table._start)
        for row, history in enumerate(histories):
            history._table, history._row = table, row
        return table

    def copy_of(self, row: int) -> HistoryTable:
        """A table of one row, which has what `row` has here."""
        return HistoryTable(self._seen[row : row + 1].clone(), self._counts[row : row + 1].clone(), self._start)

    @property
    def num_rows(self) -> int:
        """S"""
        return len(self._seen)

    @property
    def seen(self) -> Tensor:
        """Whether each of this rank's tokens is in the sequence, [S, Vl]."""
        return self._seen[:, :-1]

    @property
    def counts(self) -> Tensor:
        """How often each of this rank's tokens was generated, [S, Vl] float32."""
        return self._counts[:, :-1]

    def see(self, token_ids: Tensor) -> None:
        """Note that row s has the tokens token_ids[s], [S, n]."""
        self._seen.scatter_(1, self._places(token_ids), True)

    def count(self, token_ids: Tensor) -> None:
        """Count tokens that were generated, [S, n]."""
        ones = torch.ones_like(token_ids, dtype=torch.float32)
        self._counts.scatter_add_(1, self._places(token_ids), ones)

    def add_to(self, row: int, token_ids: Tensor) -> None:
        """Note that one row has generated tokens [n]."""
        part = HistoryTable(self._seen[row : row + 1], self._counts[row : row + 1], self._start)
        part.see(token_ids.unsqueeze(0))
        part.count(token_ids.unsqueeze(0))

    def _places(self, token_ids: Tensor) -> Tensor:
        places, width = token_ids - self._start, self._seen.shape[1] - 1
        return places.masked_fill((places < 0) | (places >= width), width)


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

    def fork(self, token_ids: Sequence[int]) -> RecentTokens:
        """The last tokens behind these, which this one does not note."""
        fork = copy(self)
        fork.extend(token_ids)
        return fork

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


@dataclass(frozen=True, eq=False)
class Allowed:
    """The tokens that some sequences may get: their ids, or uint8 [ceil(V / 8)] from the first byte's lowest bit on."""

    ids: tuple[int, ...] | None = None
    bits: NDArray[np.uint8] | None = None

    @classmethod
    def of_bits(cls, given: bytes, size: int) -> Allowed:
        """Of a vocabulary of `size` tokens. What is beyond it is not there, and where the bits end, nothing is."""
        bits = np.zeros(-(-size // 8), dtype=np.uint8)
        read = np.frombuffer(given, dtype=np.uint8)[: len(bits)]
        bits[: len(read)] = read
        bits[-1] &= (1 << (size - 1) % 8 + 1) - 1
        return cls(bits=bits)

    @classmethod
    def but(cls, ids: Sequence[int], size: int) -> Allowed:
        """All tokens but these."""
        forbidden = np.array(ids, dtype=np.int64)
        tokens = np.ones(size, dtype=bool)
        tokens[forbidden[forbidden < size]] = False
        return cls(bits=np.packbits(tokens, bitorder="little"))


class Masks:
    """What the rows of a step may get. allowed: of each of R rows, None where anything goes.

    Adding 0 or minus infinity, looked up for each byte of a mask, takes a CPU a tenth of the time of `masked_fill`.
    """

    def __init__(self, allowed: Sequence[Allowed | None], device: Device, vocabulary: Vocabulary):
        self._vocabulary = vocabulary
        rows = [(row, one) for row, one in enumerate(allowed) if one is not None]
        listed = [(row, one.ids) for row, one in rows if one.ids is not None]
        mine = [(row, token - vocabulary.start) for row, ids in listed for token in ids if vocabulary.has(token)]
        self._listed_rows = device.upload([row for row, _ in listed])
        self._listed = device.upload([row for row, _ in mine]), device.upload([column for _, column in mine])
        packed = [(row, one.bits) for row, one in rows if one.bits is not None]
        self._packed_rows = device.upload([row for row, _ in packed])
        self._packed: Tensor | None = None
        if packed:
            different = {id(bits): bits for _, bits in packed}
            self._packed = _scores(device, np.stack(list(different.values())), vocabulary)
            if len(different) < len(packed):
                places = {key: place for place, key in enumerate(different)}
                self._packed = self._packed[device.upload([places[id(bits)] for _, bits in packed])]

    def apply(self, logits: Tensor, unbiased: Tensor | None = None) -> Tensor:
        """Logits [R, Vl], float32, of which only what is allowed is left; changed in place, and so is `unbiased`.

        unbiased: the same before biases, which hold for rows where the biases leave nothing of what is allowed.
        """
        self._forbid(logits)
        if unbiased is None:
            return logits
        is_empty = self._vocabulary.best(logits) == NEVER
        self._forbid(unbiased)
        return torch.where(is_empty, unbiased, logits)

    def _forbid(self, logits: Tensor) -> None:
        if len(self._listed_rows):
            kept = logits[self._listed]
            logits.index_fill_(0, self._listed_rows, NEVER).index_put_(self._listed, kept)
        if self._packed is not None:
            logits.index_add_(0, self._packed_rows, self._packed)


def _scores(device: Device, bits: NDArray[np.uint8], vocabulary: Vocabulary) -> Tensor:
    """[U, Vl] what is added to the logits of this rank's tokens, from masks [U, ceil(V / 8)]; padding is forbidden."""
    first = vocabulary.start // 8
    bits = bits[:, first : -(-(vocabulary.start + vocabulary.width) // 8)]
    uploaded = device.upload(bits, torch.uint8).int()
    bytes_ = torch.arange(256, device=uploaded.device).unsqueeze(1)
    of_byte = torch.zeros(256, 8, device=uploaded.device)
    of_byte.masked_fill_((bytes_ >> torch.arange(8, device=uploaded.device)) & 1 == 0, NEVER)
    scores = of_byte.index_select(0, uploaded.flatten()).view(len(bits), -1)
    skipped = vocabulary.start - 8 * first
    scores = scores[:, skipped : skipped + vocabulary.width]
    missing = vocabulary.width - scores.shape[1]
    return torch.nn.functional.pad(scores, (0, missing), value=NEVER) if missing else scores
