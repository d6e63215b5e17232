"""`python -m server.backends.cpu`: compile the kernels now rather than when a server first starts.

Never fails: they are optional, and a server says the same when it does without them.
"""

from __future__ import annotations

from server.backends.cpu import load
from server.backends.cpu.build import BuildError

if __name__ == "__main__":
    try:
        load()
        print("CPU kernels: compiled")
    except BuildError as error:
        print(f"CPU kernels: {error}")
