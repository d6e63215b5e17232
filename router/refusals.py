"""What the HTTP layer says to a request that never became one: whole answers, in the schema of all errors."""

from __future__ import annotations

from http import HTTPStatus

import orjson


def refusal(status: int, error: str, error_type: str = "validation", header: str = "") -> bytes:
    """A whole answer, after which the connection is closed."""
    body = orjson.dumps({"error": error, "error_type": error_type})
    return (
        f"HTTP/1.1 {status} {HTTPStatus(status).phrase}\r\ncontent-type: application/json\r\nconnection: close\r\n"
        f"{header}content-length: {len(body)}\r\n\r\n"
    ).encode() + body


MALFORMED = refusal(400, "The request is not valid HTTP/1.1")
TIMED_OUT = refusal(408, "The request did not arrive in time", "request_timeout")
UNKNOWN_CODING = refusal(501, "The body has a Transfer-Encoding other than `chunked`: send it as it is")
TOO_SMALL_PARTS = refusal(400, "The body comes in thousands of parts of a few bytes each: send larger ones")
STOPPING = refusal(503, "The server is stopping or restarting", "unavailable", "retry-after: 1\r\n")
TOO_LARGE = refusal(431, "The request's headers or trailers are larger or more than the server takes")
TOO_MANY = refusal(429, "Too many connections or unanswered requests", "overloaded", "retry-after: 1\r\n")
