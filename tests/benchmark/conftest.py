"""What the tests of the benchmark share."""

from __future__ import annotations

import pytest

from benchmark.cost import ceilings


@pytest.fixture(autouse=True)
def quick_probe(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ceilings from short repeats: rough, and enough to test with."""
    monkeypatch.setattr(ceilings, "PROBE_SECONDS", 0.02)
