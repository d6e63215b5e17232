"""The OpenAPI document: what FastAPI would find out if the routes let it parse bodies and write answers.

Answers are TypedDicts: mypy holds what builds them to their shapes, which are here made schemas of.

`add_post` adds a route with what it says of itself; `api_document` adds what holds for all: keys, ids, and errors from
around the routes. It is made once, at start.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Any, Literal

import orjson
from fastapi import FastAPI
from pydantic import TypeAdapter
from starlette.responses import Response

from router.apis.anthropic.answers import MessageError
from router.apis.errors import ANTHROPIC
from router.apis.middleware import OPEN_PATHS, PATHS_OF_ANTHROPIC
from router.apis.openai.answers import ErrorAnswer
from router.apis.serving import DEADLINE_HEADER, MOST_DEADLINE_MS, Handler
from router.errors import ErrorResponse
from router.requests import schemas

Json = dict[str, Any]
SECURITY, OF_ANTHROPIC = "ApiKey", "AnthropicApiKey"
SECURITY_SCHEMES: dict[str, Json] = {
    SECURITY: {"type": "http", "scheme": "bearer"},
    OF_ANTHROPIC: {"type": "apiKey", "in": "header", "name": "x-api-key"},
}
# Of requests with a body. 408 and 431 are the HTTP layer's: they come in TGI's shape on every route.
ERROR_STATUSES = (400, 404, 413, 415, 422, 424, 429, 500, 503, 504)
DEADLINE = {
    "name": DEADLINE_HEADER,
    "in": "header",
    "required": False,
    "description": "What the request may take, waiting included, in milliseconds.",
    "schema": {"type": "integer", "minimum": 1, "maximum": MOST_DEADLINE_MS},
}
REQUEST_ID = {
    "x-request-id": {
        "description": "The request's own, if it sent a harmless one.",
        "required": True,
        "schema": {"type": "string", "pattern": "^[A-Za-z0-9_-]{1,64}$"},
    }
}


def add_post(
    app: FastAPI,
    path: str,
    handler: Handler,
    summary: str,
    bodies: type[schemas.Strict] | Sequence[type[schemas.Strict]],
    answer: Any = None,
    *,
    events: Any = None,
    last_data: str = "",
    errors: Any = ErrorResponse,
    text: bool = False,
    statuses: Sequence[int] = ERROR_STATUSES,
) -> None:
    """Serve a route that takes JSON.

    bodies: one of these. answer: the JSON that answers; events: what a stream's events are, if there may be one;
    last_data: what its last event may say in place of JSON; errors: TGI's alone may be a 422; text: whether a sentence
    answers.
    """
    every = [_inlined(body, "validation") for body in ([bodies] if isinstance(bodies, type) else bodies)]
    content = {"application/json": {"schema": every[0] if len(every) == 1 else {"anyOf": every}}}
    good: Json = {}
    if text:
        good["content"] = {"text/plain": {"schema": {"type": "string"}}}
    if answer is not None:
        good["model"] = answer
    if events is not None:
        both = [_inlined(kind, "serialization") for kind in (events, errors)]
        data: Json = {"type": "string", "contentMediaType": "application/json", "contentSchema": {"anyOf": both}}
        if last_data:
            data = {"anyOf": [{"const": last_data}, data]}
        event = {"type": "object", "required": ["data"], "properties": {"data": data}}
        good["content"] = {"text/event-stream": {"itemSchema": event}}
    refused = [status for status in statuses if status != 422 or errors is ErrorResponse]
    responses: dict[int | str, Json] = {200: good, **{status: _in_json(errors) for status in refused}}
    extra = {"requestBody": {"required": True, "content": content}, "parameters": [DEADLINE]}
    added = app.post(path, summary=summary, response_class=Response, responses=responses, openapi_extra=extra)
    added(handler)


@cache
def _inlined(shape: Any, mode: Literal["validation", "serialization"]) -> Json:
    return inlined(TypeAdapter(shape).json_schema(mode=mode))


def inlined(schema: Json) -> Json:
    """A JSON schema with its definitions where they are used: the document has no place for them."""
    definitions = schema.pop("$defs", {})

    def resolve(part: Any) -> Any:
        if isinstance(part, list):
            return [resolve(one) for one in part]
        if not isinstance(part, dict):
            return part
        if "$ref" in part:
            return resolve(definitions[part["$ref"].rpartition("/")[2]])
        return {name: resolve(value) for name, value in part.items() if name != "discriminator"}

    found: Json = resolve(schema)
    return found


def api_document(app: FastAPI, *, has_keys: bool, is_on_loopback: bool) -> bytes:
    """The whole document, of the routes that the application has now."""
    document = app.openapi()
    components = document.setdefault("components", {})
    components.setdefault("schemas", {}).update(_schemas_of(ErrorResponse, ErrorAnswer, MessageError))
    if has_keys:
        components["securitySchemes"] = SECURITY_SCHEMES
    for name in ("HTTPValidationError", "ValidationError"):  # the framework's, which no route of ours answers with
        components["schemas"].pop(name, None)
    around = [500, *([421] if is_on_loopback else [])]
    for path, operations in document["paths"].items():
        for method, operation in operations.items():
            if "requestBody" not in operation:
                operation["responses"].pop("422", None)
            is_closed = has_keys and not (method == "get" and path in OPEN_PATHS)
            if is_closed:
                schemes = (SECURITY, OF_ANTHROPIC) if path.startswith(PATHS_OF_ANTHROPIC) else (SECURITY,)
                operation["security"] = [{scheme: []} for scheme in schemes]  # any of them
            for status in [*around, *([401] if is_closed else [])]:
                operation["responses"].setdefault(str(status), _error(path))
            for response in operation["responses"].values():
                response["headers"] = REQUEST_ID
    return orjson.dumps(document)


def _schemas_of(*shapes: type) -> Json:
    return {shape.__name__: _inlined(shape, "serialization") for shape in shapes}


def _error(path: str) -> Json:
    """What the layers around the routes answer, in the shape of the path's API."""
    shape: type = ErrorAnswer if path.startswith("/v1/") else ErrorResponse
    if path.startswith(ANTHROPIC):
        shape = MessageError
    return {"description": "Refused before a route has seen it", **_in_json(shape)}


def _in_json(shape: type) -> Json:
    """By reference: the framework would make schemas of a model for each status of each route, which takes long."""
    return {"content": {"application/json": {"schema": {"$ref": f"#/components/schemas/{shape.__name__}"}}}}
