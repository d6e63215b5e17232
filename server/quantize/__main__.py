"""The process that quantises: `python -P -m server.quantize JOB`, which the launcher starts.

JOB is a file with a `Job`. What is going on goes to standard error, what came of it to standard output; the last line
of standard error is a sentence where it failed. Signals are heeded before torch is imported, which takes seconds.
"""

from __future__ import annotations

import os
import signal
import sys
from types import FrameType
from typing import NoReturn


def main(argv: list[str]) -> int:
    """Returns the exit code."""
    if len(argv) != 1:
        print("usage: python -m server.quantize JOB", file=sys.stderr)
        return 2
    heed_signals()
    from server.quantize import command

    return command.main(argv[0])


def heed_signals() -> None:
    """End at a signal as if the program ended by itself, and say so."""
    for signum in (signal.SIGINT, signal.SIGTERM):
        signal.signal(signum, _leave)


def _leave(signum: int, frame: FrameType | None) -> NoReturn:
    """As if the program ended by itself, so that what is half made is removed, which another signal does not stop."""
    for other in (signal.SIGINT, signal.SIGTERM):
        signal.signal(other, signal.SIG_IGN)
    # Not through sys.stderr, whose buffer the interrupted code may be writing.
    os.write(2, f"\nerror: stopped by {signal.Signals(signum).name}: nothing is made, start again\n".encode())
    raise SystemExit(128 + signum)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
