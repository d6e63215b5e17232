"""Which models a request may name, and the routes by which adapters come and go while the server runs.

`/v1/models` is for OpenAI's clients and for Anthropic's, which send `anthropic-version`: to each in its shape. The
latter two routes are vLLM's. They are closed unless a key is an administrator's or the server was started so, and what
they load lies below the folder of `--adapter-dir`.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Sequence
from datetime import UTC, datetime
from typing import Any

import orjson
from fastapi import FastAPI, Request
from pydantic import Field
from starlette.responses import PlainTextResponse, Response

from router.apis.anthropic.answers import MessageError, MessageModel, MessageModels
from router.apis.document import ERROR_STATUSES, add_post
from router.apis.errors import ANTHROPIC, error_response
from router.apis.openai import answers
from router.apis.openai.answers import ErrorAnswer, ServedModel, ServedModels
from router.apis.serving import Services, account_of, caller_of, read
from router.errors import Forbidden, RouterError
from router.http.guard import ClientConnection
from router.requests.schemas import Lenient

VERSION = "anthropic-version"
Json = dict[str, Any]

logger = logging.getLogger(__name__)


class LoadAdapter(Lenient):
    """The body of `/v1/load_lora_adapter`."""

    lora_name: str = Field(description="What requests will call it.")
    lora_path: str = Field(description="Its folder, below that of `--adapter-dir`: a whole path, or from there.")
    load_inplace: bool | None = Field(default=None, description="Whether another of this name may be there already.")


class UnloadAdapter(Lenient):
    """The body of `/v1/unload_lora_adapter`."""

    lora_name: str = Field(description="What requests call it.")


class Listing:
    """The model and its adapters, in the shapes of both APIs."""

    def __init__(self, services: Services) -> None:
        self._base = services.adapters.base
        self._limits = services.limits
        self._created = answers.now()

    def of_openai(self, name: str) -> ServedModel:
        """One of them."""
        told: ServedModel = {
            "id": name,
            "object": "model",
            "created": self._created,
            "owned_by": "lockstep",
            "root": self._base,
            "max_model_len": self._limits.max_total_tokens,
        }
        return told if name == self._base else told | {"parent": self._base}

    def of_anthropic(self, name: str) -> MessageModel:
        """The same."""
        return {
            "type": "model",
            "id": name,
            "display_name": name,
            "created_at": datetime.fromtimestamp(self._created, UTC).isoformat(),
            "lifecycle": "active",
            "max_input_tokens": self._limits.max_input_length,
            "max_tokens": self._limits.max_total_tokens - 1,
        }

    def one(self, name: str, *, is_anthropic: bool) -> ServedModel | MessageModel:
        """One of them."""
        return self.of_anthropic(name) if is_anthropic else self.of_openai(name)

    def page(self, names: Sequence[str], *, is_anthropic: bool) -> ServedModels | MessageModels:
        """All of them."""
        if not is_anthropic:
            return {"object": "list", "data": list(map(self.of_openai, names))}
        first, last = (names[0], names[-1]) if names else (None, None)
        data = list(map(self.of_anthropic, names))
        return {"data": data, "has_more": False, "first_id": first, "last_id": last}


def add_model_routes(app: FastAPI, services: Services) -> None:
    """Serve what clients ask before they choose a model."""
    listing, adapters = Listing(services), services.adapters

    def names_for(request: Request) -> Iterable[str]:
        allowed = caller_of(request, services).adapters
        if not adapters.is_on or adapters.serves_base(allowed):
            yield adapters.base
        yield from adapters.served(allowed)

    async def models(request: Request) -> Response:
        return _json(listing.page(list(names_for(request)), is_anthropic=VERSION in request.headers))

    async def one_model(request: Request, name: str) -> Response:
        is_anthropic = VERSION in request.headers
        try:
            if name != adapters.base or name not in names_for(request):
                await services.generator.find_adapter(name, caller_of(request, services))
        except RouterError as error:
            return error_response(error, ANTHROPIC if is_anthropic else request.url.path)
        return _json(listing.one(name, is_anthropic=is_anthropic))

    found: Json = {"response_class": Response, "responses": {200: {"model": ServedModels | MessageModels}}}
    app.get("/v1/models", summary="The model that is served, and its adapters", **found)(models)
    found["responses"] = {200: {"model": ServedModel | MessageModel}, 404: {"model": ErrorAnswer | MessageError}}
    app.get("/v1/models/{name:path}", summary="One of them by its name", **found)(one_model)


def add_adapter_routes(app: FastAPI, services: Services) -> None:
    """Serve what loads and unloads adapters."""

    async def load(request: Request) -> Response:
        _refuse_strangers(request, services)
        body = await read(request, services, LoadAdapter)
        with services.permits.hold(account_of(request)), ClientConnection.of(request.scope).needed():
            in_place = body.load_inplace is True
            adapter = await services.adapters.load(body.lora_name, body.lora_path, in_place=in_place)
        logger.info("loaded the adapter %s", adapter.name, extra={"key": adapter.key.hex()})
        return PlainTextResponse(f"Success: LoRA adapter '{adapter.name}' added successfully.")

    async def unload(request: Request) -> Response:
        _refuse_strangers(request, services)
        body = await read(request, services, UnloadAdapter)
        with services.permits.hold(account_of(request)):
            await services.adapters.unload(body.lora_name)
        logger.info("unloaded the adapter %s", body.lora_name)
        return PlainTextResponse(f"Success: LoRA adapter '{body.lora_name}' removed successfully.")

    told: Json = {"text": True, "errors": ErrorAnswer, "statuses": (*ERROR_STATUSES, 403)}
    summary = "vLLM's: have a name stand for an adapter; for administrators"
    add_post(app, "/v1/load_lora_adapter", load, summary, LoadAdapter, **told)
    summary = "vLLM's: have a name stand for no adapter any more; for administrators"
    add_post(app, "/v1/unload_lora_adapter", unload, summary, UnloadAdapter, **told)


def _refuse_strangers(request: Request, services: Services) -> None:
    """Raises Forbidden."""
    account = account_of(request)
    if services.config.allow_adapter_changes or (account is not None and account.key.admin):
        return
    raise Forbidden(
        "adapters are loaded and unloaded with a key that has `admin` in --api-keys-file, or where the server was "
        "started with --allow-adapter-changes"
    )


def _json(body: ServedModel | ServedModels | MessageModel | MessageModels) -> Response:
    return Response(orjson.dumps(body), media_type="application/json", headers={"vary": VERSION})
