"""Builds the hollow GPU and runs a command on it."""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
import sysconfig
from pathlib import Path

HERE = Path(__file__).resolve().parent
BUILT = HERE.parents[2] / "build" / "hollow"
LIBRARIES = ("libcuda.so.1", "libnvidia-ml.so.1")  # by which torch and Triton look for it
# What the launcher asks nvidia-smi: a list of GPUs, and clocks.
SMI = """#!/bin/sh
case "$*" in
*-L*) for i in $(seq 0 $((${HOLLOW_GPUS:-1} - 1))); do
    echo "GPU $i: NVIDIA H200 (UUID: GPU-0000000$i-0000-0000-0000-000000000000)"
done ;;
*query-gpu*) echo "1980, 1980, 3201, 3201, 300.00, 700.00, 40" ;;
*) echo "a hollow GPU" ;;
esac
"""
# CUDA's headers choose by these between code for the device and for the host, of which nothing is called here.
TARGETS = "".join(f"#define NV_{name}(...)\n" for name in ("IF_ELSE_TARGET", "IF_TARGET", "DISPATCH_TARGET"))


def build() -> None:
    """Compile the driver with the headers that torch and Triton bring."""
    site = Path(sysconfig.get_path("purelib"))
    of_torch = [folder for name in ("cu*", "nccl") for folder in sorted(site.glob(f"nvidia/{name}/include"))]
    headers = [BUILT / "include", *of_torch, site / "triton/backends/nvidia/include"]
    for folder in ("bin", "include/nv"):
        (BUILT / folder).mkdir(parents=True, exist_ok=True)
    (BUILT / "include" / "nv" / "target").write_text(TARGETS)
    smi = BUILT / "bin" / "nvidia-smi"
    smi.write_text(SMI)
    smi.chmod(0o755)
    library = BUILT / LIBRARIES[0]
    compiler = ("g++", "-O1", "-fPIC", "-shared", "-std=c++17", "-w", *(f"-I{folder}" for folder in headers))
    subprocess.run([*compiler, "-o", str(library), *map(str, sorted(HERE.glob("*.cpp"))), "-ldl"], check=True)
    for name in LIBRARIES[1:]:
        (BUILT / name).unlink(missing_ok=True)
        (BUILT / name).symlink_to(library)


def environment() -> dict[str, str]:
    """In which a command finds the hollow GPU."""
    return os.environ | {
        "LD_PRELOAD": str(BUILT / LIBRARIES[0]),
        "LD_LIBRARY_PATH": str(BUILT),
        "TRITON_LIBCUDA_PATH": str(BUILT),
        "TRITON_CACHE_DIR": str(BUILT / "triton"),
        "PATH": f"{BUILT / 'bin'}:{os.environ['PATH']}",
    }


def main(command: list[str]) -> None:
    """Become the command."""
    if not command:
        sys.exit("error: no command: python -m tests.gpu.hollow COMMAND …")
    build()
    try:
        os.execvpe(command[0], command, environment())
    except OSError as error:
        sys.exit(f"error: {shlex.join(command)} cannot be run: {error.strerror}")


if __name__ == "__main__":
    main(sys.argv[1:])
