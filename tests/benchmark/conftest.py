"""What the tests of the benchmark share."""

from __future__ import annotations

import pytest

from benchmark.cost import devices


@pytest.fixture(autouse=True)
def quick_probe(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ceilings from short repeats: rough, and enough to test with."""
    monkeypatch.setattr(devices, "PROBE_SECONDS", 0.02)
