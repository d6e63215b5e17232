"""`python -m server.backends.cpu`: compile the kernels now rather than when a server first starts.

Never fails: they are optional, and a server says the same when it does without them. With `--portable` they are
compiled for all kinds of CPUs instead, to be carried to machines without a compiler; then what fails is an error.
"""

from __future__ import annotations

import argparse
import platform
import sys

from host.cpu_kinds import AARCH64, X86_64
from server.backends.cpu import build, load
from server.backends.cpu.build import BuildError


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m server.backends.cpu", description="Compile the CPU kernels.")
    parser.add_argument("--portable", action="store_true", help="for each kind of CPU, beside their sources")
    parser.add_argument("--machine", choices=(X86_64, AARCH64), help="of these CPUs (default: this one)")
    args = parser.parse_args()
    is_portable = args.portable or args.machine is not None
    try:
        if is_portable:
            folder = build.compile_portable(machine=args.machine or platform.machine())
            print(f"CPU kernels: compiled into {folder}")
        else:
            load()
            print("CPU kernels: compiled")
    except (BuildError, OSError) as error:
        print(f"CPU kernels: {error}")
        return 1 if is_portable else 0
    return 0


if __name__ == "__main__":
    sys.exit(main())
