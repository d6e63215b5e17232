"""TGI's own routes, `/`, `/generate` and `/generate_stream`, and what writes the events of their streams.

A token's frame is written by hand, because there is one for every token of every stream.
"""

from __future__ import annotations

from functools import partial
from typing import NotRequired

from fastapi import FastAPI, Request
from orjson import dumps
from starlette.responses import Response
from typing_extensions import TypedDict

from router.apis.document import add_post
from router.apis.serving import Handler, Services, collect, json_response, read, stream
from router.apis.tgi.bodies import (
    GenerateRequest,
    GenerateResponse,
    TokenBody,
    prompt_request_of,
    response_body,
    response_headers,
    token_body,
    visible_text,
)
from router.http.responses import frame
from router.requests.generation import OpenRequest, likeliest_first
from router.scheduling.request import Event, Failed, Finished, Token
from router.text.generated import FinishReason

# A token of a stream but for the last, without candidates: index, token id, text, log-probability, special.
TOKEN_FRAME = (
    b'data: {"index":%d,"token":{"id":%d,"text":%b,"logprob":%b,"special":%b},"generated_text":null,"details":null}\n\n'
)


class StreamDetailsBody(TypedDict):
    """What `details` asks for, with the last token of a stream."""

    finish_reason: FinishReason
    generated_tokens: int
    seed: int | None
    input_length: int


class StreamResponse(TypedDict):
    """One server-sent event."""

    index: int
    token: TokenBody
    top_tokens: NotRequired[list[TokenBody]]
    generated_text: str | None
    details: StreamDetailsBody | None


class EventFrames:
    """Turns the events of one stream into server-sent events, numbered from 1."""

    def __init__(self, request: GenerateRequest, opened: OpenRequest) -> None:
        self._request = request
        self._opened = opened
        self._index = 0

    def write(self, index: int, events: list[Event]) -> bytes:
        """All frames for these events of the one sequence."""
        if len(events) == 1 and isinstance(events[0], Token):
            return self._token_frame(events[0])  # so it nearly always is
        last = events[-1]
        if isinstance(last, Finished):
            *tokens, final = (event for event in events if isinstance(event, Token))
            return b"".join(map(self._token_frame, tokens)) + self._frame(final, last)
        frames = b"".join([self._token_frame(event) for event in events if isinstance(event, Token)])
        return frames + frame(last.error.body()) if isinstance(last, Failed) else frames

    def _token_frame(self, token: Token) -> bytes:
        """What `_frame` writes for a token that is not the last, at half the price."""
        if token.top_tokens or token.guessed:
            return self._frame(token, None)
        self._index += 1
        text, logprob = dumps(token.text), dumps(token.logprob)
        return TOKEN_FRAME % (self._index, token.id, text, logprob, b"true" if token.special else b"false")

    def _frame(self, token: Token, finished: Finished | None) -> bytes:
        self._index += 1
        event: StreamResponse = {
            "index": self._index,
            "token": token_body(token),
            "generated_text": None if finished is None else visible_text(self._request, finished.generated_text),
            "details": self._details(finished) if finished and self._request.given.details else None,
        }
        if token.top_tokens:
            event["top_tokens"] = [token_body(top) for top in token.top_tokens]
        return frame(event)

    def _details(self, finished: Finished) -> StreamDetailsBody:
        return {
            "finish_reason": finished.reason,
            "generated_tokens": finished.generated_tokens,
            "seed": self._opened.seed,
            "input_length": self._opened.input_length,
        }


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

    listed, events = list[GenerateResponse], StreamResponse
    add_post(app, "/", compatible, "A list of one answer, or a stream", GenerateRequest, listed, events=events)
    add_post(app, "/generate", generate, "The whole text at once", GenerateRequest, GenerateResponse)
    add_post(app, "/generate_stream", generate_stream, "An event for each token", GenerateRequest, events=events)
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
    headers = {"x-compute-characters": str(len(body.inputs))}
    return await stream(request, [prompt_request_of(body)], services, partial(EventFrames, body), headers=headers)
