"""The HTTP application: routes, disconnects, errors, documentation.

A route reads its body, opens a request in the batching loop, and answers from it. A client that goes away frees its
place whether it streamed or not, which no framework does for a plain response. Left out: how a stream is written
(`event_stream.py`), and the shapes of bodies and events (`schemas.py`, `tgi.py`).
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import ExitStack, asynccontextmanager, closing
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import orjson
from fastapi import FastAPI, Request
from fastapi.openapi.docs import get_swagger_ui_html
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from starlette.responses import Response

from router import deadline, schemas, tgi
from router.accounts import Account, AccountMetrics, Accounts
from router.batcher import Batcher
from router.bodies import Bodies
from router.client import ModelInfo, ShardError, Shards
from router.config import RouterConfig
from router.entry import Failed
from router.errors import (
    RouterError,
    Unhealthy,
    UnsupportedMedia,
    error_response,
    for_clients,
    status_response,
)
from router.event_stream import EventStream, first_events
from router.generation import Generator, OpenRequest, Permits
from router.guard import ClientConnection, ClientGone
from router.limits import Limits
from router.metrics import Metrics
from router.middleware import ApiKeyMiddleware, CrossOriginMiddleware, HostMiddleware, RequestIdMiddleware
from router.model_files import generation_defaults
from router.plain_answer import PlainAnswer
from router.probing import SharedHealth
from router.schemas import GenerateRequest
from router.static_file import StaticFile
from router.text import ModelTokenizer
from router.tracing import Tracer
from router.validation import Validator
from router.version import version

CLIENT_GONE = 499  # nginx's; nobody reads it
# The longest step that is still believed to make progress: a full prompt step of a large model on a slow CPU.
STUCK_STEP_MS = 60_000
STATIC = Path(__file__).parent / "static"

Handler = Callable[[Request], Awaitable[Response]]


@dataclass(frozen=True)
class Services:
    """What the routes work with."""

    config: RouterConfig
    limits: Limits
    model: ModelInfo
    shards: Shards
    batcher: Batcher
    metrics: Metrics
    validator: Validator
    permits: Permits
    bodies: Bodies
    shared_health: SharedHealth
    generator: Generator
    eos_ids: frozenset[int]
    generation_defaults: dict[str, Any]

    @property
    def compute_type(self) -> str:
        """Number and kind of the shards' devices, for TGI's header `x-compute-type`."""
        return f"{self.model.world_size}-{self.model.device}"


def create_app(
    config: RouterConfig,
    *,
    limits: Limits,
    model: ModelInfo,
    tokenizer: ModelTokenizer,
    shards: Shards,
    batcher: Batcher,
    metrics: Metrics,
    tracer: Tracer,
    accounts: Accounts | None = None,
) -> FastAPI:
    """The application. Its caller runs the batcher. accounts: None stands for those of `config`."""
    validator = Validator(tokenizer, limits, config.validation_workers, model.decoder_start)
    permits = Permits(limits.max_concurrent_requests, batcher.seconds_until_free)
    accounts = accounts if accounts is not None else accounts_of(config)
    metrics.add(AccountMetrics(accounts), *AccountMetrics.COUNTERS)
    generator = Generator(validator, batcher, metrics, tracer, permits)
    services = Services(
        config=config,
        limits=limits,
        model=model,
        shards=shards,
        batcher=batcher,
        metrics=metrics,
        validator=validator,
        permits=permits,
        bodies=Bodies(config.max_unfinished_bytes, config.payload_limit),
        shared_health=SharedHealth(shards),
        generator=generator,
        eos_ids=tokenizer.eos_ids,
        generation_defaults=generation_defaults(Path(config.model_path)),
    )

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        yield
        validator.close()
        tracer.close()

    app = FastAPI(
        title="Lockstep",
        version=version(),
        docs_url=None,
        redoc_url=None,
        openapi_url="/api-doc/openapi.json",
        lifespan=lifespan,
        telemetry={"tracing": False, "metrics": False, "logs": False, "auto_configure": False},  # tracing.py does it
    )
    app.state.services = services
    _add_generation_routes(app, services)
    _add_status_routes(app, services)
    _add_docs(app)
    _add_error_handlers(app)
    _add_middleware(app, config, accounts)
    return app


def accounts_of(config: RouterConfig) -> Accounts:
    """All API keys. Raises ValueError for a file that cannot be used."""
    return Accounts(config.api_key, Path(config.api_keys_file) if config.api_keys_file is not None else None)


# ---------------------------------------------------------------------------------------------- generation


def _add_generation_routes(app: FastAPI, services: Services) -> None:
    async def generate(request: Request) -> Response:
        body = await _read(request, services)
        answer, headers = await _generate(request, body, services)
        return PlainAnswer(orjson.dumps(answer), headers)

    async def generate_stream(request: Request) -> Response:
        return await _stream(request, await _read(request, services), services)

    async def compatible(request: Request) -> Response:
        body = await _read(request, services)
        if body.stream:
            return await _stream(request, body, services)
        answer, headers = await _generate(request, body, services)
        return PlainAnswer(orjson.dumps([answer]), headers)

    async def tokenize(request: Request) -> Response:
        body = await _read(request, services)
        shape = partial(tgi.tokenized_body, body.inputs)
        with ClientConnection.of(request.scope).needed():
            answer = await services.generator.tokenise(body.inputs, shape, **_asked_by(request, services))
        return PlainAnswer(answer)

    routes: list[tuple[str, Handler, Any, str]] = [
        ("/", compatible, list[schemas.GenerateResponse], "A list with one answer, or a stream if `stream` is true"),
        ("/generate", generate, schemas.GenerateResponse, "The whole text at once"),
        ("/generate_stream", generate_stream, schemas.StreamResponse, "Server-sent events, one for each token"),
        ("/tokenize", tokenize, list[schemas.TokenizedBody], "The tokens of the prompt"),
    ]
    for path, handler, model, summary in routes:
        app.post(path, summary=summary, response_class=Response, **_documented(model))(handler)


def _documented(model: Any) -> dict[str, Any]:
    """What FastAPI would find out if the routes let it parse the body."""
    body = GenerateRequest.model_json_schema()
    body["properties"]["parameters"] = schemas.GenerateParameters.model_json_schema()
    body.pop("$defs", None)
    statuses = (400, 401, 413, 415, 421, 422, 424, 429, 500, 503, 504)
    errors = {status: {"model": schemas.ErrorResponse} for status in statuses}
    content = {"application/json": {"schema": body}}
    return {
        "responses": {200: {"model": model}, **errors},
        "openapi_extra": {"requestBody": {"required": True, "content": content}},
    }


async def _read(request: Request, services: Services) -> GenerateRequest:
    """The body. Raises RouterError. A key's request is counted first: to refuse one must cost next to nothing."""
    if (account := _account(request)) is not None:
        account.count_request()
    media_type = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if not (media_type == "application/json" or media_type.endswith("+json")):
        raise UnsupportedMedia("the body must be JSON: send the header `Content-Type: application/json`")
    peer = request.client.host if request.client is not None else ""
    return schemas.parse(GenerateRequest, await services.bodies.read(request, account or peer))


