"""OpenAI's routes for chats and texts: `/v1/chat/completions` and `/v1/completions`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial

from fastapi import FastAPI, Request
from pydantic import BaseModel
from starlette.responses import Response

from router import tgi
from router.api_document import ERROR_STATUSES, documented
from router.asked import Asked, Rendering
from router.chat.parts import CountingReader
from router.chat.prompting import rendering
from router.chat.reading import Reading
from router.chat.tools import Offer
from router.continuing import created_of
from router.errors import ValidationError
from router.event_stream import Frames
from router.generation import OpenRequest
from router.openai import answers, asked, logprobs, read_answers, tgi_client, tools
from router.openai.answers import DONE_DATA
from router.openai.documents import ChatChunk, ChatCompletion, ErrorAnswer, TextChunk, TextCompletion
from router.openai.schemas import ChatRequest, CompletionRequest, Generation
from router.openai.scored import ScoredFrames, Scoring, add_to_chat, add_to_completion
from router.samples import Answer, likeliest
from router.schemas import MOST_VALUES
from router.serving import Handler, Services, collect, json_response, read, shaped, stream

STREAM_HEADERS = {"cache-control": "no-cache", "X-Accel-Buffering": "no"}


def most_values_of(services: Services) -> int:
    """Of a body. A prompt may be as many token ids as fit, and a few of them more before they are counted."""
    return MOST_VALUES + services.config.max_client_batch_size * services.limits.max_input_length


def add_openai_routes(app: FastAPI, services: Services) -> tuple[Handler, Handler]:
    """Serve what OpenAI's clients ask for. Returns what answers chats, and what answers completions."""
    config, most_values = services.config, most_values_of(services)

    async def chat(request: Request) -> Response:
        body = await read(request, services, ChatRequest)
        offered = tools.offered(body)
        reading = services.answer_formats.reading(offered)
        candidates = logprobs.candidates_of_chat(body.logprobs, body.top_logprobs, config.max_top_n_tokens)
        wanted = asked.of_chat(body, rendering_of(body, services, offered), config.max_n, candidates)
        scoring = None if candidates is None else Scoring(candidates, services.tokenizer)
        wanted = _with_special_tokens(body, wanted, services)
        if candidates is not None and body.include_reasoning is False:
            raise ValidationError("`logprobs` cover all tokens, reasoning too: leave it or `include_reasoning` out")
        head = _head(request, body, services, "chatcmpl")
        if reading is not None:
            return await _read_chat(request, body, wanted, services, head, reading, scoring)
        if body.stream:
            return await _stream(request, body, wanted, services, head, lambda: None, scoring)
        opened, found = await collect(request, wanted, services)
        whole = answers.chat_completion(head, found, opened.entries)
        if scoring is not None:
            whole = await shaped(request, services, partial(add_to_chat, whole, found, scoring))
        return json_response(whole, _counts(opened, found, services))

    async def completions(request: Request) -> Response:
        body = await read(request, services, CompletionRequest, most_values)
        candidates = logprobs.candidates_of_completion(body.logprobs, config.max_top_n_tokens)
        wanted = asked.of_completion(body, config.max_n, config.max_client_batch_size, candidates)
        scoring = None if candidates is None else Scoring(candidates, services.tokenizer, _scored_prompts(body, wanted))
        wanted = _with_special_tokens(body, wanted, services)
        head = _head(request, body, services, "cmpl")
        echoed = partial(_echoed, body, wanted, services)
        if body.stream:
            return await _stream(request, body, wanted, services, head, echoed, scoring)
        opened, found = await collect(request, wanted, services)
        chosen = likeliest(found, len(wanted), body.n or 1)
        token_ids = [opened.entries[i].request.token_ids for i in chosen]
        given = [found[i] for i in chosen]
        whole = answers.completion(head, given, opened.entries, echoed())
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
    answer: type[BaseModel],
    event: type[BaseModel],
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
        asked.messages_of(body),
        offered if offered is not None else tools.offered(body),
        services.answer_formats.tools,
        instruction=body.tool_prompt,
        variables=asked.variables_of(body),
        add_generation_prompt=body.add_generation_prompt is not False,
        continue_final_message=body.continue_final_message is True,
    )


