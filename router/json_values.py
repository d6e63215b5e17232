"""How many values JSON has and how deep they lie, counted before any of them is built.

A million values would stop the event loop for seconds, and what is nested as deep as Python's stack ends whatever walks
through it with a RecursionError.
"""

from __future__ import annotations

import re

# The last quote is optional: a text without an end is passed over once, and not tried again from each quote in it.
TEXTS_AND_BRACKETS = re.compile(rb'"[^"\\]*+(?:\\.[^"\\]*+)*+"?|[\[\]{}]', re.DOTALL)


def nesting(text: bytes, enough: int = 0) -> int:
    """How many lists and objects lie within each other at most. Up to `enough` it may say more than there are."""
    if (most := text.count(b"[") + text.count(b"{")) <= enough:
        return most
    depth = deepest = 0
    for found in TEXTS_AND_BRACKETS.finditer(text):
        if (begin := found[0][:1]) in b"[{":
            depth += 1
            deepest = max(deepest, depth)
        elif begin in b"]}":
            depth -= 1
    return deepest


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
