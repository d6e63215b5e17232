"""Anthropic's routes: `/v1/messages` and `/v1/messages/count_tokens`."""

from __future__ import annotations

from functools import partial
from typing import Any

from fastapi import FastAPI, Request
from starlette.responses import Response

from router.apis.anthropic import answers, requests
from router.apis.anthropic.requests import CountRequest, MessagesRequest
from router.apis.anthropic.streams import PING, MessageEvent, MessageFrames
from router.apis.conversations import Turn, turn_of
from router.apis.document import ERROR_STATUSES, documented
from router.apis.openai.routes import STREAM_HEADERS
from router.apis.serving import Services, caller_of, collect, json_response, read, shaped, stream
from router.http.guard import ClientConnection
from router.requests.generation import OpenRequest


def add_anthropic_routes(app: FastAPI, services: Services) -> None:
    """Serve what Anthropic's clients ask for."""

    async def messages(request: Request) -> Response:
        body = await read(request, services, MessagesRequest)
        turn, given = turn_in(body, services), requests.parameters_of(body)
        head = answers.Head(f"msg_{request.state.request_id}", body.model or services.config.model_id)

        def frames(opened: OpenRequest) -> MessageFrames:
            return MessageFrames(head, turn.reader(services, opened.entries[0]), opened)

        if body.stream:
            headers = {**STREAM_HEADERS, "x-compute-type": services.compute_type}
            return await stream(request, [turn.prompt_request(given)], services, frames, headers, ping=PING)
        opened, [answer] = await collect(request, [turn.prompt_request(given)], services)
        [entry] = opened.entries
        reader = turn.reader(services, entry)
        return json_response(await shaped(request, services, partial(answers.message, head, answer, entry, reader)))

    async def count_tokens(request: Request) -> Response:
        turn = turn_in(await read(request, services, CountRequest), services)
        with ClientConnection.of(request.scope).needed():
            count = await services.generator.count(turn.render, caller_of(request, services))
        told: answers.TokenCount = {"input_tokens": count}
        return json_response(told)

    statuses = [status for status in ERROR_STATUSES if status != 422]  # answers.py makes it a 400
    common: dict[str, Any] = {"errors": answers.MessageError, "statuses": statuses}
    said = documented(MessagesRequest, answers.MessageAnswer, events=MessageEvent, **common)
    summary = "Anthropic's messages; server-sent events if `stream` is true"
    app.post("/v1/messages", summary=summary, response_class=Response, **said)(messages)
    said = documented(CountRequest, answers.TokenCount, **common)
    summary = "How many tokens the prompt of such a message has"
    app.post("/v1/messages/count_tokens", summary=summary, response_class=Response, **said)(count_tokens)


def turn_in(body: CountRequest, services: Services) -> Turn:
    """What a body waits for. Raises ValidationError."""
    body.refuse_what_is_not_served()
    transcript, offered = requests.transcript_of(body), requests.offer_of(body)
    return turn_of(services, transcript, offered, requests.variables_of(body), continues=True)
