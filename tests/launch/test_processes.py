"""What a child process gets of the launcher's environment."""

from __future__ import annotations

import os
import sys

import pytest

from launch.processes import child_environment
from tests.running import ROOT


def test_children_get_no_secrets_and_no_network() -> None:
    environ = {"HF_TOKEN": "hf_secret", "API_KEY": "key", "PYTHONPATH": "/elsewhere", "LANG": "C"}
    child = child_environment(environ, local_rendezvous=True)
    assert not {"HF_TOKEN", "API_KEY"} & set(child)
    assert f"{ROOT}{os.pathsep}/elsewhere" == child["PYTHONPATH"]
    assert ("C", "1", "1") == (child["LANG"], child["HF_HUB_OFFLINE"], child["TRANSFORMERS_OFFLINE"])


@pytest.mark.skipif(sys.platform != "linux", reason="interface names are Linux's")
def test_gloo_stays_on_this_machine_unless_told_otherwise() -> None:
    assert "lo" == child_environment({}, True)["GLOO_SOCKET_IFNAME"]
    assert "eth1" == child_environment({"GLOO_SOCKET_IFNAME": "eth1"}, True)["GLOO_SOCKET_IFNAME"]
    assert "GLOO_SOCKET_IFNAME" not in child_environment({}, False)


def test_the_memory_of_a_gpu_grows_in_place_unless_told_otherwise() -> None:
    child = child_environment({}, True)
    assert "expandable_segments:True" == child["PYTORCH_ALLOC_CONF"]
    assert ("0", "0") == (child["NCCL_GRAPH_REGISTER"], child["TORCH_SYMMMEM_IMPLICIT_POOL"])
    for name in ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_HIP_ALLOC_CONF"):
        child = child_environment({name: "backend:cudaMallocAsync", "NCCL_GRAPH_REGISTER": "1"}, True)
        assert {name: "backend:cudaMallocAsync"} == {k: v for k, v in child.items() if k.endswith("_ALLOC_CONF")}
        assert "1" == child["NCCL_GRAPH_REGISTER"]
