"""Why a job cannot begin or go on: one sentence for whoever started it.

JobError            the input, the output or the journal cannot be used
├── InputChanged    the input is not, or no longer, the file that the job began with
└── ServerGone      nobody has answered for so long that the job gives up; started again, it goes on
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


class JobError(ValueError):
    """One sentence that names the file and the remedy."""


class InputChanged(JobError):
    """The lines that are left are not those that the job began with."""


class ServerGone(JobError):
    """The server does not answer, or refuses the key."""


@contextmanager
def named(path: Path) -> Iterator[None]:
    """Have an OSError name the file, which the system leaves out for one that is open."""
    try:
        yield
    except OSError as error:
        if error.filename is not None:
            raise
        raise OSError(error.errno, error.strerror, str(path)) from None
