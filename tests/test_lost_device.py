"""What `tests/gpu/conftest.py` makes of a device that is lost, with a stand-in for the device."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.gpu.conftest import LOST, leave
from tests.running import ROOT

CONFTEST = """
from tests.gpu import conftest
from tests.gpu.conftest import *

DEVICE = {"is lost": False}

def synchronise():
    if DEVICE["is lost"]:
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

conftest.synchronise = synchronise
"""
TESTS = """
from conftest import DEVICE, synchronise

def test_before(): pass

def test_that_loses_it(): DEVICE["is lost"] = True  # asynchronously: it notices nothing itself

def test_behind(): synchronise()

def test_that_is_wrong(): assert False
"""


def test_a_lost_device_fails_one_test_and_ends_its_worker(tmp_path: Path) -> None:
    """The tests behind it go on in another; what lost the device fails, and what is wrong."""
    (tmp_path / "conftest.py").write_text(CONFTEST)
    (tmp_path / "test_device.py").write_text(TESTS)
    (tmp_path / "pytest.ini").write_text("[pytest]\n")
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-n1", str(tmp_path)]
    env = {"PYTHONPATH": str(ROOT), "PATH": ""}
    done = subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True)
    said = done.stdout + done.stderr
    assert "the device is lost after test_device.py::test_that_loses_it: CUDA error: an illegal memory access" in said
    assert "2 failed, 3 passed" in said, said


def test_without_workers_the_run_ends_and_says_why(
    pytestconfig: pytest.Config, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("PYTEST_XDIST_WORKER", raising=False)
    with pytest.raises(pytest.exit.Exception, match="the device is lost") as ended:
        leave(pytestconfig, "the device is lost")
    assert LOST == ended.value.returncode
