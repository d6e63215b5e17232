"""The HTTP application: which routes there are, their status, errors and documentation.

Left out: what the routes of an API do (`router/apis`), and how a stream is written (`router/http/event_stream.py`).
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Annotated, Any, Literal

import orjson
from fastapi import FastAPI, Request
from fastapi.openapi.docs import get_swagger_ui_html
from fastapi.routing import APIRoute
from pydantic import Field
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from starlette.responses import PlainTextResponse, Response
from starlette.routing import Match
from typing_extensions import TypedDict

from host.version import version
from router.accounts import AccountMetrics, Accounts, Permits
from router.apis.anthropic.routes import add_anthropic_routes
from router.apis.document import api_document
from router.apis.errors import error_response, status_response
from router.apis.middleware import (
    HEADERS_OF_CLIENTS,
    ApiKeyMiddleware,
    CrossOriginMiddleware,
    HostMiddleware,
    RequestIdMiddleware,
)
from router.apis.models import add_model_routes
from router.apis.openai.responses.routes import add_responses_routes
from router.apis.openai.routes import add_openai_routes
from router.apis.platforms import add_platform_routes
from router.apis.playground.routes import add_playground_routes
from router.apis.serving import Services
from router.apis.tgi.answers import COUNT_HEADERS
from router.apis.tgi.routes import add_tgi_routes
from router.apis.tgi.tokens import add_token_routes
from router.batching.batcher import Batcher
from router.chat.template import ChatTemplate
from router.config import RouterConfig
from router.errors import ErrorResponse, RouterError, Unavailable, Unhealthy, for_clients
from router.grammars.compiler import Compiler
from router.http import deadline
from router.http.bodies import Bodies
from router.http.guard import ClientGone
from router.http.whole_answers import StaticFile
from router.requests.generation import Generator
from router.requests.validation import Validator
from router.sandbox import TaskError
from router.sandbox.pool import Sandbox
from router.sandbox.workers import Workers
from router.scheduling.grammar import Matching
from router.scheduling.limits import Limits
from router.shards.client import KvCache, ModelInfo, ShardError, Shards, SharedHealth
from router.telemetry.metrics import Metrics
from router.telemetry.request_log import CLIENT_GONE, RequestLogMiddleware
from router.telemetry.tracing import Tracer
from router.text.model_files import generation_defaults
from router.text.tokenizer import ModelTokenizer

# The longest step that is still believed to make progress: a full prompt step of a large model on a slow CPU.
STUCK_STEP_MS = 60_000
STATIC = Path(__file__).parent / "documentation"
NUM_ASIDE = 2  # processes for what clients can make expensive


def create_app(
    config: RouterConfig,
    *,
    limits: Limits,
    model: ModelInfo,
    cache: KvCache,
    tokenizer: ModelTokenizer,
    shards: Shards,
    batcher: Batcher,
    metrics: Metrics,
    tracer: Tracer,
    accounts: Accounts | None = None,
    chat_template: ChatTemplate | None = None,
) -> FastAPI:
    """The application. Its caller runs the batcher.

    accounts and chat_template: None stands for those of `config`, which may raise ValueError.
    """
    compiler = compiler_of(config, limits, tokenizer, batcher.matching)
    workers = Workers(config.validation_workers)
    validator = Validator(tokenizer, limits, workers, model.decoder_start, compiler)
    permits = Permits(limits.max_concurrent_requests, batcher.seconds_until_free)
    accounts = accounts if accounts is not None else accounts_of(config)
    metrics.add(AccountMetrics(accounts), *AccountMetrics.COUNTERS)
    generator = Generator(validator, batcher, metrics, tracer, permits)
    services = Services(
        config=config,
        limits=limits,
        model=model,
        cache=cache,
        tokenizer=tokenizer,
        chat_template=chat_template if chat_template is not None else chat_template_of(config),
        aside=Sandbox(NUM_ASIDE),
        shards=shards,
        batcher=batcher,
        metrics=metrics,
        workers=workers,
        validator=validator,
        permits=permits,
        bodies=Bodies(config.max_unfinished_bytes, config.payload_limit),
        shared_health=SharedHealth(shards),
        generator=generator,
        generation_defaults=generation_defaults(Path(config.model_path)),
    )

    app = _bare_app(partial(_lifespan, services=services, compiler=compiler, tracer=tracer))
    app.state.services = services
    _add_routes(app, services)
    _add_error_handlers(app)
    _add_middleware(app, config, accounts)
    return app


@asynccontextmanager
async def _lifespan(app: FastAPI, services: Services, compiler: Compiler, tracer: Tracer) -> AsyncIterator[None]:
    """What runs beside the requests, from before the first to after the last."""
    warming = asyncio.create_task(_warm_up(services))
    yield
    warming.cancel()
    await asyncio.gather(services.aside.close(), compiler.close())
    services.workers.close()
    tracer.close()


def _add_routes(app: FastAPI, services: Services) -> None:
    """Every API's, and what describes them."""
    config = services.config
    generate = add_tgi_routes(app, services)
    add_token_routes(app, services)
    add_model_routes(app, services)
    add_platform_routes(app, services, generate, *add_openai_routes(app, services))
    add_responses_routes(app, services)
    add_anthropic_routes(app, services)
    _add_status_routes(app, services)
    _add_docs(app, api_document(app, has_keys=_has_keys(config), is_on_loopback=config.is_on_loopback))
    _add_heads(app)


