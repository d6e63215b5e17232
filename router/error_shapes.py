"""An error in the shape of the API that a path belongs to."""

from __future__ import annotations

from collections.abc import Mapping
from http import HTTPStatus

from starlette.responses import Response

from router import errors
from router.errors import RouterError
from router.openai.answers import error_body, status_of

OPENAI = "/v1/"  # what its paths begin with


def error_response(error: RouterError, path: str) -> Response:
    """The whole HTTP response for an error."""
    if not path.startswith(OPENAI):
        return errors.error_response(error)
    return errors.json_error(error_body(error), status_of(error), errors.headers_of(error))


def status_response(status: int, path: str, headers: Mapping[str, str] | None = None) -> Response:
    """The response for an error that HTTP itself defines, such as 404 or 405."""
    if not path.startswith(OPENAI):
        return errors.status_response(status, headers)
    phrase = HTTPStatus(status).phrase
    told = {"message": phrase, "type": "invalid_request_error", "param": None, "code": None}
    return errors.json_error({"error": told, "error_type": phrase.lower().replace(" ", "_")}, status, headers or {})
