"""The HTTP application: which routes there are, their status, errors and documentation.

Left out: what the routes of an API do (`router/apis`), and how a stream is written (`router/http/responses.py`).
"""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any

from fastapi import FastAPI, Request
from fastapi.openapi.docs import get_swagger_ui_html
from fastapi.routing import APIRoute
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from starlette.responses import Response
from starlette.routing import Match

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
from router.apis.models import add_adapter_routes, add_model_routes
from router.apis.openai.responses.routes import add_responses_routes
from router.apis.openai.routes import add_openai_routes
from router.apis.platforms import add_platform_routes
from router.apis.serving import DEADLINE_HEADER, Services
from router.apis.status import add_status_routes
from router.apis.tgi.bodies import COUNT_HEADERS
from router.apis.tgi.routes import add_tgi_routes
from router.apis.tgi.tokens import add_token_routes
from router.batching.batcher import Batcher
from router.chat.template import ChatTemplate
from router.config import RouterConfig, most_adapter_bytes
from router.errors import RouterError, Unavailable
from router.grammars.compiler import Compiler
from router.http.bodies import Bodies
from router.http.guard import ClientGone
from router.http.responses import StaticFile
from router.requests.adapters import Adapters, Shelf
from router.requests.generation import Generator
from router.requests.validation import Validator
from router.sandbox import TaskError
from router.sandbox.pool import Sandbox
from router.sandbox.workers import Workers
from router.scheduling.grammar import Matching
from router.scheduling.limits import Limits
from router.shards.client import KvCache, ModelInfo, Shards, SharedHealth
from router.telemetry.metrics import Metrics
from router.telemetry.request_log import CLIENT_GONE, RequestLogMiddleware
from router.telemetry.tracing import Tracer
from router.text.tokenizer import ModelTokenizer

STATIC = Path(__file__).parent / "documentation"
NUM_ASIDE = 2  # processes for what clients can make expensive
CHAT_NICENESS = 5  # of those for chats: a third of a shard's share of a core, for a few milliseconds of each request

logger = logging.getLogger(__name__)


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
    shelf: Shelf | None = None,
) -> FastAPI:
    """The application. Its caller runs the batcher.

    shelf: where adapters that are loaded are read; None: the first request for one finds out. accounts
    and chat_template: None stands for those of `config`, which may raise ValueError.
    """
    compiler = compiler_of(config, limits, tokenizer, batcher.matching)
    workers = Workers(config.validation_workers)
    validator = Validator(tokenizer, limits, workers, model.decoder_start, compiler)
    permits = Permits(limits.max_concurrent_requests, batcher.seconds_until_free)
    accounts = accounts if accounts is not None else accounts_of(config)
    metrics.add(AccountMetrics(accounts), *AccountMetrics.COUNTERS)
    adapters = adapters_of(config, model.world_size, shelf)
    metrics.adapters.expect(adapters.names())
    generator = Generator(validator, batcher, metrics, tracer, permits, adapters)
    template = chat_template if chat_template is not None else chat_template_of(config)
    services = Services(
        config=config,
        limits=limits,
        model=model,
        cache=cache,
        tokenizer=tokenizer,
        chat_template=template,
        aside=Sandbox(NUM_ASIDE, tasks=template.tasks, niceness=CHAT_NICENESS),
        shards=shards,
        batcher=batcher,
        metrics=metrics,
        workers=workers,
        validator=validator,
        permits=permits,
        bodies=Bodies(config.max_unfinished_bytes, config.payload_limit),
        shared_health=SharedHealth(shards),
        generator=generator,
        adapters=adapters,
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
    warming = asyncio.ensure_future(_warm_up(services))
    yield
    warming.cancel()
    await asyncio.wait([warming])
    await asyncio.gather(services.aside.close(), compiler.close())
    services.workers.close()
    tracer.close()


def _add_routes(app: FastAPI, services: Services) -> None:
    """Every API's, and what describes them."""
    config = services.config
    generate = add_tgi_routes(app, services)
    add_token_routes(app, services)
    add_model_routes(app, services)
    add_adapter_routes(app, services)
    add_platform_routes(app, services, generate, *add_openai_routes(app, services))
    add_responses_routes(app, services)
    add_anthropic_routes(app, services)
    add_status_routes(app, services)
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


def adapters_of(config: RouterConfig, num_shards: int, shelf: Shelf | None) -> Adapters:
    """The adapters that requests may name."""
    return Adapters(
        config.own_names,
        config.adapters,
        config.adapter_dir,
        is_on=config.has_adapters,
        most_bytes=most_adapter_bytes(config.adapter_memory, num_shards),
        shelf=shelf,
    )


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
            "special": tokenizer.declared,
        }
    )


def chat_template_of(config: RouterConfig) -> ChatTemplate:
    """The model's, or what the settings say. Raises ValueError for a file that cannot be used."""
    folder = Path(config.tokenizer_path or config.model_path)
    return ChatTemplate.load(folder, config.tokenizer_config_path, config.chat_template)


async def _warm_up(services: Services) -> None:
    """Have a process ready for chats, so that the first need not wait for one, and say if they will be refused."""
    if services.chat_template.named:
        with suppress(TaskError, Unavailable, OSError):  # the first chat will try again, and say
            await services.aside.warm_up()
            if (refused := await services.chat_template.refusal(services.aside)) is not None:
                logger.warning(refused)


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
            allow_headers=(*HEADERS_OF_CLIENTS, DEADLINE_HEADER),
            expose_headers=("x-request-id", "request-id", "retry-after", *COUNT_HEADERS),
        )
    if config.is_on_loopback:
        app.add_middleware(HostMiddleware, hostname=config.hostname)
    app.add_middleware(RequestLogMiddleware)
    app.add_middleware(RequestIdMiddleware)
