"""Which compiled kernels the tests run with: those of `--cpu-kernels`, an option of pytest as of the server.

`tests/conftest.py` hands the option on as the setting's environment variable, which every server that a test starts
inherits, and every other process; what runs in the test's own process asks here.
"""

from __future__ import annotations

import os
import shutil

import pytest

from host.cpu_kinds import AUTO, NAMED, NATIVE, NONE
from server.backends import cpu
from server.backends.cpu import COMPILERS, Kernels

VARIABLE = "CPU_KERNELS"


def asked() -> str:
    """The value of the setting."""
    return os.environ.get(VARIABLE) or AUTO


def load() -> Kernels:
    """Those that are asked for. Raises BuildError."""
    return cpu.load(kind=NAMED.get(asked(), NATIVE))


def load_or_skip() -> Kernels:
    """Those that are asked for. Without a compiler there are none; one that fails to compile them is an error."""
    if asked() == NONE:
        pytest.skip("--cpu-kernels is none")
    if not any(map(shutil.which, COMPILERS)):
        pytest.skip("there is no C++ compiler")
    return load()
