"""What the tests share that interpret kernels on a CPU: see `test_triton.py`."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any
from unittest.mock import patch

import pytest
from triton.runtime import interpreter


@pytest.fixture(autouse=True, scope="module")
def quick_calls() -> Iterator[None]:
    """A function that a kernel calls finds the language as the kernel's launch has left it.

    The interpreter replaces the whole language again at every such call, which takes longer than most functions.
    """
    patched: set[bool] = set()

    def call(function: Any, *args: object, **kwargs: object) -> object:
        # Functions of the language itself see another of its modules than ours do.
        is_own = function.fn.__module__.startswith("triton.")
        if is_own not in patched:
            interpreter._patch_lang(function.fn)
            patched.add(is_own)
        return function.rewrite()(*args, **kwargs)

    with patch.object(interpreter.InterpretedFunction, "__call__", call):
        yield
