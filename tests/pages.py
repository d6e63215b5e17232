"""Parts of the pages in docs/, for tests that hold them to the code."""

from __future__ import annotations

from tests.running import ROOT


def section(page: str, heading: str) -> str:
    """What docs/PAGE says under `## heading`, up to the next heading of that level."""
    _, found, behind = (ROOT / "docs" / page).read_text().partition(f"\n## {heading}\n")
    assert found, f"docs/{page} has no section {heading!r} any more"
    return behind.partition("\n## ")[0]
