"""OpenAI's routes for chats and texts: `/v1/chat/completions` and `/v1/completions`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from fastapi import FastAPI, Request
from starlette.responses import Response

from router.apis.document import add_post
from router.apis.openai import answers, logprobs, requests, streams
from router.apis.openai.answers import ChatCompletion, ErrorAnswer, TextCompletion, add_to_chat, add_to_completion
from router.apis.openai.logprobs import Scoring
from router.apis.openai.requests import ChatRequest, CompletionRequest, Generation
from router.apis.openai.streams import DONE_DATA, ChatChunk, TextChunk, UsageWanted
from router.apis.serving import (
    Handler,
    Services,
    collect,
    json_response,
    read,
    reader_of,
    shaped,
    stream,
    values_of_conversations,
)
from router.apis.tgi.bodies import response_headers
from router.chat.pieces import CountingReader
from router.chat.prompting import rendering
from router.chat.reading import Reading
from router.chat.tools import Offer
from router.errors import ValidationError
from router.http.responses import Frames
from router.requests.continuing import created_of
from router.requests.generation import Answer, OpenRequest, likeliest
from router.requests.schemas import MOST_VALUES, PromptRequest, Rendering

OR_EVENTS = "; server-sent events if `stream` is true"


def most_values_of(services: Services) -> int:
    """Of a body. A prompt may be as many token ids as fit, and a few of them more before they are counted."""
    return MOST_VALUES + services.config.max_client_batch_size * services.limits.max_input_length


def add_openai_routes(app: FastAPI, services: Services) -> tuple[Handler, Handler]:
    """Serve what OpenAI's clients ask for. Returns what answers chats, and what answers completions."""

    async def chat(request: Request) -> Response:
        return await _chat(
            request, await read(request, services, ChatRequest, values_of_conversations(services)), services
        )

    async def completions(request: Request) -> Response:
        return await _complete(request, await read(request, services, CompletionRequest, most_values), services)

    most_values = most_values_of(services)
    ends: dict[str, Any] = {"last_data": DONE_DATA, "errors": ErrorAnswer}
    summary, shapes = "OpenAI's chat completions", (ChatRequest, ChatCompletion)
    add_post(app, "/v1/chat/completions", chat, f"{summary}{OR_EVENTS}", *shapes, events=ChatChunk, **ends)
    summary, of_text = "OpenAI's text completions", (CompletionRequest, TextCompletion)
    add_post(app, "/v1/completions", completions, f"{summary}{OR_EVENTS}", *of_text, events=TextChunk, **ends)
    return chat, completions


# ------------------------------------------------------------------------------------------------------------ chats


async def _chat(request: Request, body: ChatRequest, services: Services) -> Response:
    config, offered = services.config, requests.offered(body)
    reading = services.answer_formats.reading(offered)
    candidates = logprobs.candidates_of_chat(body.logprobs, body.top_logprobs, config.max_top_n_tokens)
    wanted = requests.of_chat(body, rendering_of(body, services, offered), config.max_n, candidates)
    wanted = _with_special_tokens(body, wanted, services)
    if candidates is not None and body.include_reasoning is False:
        raise ValidationError("`logprobs` cover all tokens, reasoning too: leave it or `include_reasoning` out")
    begun = requests.begun(body)
    if reading is not None:
        wanted = [reading.applied_to(one, begun) for one in wanted]
    scoring = None if candidates is None else Scoring(candidates, services.tokenizer)
    told = _Chat(_head(request, body, services, "chatcmpl"), body, services, reading, begun, scoring)
    if body.stream:
        return await stream(request, wanted, services, told.frames)
    opened, found = await collect(request, wanted, services)
    if reading is None and scoring is None:
        whole = told.whole(opened, found)
    else:
        whole = await shaped(request, services, partial(told.whole, opened, found))
    return json_response(whole, _counts(opened, found, services))


@dataclass(frozen=True)
class _Chat:
    """How the answers to one chat are told. reading: what takes them apart; None: they are text alone."""

    head: answers.Head
    body: ChatRequest
    services: Services
    reading: Reading | None
    begun: str
    scoring: Scoring | None

    def frames(self, opened: OpenRequest) -> Frames:
        """As a stream."""
        told, scoring = (self.head, opened, _usage_of(self.body)), self.scoring
        frames: Frames
        if (readers := self._readers(opened)) is not None:
            frames = streams.ReadChatFrames(*told, readers, self._reasoning, scoring)
        else:
            frames = streams.ChatFrames(*told) if scoring is None else streams.ScoredChatFrames(*told, scoring)
        return streams.TgiClientFrames(frames) if streams.is_of_tgi_client(self.body) else frames

    def whole(self, opened: OpenRequest, found: Sequence[Answer]) -> ChatCompletion:
        """At once."""
        readers = self._readers(opened)
        told = answers.chat_completion(self.head, found, opened.entries, readers, self._reasoning)
        return told if self.scoring is None else add_to_chat(told, found, self.scoring)

    def _readers(self, opened: OpenRequest) -> list[CountingReader] | None:
        if (reading := self.reading) is None:
            return None
        return [
            CountingReader(reader_of(self.services, reading, entry, self.begun, self.head.created))
            for entry in opened.entries
        ]

    @property
    def _reasoning(self) -> answers.ReasoningName | None:
        """What it is called; None: it is not shown."""
        if self.reading is None or self.reading.rules.reasoning is None or self.body.include_reasoning is False:
            return None
        return "reasoning" if self.services.config.reasoning_field == "reasoning" else "reasoning_content"


