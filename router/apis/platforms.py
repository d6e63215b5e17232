"""How hosting platforms call a server: SageMaker's `/invocations` and Vertex AI's `/vertex`.

Translations of shapes alone: what they ask for goes the way of the routes that people call.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any

import orjson
from fastapi import FastAPI, Request
from pydantic import Discriminator, Field, Tag
from starlette.responses import Response
from typing_extensions import TypedDict

from router.apis.document import add_post
from router.apis.openai.answers import ChatCompletion, ErrorAnswer, TextCompletion
from router.apis.openai.requests import ChatRequest, CompletionRequest, of_chat
from router.apis.openai.routes import rendering_of
from router.apis.openai.streams import DONE_DATA, ChatChunk, TextChunk
from router.apis.serving import Handler, Services, collect, json_response, read, read_bytes
from router.apis.tgi.bodies import GenerateRequest, GenerateResponse, prompt_request_of, response_headers
from router.apis.tgi.routes import StreamResponse
from router.errors import ValidationError
from router.requests import schemas
from router.requests.generation import Answer, likeliest_first
from router.requests.schemas import Lenient, PromptRequest


def _kind(instance: Any) -> str:
    return "chat" if isinstance(instance, dict) and "messages" in instance else "generate"


Instance = Annotated[
    Annotated[GenerateRequest, Tag("generate")] | Annotated[ChatRequest, Tag("chat")], Discriminator(_kind)
]


class VertexRequest(Lenient):
    """The body of `/vertex`."""

    instances: Annotated[list[Instance], Field(fail_fast=True)] = Field(
        description="Bodies of `/generate` or of `/v1/chat/completions`, at most `max_client_batch_size`."
    )


class VertexResponse(TypedDict):
    """The answer of `/vertex`."""

    predictions: Annotated[list[str], Field(description="A text for each instance.")]


# One event of a stream of `/invocations`.
InvocationEvent = StreamResponse | ChatChunk | TextChunk | ErrorAnswer


def add_platform_routes(app: FastAPI, services: Services, generate: Handler, chat: Handler, complete: Handler) -> None:
    """Serve what SageMaker and Vertex AI send. The handlers are those of `/` and of OpenAI's completions."""
    most = services.config.max_client_batch_size
    most_values = schemas.MOST_VALUES + most * services.limits.max_input_length

    async def meant(request: Request) -> Handler:
        """The handler that answers this body, which is put back."""
        body = request.state.body = await read_bytes(request, services)
        schemas.refuse_excess(body, most_values)
        if not isinstance(fields := _value_of(body), dict):
            return generate  # whose parser says what is wrong
        for name, handler in (("inputs", generate), ("messages", chat), ("prompt", complete)):
            if name in fields:
                return handler
        raise ValidationError("the body has none of `inputs`, `messages` and `prompt`: give one of them")

    async def invocations(request: Request) -> Response:
        return await (await meant(request))(request)

    async def vertex(request: Request) -> Response:
        body = await read(request, services, VertexRequest)
        if not 0 < len(body.instances) <= most:
            raise ValidationError(
                f"`instances` has {len(body.instances)} instances: give 1 to {most} (max_client_batch_size)"
            )
        asked = [_asked(number, instance, services) for number, instance in enumerate(body.instances)]
        opened, answers = await collect(request, asked, services)
        best = [likeliest_first(some)[0].finished for some in _by_prompt(asked, answers)]
        num_characters = sum(len(one.prompt) for one in asked if isinstance(one.prompt, str))
        headers = response_headers(num_characters, opened, best, services.compute_type)
        texts = [_before(one) + finished.generated_text for one, finished in zip(body.instances, best, strict=True)]
        told: VertexResponse = {"predictions": texts}
        return json_response(told, headers)

    summary = "SageMaker's: a body of `/`, `/v1/chat/completions` or `/v1/completions`, answered as there"
    bodies = (GenerateRequest, ChatRequest, CompletionRequest)
    answer = list[GenerateResponse] | ChatCompletion | TextCompletion
    streamed: dict[str, Any] = {"events": InvocationEvent, "last_data": DONE_DATA}
    add_post(app, "/invocations", invocations, summary, bodies, answer, **streamed)
    add_post(app, "/vertex", vertex, "Vertex AI's: several prompts at once", VertexRequest, VertexResponse)


def _value_of(body: bytes) -> Any:
    """What a body says; None for one that is broken."""
    try:
        return orjson.loads(body)
    except orjson.JSONDecodeError:
        return None


def _asked(number: int, instance: GenerateRequest | ChatRequest, services: Services) -> PromptRequest:
    if instance.stream:
        raise ValidationError(f"`instances.{number}.stream` is true, and /vertex answers at once: leave it out")
    if isinstance(instance, GenerateRequest):
        return prompt_request_of(instance)
    if instance.logprobs or instance.top_logprobs:
        raise ValidationError(f"`instances.{number}.logprobs` is not served on /vertex: leave it out")
    if instance.n not in (None, 1):
        raise ValidationError(f"`instances.{number}.n` is {instance.n}, and an instance has one answer: leave it out")
    if instance.tools:
        raise ValidationError(
            f"`tools` of `instances.{number}` are not served, as /vertex answers in text: leave them out"
        )
    [asked] = of_chat(instance, rendering_of(instance, services), max_n=1, candidates=None)
    return asked


def _before(instance: GenerateRequest | ChatRequest) -> str:
    """The prompt, where an instance wants it in front of its text."""
    if isinstance(instance, GenerateRequest) and instance.given.return_full_text:
        return instance.inputs
    return ""


def _by_prompt(asked: Sequence[PromptRequest], answers: Sequence[Answer]) -> list[Sequence[Answer]]:
    """The samples of each prompt."""
    found, start = [], 0
    for one in asked:
        stop = start + (one.num_answers or one.given.best_of or 1)
        found.append(answers[start:stop])
        start = stop
    return found
