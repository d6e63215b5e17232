"""OpenAI's routes for chats and texts: `/v1/chat/completions` and `/v1/completions`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial

from fastapi import FastAPI, Request
from starlette.responses import Response

from router.apis.document import ERROR_STATUSES, documented
from router.apis.openai import answers, logprobs, requests, streams
from router.apis.openai.answers import ChatCompletion, ErrorAnswer, TextCompletion, add_to_chat, add_to_completion
from router.apis.openai.logprobs import Scoring
from router.apis.openai.requests import ChatRequest, CompletionRequest, Generation
from router.apis.openai.streams import DONE_DATA, ChatChunk, TextChunk, UsageWanted
from router.apis.serving import Handler, Services, collect, json_response, read, shaped, stream
from router.apis.tgi.answers import response_headers
from router.chat.pieces import CountingReader
from router.chat.prompting import rendering
from router.chat.reader import Reading
from router.chat.tools import Offer
from router.errors import ValidationError
from router.http.event_stream import Frames
from router.requests.continuing import created_of
from router.requests.generation import OpenRequest
from router.requests.prompt import PromptRequest, Rendering
from router.requests.samples import Answer, likeliest
from router.requests.schemas import MOST_VALUES

STREAM_HEADERS = {"cache-control": "no-cache", "X-Accel-Buffering": "no"}


def most_values_of(services: Services) -> int:
    """Of a body. A prompt may be as many token ids as fit, and a few of them more before they are counted."""
    return MOST_VALUES + services.config.max_client_batch_size * services.limits.max_input_length


def add_openai_routes(app: FastAPI, services: Services) -> tuple[Handler, Handler]:
    """Serve what OpenAI's clients ask for. Returns what answers chats, and what answers completions."""
    config, most_values = services.config, most_values_of(services)

    async def chat(request: Request) -> Response:
        body = await read(request, services, ChatRequest)
        offered = requests.offered(body)
        reading = services.answer_formats.reading(offered)
        candidates = logprobs.candidates_of_chat(body.logprobs, body.top_logprobs, config.max_top_n_tokens)
        wanted = requests.of_chat(body, rendering_of(body, services, offered), config.max_n, candidates)
        scoring = None if candidates is None else Scoring(candidates, services.tokenizer)
        wanted = _with_special_tokens(body, wanted, services)
        if candidates is not None and body.include_reasoning is False:
            raise ValidationError("`logprobs` cover all tokens, reasoning too: leave it or `include_reasoning` out")
        head = _head(request, body, services, "chatcmpl")
        if reading is not None:
            return await _read_chat(request, body, wanted, services, head, reading, scoring)
        if body.stream:

            def frames(opened: OpenRequest) -> Frames:
                if scoring is None:
                    return streams.ChatFrames(head, opened, _usage_of(body))
                return streams.ScoredChatFrames(head, opened, _usage_of(body), scoring)

            return await _stream_chat(request, body, wanted, services, frames)
        opened, found = await collect(request, wanted, services)
        whole = answers.chat_completion(head, found, opened.entries)
        if scoring is not None:
            whole = await shaped(request, services, partial(add_to_chat, whole, found, scoring))
        return json_response(whole, _counts(opened, found, services))

    async def completions(request: Request) -> Response:
        body = await read(request, services, CompletionRequest, most_values)
        candidates = logprobs.candidates_of_completion(body.logprobs, config.max_top_n_tokens)
        wanted = requests.of_completion(body, config.max_n, config.max_client_batch_size, candidates)
        scoring = None if candidates is None else Scoring(candidates, services.tokenizer, _scored_prompts(body, wanted))
        wanted = _with_special_tokens(body, wanted, services)
        head = _head(request, body, services, "cmpl")
        if body.stream:

            def frames(opened: OpenRequest) -> Frames:
                if scoring is None:
                    return streams.TextFrames(head, opened, _usage_of(body), _echoed(body, wanted, services))
                return streams.ScoredTextFrames(head, opened, _usage_of(body), scoring, services.workers)

            return await stream(request, wanted, services, frames, _stream_headers(services))
        opened, found = await collect(request, wanted, services)
        chosen = likeliest(found, len(wanted), body.n or 1)
        token_ids = [opened.entries[i].request.token_ids for i in chosen]
        given = [found[i] for i in chosen]
        whole = answers.completion(head, given, opened.entries, _echoed(body, wanted, services))
        if scoring is not None:
            whole = await shaped(request, services, partial(add_to_completion, whole, given, token_ids, scoring))
        return json_response(whole, _counts(opened, given, services))

    _add(app, "/v1/chat/completions", "OpenAI's chat completions", ChatRequest, ChatCompletion, ChatChunk, chat)
    of_text = (CompletionRequest, TextCompletion, TextChunk)
    _add(app, "/v1/completions", "OpenAI's text completions", *of_text, completions)
    return chat, completions


def _add(
    app: FastAPI,
    path: str,
    summary: str,
    body: type[Generation],
    answer: object,
    event: object,
    handler: Handler,
) -> None:
    statuses = [status for status in ERROR_STATUSES if status != 422]  # answers.py makes it a 400
    said = documented(body, answer, events=event, last_data=DONE_DATA, errors=ErrorAnswer, statuses=statuses)
    app.post(path, summary=f"{summary}; server-sent events if `stream` is true", response_class=Response, **said)(
        handler
    )


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
    model = body.model or services.config.model_id
    return answers.Head(f"{prefix}-{request.state.request_id}", model, created_of(request))


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


async def _read_chat(
    request: Request,
    body: ChatRequest,
    wanted: list[PromptRequest],
    services: Services,
    head: answers.Head,
    reading: Reading,
    scoring: Scoring | None,
) -> Response:
    """A chat whose answers may have reasoning or calls of tools."""
    begun = requests.begun(body)
    wanted = [reading.applied_to(one, begun) for one in wanted]
    name: answers.ReasoningName | None = None
    if reading.rules.reasoning is not None and body.include_reasoning is not False:
        name = "reasoning" if services.config.reasoning_field == "reasoning" else "reasoning_content"

    def readers(opened: OpenRequest) -> list[CountingReader]:
        ends = [services.tokenizer.end_of(entry.request.prompt_ids) for entry in opened.entries]
        return [CountingReader(reading.reader(end, begun)) for end in ends]

    def frames(opened: OpenRequest) -> Frames:
        return streams.ReadChatFrames(head, opened, _usage_of(body), readers(opened), name, scoring)

    if body.stream:
        return await _stream_chat(request, body, wanted, services, frames)
    opened, found = await collect(request, wanted, services)

    def shape() -> ChatCompletion:
        whole = answers.read_chat_completion(head, found, opened.entries, readers(opened), name)
        return whole if scoring is None else add_to_chat(whole, found, scoring)

    return json_response(await shaped(request, services, shape), _counts(opened, found, services))


async def _stream_chat(
    request: Request,
    body: ChatRequest,
    wanted: list[PromptRequest],
    services: Services,
    frames_of: Callable[[OpenRequest], Frames],
) -> Response:
    def frames(opened: OpenRequest) -> Frames:
        written = frames_of(opened)
        return streams.TgiClientFrames(written) if streams.is_of_tgi_client(body) else written

    return await stream(request, wanted, services, frames, _stream_headers(services))


def _usage_of(body: Generation) -> UsageWanted:
    options = body.stream_options
    if options is None or options.include_usage is not True:
        return UsageWanted()
    return UsageWanted(at_end=True, in_every_chunk=options.continuous_usage_stats is True)


def _stream_headers(services: Services) -> dict[str, str]:
    return {**STREAM_HEADERS, "x-compute-type": services.compute_type}
