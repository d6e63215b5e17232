"""Prints what Lockstep depends on, for a layer of an image that a change of its sources leaves as it is."""

from __future__ import annotations

import tomllib
from pathlib import Path

if __name__ == "__main__":
    print("\n".join(tomllib.loads(Path("pyproject.toml").read_text())["project"]["dependencies"]))
