"""What the routes of every API are made of: a body is read, a request opened, its answer collected or streamed.

A client that goes away frees its place whether it streamed or not, which no framework does for a plain response. A
conversation that an API tells as a transcript takes the same way to the model and back, whatever the API (`Turn`).
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any, TypeVar

import orjson
from fastapi import Request
from pydantic import BaseModel
from starlette.responses import Response

from router.accounts import Account, Permits
from router.batching.batcher import Batcher
from router.chat.pieces import AnswerReader, PlainReader, call_ids
from router.chat.prompting import rendering
from router.chat.reading import AnswerFormats, Reading
from router.chat.template import ChatTemplate
from router.chat.tools import Offer
from router.chat.transcript import Transcript
from router.config import RouterConfig
from router.errors import UnsupportedMedia, ValidationError
from router.http.bodies import Bodies
from router.http.guard import ClientConnection
from router.http.responses import PING, EventStream, Frames, PlainAnswer, first_events
from router.requests import continuing, schemas
from router.requests.adapters import Adapters
from router.requests.generation import Answer, Caller, Generator, OpenRequest
from router.requests.schemas import GenerateParameters, PromptRequest, Rendering
from router.requests.validation import Validator
from router.sandbox.pool import Sandbox
from router.sandbox.workers import Workers
from router.scheduling.limits import Limits
from router.scheduling.request import Entry, Failed
from router.shards.client import KvCache, ModelInfo, Shards, SharedHealth
from router.telemetry.metrics import Metrics
from router.telemetry.request_log import harmless, harmless_names
from router.text.tokenizer import ModelTokenizer

DEADLINE_HEADER = "x-request-timeout-ms"
MOST_VALUES_BESIDE = 90_000  # which take a fifth of a second to read
MOST_DEADLINE_MS = 24 * 60 * 60 * 1000
ADAPTER_HEADER = "x-lockstep-adapter"  # of an answer: NAME=KEY, the key of the content in hexadecimal digits
# Of a stream, which must not wait in a cache or in a proxy's buffer.
STREAM_HEADERS = {"cache-control": "no-cache", "X-Accel-Buffering": "no"}
NO_HEADERS: Mapping[str, str] = {}

Handler = Callable[[Request], Awaitable[Response]]
Shaped = TypeVar("Shaped")


@dataclass(frozen=True)
class Services:
    """What the routes work with."""

    config: RouterConfig
    limits: Limits
    model: ModelInfo
    cache: KvCache
    tokenizer: ModelTokenizer
    chat_template: ChatTemplate
    aside: Sandbox
    shards: Shards
    batcher: Batcher
    metrics: Metrics
    workers: Workers
    validator: Validator
    permits: Permits
    bodies: Bodies
    shared_health: SharedHealth
    generator: Generator
    adapters: Adapters

    @cached_property
    def answer_formats(self) -> AnswerFormats:
        """How the model writes calls of tools and reasoning."""
        config = self.config
        return AnswerFormats.of(config.tool_call_parser, config.reasoning_parser, self.chat_template, self.tokenizer)

    @property
    def compute_type(self) -> str:
        """Number and kind of the shards' devices, for TGI's header `x-compute-type`."""
        return f"{self.model.world_size}-{self.model.device}"


async def read(
    request: Request, services: Services, schema: type[schemas.Body], most_values: int = schemas.MOST_VALUES
) -> schemas.Body:
    """The body. Raises RouterError."""
    return parsed(request, schema, await read_bytes(request, services), most_values)


def values_of_conversations(services: Services) -> int:
    """The most values of a body with a conversation: an agent's grows by dozens with each turn, as its prompt does."""
    return schemas.MOST_VALUES + min(services.limits.max_input_length // 2, MOST_VALUES_BESIDE)


def parsed(
    request: Request, schema: type[schemas.Body], raw: bytes, most_values: int = schemas.MOST_VALUES
) -> schemas.Body:
    """The body of what `read_bytes` gave. Raises RouterError."""
    body = schemas.parse(schema, raw, most_values)
    _note_names(request, body)
    return body


async def read_bytes(request: Request, services: Services) -> bytes:
    """The body as it came, or as a route has put it back for another. Raises RouterError.

    A key's request is counted first: to refuse one must cost next to nothing.
    """
    known: bytes | None = request.scope["state"].pop("body", None)
    if known is not None:
        return known
    if (account := account_of(request)) is not None:
        account.count_request()
    media_type = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if not (media_type == "application/json" or media_type.endswith("+json")):
        raise UnsupportedMedia("the body must be JSON: send the header `Content-Type: application/json`")
    raw = await services.bodies.read(request, account or peer_of(request))
    return continuing.without_known(request, raw, services.config.continuation_key)


def _note_names(request: Request, body: BaseModel) -> None:
    """For the log line: the model or adapter that the client names, and fields that are not looked at."""
    model = getattr(body, "model", None) or getattr(getattr(body, "parameters", None), "adapter_id", None)
    if isinstance(model, str):
        request.state.log["model"] = harmless(model)
    if isinstance(body, schemas.Lenient) and (ignored := body.ignored()):
        request.state.log["ignored_fields"] = harmless_names(ignored)


async def collect(
    request: Request, asked: Sequence[PromptRequest], services: Services
) -> tuple[OpenRequest, list[Answer]]:
    """All samples of a plain answer, and the request, which is closed. Raises RouterError."""
    with ClientConnection.of(request.scope).needed():
        with closing(await _open(request, asked, services, is_stream=False)) as opened:
            return opened, await opened.answers()


async def shaped(request: Request, services: Services, shape: Callable[[], Shaped]) -> Shaped:
    """What `shape` makes of a whole answer, in a thread: a long one takes long, and streams go on meanwhile."""
    caller = Caller(account_of(request), peer_of(request))
    with ClientConnection.of(request.scope).needed():
        return await services.workers.do(shape, caller.owner)


async def stream(
    request: Request,
    asked: Sequence[PromptRequest],
    services: Services,
    frames_of: Callable[[OpenRequest], Frames],
    *,
    headers: Mapping[str, str] = NO_HEADERS,
    ping: bytes = PING,
) -> Response:
    """A stream whose first events are there already. Raises RouterError if they are a failure.

    headers: beside those of all streams. ping: the API's sign of life.
    """
    is_told = continuing.is_trusted(request, services.config.continuation_key)
    with ExitStack() as undo:
        with ClientConnection.of(request.scope).needed():
            opened = undo.enter_context(closing(await _open(request, asked, services, is_stream=True)))
            first = await first_events(opened)
        for _, events in first:
            if isinstance(events[0], Failed):
                raise events[0].error
        journal = opened.journal(continuing.created_of(request), continuing.known_of(request)) if is_told else None
        told = {} if journal is None else {continuing.TOLD_HEADER: "1"}
        every = {**STREAM_HEADERS, "x-compute-type": services.compute_type, **adapter_header(opened), **headers, **told}
        answer = EventStream(opened, frames_of(opened), first, every, ping, journal)
        undo.pop_all()  # from here on the response closes the request
    return answer


async def _open(
    request: Request, asked: Sequence[PromptRequest], services: Services, *, is_stream: bool
) -> OpenRequest:
    return await services.generator.open(
        asked,
        headers=request.headers,
        is_stream=is_stream,
        request_id=request.state.request_id,
        log=request.state.log,
        known=continuing.known_of(request) if is_stream else None,
        caller=caller_of(request, services),
    )


def caller_of(request: Request, services: Services) -> Caller:
    """Whose request it is, and how long it may take from now on. Raises ValidationError."""
    timeout_s = timeout_of(request.headers.get(DEADLINE_HEADER), services.config.request_timeout)
    return Caller(account_of(request), peer_of(request), timeout_s, getattr(request.scope.get("route"), "path", ""))


def timeout_of(header: str | None, longest: float | None) -> float | None:
    """Seconds that a request has: the smaller of the two; None for no limit. Raises ValidationError."""
    if header is None:
        return longest
    text = header.strip()
    if not (
        text.isascii()
        and text.isdecimal()
        and len(text) <= len(str(MOST_DEADLINE_MS))
        and 1 <= int(text) <= MOST_DEADLINE_MS
    ):
        raise ValidationError(
            f"{DEADLINE_HEADER} is {text[:40]!r}: give a whole number of milliseconds from 1 to {MOST_DEADLINE_MS}, or "
            "leave it out"
        )
    asked = int(text) / 1000
    return asked if longest is None else min(asked, longest)


def account_of(request: Request) -> Account | None:
    """Whose key the request came with; None where the server has no keys."""
    account: Account | None = getattr(request.state, "account", None)
    return account


def json_response(body: Any, headers: Mapping[str, str] | None = None) -> Response:
    """A JSON response; several times faster than the framework's own."""
    return PlainAnswer(orjson.dumps(body), headers)


def adapter_header(opened: OpenRequest) -> dict[str, str]:
    """Which adapters a request has had, and with which content."""
    told = ", ".join(f"{adapter.name}={adapter.key.hex()}" for adapter in opened.adapters)
    return {ADAPTER_HEADER: told} if told else {}


def peer_of(request: Request) -> str:
    """The address that a request came from."""
    return request.client.host if request.client is not None else ""


@dataclass(frozen=True, slots=True)
class Turn:
    """The answer that a conversation waits for.

    render: makes its prompt. begun: what is said of it already. model: that the request names.
    """

    render: Rendering
    reading: Reading | None
    begun: str
    model: str | None

    def prompt_request(self, given: GenerateParameters) -> PromptRequest:
        """What the router is asked for. Raises ValidationError."""
        fixed: dict[str, Any] = {"has_special_tokens": True, "shows_stop": False, "num_answers": 1}
        one = PromptRequest(self.render, given, **fixed, model=self.model)
        return one if self.reading is None else self.reading.applied_to(one, self.begun)

    def reader(self, services: Services, entry: Entry, created: int) -> AnswerReader:
        """What takes the answer apart. created: when it began, in seconds since 1970."""
        if self.reading is None:
            return PlainReader()
        return reader_of(services, self.reading, entry, self.begun, created)


def reader_of(services: Services, reading: Reading, entry: Entry, begun: str, created: int) -> AnswerReader:
    """What takes an answer apart. Where a stream goes on on another server, calls have the same ids there."""
    one = entry.request
    make_id = call_ids(entry.request_id, created, one.sampling.seed, len(one.prompt_ids))
    return reading.reader(services.tokenizer.end_of(one.prompt_ids), begun, make_id)


def turn_of(
    services: Services,
    transcript: Transcript,
    offered: Offer,
    variables: Mapping[str, Any],
    *,
    model: str | None,
    continues: bool = False,
) -> Turn:
    """What comes next in a conversation. Raises ValidationError.

    variables: of the chat template. continues: whether a last message of the assistant is the beginning of the answer.
    """
    formats = services.answer_formats
    reading = formats.reading(offered)
    if continues:
        transcript.drop_empty_end()
    begun = transcript.begun if continues else None
    render = rendering(
        services.chat_template,
        services.aside,
        transcript.messages(),
        offered,
        formats.tools,
        variables=variables,
        continue_final_message=begun is not None,
    )
    return Turn(render, reading, begun or "", model)


async def answer_turn(
    request: Request,
    services: Services,
    turn: Turn,
    asked: PromptRequest,
    *,
    is_stream: bool,
    frames: Callable[[OpenRequest, AnswerReader], Frames],
    shape: Callable[[Answer, Entry, AnswerReader], Any],
    ping: bytes = PING,
) -> Response:
    """The answer, as a stream of `frames` or as the whole that `shape` makes of it. Raises RouterError."""

    def reader(opened: OpenRequest) -> AnswerReader:
        return turn.reader(services, opened.entries[0], continuing.created_of(request))

    if is_stream:
        return await stream(request, [asked], services, lambda opened: frames(opened, reader(opened)), ping=ping)
    opened, [answer] = await collect(request, [asked], services)
    whole = partial(shape, answer, opened.entries[0], reader(opened))
    return json_response(await shaped(request, services, whole), adapter_header(opened))


async def num_prompt_tokens(request: Request, services: Services, turn: Turn) -> int:
    """How many tokens the prompt of a turn has. Raises RouterError."""
    with ClientConnection.of(request.scope).needed():
        return await services.generator.count(turn.render, turn.model, caller_of(request, services))
