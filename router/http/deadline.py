"""How long a request may take: what its client asks for in a header, and what the server allows."""

from __future__ import annotations

from router.errors import ValidationError

HEADER = "x-request-timeout-ms"
MOST_MS = 24 * 60 * 60 * 1000


def timeout_of(header: str | None, longest: float | None) -> float | None:
    """Seconds that a request has: the smaller of the two; None for no limit. Raises ValidationError."""
    if header is None:
        return longest
    text = header.strip()
    if not (text.isascii() and text.isdecimal() and len(text) <= len(str(MOST_MS)) and 1 <= int(text) <= MOST_MS):
        raise ValidationError(
            f"{HEADER} is {text[:40]!r}: give a whole number of milliseconds from 1 to {MOST_MS}, or leave it out"
        )
    asked = int(text) / 1000
    return asked if longest is None else min(asked, longest)
