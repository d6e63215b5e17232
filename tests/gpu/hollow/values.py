"""A plugin of pytest for the hollow GPU, `-p tests.gpu.hollow.values`: a test that only finds other values is skipped.

So is one that fails in the reference, which computes with what it reads. What is left of failures is worth a look: an
error of CUDA, torch or Triton, or of ours on the way.
"""

from __future__ import annotations

from collections.abc import Generator
from pathlib import Path

import pytest
import torch

from server.backends import reference

REFERENCE = Path(reference.__file__).parent


def is_of_values(error: pytest.ExceptionInfo[BaseException]) -> bool:
    """Nothing was computed: what the reference says is of values, and assertions but one, that a server is ready."""
    if error.errisinstance(AssertionError):
        return not str(error.value).startswith("not ready")
    return REFERENCE in Path(error.traceback[-1].path).parents


def pytest_configure() -> None:
    """A test goes on behind tensors that are not close."""
    torch.testing.assert_close = lambda *tensors, **tolerances: None


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item, call: pytest.CallInfo[None]
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """The report of a test, or that it is skipped."""
    report = yield
    if call.when == "call" and call.excinfo is not None and is_of_values(call.excinfo):
        report.outcome, report.longrepr = "skipped", (str(item.path), item.location[1] or 0, "other values")
    return report
