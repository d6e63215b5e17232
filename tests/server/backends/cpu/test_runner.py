"""What runs the kernels of other processors: that it says so when they touch what is nobody's."""

from __future__ import annotations

from contextlib import closing
from pathlib import Path

import pytest
import torch

from host.cpu_kinds import NATIVE
from server.backends.cpu.kernels import Kernels
from tests.server.backends.cpu.runner import Runner, command_for


def test_an_address_without_memory_is_an_error_and_not_the_end_of_the_tests(tmp_path: Path) -> None:
    with closing(Runner(*command_for(NATIVE, tmp_path))) as runner:
        with pytest.raises(AssertionError, match="no memory of the other process"):
            Kernels(runner).norm[torch.float32](4096, 0, 0, 0, 0, 0, 0, 1, 1)
