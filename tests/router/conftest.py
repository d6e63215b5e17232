"""What tests of several APIs share."""

from __future__ import annotations

from pathlib import Path

import pytest


@pytest.fixture
def template(tmp_path: Path) -> str:
    """A chat template that makes a prompt of the last message alone."""
    path = tmp_path / "template.jinja"
    path.write_text("{{ messages[-1]['content'] }}")
    return str(path)
