"""Quantised checkpoints that several tests use."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.server.quantisation import cases
from tests.server.quantisation.cases import Quantised
from tests.server.quantisation.quantised import Layer


@pytest.fixture(scope="session")
def quantised_models(tmp_path_factory: pytest.TempPathFactory) -> Quantised:
    """The folder of a pair of format and family, with `quantised` and `dense` in it, and its layers; made once."""
    made: dict[str, tuple[Path, dict[str, Layer]]] = {}

    def get(name: str) -> tuple[Path, dict[str, Layer]]:
        if name not in made:
            folder = tmp_path_factory.mktemp(name)
            made[name] = folder, cases.save(name, folder)
        return made[name]

    return get
