"""ASGI layers around the routes: request ids, the Host header, other origins and the API key.

Plain ASGI callables. Starlette's `BaseHTTPMiddleware` would pass every token of every stream through one more task.
"""

from __future__ import annotations

import re
import secrets
from ipaddress import ip_address

from starlette.datastructures import Headers, MutableHeaders
from starlette.middleware.cors import CORSMiddleware
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from router.accounts import Account, Accounts
from router.apis.errors import ANTHROPIC, OPENAI, error_response, json_error, status_type
from router.apis.playground import routes as playground
from router.errors import Unauthorized, WrongHost

SAFE_REQUEST_ID = re.compile(r"[A-Za-z0-9_-]{1,64}")
HOST = re.compile(r"(\[(?P<ipv6>[0-9A-Fa-f:.]+)\]|(?P<name>[^:\[\]]+))(:[0-9]*)?")
# Open without a key: probes, and the documentation and the playground with what they load, which is the same for all.
# Everything else is closed by default.
OPEN_PATHS = playground.OPEN_PATHS | {
    "/", "/health", "/ping", "/docs", "/docs/swagger-ui.css", "/docs/swagger-ui-bundle.js", "/api-doc/openapi.json",
    "/openapi.json",
}  # fmt: skip
# What a page of an allowed origin may send: OpenAI's and Anthropic's clients for browsers send all of these.
HEADERS_OF_CLIENTS = (
    *("content-type", "authorization", "x-request-id", "x-api-key", "idempotency-key"),
    *("anthropic-version", "anthropic-beta", "anthropic-dangerous-direct-browser-access"),
    *("anthropic-workspace-id", "anthropic-user-profile-id"),
    *("openai-organization", "openai-project", "openai-beta"),
    *(
        f"x-stainless-{name}"
        for name in (
            "lang package-version os arch runtime runtime-version retry-count timeout helper-method helper poll-helper "
            "custom-poll-interval"
        ).split()
    ),
)
# What Anthropic's clients call, with a key in a header of their own and the request's id in another.
PATHS_OF_ANTHROPIC = (ANTHROPIC, "/v1/models")


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
                headers = MutableHeaders(scope=message)
                headers["x-request-id"] = request_id
                if scope["path"].startswith(PATHS_OF_ANTHROPIC):
                    headers["request-id"] = request_id  # what Anthropic's clients report
            await send(message)

        await self._app(scope, receive, send_with_id)


class HostMiddleware:
    """For a server on loopback: refuses requests whose Host header is no name of this machine.

    A web page may point a name of its own at 127.0.0.1 and then call the server as its own origin (DNS rebinding). Its
    requests still carry that name. A request without a Host is from no browser.
    """

    def __init__(self, app: ASGIApp, hostname: str) -> None:
        self._app = app
        self._hostname = hostname

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and not all(map(self._is_own, Headers(scope=scope).getlist("host"))):
            await error_response(WrongHost(self._hostname), scope["path"])(scope, receive, send)
        else:
            await self._app(scope, receive, send)

    def _is_own(self, host: str) -> bool:
        match = HOST.fullmatch(host)
        if match is None:
            return False
        name = (match["ipv6"] or match["name"]).lower().removesuffix(".")
        if name in ("localhost", self._hostname.lower()) or name.endswith(".localhost"):
            return True
        try:
            return ip_address(name).is_loopback
        except ValueError:
            return False


class CrossOriginMiddleware(CORSMiddleware):
    """Starlette's, whose refusals are text, with refusals in the schema of all errors."""

    def preflight_response(self, request_headers: Headers) -> Response:
        """Whether a page of this origin may send this request."""
        answer = super().preflight_response(request_headers)
        if answer.status_code < 400:
            return answer
        headers = {name: value for name, value in answer.headers.items() if not name.startswith("content-")}
        reason = bytes(answer.body).decode()  # such as `Disallowed CORS origin, headers`
        told = f"{reason}: allowed are origins of --cors-allow-origin, GET and POST, and what known clients send"
        return json_error({"error": told, "error_type": status_type(answer.status_code)}, answer.status_code, headers)


class ApiKeyMiddleware:
    """Asks for `Authorization: Bearer KEY` but on GET and HEAD of OPEN_PATHS, and notes whose key it is.

    On paths of OpenAI's and Anthropic's clients `x-api-key: KEY` will do.
    """

    def __init__(self, app: ASGIApp, accounts: Accounts) -> None:
        self._app = app
        self._accounts = accounts

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and not self._is_open(scope):
            account = self._account(scope)
            if account is None:
                await error_response(Unauthorized(), scope["path"])(scope, receive, send)
                return
            scope.setdefault("state", {})["account"] = account
        await self._app(scope, receive, send)

    def _is_open(self, scope: Scope) -> bool:
        return scope["method"] in ("GET", "HEAD") and scope["path"] in OPEN_PATHS

    def _account(self, scope: Scope) -> Account | None:
        scheme, _, key = _header(scope, b"authorization").partition(b" ")
        account = self._accounts.find(key.strip())
        if account is not None and scheme.lower() == b"bearer":
            return account
        if scope["path"].startswith(OPENAI):
            return self._accounts.find(_header(scope, b"x-api-key").strip())
        return None


def _header(scope: Scope, name: bytes) -> bytes:
    """The first one of this name; empty where there is none."""
    return next((value for key, value in scope["headers"] if key == name), b"")
