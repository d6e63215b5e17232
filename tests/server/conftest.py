"""Checkpoints that every test of the server uses."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from transformers import BloomConfig, BloomForCausalLM
from transformers.utils import logging as transformers_logging

from server.backends.cpu import Kernels
from tests.cpu_kernels import load_or_skip
from tests.running import ROOT
from tests.server.checkpoints import Checkpoints, Oracle, save

torch.set_num_threads(1)  # two would wait for each other longer than these tiny models compute, on busy cores above all
DEMO = ROOT / "server" / "demo"


def save_tiny_bloom(folder: Path, **changes: object) -> BloomForCausalLM:
    """A random BLOOM with weights large enough that every part of it matters to the logits."""
    transformers_logging.disable_progress_bar()
    torch.manual_seed(7)
    sizes = {"vocab_size": 103, "hidden_size": 64, "n_head": 8, "n_layer": 3}
    model = BloomForCausalLM(BloomConfig(**(sizes | changes))).eval()
    for parameter in model.parameters():
        parameter.data.normal_(0, 0.2)
    model.save_pretrained(folder)
    return model


@pytest.fixture(scope="session")
def kernels() -> Kernels:
    """The compiled CPU kernels, where there are any."""
    return load_or_skip()


@pytest.fixture(scope="session")
def tiny_bloom(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder of a tiny random BLOOM: 8 heads, and a vocabulary that no world size divides."""
    folder = tmp_path_factory.mktemp("tiny-bloom")
    save_tiny_bloom(folder)
    return folder


@pytest.fixture(scope="session")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> Checkpoints:
    """A case's folder and its oracle, made once."""
    made: dict[str, tuple[Path, Oracle]] = {}

    def get(case: str) -> tuple[Path, Oracle]:
        if case not in made:
            folder = tmp_path_factory.mktemp(case)
            made[case] = folder, save(case, folder)
        return made[case]

    return get
