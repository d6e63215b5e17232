"""Pages of lists as OpenAI's clients turn them: `limit`, `after` and `order`."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from router.batches.store import Record
from router.errors import ValidationError

MOST_DIGITS = 9  # of a number in a query; Python reads no number of thousands
LIMIT_PARAMETERS = [
    {
        "name": "limit",
        "in": "query",
        "required": False,
        "description": "Entries of a page.",
        "schema": {"type": "integer", "minimum": 1},
    },
    {
        "name": "after",
        "in": "query",
        "required": False,
        "description": "The id of the last entry of the page before.",
        "schema": {"type": "string"},
    },
]


def shown(record: Record) -> dict[str, Any]:
    """A record as its owner sees it."""
    return {name: value for name, value in record.items() if name != "owner" and not name.startswith("_")}


def page(
    records: Sequence[Record],
    query: Mapping[str, str],
    default: int,
    most: int,
    show: Callable[[Record], dict[str, Any]],
) -> dict[str, Any]:
    """A page of records, which come oldest first and are listed newest first. Raises ValidationError."""
    limit, after, order = query.get("limit", str(default)), query.get("after"), query.get("order", "desc")
    if not (limit.isascii() and limit.isdecimal() and len(limit) <= MOST_DIGITS and 1 <= int(limit) <= most):
        raise ValidationError(f"`limit` is {limit[:20]!r}: give a whole number from 1 to {most}")
    if order not in ("asc", "desc"):
        raise ValidationError(f"`order` is {order[:20]!r}: give asc or desc")
    ordered = list(records) if order == "asc" else list(reversed(records))
    if after is not None:
        at = next((i for i, record in enumerate(ordered) if record["id"] == after), None)
        if at is None:
            raise ValidationError(f"`after` is {after[:60]!r}, which is not in this list: begin again without it")
        ordered = ordered[at + 1 :]
    here = ordered[: int(limit)]
    return {
        "object": "list",
        "data": [show(record) for record in here],
        "first_id": here[0]["id"] if here else None,
        "last_id": here[-1]["id"] if here else None,
        "has_more": len(ordered) > len(here),
    }
