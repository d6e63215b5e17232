"""The shapes of TGI's own routes: JSON bodies, server-sent events, response headers.

The API's document is generated from the same shapes; nothing checks answers while the server runs. Of a frame all but
what a token changes is written once, because there is one for every token of every stream.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Annotated, NotRequired

from orjson import dumps
from pydantic import Field
from typing_extensions import TypedDict

from router.asked import Asked
from router.entry import Event, Failed, Finished, Token
from router.generation import OpenRequest
from router.samples import Answer, likeliest_first, one_per_prompt
from router.schemas import GenerateParameters, GenerateRequest
from router.text import FinishReason

# A token of a stream but for the last, without candidates: index, token id, text, log-probability, special.
TOKEN_FRAME = (
    b'data: {"index":%d,"token":{"id":%d,"text":%b,"logprob":%b,"special":%b},"generated_text":null,"details":null}\n\n'
)
PING = b": ping\n\n"  # a comment: clients ignore it, proxies see that the stream lives
# What `response_headers` gives, for pages of other origins to read.
COUNT_HEADERS = (
    "x-compute-type", "x-compute-characters", "x-prompt-tokens", "x-generated-tokens", "x-compute-time", "x-total-time",
    "x-validation-time", "x-queue-time", "x-inference-time", "x-time-per-token",
)  # fmt: skip


class TokenBody(TypedDict):
    """One generated token."""

    id: int
    text: str
    logprob: float | None
    special: bool


class PromptTokenBody(TypedDict):
    """One token of the prompt; the first has no log-probability."""

    id: int
    text: str
    logprob: float | None


class Details(TypedDict):
    """What `details` asks for, of each sample."""

    finish_reason: FinishReason
    generated_tokens: int
    seed: int | None
    prefill: list[PromptTokenBody]
    tokens: list[TokenBody]
    top_tokens: NotRequired[list[list[TokenBody]]]


class SequenceBody(Details):
    """A sample of `best_of` that is not the best."""

    generated_text: str


class Others(TypedDict, total=False):
    """The samples that are not the best, where there is more than one."""

    best_of_sequences: list[SequenceBody]


class DetailsBody(Details, Others):
    """What `details` asks for."""


class GenerateResponse(TypedDict):
    """The whole answer."""

    generated_text: str
    details: NotRequired[DetailsBody]


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


class TokenizedBody(TypedDict):
    """One token of a text, with its place in bytes."""

    id: int
    text: str
    start: Annotated[int, Field(description="First byte in `inputs`.")]
    stop: Annotated[int, Field(description="The byte after the last.")]


class ChatTokenizedBody(TypedDict):
    """A chat's prompt and its tokens."""

    tokenize_response: list[TokenizedBody]
    templated_text: str


class DetokenizedBody(TypedDict):
    """The text of token ids."""

    text: str


def asked(request: GenerateRequest) -> Asked:
    """What a body asks for."""
    return Asked(request.inputs, request.given)


def response_body(request: GenerateRequest, answers: list[Answer]) -> GenerateResponse:
    """The answer of `/generate`."""
    given = request.given
    best, *others = likeliest_first(answers)
    body: GenerateResponse = {"generated_text": _visible_text(request, best.finished.generated_text)}
    if given.details or given.decoder_input_details:
        body["details"] = {**_details(best, given), **_others(request, others)}
    return body


def _others(request: GenerateRequest, answers: Sequence[Answer]) -> Others:
    told: list[SequenceBody] = [
        {"generated_text": _visible_text(request, answer.finished.generated_text), **_details(answer, request.given)}
        for answer in answers
    ]
    return {"best_of_sequences": told} if told else {}


def _visible_text(request: GenerateRequest, generated: str) -> str:
    return request.inputs + generated if request.given.return_full_text else generated


def _details(answer: Answer, given: GenerateParameters) -> Details:
    details: Details = {
        "finish_reason": answer.finished.reason,
        "generated_tokens": answer.finished.generated_tokens,
        "seed": answer.seed,
        "prefill": [{"id": token.id, "text": token.text, "logprob": token.logprob} for token in answer.prompt],
        "tokens": [_token(token) for token in answer.tokens],
    }
    if given.top_n_tokens:
        details["top_tokens"] = [[_token(top) for top in token.top_tokens] for token in answer.tokens]
    return details


