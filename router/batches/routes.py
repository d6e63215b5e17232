"""OpenAI's `/v1/batches`, and what a server with a `batch_dir` does beside its requests."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from fastapi import FastAPI, Request
from starlette.responses import Response

from router.accounts import Account, Accounts
from router.api_document import documented
from router.batches.answering import Answering
from router.batches.batches import Batches
from router.batches.documents import BatchList, BatchObject, CreateBatch
from router.batches.file_routes import add_file_routes, documented_in, owner_of
from router.batches.pages import LIMIT_PARAMETERS, page
from router.batches.store import Bounds, Store, disk_trouble
from router.config import RouterConfig
from router.metrics import Metrics
from router.openai.documents import ErrorAnswer
from router.serving import Services, json_response, read
from router.tracing import Tracer

PAGE, MOST_PAGE = 20, 100


def store_of(config: RouterConfig) -> Store | None:
    """The folder of batches, if there is one. Raises ValueError where it cannot be used."""
    if config.batch_dir is None:
        return None
    bounds = Bounds(config.batch_max_file_bytes, config.batch_max_files, config.batch_max_bytes)
    return Store(Path(config.batch_dir), bounds)


def add_batch_routes(
    app: FastAPI, services: Services, store: Store, accounts: Accounts, metrics: Metrics, tracer: Tracer
) -> Batches:
    """Serve files and batches. Returns the batches, which the caller starts and closes."""
    answering = Answering(services, metrics, tracer)
    batches = Batches(store, answering, _finder(accounts), services.config)
    add_file_routes(app, services, store)

    async def create(request: Request) -> Response:
        body = await read(request, services, CreateBatch)
        body.refuse_what_is_not_served()
        try:
            return json_response(batches.seen(await batches.create(owner_of(request), body)))
        except OSError as error:
            raise disk_trouble(error) from None

    async def listed(request: Request) -> Response:
        owner = owner_of(request)
        mine = [batch for batch in store.batches.values() if batch["owner"] == owner]
        return json_response(page(mine, request.query_params, PAGE, MOST_PAGE, batches.seen))

    async def one(request: Request, id: str) -> Response:
        return json_response(batches.seen(store.batch(owner_of(request), id)))

    async def cancel(request: Request, id: str) -> Response:
        try:
            return json_response(batches.seen(await batches.cancel(owner_of(request), id)))
        except OSError as error:
            raise disk_trouble(error) from None

    said = documented(CreateBatch, BatchObject, errors=ErrorAnswer, statuses=(400, 404, 413, 415, 429, 500, 503))
    said["openapi_extra"].pop("parameters")
    app.post("/v1/batches", summary="Have a file of requests answered", response_class=Response, **said)(create)
    of_list = documented_in(BatchList, 400, openapi_extra={"parameters": LIMIT_PARAMETERS})
    app.get("/v1/batches", summary="Your batches, the newest first", **of_list)(listed)
    app.get("/v1/batches/{id}", summary="How far a batch is", **documented_in(BatchObject, 404))(one)
    of_cancel = documented_in(BatchObject, 400, 404, 503)
    app.post("/v1/batches/{id}/cancel", summary="Stop a batch", **of_cancel)(cancel)
    return batches


def _finder(accounts: Accounts) -> Callable[[str], Account | None]:
    return lambda name: next((account for account in accounts if account.name == name), None)
