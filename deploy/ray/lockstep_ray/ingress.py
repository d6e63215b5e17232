"""The HTTP server of the application: Lockstep's own APIs, in front of all models and replicas."""

from __future__ import annotations

import hmac
import logging
import re
import secrets
import time
from collections.abc import AsyncGenerator, Mapping
from contextlib import aclosing
from dataclasses import asdict
from typing import Any

import orjson
from ray import serve
from ray.exceptions import ActorDiedError, ActorUnavailableError, RayActorError, RayTaskError
from ray.serve.exceptions import BackPressureError, DeploymentUnavailableError
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse

from lockstep_ray.errors import INVALID_KEY, NO_SUCH_MODEL, error_body
from lockstep_ray.relay import Answer, Counts, Head, Patience, Relay, ReplicaLost
from lockstep_ray.requests import RelayedRequest, adapter_of, is_served, model_of, read_body, size_of
from lockstep_ray.settings import Deployment, deployment_name

SAFE_REQUEST_ID = re.compile(r"[A-Za-z0-9_-]{1,64}")
# Headers of one connection, and those between replicas and balancers.
NOT_PASSED = frozenset({
    "host", "connection", "keep-alive", "transfer-encoding", "content-length", "authorization", "x-api-key", "upgrade",
    "te", "trailer", "expect", "proxy-authorization", "x-request-id",
})  # fmt: skip
LOST = (ActorDiedError, ActorUnavailableError, RayActorError)

logger = logging.getLogger("ray.serve")


class Handle:
    """Serve's handle of one deployment as `Replicas`."""

    def __init__(self, handle: Any) -> None:
        self._handle = handle.options(method_name="ask", stream=True)

    async def ask(self, ask: RelayedRequest) -> AsyncGenerator[Head | bytes, None]:
        """See `Replicas`."""
        pieces = self._handle.remote(ask)
        replica: str | None = None
        is_over = False
        try:
            async for piece in pieces:
                if isinstance(piece, Head):
                    replica = piece.replica
                yield piece
            is_over = True
        except ReplicaLost:
            raise
        except RayTaskError as error:
            cause = error.as_instanceof_cause() if not isinstance(error.cause, ReplicaLost) else error.cause
            raise (cause if isinstance(cause, ReplicaLost) else error) from None
        except LOST:
            raise ReplicaLost("the replica died", replica) from None
        except (BackPressureError, DeploymentUnavailableError) as error:
            raise ReplicaLost(f"no replica takes the request: {type(error).__name__}") from None
        finally:
            if not is_over:
                pieces.cancel()


