"""Environments of their own for what tests Lockstep and conflicts with its pins."""

from __future__ import annotations

import subprocess
import venv
from pathlib import Path


class NoEnvironment(Exception):
    """pip could not install what an environment needs, and why."""


def environment(folder: Path, requirements: Path) -> Path:
    """The interpreter of the environment in `folder`, which is made anew when what it needs has changed.

    Raises NoEnvironment.
    """
    wanted = requirements.read_text()
    python, installed = folder / "bin" / "python", folder / "installed.txt"
    if not (installed.is_file() and installed.read_text() == wanted):
        print(f"setting up {folder}", flush=True)
        venv.create(folder, clear=True, with_pip=True)
        pip = (python, "-m", "pip", "install", "--quiet", "--disable-pip-version-check")
        found = subprocess.run((*pip, "--requirement", requirements), capture_output=True, text=True)
        if found.returncode:
            raise NoEnvironment(f"{requirements.name}: {found.stderr.strip().splitlines()[-1]}")
        installed.write_text(wanted)
    return python
