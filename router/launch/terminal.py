"""The launcher's standard streams: they exist, and what is shown there cannot steer a terminal."""

from __future__ import annotations

import os
import re

CONTROL = re.compile("[\x00-\x08\x0a-\x1f\x7f-\x9f\u2028\u2029\u202a-\u202e\u2066-\u2069]")


def printable(text: str) -> str:
    """`text` with control characters escaped: what a prompt or a file name says must not steer the terminal."""
    return CONTROL.sub(lambda match: repr(match[0])[1:-1], text)


def open_standard_streams() -> None:
    """A launcher started with closed standard streams must not get a socket under their numbers."""
    for descriptor in (0, 1, 2):
        try:
            os.fstat(descriptor)
        except OSError:
            os.open(os.devnull, os.O_RDWR)
