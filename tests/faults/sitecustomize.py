"""For tests: put this folder on PYTHONPATH, and shards can meet faults and the router can give memory back.

LOCKSTEP_TEST_FAULT names a file that says `RANK KIND`. The rank that it names meets the fault in its next step, once:
whoever does removes the file. KIND is `raise`, or the seconds for which the step sleeps. SIGUSR2 makes the router
collect its garbage and give free memory back to the system. Where LOCKSTEP_TEST_GUESSES is set, the router tries all
guesses that it has, as if rows cost nothing. Python imports this module by its name at every start.
"""

from __future__ import annotations

import ctypes
import gc
import itertools
import math
import os
import signal
import sys
import time
from pathlib import Path
from typing import Any


def _install(path: Path) -> None:
    engine: Any = sys.modules["server.stepping.engine"].Engine
    launch = engine.launch

    def with_fault(self: Any, request: Any) -> Any:
        try:
            number, kind = path.read_text().split()
        except (FileNotFoundError, ValueError):
            return launch(self, request)
        if int(number) == self.shard.rank:
            path.unlink()
            if kind == "raise":
                raise RuntimeError("a tile was lost")
            time.sleep(float(kind))
        return launch(self, request)

    engine.launch = with_fault


def _guess_always() -> None:
    from router.drafting import speculation, step_costs

    speculation.MARGIN = speculation.LEAST_PROMISE = 0.0
    speculation.Account.room = lambda self, plain_seconds: math.inf  # type: ignore[method-assign]
    step_costs.StepCosts.drafted = lambda self, batch: itertools.repeat(self.plain(batch))  # type: ignore[method-assign]


def _give_back(*_: object) -> None:
    gc.collect()
    ctypes.CDLL("libc.so.6").malloc_trim(0)


if "router" in sys.orig_argv:
    signal.signal(signal.SIGUSR2, _give_back)
    if "LOCKSTEP_TEST_GUESSES" in os.environ:
        _guess_always()
if "server.fork_server" in sys.orig_argv and "LOCKSTEP_TEST_FAULT" in os.environ:
    os.register_at_fork(after_in_child=lambda: _install(Path(os.environ["LOCKSTEP_TEST_FAULT"])))
