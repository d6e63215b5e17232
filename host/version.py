"""Versions: of Lockstep itself, and of the packages that are installed. Reads metadata and imports none of them."""

from __future__ import annotations

import importlib.metadata
import tomllib
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]


def version() -> str:
    """The version of Lockstep: of the installed package, else of the checkout that this file is in."""
    try:
        return importlib.metadata.version("lockstep")
    except importlib.metadata.PackageNotFoundError:
        return str(tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"])


def package_version(package: str) -> str:
    """The installed version of `package`, or "not installed"."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "not installed"
