"""TGI's own routes: `/`, `/generate` and `/generate_stream`."""

from __future__ import annotations

from functools import partial
from typing import Any

from fastapi import FastAPI, Request
from starlette.responses import Response

from router.apis.document import documented
from router.apis.serving import Handler, Services, collect, json_response, read, stream
from router.apis.tgi.answers import GenerateResponse, response_body, response_headers
from router.apis.tgi.requests import GenerateRequest, prompt_request_of
from router.apis.tgi.streams import EventFrames, StreamResponse, stream_headers
from router.requests.samples import likeliest_first


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

    events, answer = StreamResponse, GenerateResponse
    listed = list[GenerateResponse]
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
) -> tuple[GenerateResponse, dict[str, str]]:
    """Body and headers of a plain answer."""
    opened, answers = await collect(request, [prompt_request_of(body)], services)
    best = likeliest_first(answers)[0].finished
    headers = response_headers(len(body.inputs), opened, [best], services.compute_type)
    return response_body(body, answers), headers


async def _stream(request: Request, body: GenerateRequest, services: Services) -> Response:
    headers = stream_headers(body, services.compute_type)
    return await stream(request, [prompt_request_of(body)], services, partial(EventFrames, body), headers)