def _with_special_tokens(body: Generation, wanted: list[Asked], services: Services) -> list[Asked]:
    """The same with special tokens in the text, but for those that end it, where the client wants that."""
    if body.skip_special_tokens is not False:
        return wanted
    shown = services.tokenizer.special_ids - services.tokenizer.eos_ids
    return [replace(one, shown_marks=shown) for one in wanted]


def _counts(opened: OpenRequest, given: Sequence[Answer], services: Services) -> dict[str, str]:
    """TGI's headers, which it has here too."""
    return tgi.response_headers(None, opened, [answer.finished for answer in given], services.compute_type)


def _head(request: Request, body: Generation, services: Services, prefix: str) -> answers.Head:
    model = body.model or services.config.model_id
    return answers.Head(f"{prefix}-{request.state.request_id}", model, created_of(request))


def _echoed(body: CompletionRequest, wanted: Sequence[Asked], services: Services) -> list[str]:
    """What `echo` puts before each answer: its prompt. Once the prompts are known to be valid."""
    return [_prompt(one, services) if body.echo else "" for one in wanted for _ in range(body.n or 1)]


def _scored_prompts(body: CompletionRequest, wanted: Sequence[Asked]) -> list[str | Sequence[int]]:
    """The prompt of each answer, where its log-probabilities are echoed with it."""
    prompts = [one.prompt for one in wanted if not callable(one.prompt)]
    return [prompt for prompt in prompts for _ in range(body.n or 1)] if body.echo else []


def _prompt(one: Asked, services: Services) -> str:
    assert not callable(one.prompt)
    return one.prompt if isinstance(one.prompt, str) else services.tokenizer.decode(one.prompt)


async def _read_chat(
    request: Request,
    body: ChatRequest,
    wanted: list[Asked],
    services: Services,
    head: answers.Head,
    reading: Reading,
    scoring: Scoring | None,
) -> Response:
    """A chat whose answers may have reasoning or calls of tools."""
    begun = asked.begun(body)
    wanted = [reading.asked(one, begun) for one in wanted]
    name = None if reading.manner.reasoning is None else services.config.reasoning_field
    shown = read_answers.Shown(name, body.include_reasoning is not False)

    def readers(opened: OpenRequest) -> list[CountingReader]:
        ends = [services.tokenizer.end_of(entry.request.prompt_ids) for entry in opened.entries]
        return [CountingReader(reading.reader(end, begun)) for end in ends]

    def frames(opened: OpenRequest) -> Frames:
        usage = _usage_of(body)
        return _for_client(
            body, read_answers.ReadChunkFrames(head, opened, readers(opened), scoring, shown, includes_usage=usage)
        )

    if body.stream:
        return await stream(request, wanted, services, frames, _stream_headers(services))
    opened, found = await collect(request, wanted, services)

    def shape() -> answers.Json:
        whole = read_answers.chat_completion(head, found, opened.entries, readers(opened), shown)
        return whole if scoring is None else add_to_chat(whole, found, scoring)

    return json_response(await shaped(request, services, shape), _counts(opened, found, services))


def _for_client(body: Generation, frames: Frames) -> Frames:
    is_tgi_s = isinstance(body, ChatRequest) and tgi_client.asks(body)
    return tgi_client.TgiClientFrames(frames) if is_tgi_s else frames


def _usage_of(body: Generation) -> answers.UsageWanted:
    options = body.stream_options
    if options is None or options.include_usage is not True:
        return answers.UsageWanted()
    return answers.UsageWanted(at_end=True, in_every_chunk=options.continuous_usage_stats is True)


def _stream_headers(services: Services) -> dict[str, str]:
    return {**STREAM_HEADERS, "x-compute-type": services.compute_type}


async def _stream(
    request: Request,
    body: Generation,
    wanted: list[Asked],
    services: Services,
    head: answers.Head,
    echoed: Callable[[], list[str] | None],
    scoring: Scoring | None,
) -> Response:
    """echoed: what comes before each answer of a completion; of a chat, nothing. Called once the prompts are valid."""

    def frames(opened: OpenRequest) -> Frames:
        includes_usage = _usage_of(body)
        if scoring is not None:
            is_chat = isinstance(body, ChatRequest)
            workers = services.workers
            scored = ScoredFrames(head, opened, scoring, workers, includes_usage=includes_usage, is_chat=is_chat)
            return _for_client(body, scored)
        return _for_client(body, answers.ChunkFrames(head, opened, includes_usage=includes_usage, echoed=echoed()))

    return await stream(request, wanted, services, frames, _stream_headers(services))