def _token(token: Token) -> TokenBody:
    return {"id": token.id, "text": token.text, "logprob": token.logprob, "special": token.special}


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
        if token.top_tokens:
            return self._frame(token, None)
        self._index += 1
        text, logprob = dumps(token.text), dumps(token.logprob)
        return TOKEN_FRAME % (self._index, token.id, text, logprob, b"true" if token.special else b"false")

    def _frame(self, token: Token, finished: Finished | None) -> bytes:
        self._index += 1
        event: StreamResponse = {
            "index": self._index,
            "token": _token(token),
            "generated_text": None if finished is None else _visible_text(self._request, finished.generated_text),
            "details": self._details(finished) if finished and self._request.given.details else None,
        }
        if token.top_tokens:
            event["top_tokens"] = [_token(top) for top in token.top_tokens]
        return frame(event)

    def _details(self, finished: Finished) -> StreamDetailsBody:
        return {
            "finish_reason": finished.reason,
            "generated_tokens": finished.generated_tokens,
            "seed": self._opened.seed,
            "input_length": self._opened.input_length,
        }


def frame(event: Mapping[str, object]) -> bytes:
    """One server-sent event. JSON has no raw newline, so one event is always one line."""
    return b"data: " + dumps(event) + b"\n\n"


def stream_headers(request: GenerateRequest, compute_type: str) -> dict[str, str]:
    """Headers of a stream, which must not wait in a cache or a proxy's buffer."""
    return {
        "x-compute-type": compute_type,
        "x-compute-characters": str(len(request.inputs)),
        "cache-control": "no-cache",
        "X-Accel-Buffering": "no",
    }


def response_headers(
    num_characters: int | None, opened: OpenRequest, finished: Sequence[Finished], compute_type: str
) -> dict[str, str]:
    """Counts of all answers that are given, and times in whole milliseconds of the one that took longest.

    num_characters: of the prompts; None where a client has not written them itself.
    """
    times = max((one.timings for one in finished), key=lambda timings: timings.finished)
    inference = times.finished - times.admitted
    generated = sum(one.generated_tokens for one in finished)
    seconds = {
        "x-compute-time": times.finished - opened.received_at,
        "x-total-time": times.finished - opened.received_at,
        "x-validation-time": times.queued - opened.received_at,
        "x-queue-time": times.admitted - times.queued,
        "x-inference-time": inference,
        "x-time-per-token": inference / max(generated, 1),
    }
    return {
        "x-compute-type": compute_type,
        **({} if num_characters is None else {"x-compute-characters": str(num_characters)}),
        "x-prompt-tokens": str(sum(entry.request.input_length for entry in one_per_prompt(opened.entries))),
        "x-generated-tokens": str(generated),
        **{name: str(round(value * 1000)) for name, value in seconds.items()},
    }


def tokenized_body(text: str, tokens: Sequence[tuple[int, tuple[int, int]]]) -> bytes:
    """The answer of `/tokenize`."""
    return dumps(_tokens_in(text, tokens))


def chat_tokenized_body(text: str, tokens: Sequence[tuple[int, tuple[int, int]]]) -> bytes:
    """The answer of `/chat_tokenize`."""
    told: ChatTokenizedBody = {"tokenize_response": _tokens_in(text, tokens), "templated_text": text}
    return dumps(told)


def _tokens_in(text: str, tokens: Sequence[tuple[int, tuple[int, int]]]) -> list[TokenizedBody]:
    """Character offsets become byte offsets, as TGI's are."""
    byte_at = _byte_offsets(text, {offset for _, span in tokens for offset in span})
    return [
        {"id": id, "text": text[start:stop], "start": byte_at[start], "stop": byte_at[stop]}
        for id, (start, stop) in tokens
    ]


def _byte_offsets(text: str, offsets: Iterable[int]) -> dict[int, int]:
    """Character offset -> byte offset."""
    found, last, num_bytes = {}, 0, 0
    for offset in sorted(offsets):
        num_bytes += len(text[last:offset].encode())
        found[offset], last = num_bytes, offset
    return found
