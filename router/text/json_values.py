"""How many values JSON has and how deep they lie, counted before any of them is built.

A million values would stop the event loop for seconds, and what is nested as deep as Python's stack ends whatever walks
through it with a RecursionError.
"""

from __future__ import annotations

import re

# The last quote is optional: a text without an end is passed over once, and not tried again from each quote in it.
TEXTS_AND_BRACKETS = re.compile(rb'"[^"\\]*+(?:\\.[^"\\]*+)*+"?|[\[\]{}]', re.DOTALL)


def is_nested_deeper(text: bytes, most: int) -> bool:
    """Whether more than so many lists and objects lie within each other."""
    if text.count(b"[") + text.count(b"{") <= most:
        return False
    depth = 0
    for found in TEXTS_AND_BRACKETS.finditer(text):
        if (begin := found[0][:1]) in b"[{":
            depth += 1
            if depth > most:
                return True
        elif begin in b"]}":
            depth -= 1
    return False


def num_values(text: bytes, enough: int) -> int:
    """How many values JSON has; beyond `enough` it may say fewer than there are, or more.

    Every value but the last of a list or object is followed by a comma, and each list and object has one last; empty
    ones are counted twice. What is within strings counts for nothing: a prompt may have as many commas as it likes.
    """
    if (most := _num_begun(text)) <= enough and text.count(b'"') <= 4 * enough:
        return most
    without_escapes = text.replace(rb"\\", b"").replace(rb"\"", b"")
    outside_strings = without_escapes.split(b'"', 4 * enough + 4)[::2]
    # Of so many strings, names and values alike, every other one is a value at least.
    return max(_num_begun(b"".join(outside_strings)), len(outside_strings) // 2)


def _num_begun(text: bytes) -> int:
    return sum(map(text.count, (b",", b"[", b"{")))
