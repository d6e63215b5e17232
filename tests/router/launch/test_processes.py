"""What a child process gets of the launcher's environment."""

from __future__ import annotations

import os
import sys

import pytest

from router.launch.processes import child_environment
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
