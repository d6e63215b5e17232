"""The Triton kernels without a GPU: interpreted and compared with the reference, and compiled for one.

Triton decides at its import whether it interprets, so both run in processes of their own: whatever this process has
imported before, and in which order, does not matter. On a GPU they run in `tests/gpu/kernels/`.

In the suite every kernel and every way through it is there once; `make test-kernels` has all shapes, which takes
several times as long.
"""

from __future__ import annotations

import os
import platform
import subprocess
import sys

import pytest

from tests.running import ROOT

HAS_TRITON = sys.platform == "linux" and platform.machine() == "x86_64"  # where `.[dev]` installs it
needs_triton = pytest.mark.skipif(not HAS_TRITON, reason="Triton exists for Linux on x86-64 alone")


SUBJECTS = ("kernels", "logits", "linear", "quantised", "adapters")
# Of each subject the tests that are in the suite, and the others; all that compile logits are in the suite.
IN_SUITE = [pytest.param(subject, "not kernels", id=subject) for subject in SUBJECTS]
OTHERS = {s: pytest.param(s, "kernels", id=f"{s}, all shapes", marks=pytest.mark.kernels) for s in SUBJECTS}
INTERPRETED = [*IN_SUITE, *OTHERS.values()]
COMPILED = [*IN_SUITE, *(run for subject, run in OTHERS.items() if subject != "logits")]


def run_tests(environment: dict[str, str], part: str, name: str) -> subprocess.CompletedProcess[str]:
    """All tests of a module in one process: to import what they need takes longer than most of them."""
    command = [
        sys.executable,
        "-m",
        "pytest",
        "--noconftest",
        "-p",
        "no:cacheprovider",
        "-q",
        "-m",
        part,
        f"tests/server/backends/cuda/{name}.py",
    ]
    return subprocess.run(command, cwd=ROOT, env=os.environ | environment, capture_output=True, text=True)


@needs_triton
@pytest.mark.parametrize(("subject", "part"), INTERPRETED)
def test_interpreted_kernels_equal_the_reference(subject: str, part: str) -> None:
    result = run_tests({"TRITON_INTERPRET": "1"}, part, f"interpreted_{subject}")
    assert 0 == result.returncode, result.stdout + result.stderr


@needs_triton
@pytest.mark.rest
@pytest.mark.parametrize(("subject", "part"), COMPILED)
def test_kernels_compile_for_a_gpu(subject: str, part: str, pytestconfig: pytest.Config) -> None:
    # Compiling is most of the time. Triton keeps each result under a hash of the kernel's source, of all that it calls,
    # of the options and of Triton itself; a clean checkout, as in CI, has none.
    assert pytestconfig.cache is not None
    kept = str(pytestconfig.cache.mkdir("triton"))
    result = run_tests({"TRITON_INTERPRET": "0", "TRITON_CACHE_DIR": kept}, part, f"compiled_{subject}")
    assert 0 == result.returncode, result.stdout + result.stderr


def test_a_server_on_a_cpu_does_not_import_triton() -> None:
    code = "import sys, server.__main__, server.loading, server.service; print('triton' in sys.modules)"
    result = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert "False" == result.stdout.strip()
