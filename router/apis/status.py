"""What the server says of itself: its health, the model and its limits, its version and metrics.

What the model's publisher says about generating is reported and not applied: as in TGI, a request that names no
sampling parameter gets the most likely tokens, whatever the model.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Literal

import orjson
from fastapi import FastAPI
from pydantic import Field
from starlette.responses import PlainTextResponse, Response
from typing_extensions import TypedDict

from host.version import version
from router.apis.playground.routes import add_playground_routes
from router.apis.serving import Services
from router.errors import ErrorResponse, Unhealthy, for_clients
from router.shards.client import ShardError
from router.text.tokenizer import read_json

# The longest step that is still believed to make progress: a full prompt step of a large model on a slow CPU.
STUCK_STEP_MS = 60_000
DEFAULTS = (
    "do_sample",
    "temperature",
    "top_k",
    "top_p",
    "typical_p",
    "repetition_penalty",
    "max_new_tokens",
    "max_length",
)


def add_status_routes(app: FastAPI, services: Services) -> None:
    async def health() -> Response:
        await check_health(services)
        return Response()

    async def info() -> Response:
        return Response(orjson.dumps(info_body(services, defaults)), media_type="application/json")

    async def metrics() -> Response:
        return Response(services.metrics.render(), media_type="text/plain; version=0.0.4; charset=utf-8")

    async def server_version() -> dict[str, str]:
        return {"version": version()}

    defaults = generation_defaults(Path(services.config.model_path))
    add_playground_routes(app, services, health)
    app.head("/", include_in_schema=False)(health)  # a probe, whatever it accepts
    alive: dict[str, Any] = {"response_class": Response, "responses": {503: {"model": ErrorResponse}}}
    for path in ("/health", "/ping"):
        app.get(path, summary="200 with an empty body while requests can be answered", **alive)(health)
    of_info: dict[str, Any] = {"response_class": Response, "responses": {200: {"model": InfoBody}}}
    app.get("/info", summary="The model and the limits", **of_info)(info)
    app.get("/metrics", summary="Prometheus metrics", response_class=PlainTextResponse)(metrics)
    app.get("/version", summary="The server's version")(server_version)


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
    speculate: int
    adapters: Annotated[
        int | None, Field(description="That are known, of a folder those that were asked for; null: there can be none.")
    ]
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


def info_body(services: Services, defaults: dict[str, Any]) -> InfoBody:
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
        "speculate": limits.speculate,
        "adapters": len(services.adapters) if services.adapters.is_on else None,
        "max_client_batch_size": config.max_client_batch_size,
        "validation_workers": config.validation_workers,
        "num_shard": model.world_size,
        "quantize": model.quantize,
        "eos_token_ids": sorted(services.tokenizer.eos_ids),
        "generation_defaults": defaults,
        "decode_graphs": cache.captured,
        "decode_graph_bytes": cache.graph_bytes,
        "measured_products": list(cache.products),
        "clocks": cache.clocks or None,
        "router": "lockstep-router",
        "version": version(),
        "sha": None,
        "docker_label": None,
    }


def generation_defaults(model_folder: Path) -> dict[str, Any]:
    """What generation_config.json sets of the parameters that a request can set too."""
    given = read_json(model_folder / "generation_config.json")
    return {name: given[name] for name in DEFAULTS if given.get(name) is not None}
