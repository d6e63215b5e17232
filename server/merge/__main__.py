"""The process that merges: `python -P -m server.merge JOB`, which the launcher starts.

JOB is a file with a `Job`. What came of it goes to standard output; the last line of standard error is a sentence where
it failed. Signals are heeded before torch is imported, which takes seconds.
"""

from __future__ import annotations

import sys

from server.quantize.__main__ import heed_signals


def main(argv: list[str]) -> int:
    """Returns the exit code."""
    if len(argv) != 1:
        print("usage: python -m server.merge JOB", file=sys.stderr)
        return 2
    heed_signals()
    from server.merge import command

    return command.main(argv[0])


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
