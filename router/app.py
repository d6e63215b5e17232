"""The HTTP application: which routes there are, their status, errors and documentation.

Left out: what the routes of an API do (`tgi_routes.py`, `openai/routes.py`, `serving.py`), and how a stream is written
(`event_stream.py`).
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager, suppress
from pathlib import Path
from typing import Any

import orjson
from fastapi import FastAPI, Request
from fastapi.openapi.docs import get_swagger_ui_html
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from starlette.responses import Response

from router import deadline
from router.accounts import AccountMetrics, Accounts
from router.anthropic.routes import add_anthropic_routes
from router.aside import TaskError
from router.aside.pool import Aside
from router.batcher import Batcher
from router.bodies import Bodies
from router.chat.reading import AnswerFormats
from router.chat.template import ChatTemplate
from router.client import ModelInfo, ShardError, Shards
from router.config import RouterConfig
from router.error_shapes import error_response, status_response
from router.errors import RouterError, Unhealthy, for_clients
from router.generation import Generator
from router.guard import ClientGone
from router.limits import Limits
from router.metrics import Metrics
from router.middleware import (
    HEADERS_OF_CLIENTS,
    ApiKeyMiddleware,
    CrossOriginMiddleware,
    HostMiddleware,
    RequestIdMiddleware,
)
from router.model_files import generation_defaults
from router.openai.responses.routes import add_responses_routes
from router.openai.routes import add_openai_routes
from router.permits import Permits
from router.platform_routes import add_platform_routes
from router.playground.routes import add_playground_routes
from router.probing import SharedHealth
from router.request_log import CLIENT_GONE, RequestLogMiddleware
from router.serving import Services
from router.static_file import StaticFile
from router.text import ModelTokenizer
from router.tgi_routes import add_tgi_routes
from router.token_routes import add_token_routes
from router.tracing import Tracer
from router.validation import Validator
from router.version import version

# The longest step that is still believed to make progress: a full prompt step of a large model on a slow CPU.
STUCK_STEP_MS = 60_000
STATIC = Path(__file__).parent / "static"
NUM_ASIDE = 2  # processes for what clients can make expensive


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
    chat_template: ChatTemplate | None = None,
) -> FastAPI:
    """The application. Its caller runs the batcher.

    accounts and chat_template: None stands for those of `config`, which may raise ValueError.
    """
    validator = Validator(tokenizer, limits, config.validation_workers, model.decoder_start)
    permits = Permits(limits.max_concurrent_requests, batcher.seconds_until_free)
    accounts = accounts if accounts is not None else accounts_of(config)
    metrics.add(AccountMetrics(accounts), *AccountMetrics.COUNTERS)
    generator = Generator(validator, batcher, metrics, tracer, permits)
    chat_template = chat_template if chat_template is not None else chat_template_of(config)
    services = Services(
        config=config,
        limits=limits,
        model=model,
        tokenizer=tokenizer,
        chat_template=chat_template,
        answer_formats=AnswerFormats.of(config.tool_call_parser, config.reasoning_parser, chat_template, tokenizer),
        aside=Aside(NUM_ASIDE),
        shards=shards,
        batcher=batcher,
        metrics=metrics,
        validator=validator,
        permits=permits,
        bodies=Bodies(config.max_unfinished_bytes, config.payload_limit),
        shared_health=SharedHealth(shards),
        generator=generator,
        generation_defaults=generation_defaults(Path(config.model_path)),
    )

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        warming = asyncio.create_task(_warm_up(services))
        yield
        warming.cancel()
        await services.aside.close()
        validator.close()
        tracer.close()

    app = _bare_app(lifespan)
    app.state.services = services
    _add_apis(app, services)
    _add_status_routes(app, services)
    _add_docs(app)
    _add_error_handlers(app)
    _add_middleware(app, config, accounts)
    return app


def _add_apis(app: FastAPI, services: Services) -> None:
    generate = add_tgi_routes(app, services)
    add_token_routes(app, services)
    add_platform_routes(app, services, generate, *add_openai_routes(app, services))
    add_responses_routes(app, services)
    add_anthropic_routes(app, services)


def _bare_app(lifespan: Callable[[FastAPI], AbstractAsyncContextManager[None]]) -> FastAPI:
    return FastAPI(
        title="Lockstep",
        version=version(),
        docs_url=None,
        redoc_url=None,
        openapi_url="/api-doc/openapi.json",
        lifespan=lifespan,
        telemetry={"tracing": False, "metrics": False, "logs": False, "auto_configure": False},  # tracing.py does it
    )


def accounts_of(config: RouterConfig) -> Accounts:
    """All API keys. Raises ValueError for a file that cannot be used."""
    return Accounts(config.api_key, Path(config.api_keys_file) if config.api_keys_file is not None else None)


def chat_template_of(config: RouterConfig) -> ChatTemplate:
    """The model's, or what the settings say. Raises ValueError for a file that cannot be used."""
    folder = Path(config.tokenizer_path or config.model_path)
    return ChatTemplate.load(folder, config.tokenizer_config_path, config.chat_template)


async def _warm_up(services: Services) -> None:
    """Have a process ready for chats, so that the first need not wait for one."""
    if services.chat_template.named:
        with suppress(TaskError, OSError):  # the first chat will try again, and say
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
    for path in ("/health", "/ping"):
        app.get(path, summary="200 with an empty body while requests can be answered", response_class=Response)(health)
    for path in ("/", "/health", "/ping"):
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
        "eos_token_ids": sorted(services.tokenizer.eos_ids),
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

    async def refused(request: Request, error: Any) -> Response:
        request.state.log.setdefault("reason", error.error_type)
        return error_response(error, request.url.path)

    async def http_error(request: Request, error: Any) -> Response:
        return status_response(error.status_code, request.url.path, error.headers)

    async def gone(_: Request, error: Exception) -> Response:
        return Response(status_code=CLIENT_GONE)

    async def bug(request: Request, error: Exception) -> Response:  # outside of all layers, whose headers are lost
        return status_response(500, request.url.path, {"x-request-id": request.state.request_id})

    app.add_exception_handler(RouterError, refused)
    app.add_exception_handler(HTTPException, http_error)
    app.add_exception_handler(ClientGone, gone)
    app.add_exception_handler(ClientDisconnect, gone)
    app.add_exception_handler(Exception, bug)


def _add_middleware(app: FastAPI, config: RouterConfig, accounts: Accounts) -> None:
    """Outermost last: an id on every answer, the log, then the Host, then CORS (preflights carry no key), the key."""
    if config.api_key is not None or config.api_keys_file is not None:
        app.add_middleware(ApiKeyMiddleware, accounts=accounts)
    if config.cors_allow_origin:
        app.add_middleware(
            CrossOriginMiddleware,
            allow_origins=config.cors_allow_origin,
            allow_methods=("GET", "POST"),
            allow_headers=(*HEADERS_OF_CLIENTS, deadline.HEADER),
        )
    if config.is_on_loopback:
        app.add_middleware(HostMiddleware, hostname=config.hostname)
    app.add_middleware(RequestLogMiddleware)
    app.add_middleware(RequestIdMiddleware)