async def _open(request: Request, body: GenerateRequest, services: Services, *, is_stream: bool) -> OpenRequest:
    return await services.generator.open(
        body,
        request_id=request.state.request_id,
        headers=request.headers,
        is_stream=is_stream,
        **_asked_by(request, services),
    )


def _asked_by(request: Request, services: Services) -> dict[str, Any]:
    """Whose request it is, and how long it may take from now on. Raises ValidationError."""
    timeout_s = deadline.timeout_of(request.headers.get(deadline.HEADER), services.config.request_timeout)
    return {"account": _account(request), "timeout_s": timeout_s}


def _account(request: Request) -> Account | None:
    """Whose key the request came with; None where the server has no keys."""
    account: Account | None = getattr(request.state, "account", None)
    return account


async def _generate(
    request: Request, body: GenerateRequest, services: Services
) -> tuple[dict[str, Any], dict[str, str]]:
    """Body and headers of a plain answer."""
    with ClientConnection.of(request.scope).needed():
        with closing(await _open(request, body, services, is_stream=False)) as opened:
            answers = await opened.answers()
    headers = tgi.response_headers(body, opened, answers[0].finished, services.compute_type)
    return tgi.response_body(body, answers), headers


async def _stream(request: Request, body: GenerateRequest, services: Services) -> Response:
    """A stream whose first events are there already. Raises RouterError if they are a failure."""
    with ExitStack() as undo:
        with ClientConnection.of(request.scope).needed():
            opened = undo.enter_context(closing(await _open(request, body, services, is_stream=True)))
            first = await first_events(opened)
        if first and isinstance(first[0], Failed):
            raise first[0].error
        headers = tgi.stream_headers(body, services.compute_type)
        stream = EventStream(opened, tgi.EventFrames(body, opened), first, headers)
        undo.pop_all()  # from here on the response closes the request
    return stream


# -------------------------------------------------------------------------------------------------- status


def _add_status_routes(app: FastAPI, services: Services) -> None:
    async def health() -> Response:
        await check_health(services)
        return Response()

    async def info() -> Response:
        return Response(orjson.dumps(info_body(services)), media_type="application/json")

    async def metrics() -> Response:
        return Response(services.metrics.render(), media_type="text/plain; version=0.0.4; charset=utf-8")

    for path in ("/", "/health", "/ping"):
        app.get(path, summary="200 with an empty body while requests can be answered", response_class=Response)(health)
        app.head(path, include_in_schema=False)(health)  # what load balancers send
    app.get("/info", summary="The model and the limits", response_class=Response)(info)
    app.get("/metrics", summary="Prometheus metrics", response_class=Response)(metrics)


