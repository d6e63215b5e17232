"""What the tests of the benchmark share."""

from __future__ import annotations

import pytest

from benchmark import roofline


@pytest.fixture(autouse=True)
def quick_probe(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ceilings from short repeats of small products: rough, and enough to test with."""
    monkeypatch.setattr(roofline, "PROBE_SECONDS", 0.02)
    monkeypatch.setattr(roofline, "MATRIX_SIZES", ((256, 512, 512),))