class Ingress:
    """The deployment that has the route."""

    def __init__(self, settings: dict[str, Any], handles: Mapping[str, Any]) -> None:
        self._settings = settings_of = Deployment.model_validate(settings)
        self._by_name = settings_of.by_name()
        self._parents = settings_of.parents()
        self._default = settings_of.models[0].name
        self._counts = Counts()
        patience = Patience(most_tries=settings_of.most_tries, give_up_s=settings_of.give_up_s)
        self._relays = {name: Relay(Handle(handle), patience, self._counts) for name, handle in handles.items()}
        self._handles = dict(handles)
        self._created = int(time.time())

    async def counts(self) -> dict[str, int]:
        """What happened to requests since this ingress began."""
        return asdict(self._counts)

    async def counters(self, model: str, replica: str) -> dict[str, float]:
        """Of a replica's /metrics. replica: its name."""
        ask = RelayedRequest("GET", "/metrics", "", (), b"", 0, None, only=replica)
        named = next(name for name in self._handles if deployment_name(name) == deployment_name(model))
        found: dict[str, float] = await self._handles[named].counters.remote(ask)
        return found

    async def __call__(self, request: Request) -> Response:
        """Answer a request of HTTP."""
        given = request.headers.get("x-request-id", "")
        request_id = given if SAFE_REQUEST_ID.fullmatch(given) else secrets.token_hex(8)
        return self._refusal(request) or await self._answer(request, request_id)

    def _refusal(self, request: Request) -> Response | None:
        """The refusal of a request by its host, path or key, if any."""
        path, hosts = request.url.path, self._settings.hosts
        host = re.sub(r":\d+$", "", request.headers.get("host", "localhost"))
        if "*" not in hosts and host.lower() not in hosts:
            return refusal(path, 421, f"this Host is none of the `hosts` in app.yaml, which are {', '.join(hosts)}")
        if not is_served(request.method, path):
            return refusal(path, 404, f"{request.method} {path} is not served here")
        is_open = request.method in ("GET", "HEAD") and not path.startswith(("/v1/", "/info"))
        if self._settings.api_key and not is_open and not self._has_key(request):
            sentence = "Missing or wrong API key: send it as `Authorization: Bearer KEY`"
            return refusal(path, 401, sentence, INVALID_KEY)
        return None

    def _has_key(self, request: Request) -> bool:
        scheme, _, key = request.headers.get("authorization", "").partition(" ")
        given = key.strip() if scheme.lower() == "bearer" else request.headers.get("x-api-key", "").strip()
        return hmac.compare_digest(given.encode(), self._settings.api_key.encode())

    async def _answer(self, request: Request, request_id: str) -> Response:
        path = request.url.path
        if path == "/v1/models" or path.startswith("/v1/models/"):
            return self._models(path)
        body = await self._read(request)
        if body is None:
            return refusal(path, 413, f"the body is larger than {self._settings.payload_limit} bytes (payload_limit)")
        found = read_body(body)
        named = model_of(found) if path.startswith("/v1/") else None
        model = self._default if named is None else self._by_name.get(named)
        if model is None:
            sentence = f"The model `{named}` does not exist: /v1/models lists those that do"
            return refusal(path, 404, sentence, NO_SUCH_MODEL)
        headers = [(name, value) for name, value in request.headers.items() if _is_passed(name)]
        headers.append(("x-request-id", request_id))
        tokens, prefix = size_of(found, adapter_of(found, self._parents))
        ask = RelayedRequest(request.method, path, request.url.query, tuple(headers), body, tokens, prefix)
        return response_of(await self._relays[model].answer(ask))

    async def _read(self, request: Request) -> bytes | None:
        """The body; None where it is too large."""
        body = bytearray()
        async for piece in request.stream():
            body += piece
            if len(body) > self._settings.payload_limit:
                return None
        return bytes(body)

    def _parent(self, name: str) -> dict[str, str]:
        return {"parent": self._parents[name]} if name in self._parents else {}

    def _models(self, path: str) -> Response:
        listed = [
            {"id": name, "object": "model", "created": self._created, "owned_by": "lockstep"} | self._parent(name)
            for name in self._by_name
        ]
        if path == "/v1/models":
            return json_response({"object": "list", "data": listed})
        name = path.removeprefix("/v1/models/")
        found = next((one for one in listed if one["id"] == name), None)
        return (
            json_response(found) if found else refusal(path, 404, f"The model `{name}` does not exist", NO_SUCH_MODEL)
        )


def _is_passed(name: str) -> bool:
    return name not in NOT_PASSED and not name.startswith("x-lockstep-")


def response_of(answer: Answer) -> Response:
    """The same for Starlette, with the headers as they came."""
    if answer.rest is None:
        response = Response(answer.first, answer.status)
    else:
        response = StreamingResponse(_closed(answer.rest), answer.status)
    response.raw_headers = [
        (name.encode("latin-1"), value.encode("latin-1"))
        for name, value in answer.headers
        if answer.rest is None or name.lower() != "content-length"
    ]
    if answer.rest is None and "content-length" not in response.headers:
        response.headers["content-length"] = str(len(answer.first))
    return response


async def _closed(pieces: AsyncGenerator[bytes, None]) -> AsyncGenerator[bytes, None]:
    async with aclosing(pieces):
        async for piece in pieces:
            yield piece


def json_response(body: Any, status: int = 200) -> Response:
    """JSON."""
    return Response(orjson.dumps(body), status, media_type="application/json")


def refusal(path: str, status: int, sentence: str, code: str | None = None) -> Response:
    """An error in the shape of the path's API."""
    return json_response(error_body(path, status, sentence, code), status)


def deployment_of(settings: Deployment, handles: Mapping[str, Any]) -> Any:
    """The bound ingress."""
    return serve.deployment(
        Ingress,
        name="ingress",
        num_replicas=settings.num_ingresses,
        max_ongoing_requests=settings.max_ongoing_requests,
        ray_actor_options={"num_cpus": 0},
        graceful_shutdown_timeout_s=max(one.graceful_shutdown_timeout_s for one in settings.models),
        graceful_shutdown_wait_loop_s=0.5,
    ).bind(settings.model_dump(), dict(handles))
