"""What holds for all tests: how many examples Hypothesis tries.

`HYPOTHESIS_PROFILE=large` tries twenty times as many, as `.ci/run` does. No profile has a deadline: how long an example
takes says nothing on a busy machine.
"""

from __future__ import annotations

import os

from hypothesis import settings

settings.register_profile("small", max_examples=100, deadline=None)
settings.register_profile("large", max_examples=2000, deadline=None)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "small"))
