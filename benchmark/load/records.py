"""One JSON record for each request, in a file beside the report: everything from which its figures follow.

Times are seconds since the row began (`began_unix_s` of the row), by the client's clock. They are written when a row
has ended, so that no disk delays a request.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import orjson

from benchmark.outcomes import Outcome

NAME = "requests.jsonl"


def records_of(row: int, outcomes: Sequence[Outcome], began: float) -> Iterator[dict[str, Any]]:
    """A record of each request in the order of their intended sending. began: of the row, by time.perf_counter."""
    for number, one in enumerate(sorted(outcomes, key=lambda one: one.intended_at)):
        reply = one.reply
        times = [round(at - began, 6) for at in reply.token_times]
        yield {
            "row": row,
            "request": number,
            "turn": one.turn,
            "intended_s": round(one.intended_at - began, 6),
            "sent_s": round(reply.sent_at - began, 6),
            "held_s": round(one.held_s, 6),
            "first_token_s": times[0] if times else None,
            "token_s": times,
            "ended_s": round(reply.ended_at - began, 6),
            "input_length": one.lengths.input_length,
            "output_length": one.lengths.output_length,
            "prompt_tokens": reply.num_prompt_tokens,
            "output_tokens": reply.num_tokens,
            "status": reply.status,
            "error": reply.error,
            "detail": reply.detail,
        }


class Records:
    """The file of a run's records; nothing without a folder."""

    def __init__(self, folder: Path | None) -> None:
        self._path = folder and folder / NAME
        self._rows = 0

    def add(self, outcomes: Sequence[Outcome], began: float) -> None:
        """Append the records of the next row. A full disk is a warning: the report has the row's figures."""
        row, self._rows = self._rows, self._rows + 1
        if self._path is None:
            return
        try:
            with self._path.open("ab" if row else "wb") as file:
                file.writelines(orjson.dumps(one) + b"\n" for one in records_of(row, outcomes, began))
        except OSError as error:
            print(f"warning: cannot write {self._path}: {error.strerror}; free some space", file=sys.stderr)
