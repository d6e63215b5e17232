"""Kernels for the CPU in C++, compiled when a server first starts on a machine, and what Python needs to call them.

Optional: everything here has an equal in stock torch operators, against which it is tested, and which serves where
there is no compiler. `load` says which it is, and why.

Left out: anything for GPUs, and dtypes other than float32 and bfloat16.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from server.native.build import COMPILERS, BuildError, build
from server.native.kernels import Kernels

__all__ = ["Kernels", "load"]


def load(cache: Path | None = None, compilers: Sequence[str] = COMPILERS) -> tuple[Kernels | None, str]:
    """The kernels and what was compiled, or None and why there are none. Takes seconds where nothing is compiled yet.

    cache: where libraries are kept, by default below the user's home.
    """
    try:
        return Kernels(build(cache, compilers)), "compiled"
    except BuildError as error:
        return None, str(error)
