"""The playground: the page at `/` for browsers, what it loads, and the running batch that it shows.

Files come from memory, each with the headers that hold it in. The policy lets the page load from this server alone, run
nothing that stands in the page itself, and be part of no other page; with trusted types no script can make markup of a
text, so what a model writes stays text.
"""

from __future__ import annotations

import re
from collections.abc import Awaitable, Callable, Iterable
from pathlib import Path
from typing import Any

from fastapi import FastAPI, Request
from starlette.responses import Response

from router.apis.serving import Services, account_of, json_response
from router.errors import ErrorResponse
from router.http.responses import StaticFile

FOLDER = Path(__file__).parent
PAGE = "page.html"
MEDIA_TYPES = {".css": "text/css", ".html": "text/html", ".js": "text/javascript"}
NAMES = ("app.css", "app.js", "answer.js", "code.js", "live.js", "parameters.js", "server.js", "theme.js")
# Without a key: the page asks for it, and what it then shows comes with the key alone.
OPEN_PATHS = frozenset(f"/playground/{name}" for name in NAMES)
POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; img-src data:; base-uri 'none'; "
    "form-action 'none'; frame-ancestors 'none'; require-trusted-types-for 'script'; trusted-types 'none'"
)
HEADERS = {
    "cache-control": "no-cache",
    "content-security-policy": POLICY,
    "cross-origin-resource-policy": "same-origin",
    "referrer-policy": "no-referrer",
    "vary": "Accept",
    "x-content-type-options": "nosniff",
}
NEVER = re.compile(r"q\s*=\s*0(\.0*)?")


class LoadedFile:
    """A file of this folder, read once."""

    def __init__(self, name: str) -> None:
        path = FOLDER / name
        self._content = path.read_bytes()
        self._media_type = MEDIA_TYPES[path.suffix]

    def response(self) -> Response:
        """It as an answer."""
        return StaticFile(self._content, media_type=self._media_type, headers=HEADERS)


def wants_page(accept: Iterable[str]) -> bool:
    """Whether these Accept headers name HTML itself, as browsers' do and those of probes and API clients do not."""
    for media_range in ",".join(accept).lower().split(","):
        name, *parameters = (part.strip() for part in media_range.split(";"))
        if name == "text/html":
            return not any(map(NEVER.fullmatch, parameters))
    return False


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
