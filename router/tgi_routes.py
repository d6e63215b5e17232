"""TGI's own routes: `/`, `/generate` and `/generate_stream`."""

from __future__ import annotations

from functools import partial
from typing import Any

from fastapi import FastAPI, Request
from starlette.responses import Response

from router import tgi
from router.api_document import documented
from router.samples import likeliest_first
from router.schemas import GenerateRequest
from router.serving import Handler, Services, collect, json_response, read, stream


def add_tgi_routes(app: FastAPI, services: Services) -> Handler:
    """Serve what asks the model for tokens as TGI's clients do. Returns what answers `/`."""

    async def generate(request: Request) -> Response:
        body = await read(request, services, GenerateRequest)
        return json_response(*await _generate(request, body, services))

    async def generate_stream(request: Request) -> Response:
        return await _stream(request, await read(request, services, GenerateRequest), services)

    async def compatible(request: Request) -> Response:
        body = await read(request, services, GenerateRequest)
        if body.stream:
            return await _stream(request, body, services)
        answer, headers = await _generate(request, body, services)
        return json_response([answer], headers)

    events, answer = tgi.StreamResponse, tgi.GenerateResponse
    listed = list[tgi.GenerateResponse]
    routes: list[tuple[str, Handler, dict[str, Any], str]] = [
        (
            "/",
            compatible,
            documented(GenerateRequest, listed, events=events),
            "A list of one answer, or a stream",
        ),
        ("/generate", generate, documented(GenerateRequest, answer), "The whole text at once"),
        ("/generate_stream", generate_stream, documented(GenerateRequest, events=events), "An event for each token"),
    ]
    for path, handler, said, summary in routes:
        app.post(path, summary=summary, response_class=Response, **said)(handler)
    return compatible


async def _generate(
    request: Request, body: GenerateRequest, services: Services
) -> tuple[tgi.GenerateResponse, dict[str, str]]:
    """Body and headers of a plain answer."""
    opened, answers = await collect(request, [tgi.asked(body)], services)
    best = likeliest_first(answers)[0].finished
    headers = tgi.response_headers(len(body.inputs), opened, [best], services.compute_type)
    return tgi.response_body(body, answers), headers


async def _stream(request: Request, body: GenerateRequest, services: Services) -> Response:
    headers = tgi.stream_headers(body, services.compute_type)
    return await stream(request, [tgi.asked(body)], services, partial(tgi.EventFrames, body), headers)
