"""Errors of the ingress itself in the shape of each API: refusals, and the last event of a stream that is lost."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import orjson

from router.apis.anthropic.answers import error_of

ANTHROPIC, OPENAI = "/v1/messages", "/v1/"
TYPES = {
    401: "unauthorized",
    404: "not_found",
    405: "not_found",
    413: "validation",
    422: "validation",
    421: "wrong_host",
}
INVALID_KEY, NO_SUCH_MODEL = "invalid_api_key", "model_not_found"  # codes of OpenAI's API


def error_body(path: str, status: int, sentence: str, code: str | None = None) -> Mapping[str, Any]:
    """An error as clients of this path read it. code: for OpenAI's clients, where they look at one."""
    error_type = TYPES.get(status, "unavailable" if status == 503 else "incomplete_generation")
    if path.startswith(ANTHROPIC):
        return error_of(status, sentence, error_type)
    if path.startswith(OPENAI):
        kind = "server_error" if status >= 500 else "invalid_request_error"
        told = {"message": sentence, "type": kind, "param": None, "code": code}
        return {"error": told, "error_type": error_type}
    return {"error": sentence, "error_type": error_type}


def error_event(path: str, sentence: str) -> bytes:
    """The end of a stream that cannot go on."""
    data = b"data: " + orjson.dumps(error_body(path, 500, sentence)) + b"\n\n"
    if path.startswith(ANTHROPIC):
        return b"event: error\n" + data
    return data + (b"data: [DONE]\n\n" if path in ("/v1/chat/completions", "/v1/completions") else b"")
