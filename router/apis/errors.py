"""An error in the shape of the API that a path belongs to."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from http import HTTPStatus

import orjson
from starlette.responses import Response

from router.apis.anthropic import answers as anthropic
from router.apis.openai import answers as openai
from router.apis.openai.responses import answers as responses
from router.errors import ErrorResponse, RetryLater, RouterError

OPENAI = "/v1/"  # what its paths begin with
ANTHROPIC = "/v1/messages"
RESPONSES = "/v1/responses"
NO_BATCHES = (
    "this server keeps no files and no batches: `lockstep batch --url URL --input FILE --output FILE` answers a file "
    "of requests in OpenAI's batch format"
)
# What clients look for and may not find, by what its paths begin with.
MAYBE_NOT_SERVED = {
    f"{RESPONSES}/compact": "conversations are not compacted here: send the items that the model is to read",
    RESPONSES + "/": responses.NOT_STORED,
    "/v1/files": NO_BATCHES,
    "/v1/batches": NO_BATCHES,
    f"{ANTHROPIC}/batches": NO_BATCHES,
}


def error_response(error: RouterError, path: str) -> Response:
    """The whole HTTP response for an error."""
    if not path.startswith(OPENAI):
        return json_error(error.body(), error.status, headers_of(error))
    body_of: Callable[[RouterError], object] = openai.error_body
    if path.startswith(ANTHROPIC):
        body_of = anthropic.error_body
    elif path.startswith(RESPONSES):
        body_of = responses.error_body
    return json_error(body_of(error), openai.status_of(error), headers_of(error))


def status_response(status: int, path: str, headers: Mapping[str, str] | None = None) -> Response:
    """The response for an error that HTTP itself defines, such as 404 or 405."""
    phrase, error_type = status_sentence(status, headers), status_type(status)
    if not path.startswith(OPENAI):
        told: ErrorResponse = {"error": phrase, "error_type": error_type}
        return json_error(told, status, headers or {})
    sentence = (status == 404 and _why_not_there(path)) or phrase
    if path.startswith(ANTHROPIC):
        return json_error(anthropic.error_of(status, sentence, error_type), status, headers or {})
    if status == 405 and path == RESPONSES:
        sentence += ": WebSockets are not served here, and `stream` gives events"
    kind = "server_error" if status >= 500 else "invalid_request_error"
    detail: openai.ErrorDetail = {"message": sentence, "type": kind, "param": None, "code": None}
    return json_error({"error": detail, "error_type": error_type}, status, headers or {})


def _why_not_there(path: str) -> str | None:
    whole = f"{path}/"
    return next((told for start, told in MAYBE_NOT_SERVED.items() if whole.startswith(f"{start.rstrip('/')}/")), None)


def headers_of(error: RouterError) -> Mapping[str, str]:
    """What an error says beside its body."""
    return {"Retry-After": str(error.retry_after_s)} if isinstance(error, RetryLater) else error.headers


def status_type(status: int) -> str:
    """The name of such an error for programs."""
    return HTTPStatus(status).phrase.lower().replace(" ", "_")


def status_sentence(status: int, headers: Mapping[str, str] | None = None) -> str:
    """What people read of such an error. headers: those of the response."""
    phrase = HTTPStatus(status).phrase
    if status == HTTPStatus.NOT_FOUND:
        return f"{phrase}: GET /openapi.json lists all routes"
    if allowed := (headers or {}).get("Allow"):
        return f"{phrase}: send {allowed.replace(', ', ' or ')}"
    return phrase


def json_error(body: object, status: int, headers: Mapping[str, str]) -> Response:
    """A response of any shape."""
    return Response(orjson.dumps(body), status, headers=dict(headers), media_type="application/json")