def _bare_app(lifespan: Callable[[FastAPI], AbstractAsyncContextManager[None]]) -> FastAPI:
    return FastAPI(
        title="Lockstep",
        version=version(),
        docs_url=None,
        redoc_url=None,
        openapi_url=None,
        lifespan=lifespan,
        telemetry={"tracing": False, "metrics": False, "logs": False, "auto_configure": False},  # tracing.py does it
    )


def accounts_of(config: RouterConfig) -> Accounts:
    """All API keys. Raises ValueError for a file that cannot be used."""
    return Accounts(config.api_key, Path(config.api_keys_file) if config.api_keys_file is not None else None)


def compiler_of(config: RouterConfig, limits: Limits, tokenizer: ModelTokenizer, matching: Matching | None) -> Compiler:
    """What compiles grammars, or refuses them where they are not served."""
    if config.disable_grammar_support:
        return Compiler(refusal="leave `grammar` out, or start the server without --disable-grammar-support")
    if matching is None:
        return Compiler()
    if not tokenizer.eos_ids:
        return Compiler(refusal="the model has no end token, so leave `grammar` out")
    tasks = "router.grammars.matcher", matchers_of(config, limits, tokenizer)
    return Compiler(Sandbox(1, tasks=tasks), on_grammar=matching.start)


def matchers_of(config: RouterConfig, limits: Limits, tokenizer: ModelTokenizer) -> str:
    """The arguments of `router.grammars.matcher.Matchers`, as JSON."""
    path = Path(config.tokenizer_path or config.model_path) / "tokenizer.json"
    return json.dumps(
        {
            "tokenizer_path": str(path.absolute()),
            "vocab_size": limits.vocab_size,
            "eos_ids": sorted(tokenizer.eos_ids),
        }
    )


def chat_template_of(config: RouterConfig) -> ChatTemplate:
    """The model's, or what the settings say. Raises ValueError for a file that cannot be used."""
    folder = Path(config.tokenizer_path or config.model_path)
    return ChatTemplate.load(folder, config.tokenizer_config_path, config.chat_template)


async def _warm_up(services: Services) -> None:
    """Have a process ready for chats, so that the first need not wait for one."""
    if services.chat_template.named:
        with suppress(TaskError, Unavailable, OSError):  # the first chat will try again, and say
            await services.aside.warm_up()


# -------------------------------------------------------------------------------------------------- status


def _add_status_routes(app: FastAPI, services: Services) -> None:
    async def health() -> Response:
        await check_health(services)
        return Response()

    async def info() -> Response:
        return Response(orjson.dumps(info_body(services)), media_type="application/json")

    async def metrics() -> Response:
        return Response(services.metrics.render(), media_type="text/plain; version=0.0.4; charset=utf-8")

    add_playground_routes(app, services, health)
    app.head("/", include_in_schema=False)(health)  # a probe, whatever it accepts
    alive: dict[str, Any] = {"response_class": Response, "responses": {503: {"model": ErrorResponse}}}
    for path in ("/health", "/ping"):
        app.get(path, summary="200 with an empty body while requests can be answered", **alive)(health)
    of_info: dict[str, Any] = {"response_class": Response, "responses": {200: {"model": InfoBody}}}
    app.get("/info", summary="The model and the limits", **of_info)(info)
    app.get("/metrics", summary="Prometheus metrics", response_class=PlainTextResponse)(metrics)


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


class InfoBody(TypedDict):
    """The answer of `/info`: the fields of all TGI versions, and our own."""

    model_id: str
    model_sha: str | None
    model_dtype: str
    model_device_type: Literal["cpu", "cuda"]
    model_pipeline_tag: str | None
    max_concurrent_requests: int
    max_best_of: int
    max_stop_sequences: int
    max_top_n_tokens: int
    max_input_length: int
    max_input_tokens: int
    max_total_tokens: int
    waiting_served_ratio: float
    max_batch_prefill_tokens: int
    max_batch_total_tokens: int
    max_waiting_tokens: int
    max_batch_size: int | None
    kv_admission: str
    max_client_batch_size: int
    validation_workers: int
    num_shard: int
    quantize: str | None
    eos_token_ids: list[int]
    generation_defaults: Annotated[
        dict[str, Any], Field(description="What the model's publisher says; it is not applied.")
    ]
    decode_graphs: Annotated[
        str, Field(description="Which steps are captured, and how long that took when shards started.")
    ]
    decode_graph_bytes: Annotated[int, Field(description="Of the device's memory, of each shard; 0: not known.")]
    measured_products: Annotated[list[str], Field(description="Kernel of each measured product, with its GB/s.")]
    clocks: Annotated[str | None, Field(description="Of a GPU while it decoded before the first request.")]
    router: str
    version: str
    sha: str | None
    docker_label: str | None


