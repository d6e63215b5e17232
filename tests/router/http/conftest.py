"""Tests here run on the event loop that serves."""

from __future__ import annotations

import inspect

import pytest
import uvloop


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool | None:
    """As for all tests that are coroutines, but on that loop."""
    if not inspect.iscoroutinefunction(pyfuncitem.obj):
        return None
    uvloop.run(pyfuncitem.obj(**{name: pyfuncitem.funcargs[name] for name in pyfuncitem._fixtureinfo.argnames}))
    return True
