"""What stands between a layer's matrix products through the compiler, run by `test_triton.py` in its own process."""

from __future__ import annotations

import pytest
import torch

from server.backends.cuda.kernels.routing import FusedRouting
from server.backends.cuda.machine_code import MachineCode
from server.backends.protocol import Summand
from server.backends.reference.linear import DenseFormat
from tests.server.backends.cuda.compiled_cases import found
from tests.server.backends.cuda.kernel_cases import norms

__all__ = ["found"]


def zeros(*shape: int) -> torch.Tensor:
    return torch.zeros(*shape, dtype=torch.bfloat16)


@pytest.mark.parametrize("num_deltas", [1, 2])
@pytest.mark.parametrize("has_own_norm", [True, False], ids=["normalised summand", "plain summand"])
@pytest.mark.parametrize("is_centred", [True, False], ids=["layer norm", "rms norm"])
def test_norms_behind_all_summands_compile(
    is_centred: bool, has_own_norm: bool, num_deltas: int, found: list[MachineCode]
) -> None:
    (_, norm), (_, own_norm) = (norms(4096, is_centred, seed, torch.bfloat16, torch.device("cpu")) for seed in (0, 1))
    deltas, biases = (zeros(2, 4096),) * num_deltas, (zeros(4096),) * num_deltas
    norm.add(zeros(2, 4096), Summand(deltas, biases, own_norm if has_own_norm else None))
    assert {"_add_norm"} == {code.kernel for code in found}


@pytest.mark.parametrize("is_centred", [True, False], ids=["layer norm", "rms norm"])
def test_norms_of_heads_compile(is_centred: bool, found: list[MachineCode]) -> None:
    (_, queries), (_, keys) = (norms(128, is_centred, seed, torch.bfloat16, torch.device("cpu")) for seed in (0, 1))
    queries.normalise_heads(keys, zeros(2, 48, 128), kv_heads=8)
    assert {"_norm_heads"} == {code.kernel for code in found}


@pytest.mark.parametrize(("experts", "top_k"), [(8, 2), (128, 8), (60, 6)])
def test_routing_compiles(experts: int, top_k: int, found: list[MachineCode]) -> None:
    routing = FusedRouting(experts, top_k, renormalise=True)
    routing(DenseFormat(zeros(experts, 64)), zeros(3, 64)).combine(zeros(3 * top_k, 4096))
    assert {"_choose", "_group", "_weigh"} == {code.kernel for code in found}
