"""Tests on a cluster of their own, which asks for a token that nobody else has: Ray's ports are open to the network."""

from __future__ import annotations

import os
import secrets

os.environ["RAY_AUTH_MODE"] = "token"
os.environ["RAY_AUTH_TOKEN"] = secrets.token_hex(32)
os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