def info_body(services: Services) -> InfoBody:
    """What they are."""
    config, limits, model, cache = services.config, services.limits, services.model, services.cache
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
        "kv_admission": limits.kv_admission,
        "max_client_batch_size": config.max_client_batch_size,
        "validation_workers": config.validation_workers,
        "num_shard": model.world_size,
        "quantize": model.quantize,
        "eos_token_ids": sorted(services.tokenizer.eos_ids),
        "generation_defaults": services.generation_defaults,
        "decode_graphs": cache.captured,
        "decode_graph_bytes": cache.graph_bytes,
        "measured_products": list(cache.products),
        "clocks": cache.clocks or None,
        "router": "lockstep-router",
        "version": version(),
        "sha": None,
        "docker_label": None,
    }


# ----------------------------------------------------------------------------------------- around the routes


def _add_docs(app: FastAPI, document: bytes) -> None:
    """The API's document at TGI's path and at the usual one, and its page with a copy of Swagger UI: no browser of ours
    calls a third party.

    The files are kept in memory, once: a client that does not read one holds no descriptor and no copy of it.
    """

    async def docs() -> Response:
        return get_swagger_ui_html(
            openapi_url="/openapi.json",
            title="Lockstep API",
            swagger_js_url="/docs/swagger-ui-bundle.js",
            swagger_css_url="/docs/swagger-ui.css",
            swagger_favicon_url="data:,",
            swagger_ui_parameters={"validatorUrl": None},  # its default is a service on the internet
        )

    def static(path: str, content: bytes, media_type: str) -> None:
        async def file() -> Response:
            return StaticFile(content, media_type=media_type)

        app.get(path, include_in_schema=False)(file)

    app.get("/docs", include_in_schema=False)(docs)
    for path in ("/openapi.json", "/api-doc/openapi.json"):
        static(path, document, "application/json")
    for name, media_type in (("swagger-ui-bundle.js", "text/javascript"), ("swagger-ui.css", "text/css")):
        static(f"/docs/{name}", (STATIC / name).read_bytes(), media_type)


def _add_heads(app: FastAPI) -> None:
    """Every route that answers GET answers HEAD, which load balancers send; the HTTP layer leaves the body out."""
    routes = [route for route in app.routes if isinstance(route, APIRoute)]
    has_own = {route.path for route in routes if "HEAD" in (route.methods or ())}
    for route in routes:
        if route.methods is not None and "GET" in route.methods and route.path not in has_own:
            route.methods.add("HEAD")


def _add_error_handlers(app: FastAPI) -> None:
    """Every answer that is not a success has the same JSON shape, wherever it was raised."""

    async def refused(request: Request, error: Any) -> Response:
        request.state.log.setdefault("reason", error.error_type)
        return error_response(error, request.url.path)

    async def http_error(request: Request, error: Any) -> Response:
        headers = {"Allow": _allowed(request)} if error.status_code == 405 else error.headers
        return status_response(error.status_code, request.url.path, headers)

    async def gone(_: Request, error: Exception) -> Response:
        return Response(status_code=CLIENT_GONE)

    async def bug(request: Request, error: Exception) -> Response:  # outside of all layers, whose headers are lost
        return status_response(500, request.url.path, {"x-request-id": request.state.request_id})

    app.add_exception_handler(RouterError, refused)
    app.add_exception_handler(HTTPException, http_error)
    app.add_exception_handler(ClientGone, gone)
    app.add_exception_handler(ClientDisconnect, gone)
    app.add_exception_handler(Exception, bug)


def _allowed(request: Request) -> str:
    """Methods of all routes of a path; the framework names those of the first."""
    found: set[str] = set()
    for route in request.app.routes:
        if isinstance(route, APIRoute) and route.matches(request.scope)[0] is not Match.NONE:
            found |= route.methods or set()
    return ", ".join(sorted(found))


def _has_keys(config: RouterConfig) -> bool:
    return config.api_key is not None or config.api_keys_file is not None


def _add_middleware(app: FastAPI, config: RouterConfig, accounts: Accounts) -> None:
    """Outermost last: an id on every answer, the log, then the Host, then CORS (preflights carry no key), the key."""
    if _has_keys(config):
        app.add_middleware(ApiKeyMiddleware, accounts=accounts)
    if config.cors_allow_origin:
        app.add_middleware(
            CrossOriginMiddleware,
            allow_origins=config.cors_allow_origin,
            allow_methods=("GET", "POST"),
            allow_headers=(*HEADERS_OF_CLIENTS, deadline.HEADER),
            expose_headers=("x-request-id", "retry-after", *COUNT_HEADERS),
        )
    if config.is_on_loopback:
        app.add_middleware(HostMiddleware, hostname=config.hostname)
    app.add_middleware(RequestLogMiddleware)
    app.add_middleware(RequestIdMiddleware)