async def check_health(services: Services) -> None:
    """Raises Unhealthy unless the batching loop and every shard answer, and the shards make progress."""
    if not services.batcher.is_accepting:
        raise Unhealthy("unhealthy: not accepting requests")
    if services.batcher.is_leaving:
        raise Unhealthy("unhealthy: the server is stopping or restarting")
    if services.batcher.outage is not None:
        cause = for_clients(str(services.batcher.outage))
        raise Unhealthy(f"unhealthy: the model shards are being started again: {cause}")
    try:
        health = await services.shared_health.health()
    except ShardError as error:
        raise Unhealthy(f"unhealthy: {for_clients(str(error))}") from None
    if health.oldest_step_ms > STUCK_STEP_MS:
        raise Unhealthy(f"unhealthy: a step has been running for {health.oldest_step_ms} ms on shard {health.rank}")


def info_body(services: Services) -> dict[str, Any]:
    """The fields of all TGI versions, and our own."""
    config, limits, model = services.config, services.limits, services.model
    return {
        "model_id": config.model_id,
        "model_sha": config.model_sha,
        "model_dtype": f"torch.{model.dtype}",
        "model_device_type": "cpu" if model.device == "cpu" else "cuda",
        "model_pipeline_tag": None,
        "max_concurrent_requests": limits.max_concurrent_requests,
        "max_best_of": limits.max_best_of,
        "max_stop_sequences": limits.max_stop_sequences,
        "max_top_n_tokens": limits.max_top_n_tokens,
        "max_input_length": limits.max_input_length,
        "max_input_tokens": limits.max_input_length,
        "max_total_tokens": limits.max_total_tokens,
        "waiting_served_ratio": limits.waiting_served_ratio,
        "max_batch_prefill_tokens": limits.max_batch_prefill_tokens,
        "max_batch_total_tokens": services.batcher.limits.max_batch_total_tokens,
        "max_waiting_tokens": limits.max_waiting_tokens,
        "max_batch_size": limits.max_batch_size,
        "max_client_batch_size": config.max_client_batch_size,
        "validation_workers": config.validation_workers,
        "num_shard": model.world_size,
        "quantize": model.quantize,
        "eos_token_ids": sorted(services.eos_ids),
        "generation_defaults": services.generation_defaults,
        "router": "lockstep-router",
        "version": version(),
        "sha": None,
        "docker_label": None,
    }


# ----------------------------------------------------------------------------------------- around the routes


def _add_docs(app: FastAPI) -> None:
    """The API page with its own copy of Swagger UI: no browser of ours calls a third party.

    The files are kept in memory, once: a client that does not read one holds no descriptor and no copy of it.
    """

    async def docs() -> Response:
        return get_swagger_ui_html(
            openapi_url="/api-doc/openapi.json",
            title="Lockstep API",
            swagger_js_url="/docs/swagger-ui-bundle.js",
            swagger_css_url="/docs/swagger-ui.css",
            swagger_favicon_url="data:,",
            swagger_ui_parameters={"validatorUrl": None},  # its default is a service on the internet
        )

    def static(name: str, media_type: str) -> None:
        content = (STATIC / name).read_bytes()

        async def file() -> Response:
            return StaticFile(content, media_type=media_type)

        app.get(f"/docs/{name}", include_in_schema=False)(file)

    app.get("/docs", include_in_schema=False)(docs)
    static("swagger-ui-bundle.js", "text/javascript")
    static("swagger-ui.css", "text/css")


def _add_error_handlers(app: FastAPI) -> None:
    """Every answer that is not a success has the same JSON shape, whoever raised it."""

    async def refused(_: Request, error: Any) -> Response:
        return error_response(error)

    async def http_error(_: Request, error: Any) -> Response:
        return status_response(error.status_code, error.headers)

    async def gone(_: Request, error: Exception) -> Response:
        return Response(status_code=CLIENT_GONE)

    async def bug(_: Request, error: Exception) -> Response:
        return status_response(500)

    app.add_exception_handler(RouterError, refused)
    app.add_exception_handler(HTTPException, http_error)
    app.add_exception_handler(ClientGone, gone)
    app.add_exception_handler(ClientDisconnect, gone)
    app.add_exception_handler(Exception, bug)


def _add_middleware(app: FastAPI, config: RouterConfig, accounts: Accounts) -> None:
    """Outermost last: an id on every answer, then the Host, then CORS (preflights carry no key), then the key."""
    if config.api_key is not None or config.api_keys_file is not None:
        app.add_middleware(ApiKeyMiddleware, accounts=accounts)
    if config.cors_allow_origin:
        app.add_middleware(
            CrossOriginMiddleware,
            allow_origins=config.cors_allow_origin,
            allow_methods=("GET", "POST"),
            allow_headers=("content-type", "authorization", "x-request-id", deadline.HEADER),
        )
    if config.is_on_loopback:
        app.add_middleware(HostMiddleware, hostname=config.hostname)
    app.add_middleware(RequestIdMiddleware)
