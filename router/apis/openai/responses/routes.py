"""OpenAI's `/v1/responses`, and that nothing is stored there."""

from __future__ import annotations

from functools import partial
from typing import Any

from fastapi import FastAPI, Request
from starlette.responses import Response

from router.apis.conversations import Turn, turn_of
from router.apis.document import ERROR_STATUSES, documented
from router.apis.openai.answers import ErrorAnswer
from router.apis.openai.logprobs import Scoring
from router.apis.openai.requests import scored
from router.apis.openai.responses import answers, requests
from router.apis.openai.responses.requests import InputRequest, ResponsesRequest
from router.apis.openai.responses.streams import ResponseEvent, ResponseFrames
from router.apis.openai.routes import STREAM_HEADERS
from router.apis.serving import Services, caller_of, collect, json_response, read, shaped, stream
from router.chat.pieces import CountingReader
from router.http.guard import ClientConnection
from router.requests.continuing import created_of
from router.requests.generation import OpenRequest

URL = "/v1/responses"


def add_responses_routes(app: FastAPI, services: Services) -> None:
    """Serve what OpenAI's newer clients ask for."""

    async def responses(request: Request) -> Response:
        body = await read(request, services, ResponsesRequest)
        turn, given = turn_in(body, services), requests.parameters_of(body)
        most = services.config.max_top_n_tokens
        candidates = requests.candidates_of(body, is_read=turn.reading is not None, most=most)
        wanted = scored(turn.prompt_request(given), candidates, of_prompt=False)
        scoring = None if candidates is None else Scoring(candidates, services.tokenizer)
        model = body.model or services.config.model_id
        head = answers.Head(request.state.request_id, model, answers.echo_of(body), created_of(request))

        def frames(opened: OpenRequest) -> ResponseFrames:
            reader = CountingReader(turn.reader(services, opened.entries[0]))
            return ResponseFrames(head, reader, opened, scoring)

        if body.stream:
            headers = {**STREAM_HEADERS, "x-compute-type": services.compute_type}
            return await stream(request, [wanted], services, frames, headers)
        opened, [answer] = await collect(request, [wanted], services)
        [entry] = opened.entries
        reader = CountingReader(turn.reader(services, entry))
        shape = partial(answers.response, head, answer, entry, reader, scoring)
        return json_response(await shaped(request, services, shape))

    async def input_tokens(request: Request) -> Response:
        turn = turn_in(await read(request, services, InputRequest), services)
        with ClientConnection.of(request.scope).needed():
            count = await services.generator.count(turn.render, caller_of(request, services))
        told: answers.InputTokens = {"object": "response.input_tokens", "input_tokens": count}
        return json_response(told)

    statuses = [status for status in ERROR_STATUSES if status != 422]  # answers.py makes it a 400
    common: dict[str, Any] = {"errors": ErrorAnswer, "statuses": statuses}
    said = documented(ResponsesRequest, answers.ResponseAnswer, events=ResponseEvent, **common)
    summary = "OpenAI's responses; server-sent events if `stream` is true"
    app.post(URL, summary=summary, response_class=Response, **said)(responses)
    said = documented(InputRequest, answers.InputTokens, **common)
    summary = "How many tokens the prompt of a response has"
    app.post(f"{URL}/input_tokens", summary=summary, response_class=Response, **said)(input_tokens)


def turn_in(body: InputRequest, services: Services) -> Turn:
    """What a body waits for. Raises ValidationError."""
    body.refuse_what_is_not_served()
    return turn_of(services, requests.transcript_of(body), requests.offer_of(body), requests.variables_of(body))
