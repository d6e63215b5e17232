"""What is read of an adapter for the layers of a rank, and how much at most."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from server.adapters.changes import Changes
from server.adapters.config import AdapterError
from server.adapters.identity import content_key
from server.adapters.sites import Sites
from server.backends.cpu.device import CpuDevice
from server.backends.protocol import NormChange
from server.backends.reference import ReferenceBackend

GAIN = NormChange(gain=torch.ones(25))  # of 100 bytes


class Layer:
    is_capturable = True

    def stage(self, change: NormChange) -> NormChange:
        return change

    def put(self, row: int, change: Any) -> None:
        return


@dataclass
class CountedSite:
    """A layer of which it is known how often it was asked for."""

    layer: Layer
    asked: int = 0

    def find(self, changes: Changes) -> NormChange:
        self.asked += 1
        return GAIN


def test_an_adapter_that_takes_too_much_is_not_read_to_its_end(tmp_path: Path) -> None:
    (tmp_path / "adapter_config.json").write_text(json.dumps({"peft_type": "LORA", "r": 1, "lora_alpha": 1}))
    save_file({"base_model.model.norm.weight": torch.ones(25)}, tmp_path / "adapter_model.safetensors")
    found = [CountedSite(Layer()) for _ in range(5)]
    sites = Sites(ReferenceBackend(CpuDevice()), 1, torch.float32, ["model.norm"], budget=500)
    sites.all.extend(found)
    assert 5 == len(sites.read(content_key(tmp_path), tmp_path))
    sites.budget = 250
    with pytest.raises(AdapterError, match=r"it takes more than 2\.5e-07 GB of a device, which is --adapter-memory"):
        sites.read(content_key(tmp_path), tmp_path)
    assert [2, 2, 2, 1, 1] == [site.asked for site in found]