def rendering_of(body: ChatRequest, services: Services, offered: Offer | None = None) -> Rendering:
    """How a chat's messages become a prompt. Raises ValidationError. offered: its tools, where they are known."""
    return rendering(
        services.chat_template,
        services.aside,
        requests.messages_of(body),
        offered if offered is not None else requests.offered(body),
        services.answer_formats.tools,
        instruction=body.tool_prompt,
        variables=requests.variables_of(body),
        add_generation_prompt=body.add_generation_prompt is not False,
        continue_final_message=body.continue_final_message is True,
    )


# ------------------------------------------------------------------------------------------------------ completions


async def _complete(request: Request, body: CompletionRequest, services: Services) -> Response:
    config = services.config
    candidates = logprobs.candidates_of_completion(body.logprobs, config.max_top_n_tokens)
    wanted = requests.of_completion(body, config.max_n, config.max_client_batch_size, candidates)
    scoring = None if candidates is None else Scoring(candidates, services.tokenizer, _scored_prompts(body, wanted))
    wanted = _with_special_tokens(body, wanted, services)
    head = _head(request, body, services, "cmpl")

    def frames(opened: OpenRequest) -> Frames:
        if scoring is None:
            return streams.TextFrames(head, opened, _usage_of(body), _echoed(body, wanted, services))
        return streams.ScoredTextFrames(head, opened, _usage_of(body), scoring, services.workers)

    if body.stream:
        return await stream(request, wanted, services, frames)
    opened, found = await collect(request, wanted, services)
    chosen = likeliest(found, len(wanted), body.n or 1)
    token_ids = [opened.entries[i].request.token_ids for i in chosen]
    given = [found[i] for i in chosen]
    whole = answers.completion(head, given, opened.entries, _echoed(body, wanted, services))
    if scoring is not None:
        whole = await shaped(request, services, partial(add_to_completion, whole, given, token_ids, scoring))
    return json_response(whole, _counts(opened, given, services))


def _echoed(body: CompletionRequest, wanted: Sequence[PromptRequest], services: Services) -> list[str]:
    """What `echo` puts before each answer: its prompt. Once the prompts are known to be valid."""
    return [_prompt(one, services) if body.echo else "" for one in wanted for _ in range(body.n or 1)]


def _scored_prompts(body: CompletionRequest, wanted: Sequence[PromptRequest]) -> list[str | Sequence[int]]:
    """The prompt of each answer, where its log-probabilities are echoed with it."""
    prompts = [one.prompt for one in wanted if not callable(one.prompt)]
    return [prompt for prompt in prompts for _ in range(body.n or 1)] if body.echo else []


def _prompt(one: PromptRequest, services: Services) -> str:
    assert not callable(one.prompt)
    return one.prompt if isinstance(one.prompt, str) else services.tokenizer.decode(one.prompt)


# ------------------------------------------------------------------------------------------------------------- both


def _with_special_tokens(body: Generation, wanted: list[PromptRequest], services: Services) -> list[PromptRequest]:
    """The same with special tokens in the text, but for those that end it, where the client wants that."""
    if body.skip_special_tokens is not False:
        return wanted
    shown = services.tokenizer.special_ids - services.tokenizer.eos_ids
    return [replace(one, shown_marks=shown) for one in wanted]


def _counts(opened: OpenRequest, given: Sequence[Answer], services: Services) -> dict[str, str]:
    """TGI's headers, which it has here too."""
    return response_headers(None, opened, [answer.finished for answer in given], services.compute_type)


def _head(request: Request, body: Generation, services: Services, prefix: str) -> answers.Head:
    model = body.model or services.adapters.base
    return answers.Head(f"{prefix}-{request.state.request_id}", model, created_of(request))


def _usage_of(body: Generation) -> UsageWanted:
    options = body.stream_options
    if options is None or options.include_usage is not True:
        return UsageWanted()
    return UsageWanted(at_end=True, in_every_chunk=options.continuous_usage_stats is True)
