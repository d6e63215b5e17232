"""What a target of the Makefile needs and how to get it, said before it starts: `python3 tests/needs.py TARGET …`.

What can be looked up at once is looked up. Without what a target cannot do without, this ends with exit code 1; what a
target only does more with is named, and it goes on. This runs before there is an environment: with nothing but Python's
own library, of any version of it.
"""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parent.parent
OLDEST = (3, 11)


class Need(NamedTuple):
    """One thing that must be there."""

    name: str
    is_here: Callable[[], bool]
    remedy: str
    is_optional: bool = False  # the target does less without it


def command(name: str, package: str, is_optional: bool = False) -> Need:
    """A command, of a package of Debian's."""
    return Need(name, lambda: shutil.which(name) is not None, f"apt-get install {package}", is_optional)


def disk(gigabytes: float) -> Need:
    """Free space."""
    remedy = f"make room in {ROOT}"
    return Need(f"{gigabytes:g} GB of disk", lambda: shutil.disk_usage(ROOT).free >= gigabytes * 1e9, remedy)


def memory(gigabytes: float) -> Need:
    """Memory that the machine has; a container may have less."""
    pages, size = os.sysconf("SC_PHYS_PAGES"), os.sysconf("SC_PAGE_SIZE")
    remedy = "it may be slow or be ended by the kernel: fewer workers need less (ARGS=-n1)"
    return Need(f"{gigabytes:g} GB of memory", lambda: pages * size >= gigabytes * 1e9, remedy, True)


def root() -> Need:
    """The superuser: what wants it is skipped as somebody else."""
    return Need("root", lambda: os.geteuid() == 0, "sudo make", is_optional=True)


def file(path: str, remedy: str, is_optional: bool = False) -> Need:
    """Something that must exist."""
    return Need(path, lambda: (ROOT / path).exists(), remedy, is_optional)


PYTHON = Need(
    f"Python {OLDEST[0]}.{OLDEST[1]} or newer",
    lambda: sys.version_info >= OLDEST,
    "make PYTHON=/path/to/a/newer/python3",
)
GPU = command("nvidia-smi", "nvidia-driver, for an NVIDIA GPU")
INDEX = "what pip reads from (PyPI or a mirror of it)"
COMPILER = command("g++", "g++", is_optional=True)  # without it what compiles kernels is skipped
ARM = [  # without them, the kernels for aarch64
    command("aarch64-linux-gnu-g++", "g++-aarch64-linux-gnu", is_optional=True),
    command("qemu-aarch64-static", "qemu-user-static", is_optional=True),
]
TUN = file("/dev/net/tun", "modprobe tun", is_optional=True)

# What each target says, and what is looked up.
NEEDS: dict[str, tuple[str, Sequence[Need]]] = {
    "install": (f"some minutes, once, and {INDEX}", [PYTHON, disk(3)]),
    "serve": ("nothing more for the embedded model", []),
    "test": ("five to ten minutes of two cores", [memory(8), COMPILER, *ARM]),
    "test-rest": ("ten to twenty minutes of two cores", [memory(8), COMPILER, *ARM]),
    "test-formats": (f"hours, and {INDEX}", [disk(10), memory(8), COMPILER]),
    "test-offload": ("a temporary folder on a disk (TMPDIR)", [COMPILER]),
    "test-kernels": ("nothing more", []),
    "test-clients": (f"{INDEX}", [disk(3), command("chromium", "chromium", is_optional=True)]),
    "test-nodes": ("nothing more", [root(), command("ip", "iproute2", is_optional=True), TUN]),
    "test-agents": (f"{INDEX} and npm's", [command("npm", "npm"), disk(2)]),
    "test-ray": (f"{INDEX}", [disk(1), memory(8)]),
    "soak": ("an hour and a half", []),
    "test-gpu": ("a GPU", [GPU]),
    "bench-check": ("a machine that does nothing else: it asks how long things take", []),
    "bench-gpu": ("a GPU that does nothing else", [GPU]),
    "pack": (INDEX, [disk(1)]),
    "test-suites": (f"{INDEX}, 130 MB of it the first time", [disk(2)]),
    "compile-kernels": (f"{INDEX}, and some minutes", [disk(1)]),
    "hollow-gpu": (f"{INDEX}, a Python as GPU_PYTHON says, and a quarter of an hour", [disk(8), command("g++", "g++")]),
    "gpu-first": (f"{INDEX}, and some minutes to compile kernels", [disk(1)]),
    "check": ("nothing more", []),
    "proto": ("nothing more", []),
    "docs": ("nothing more", []),
}


def main(targets: Sequence[str]) -> int:
    """Say what these targets need. Returns 0 unless one of them cannot do without what is missing."""
    code = 0
    for target in targets:
        if target not in NEEDS:
            continue
        words, needs = NEEDS[target]
        print(f"make {target} needs {', '.join([*(need.name for need in needs), words])}", flush=True)
        for need in needs:
            if not need.is_here():
                code |= not need.is_optional
                goes_on = "parts are left out" if need.is_optional else "nothing is started"
                print(f"  {need.name} is not here, {goes_on}: {need.remedy}", flush=True)
    return int(code)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
