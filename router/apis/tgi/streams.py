"""Streams of TGI's own routes: the shapes of their events, and what writes them.

A token's frame is written by hand, because there is one for every token of every stream.
"""

from __future__ import annotations

from typing import NotRequired

from orjson import dumps
from typing_extensions import TypedDict

from router.apis.tgi.answers import TokenBody, token_body, visible_text
from router.apis.tgi.requests import GenerateRequest
from router.http.event_stream import frame
from router.requests.generation import OpenRequest
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
        if token.top_tokens:
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


def stream_headers(request: GenerateRequest, compute_type: str) -> dict[str, str]:
    """Headers of a stream, which must not wait in a cache or a proxy's buffer."""
    return {
        "x-compute-type": compute_type,
        "x-compute-characters": str(len(request.inputs)),
        "cache-control": "no-cache",
        "X-Accel-Buffering": "no",
    }
