"""An error in the shape of the API that a path belongs to."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from starlette.responses import Response

from router import errors
from router.anthropic import answers as anthropic
from router.errors import RouterError
from router.openai import answers as openai
from router.openai.responses import answers as responses

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
        return errors.error_response(error)
    body_of: Callable[[RouterError], object] = openai.error_body
    if path.startswith(ANTHROPIC):
        body_of = anthropic.error_body
    elif path.startswith(RESPONSES):
        body_of = responses.error_body
    return errors.json_error(body_of(error), openai.status_of(error), errors.headers_of(error))


def status_response(status: int, path: str, headers: Mapping[str, str] | None = None) -> Response:
    """The response for an error that HTTP itself defines, such as 404 or 405."""
    if not path.startswith(OPENAI):
        return errors.status_response(status, headers)
    phrase, error_type = errors.status_sentence(status, headers), errors.status_type(status)
    sentence = (status == 404 and _why_not_there(path)) or phrase
    if path.startswith(ANTHROPIC):
        return errors.json_error(anthropic.error_of(status, sentence, error_type), status, headers or {})
    if status == 405 and path == RESPONSES:
        sentence += ": WebSockets are not served here, and `stream` gives events"
    kind = "server_error" if status >= 500 else "invalid_request_error"
    told = {"message": sentence, "type": kind, "param": None, "code": None}
    return errors.json_error({"error": told, "error_type": error_type}, status, headers or {})


def _why_not_there(path: str) -> str | None:
    whole = f"{path}/"
    return next((told for start, told in MAYBE_NOT_SERVED.items() if whole.startswith(f"{start.rstrip('/')}/")), None)
