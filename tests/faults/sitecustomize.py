"""A fault inside a shard, for tests: put this folder on PYTHONPATH and name a file in LOCKSTEP_TEST_FAULT.

The file says `RANK KIND`. The rank that it names meets the fault in its next step, once: whoever does removes the file.
KIND is `raise`, or the seconds for which the step sleeps. Python imports this module by its name at every start; no
process but a shard does anything with it.
"""

from __future__ import annotations

import os
import sys
import threading
import time
from pathlib import Path
from typing import Any


def _install(path: Path, rank: str) -> None:
    while "server.service" not in sys.modules or not hasattr(sys.modules["server.service"], "serve"):
        time.sleep(0.01)
    engine: Any = sys.modules["server.stepping.engine"].Engine
    launch = engine.launch

    def with_fault(self: Any, request: Any) -> Any:
        try:
            number, kind = path.read_text().split()
        except (FileNotFoundError, ValueError):
            return launch(self, request)
        if number == rank:
            path.unlink()
            if kind == "raise":
                raise RuntimeError("a tile was lost")
            time.sleep(float(kind))
        return launch(self, request)

    engine.launch = with_fault


if "server" in sys.orig_argv and "LOCKSTEP_TEST_FAULT" in os.environ:
    _rank = sys.orig_argv[-1].rsplit("-", 1)[1].removesuffix(".json")
    threading.Thread(target=_install, args=(Path(os.environ["LOCKSTEP_TEST_FAULT"]), _rank), daemon=True).start()
