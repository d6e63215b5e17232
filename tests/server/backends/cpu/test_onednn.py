"""Weights packed for oneDNN: whether its operator takes them is asked before it is called, on whatever processor."""

from __future__ import annotations

import os
import platform
import subprocess
import sys

import pytest
import torch

from server.backends.cpu.layers import TYPICAL_TOKENS, onednn_packs
from tests.running import ROOT

# A linear layer where there is no compiler, as a server would compute it.
LINEAR = """
import torch
from server.backends import cpu
backend = cpu.choose(torch.bfloat16, ["no-such-compiler"])
weight = torch.eye(64, dtype=torch.bfloat16)
print(backend.name, backend.dense(weight, is_gated=False).product(weight, None).sum().item())
"""


def packs(dtype: torch.dtype) -> bool:
    """Whether the operator packs a weight, by trying."""
    try:
        torch.ops.mkldnn._reorder_linear_weight(torch.ones(64, 64, dtype=dtype), TYPICAL_TOKENS)
    except (AttributeError, RuntimeError):  # torch is built without it; the processor lacks something
        return False
    return True


def test_what_can_be_packed_is_what_the_operator_packs() -> None:
    assert packs(torch.bfloat16) == onednn_packs(torch.bfloat16)
    assert not onednn_packs(torch.float32)


@pytest.mark.skipif(platform.machine() != "x86_64", reason="oneDNN is limited to AVX2 where there is AVX2")
def test_bfloat16_is_computed_with_avx2_alone() -> None:
    command = [sys.executable, "-c", LINEAR]
    limited = os.environ | {"ONEDNN_MAX_CPU_ISA": "AVX2"}
    found = subprocess.run(command, cwd=ROOT, env=limited, capture_output=True, text=True, check=True)
    assert ["reference", "64.0"] == found.stdout.split()
