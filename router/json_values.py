"""How many values JSON has, counted before any of them is built: a million would stop the event loop for seconds."""

from __future__ import annotations


def has_more_values(text: bytes, most: int) -> bool:
    """Whether JSON has more than so many values.

    Every value but the last of a list or object is followed by a comma, and the last by a bracket. Those within strings
    count for nothing: a prompt may have as many as it likes.
    """
    if _num_ends(text) <= most:
        return False
    without_escapes = text.replace(rb"\\", b"").replace(rb"\"", b"")
    outside_strings = without_escapes.split(b'"', 4 * most)[::2]  # in so many strings are commas enough
    return _num_ends(b"".join(outside_strings)) > most


def _num_ends(text: bytes) -> int:
    return sum(map(text.count, (b",", b"]", b"}")))
