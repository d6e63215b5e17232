"""Which tokens sequences hold already, and how often each was generated: what penalties ask for.

Shapes: S sequences that step together, Vl this rank's part of the vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from server.backends.device import Device
from server.stepping.vocabulary import Vocabulary


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
        if rows == [(table, row) for row in range(len(table._seen))]:
            return table
        seen = torch.stack([table._seen[row] for table, row in rows])
        table = cls(seen, torch.stack([table._counts[row] for table, row in rows]), table._start)
        for row, history in enumerate(histories):
            history._table, history._row = table, row
        return table

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
