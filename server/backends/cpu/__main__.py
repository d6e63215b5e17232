"""`python -m server.backends.cpu`: compile the kernels now rather than when a server first starts.

Never fails: they are optional, and a server says the same when it does without them. With `--portable` they are
compiled for all kinds of CPUs instead, to be carried to machines without a compiler; then what fails is an error.
"""

from __future__ import annotations

import sys

from server.backends.cpu import build, load
from server.backends.cpu.build import BuildError

if __name__ == "__main__":
    is_portable = sys.argv[1:] == ["--portable"]
    try:
        if is_portable:
            print(f"CPU kernels: compiled into {build.compile_portable()}")
        else:
            load()
            print("CPU kernels: compiled")
    except BuildError as error:
        print(f"CPU kernels: {error}")
        sys.exit(1 if is_portable else 0)
