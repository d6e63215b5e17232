"""Routes of the playground: the page at `/` for browsers, its files, and the running batch that it shows."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

from fastapi import FastAPI, Request
from starlette.responses import Response

from router.apis.playground.files import NAMES, PAGE, LoadedFile, wants_page
from router.apis.serving import Services, account_of, json_response
from router.errors import ErrorResponse

Health = Callable[[], Awaitable[Response]]


def add_playground_routes(app: FastAPI, services: Services, health: Health) -> None:
    """Serve the page at `/` to clients that ask for HTML, and `health` to all others, as TGI does."""
    page = LoadedFile(PAGE)

    async def root(request: Request) -> Response:
        if wants_page(request.headers.getlist("accept")):
            return page.response()
        answer = await health()
        answer.headers["vary"] = "Accept"
        return answer

    async def batch(request: Request) -> Response:
        look = services.batcher.view.look(account_of(request))
        return json_response({"state": _state(services)} | look, {"cache-control": "no-store"})

    summary = "200 with an empty body while requests can be answered; for browsers, the playground"
    unhealthy: dict[int | str, dict[str, Any]] = {503: {"model": ErrorResponse}}
    app.get("/", summary=summary, response_class=Response, responses=unhealthy)(root)
    app.get("/playground/batch", include_in_schema=False)(batch)
    for name in NAMES:
        _add_file(app, name)


def _add_file(app: FastAPI, name: str) -> None:
    loaded = LoadedFile(name)

    async def file() -> Response:
        return loaded.response()

    app.get(f"/playground/{name}", include_in_schema=False)(file)


def _state(services: Services) -> str:
    batcher = services.batcher
    if batcher.outage is not None:
        return "restarting"
    return "stopping" if batcher.is_leaving or not batcher.is_accepting else "serving"
