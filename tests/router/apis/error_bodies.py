"""What every error that a client reads must be, and what it must never hold."""

from __future__ import annotations

import json
import re
from typing import Any

# Addresses of memory, paths, stacks, reprs of classes and objects, gRPC's words about its connections.
INTERNALS = re.compile(
    r"0x[0-9a-f]{4,}|(^|[\s\"'(=:])/[\w.-]+/\w|Traceback|File \"|<class|\bline \d+, in"
    r"|recvmsg|sendmsg|from Core|grpc|unix:|connection reset|socket closed",
    re.IGNORECASE,
)


def assert_is_clean(body: Any) -> None:
    """An object of exactly `error`, one sentence of the server's own, and `error_type`, one word."""
    assert set(body) == {"error", "error_type"}, body
    assert re.fullmatch(r"[a-z][a-z_]{2,40}", body["error_type"]), body
    assert 0 < len(body["error"]) < 600 and "\n" not in body["error"], body
    assert not INTERNALS.search(body["error"]), body


def assert_is_clean_answer(content_type: str, content: bytes) -> None:
    """A whole response."""
    assert content_type == "application/json", (content_type, content)
    assert_is_clean(json.loads(content))
