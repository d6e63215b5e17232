"""What holds for all tests: how many run at once, how many examples Hypothesis tries, and that an end from outside
leaves no process.

`HYPOTHESIS_PROFILE=large` tries five times as many, as `.ci/run` does. No profile has a deadline: how long an example
takes says nothing on a busy machine.
"""

from __future__ import annotations

import os
import signal

from hypothesis import settings

settings.register_profile("small", max_examples=100, deadline=None)
settings.register_profile("large", max_examples=500, deadline=None)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "small"))

# SIGTERM interrupts as Ctrl-C does, so that fixtures end the processes that they started.
signal.signal(signal.SIGTERM, signal.default_int_handler)


def pytest_xdist_auto_num_workers() -> int:
    """One more than there are cores: many tests wait for processes that they have started."""
    return len(os.sched_getaffinity(0)) + 1
