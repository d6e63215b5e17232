"""ASGI layers around the routes: request ids and the API key.

Plain ASGI callables. Starlette's `BaseHTTPMiddleware` would pass every token of every stream through one more task.
"""

from __future__ import annotations

import re
import secrets

from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from router.accounts import Account, Accounts
from router.errors import Unauthorized, error_response

SAFE_REQUEST_ID = re.compile(r"[A-Za-z0-9_-]{1,64}")
# Open without a key: probes, and the documentation page with what it loads. Everything else is closed by default.
OPEN_PATHS = frozenset(
    {"/", "/health", "/ping", "/docs", "/docs/swagger-ui.css", "/docs/swagger-ui-bundle.js", "/api-doc/openapi.json"}
)


class RequestIdMiddleware:
    """Gives every request an id for logs and clients: the client's own if it is harmless. Never a key to anything."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        given = Headers(scope=scope).get("x-request-id", "")
        request_id = given if SAFE_REQUEST_ID.fullmatch(given) else secrets.token_hex(8)
        scope.setdefault("state", {})["request_id"] = request_id

        async def send_with_id(message: Message) -> None:
            if message["type"] == "http.response.start":
                MutableHeaders(scope=message)["x-request-id"] = request_id
            await send(message)

        await self._app(scope, receive, send_with_id)


class ApiKeyMiddleware:
    """Asks for `Authorization: Bearer KEY` everywhere but on GETs of OPEN_PATHS, and notes whose key it is."""

    def __init__(self, app: ASGIApp, accounts: Accounts) -> None:
        self._app = app
        self._accounts = accounts

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and not self._is_open(scope):
            account = self._account(scope)
            if account is None:
                await error_response(Unauthorized())(scope, receive, send)
                return
            scope.setdefault("state", {})["account"] = account
        await self._app(scope, receive, send)

    def _is_open(self, scope: Scope) -> bool:
        return scope["method"] == "GET" and scope["path"] in OPEN_PATHS

    def _account(self, scope: Scope) -> Account | None:
        given = next((value for name, value in scope["headers"] if name == b"authorization"), b"")
        scheme, _, key = given.partition(b" ")
        account = self._accounts.find(key.strip())
        return account if scheme.lower() == b"bearer" else None
