"""What tests of several nodes ask of servers."""

from __future__ import annotations

import random

from tests.system.survival import mixed_requests

FLOAT32 = ("--dtype", "float32")
REQUESTS = mixed_requests(24, random.Random(5), most_tokens=60)
