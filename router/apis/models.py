"""`/v1/models`, for OpenAI's clients and for Anthropic's, which send `anthropic-version`: to each in its shape."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any

import orjson
from fastapi import FastAPI, Request
from starlette.responses import Response

from host.version import version
from router.apis.anthropic.answers import MessageError, MessageModel, MessageModels
from router.apis.errors import ANTHROPIC, error_response
from router.apis.openai import answers
from router.apis.openai.answers import ErrorAnswer, ServedModel, ServedModels
from router.apis.serving import Services
from router.errors import NotFound

VERSION = "anthropic-version"
Json = dict[str, Any]


def add_model_routes(app: FastAPI, services: Services) -> None:
    """Serve what clients ask before they choose a model. There is one, and any name of it is taken elsewhere."""
    name, created = services.config.model_id, answers.now()
    of_openai: ServedModel = {
        "id": name,
        "object": "model",
        "created": created,
        "owned_by": "lockstep",
        "root": name,
        "max_model_len": services.limits.max_total_tokens,
    }
    of_anthropic: MessageModel = {
        "type": "model",
        "id": name,
        "display_name": name,
        "created_at": datetime.fromtimestamp(created, UTC).isoformat(),
        "lifecycle": "active",
        "max_input_tokens": services.limits.max_input_length,
        "max_tokens": services.limits.max_total_tokens - 1,
    }
    listed: ServedModels = {"object": "list", "data": [of_openai]}
    page: MessageModels = {"data": [of_anthropic], "has_more": False, "first_id": name, "last_id": name}

    async def models(request: Request) -> Response:
        return _in_shape(request, listed, page)

    async def one_model(request: Request, name: str) -> Response:
        if name != services.config.model_id:
            error = NotFound(f"the model {name[:200]} is not served here: this server has {services.config.model_id}")
            return error_response(error, ANTHROPIC if VERSION in request.headers else request.url.path)
        return _in_shape(request, of_openai, of_anthropic)

    async def server_version() -> dict[str, str]:
        return {"version": version()}

    app.get("/version", summary="The server's version")(server_version)
    found: Json = {"response_class": Response, "responses": {200: {"model": ServedModels | MessageModels}}}
    app.get("/v1/models", summary="The model that is served", **found)(models)
    found["responses"] = {200: {"model": ServedModel | MessageModel}, 404: {"model": ErrorAnswer | MessageError}}
    app.get("/v1/models/{name:path}", summary="The same by its name", **found)(one_model)


def _in_shape(
    request: Request, of_openai: ServedModel | ServedModels, of_anthropic: MessageModel | MessageModels
) -> Response:
    body = of_anthropic if VERSION in request.headers else of_openai
    return Response(orjson.dumps(body), media_type="application/json", headers={"vary": VERSION})
