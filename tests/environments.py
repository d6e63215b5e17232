"""Environments of their own for what tests Lockstep and conflicts with its pins."""

from __future__ import annotations

import subprocess
import venv
from pathlib import Path


def environment(folder: Path, requirements: Path) -> Path:
    """The interpreter of the environment in `folder`, which is made anew when what it needs has changed."""
    wanted = requirements.read_text()
    python, installed = folder / "bin" / "python", folder / "installed.txt"
    if not (installed.is_file() and installed.read_text() == wanted):
        print(f"setting up {folder}", flush=True)
        venv.create(folder, clear=True, with_pip=True)
        pip = (python, "-m", "pip", "install", "--quiet", "--disable-pip-version-check")
        subprocess.run((*pip, "--requirement", requirements), check=True)
        installed.write_text(wanted)
    return python
