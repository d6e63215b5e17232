"""What makes a wheel with compiled CPU kernels, so that who installs it needs no compiler.

hatchling calls it. The kernels are compiled for every kind of the building machine's processors; the server takes the
fastest that its own can run (`server/backends/cpu/build.py`). Without a compiler the wheel is of Python alone, and says
so. Left out: editable installations, whose servers compile for themselves.
"""

from __future__ import annotations

import importlib.util
import platform
import shutil
import sys
import tempfile
from pathlib import Path
from types import ModuleType
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

# The oldest C library that has what the kernels call: PEP 600. A test asks auditwheel.
GLIBC = "2_34"
BUILD = "server/backends/cpu/build.py"


class KernelsHook(BuildHookInterface[Any]):
    """Adds a library for each kind, and the tag of the platform that they are for."""

    PLUGIN_NAME = "custom"

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        if version == "editable":
            return
        build = load_build(Path(self.root))
        self._folder = Path(tempfile.mkdtemp())
        try:
            made = build.compile_portable(self._folder)
        except build.BuildError as error:
            self.app.display_warning(f"this wheel has no compiled CPU kernels: {error}")
            return
        inside = Path(BUILD).parent / build.PORTABLE.name
        build_data["force_include"] |= {str(path): str(inside / path.name) for path in made.iterdir()}
        build_data["pure_python"] = False
        build_data["tag"] = f"py3-none-manylinux_{GLIBC}_{platform.machine()}"

    def finalize(self, version: str, build_data: dict[str, Any], artifact_path: str) -> None:
        if version != "editable":
            shutil.rmtree(self._folder)


def load_build(root: Path) -> ModuleType:
    """The module that compiles, without its packages, which need torch."""
    sys.path.insert(0, str(root))  # it imports from `host`
    try:
        spec = importlib.util.spec_from_file_location("kernels_build", root / BUILD)
        assert spec is not None and spec.loader is not None, "it is a Python file"
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
    finally:
        sys.path.remove(str(root))
    return module
