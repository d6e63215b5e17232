"""What the tests share that compile kernels for an H200, without one: see `test_triton.py`."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from benchmark.commands.kernels import complaints
from server.backends.cuda.machine_code import MachineCode, compiled_for

CPU = torch.device("cpu")


class Operators(TorchDispatchMode):
    """Notes the operators that compute something: views and fresh memory cost no launch."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if not func.is_view and "empty" not in func.name():
            self.names.append(func.name().removeprefix("aten::"))
        return func(*args, **kwargs or {})


@pytest.fixture
def found() -> Iterator[list[MachineCode]]:
    """What each launch is compiled to, instead of being launched."""
    with compiled_for("9.0") as codes:
        yield codes
        assert [] == [sentence for code in codes for sentence in complaints(code)]


def of_kernel(found: list[MachineCode], kernel: str) -> MachineCode:
    """The only one of this name."""
    (code,) = (code for code in found if code.kernel == kernel)
    return code
