"""Streams that go on from one server to another: what a balancer is told of a stream, and how it hands one on.

A balancer of several servers that knows their `continuation_key` sends it with a request that is streamed. Behind the
frames of every write it then finds a comment, which clients of server-sent events pass over:

    : lockstep {"seeds":[7],"created":1790000000,"tokens":[[0,312,-0.5,[]]],"over":[]}

`tokens` are those that these frames tell of: number of the sample, token, log-probability, candidates. So a frame is
known to be whole when its comment is there, and what comes without one is thrown away. When the server is lost, the
balancer sends the same request, with the same `x-request-id`, to another one, and puts before its body what it knows.
That server makes no frame for what is known and goes on behind it, with the same seed: noise is a function of seed,
position and token, so the tokens are those that would have come. The first comment of a stream with an adapter has the
key of that one's content, without which no server goes on.

Left out: the balancer (`deploy/ray/`), and how a sequence is rebuilt from its tokens
(`router/scheduling/scheduler.py`).
"""

from __future__ import annotations

import hmac
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import replace
from typing import Any

import orjson
from fastapi import Request
from pydantic import BaseModel, ConfigDict, Field, NonNegativeInt
from pydantic import ValidationError as Invalid

from router.errors import Unavailable, ValidationError
from router.scheduling.request import Event, Failed, Finished, ScoredToken, Token, ValidRequest

KEY_HEADER = "x-lockstep-continuation"
LENGTH_HEADER = "x-lockstep-known-bytes"  # how much of the body says what is known, before the request's own
TOLD_HEADER = "x-lockstep-told"  # of an answer whose writes are told of
MARK = b": lockstep "
NOTHING = MARK + b"{}\n\n"

Write = Callable[[int, list[Event]], bytes]
# Frames that take too long to be written between the tokens of other streams are prepared before `Write`.
Prepare = Callable[[list[tuple[int, list[Event]]]], Awaitable[None]]
KnownToken = tuple[NonNegativeInt, float | None, list[tuple[NonNegativeInt, float]]]  # id, logprob, candidates


class KnownSample(BaseModel):
    """One sequence of a stream, as far as its client has it. is_over: also its end."""

    model_config = ConfigDict(extra="forbid")

    seed: int = Field(ge=0, lt=2**64)
    tokens: list[KnownToken] = []
    is_over: bool = False


class Known(BaseModel):
    """What a client has of a stream. created: when the stream began, in seconds since 1970."""

    model_config = ConfigDict(extra="forbid")

    created: NonNegativeInt
    samples: list[KnownSample]
    adapter: str = Field(default="", max_length=64)  # its key, as `Journal` tells it

    def checked(self, valid: Sequence[ValidRequest], vocab_size: int) -> list[ValidRequest]:
        """The requests with the seeds that they had.

        Raises ValidationError for what no such stream has, and Unavailable where the adapter is another one.
        """
        if len(valid) != len(self.samples):
            raise ValidationError(f"{len(self.samples)} sequences are known of a stream that has {len(valid)}")
        if self.adapter != _key_of(valid):
            named = next((one.adapter.name for one in valid if one.adapter is not None), "")
            raise Unavailable(f"the adapter {named} has other content here than where this stream began: ask again")
        for one, sample in zip(valid, self.samples, strict=True):
            if len(sample.tokens) > one.max_new_tokens:
                raise ValidationError(f"{len(sample.tokens)} tokens are known of at most {one.max_new_tokens}")
            if any(id >= vocab_size for id, _, _ in sample.tokens):
                raise ValidationError(f"a known token is none of the {vocab_size} that the model has")
        pairs = zip(valid, self.samples, strict=True)
        return [replace(one, sampling=replace(one.sampling, seed=sample.seed)) for one, sample in pairs]


def is_trusted(request: Request, key: str | None) -> bool:
    """Whether a balancer with our key sends it. Raises ValidationError for a wrong one."""
    given = request.headers.get(KEY_HEADER)
    if given is None:
        return False
    if key is None or not hmac.compare_digest(given.encode(), key.encode()):
        raise ValidationError(f"`{KEY_HEADER}` is only for load balancers, and is not this server's --continuation-key")
    return True


def without_known(request: Request, raw: bytes, key: str | None) -> bytes:
    """The body of the request itself; what is known is noted with it. Raises ValidationError."""
    length = request.headers.get(LENGTH_HEADER)
    if length is None:
        return raw
    if not is_trusted(request, key) or not length.isdecimal() or int(length) > len(raw):
        raise ValidationError(f"`{LENGTH_HEADER}` is a number of bytes, and comes with `{KEY_HEADER}`")
    try:
        request.state.known = Known.model_validate_json(raw[: int(length)])
    except Invalid as error:
        raise ValidationError(f"the known part of the stream is not valid: {error.errors()[0]['msg']}") from None
    return raw[int(length) :]


def known_of(request: Request) -> Known | None:
    """What another server has told of this stream, if one has."""
    known: Known | None = getattr(request.state, "known", None)
    return known


def created_of(request: Request) -> int:
    """When the stream began, in seconds since 1970; always the same for one request."""
    known = known_of(request)
    if known is not None:
        return known.created
    if not hasattr(request.state, "created"):
        request.state.created = int(time.time())
    created: int = request.state.created
    return created


class Journal:
    """Writes of one stream what a balancer has to know, and leaves out what is known already."""

    def __init__(self, created: int, valid: Sequence[ValidRequest], known: Known | None) -> None:
        self._first: dict[str, Any] = {"created": created, "seeds": [one.sampling.seed for one in valid]}
        if key := _key_of(valid):
            self._first["adapter"] = key
        samples = known.samples if known is not None else []
        self._num_known = {index: len(one.tokens) for index, one in enumerate(samples)}
        self._is_over = {index for index, one in enumerate(samples) if one.is_over}

    async def new(
        self, events: list[tuple[int, list[Event]]], prepare: Prepare | None, write: Write
    ) -> list[tuple[int, list[Event]]]:
        """Those that the client does not have; what writes frames is given the others, too."""
        old: list[tuple[int, list[Event]]] = []
        new: list[tuple[int, list[Event]]] = []
        for index, some in events:
            count = self._count_known(index, some)
            old += [(index, some[:count])] if count else []
            new += [(index, some[count:])] if count < len(some) else []
        if old and prepare is not None:
            await prepare(old)
        for index, some in old:
            write(index, some)
        return new

    def _count_known(self, index: int, events: list[Event]) -> int:
        num_tokens = sum(isinstance(event, Token) for event in events)
        count = min(self._num_known.get(index, 0), num_tokens)
        if count:
            self._num_known[index] -= count
        is_end = count < len(events) and isinstance(events[count], Finished)
        return count + (is_end and index in self._is_over)

    def line(self, events: list[tuple[int, list[Event]]]) -> bytes:
        """The comment behind the frames of these events; none where another server may go on instead of them."""
        if any(isinstance(some[-1], Failed) and some[-1].error.status == 503 for _, some in events):
            return b""
        tokens = [_told(index, event) for index, some in events for event in some if isinstance(event, Token)]
        over = [index for index, some in events if isinstance(some[-1], Finished | Failed)]
        said, self._first = {**self._first, "tokens": tokens, "over": over}, {}
        return MARK + orjson.dumps(said) + b"\n\n"


def _key_of(valid: Sequence[ValidRequest]) -> str:
    """Of the adapter of a stream, which has one at most; empty where it has none."""
    return next((one.adapter.key.hex() for one in valid if one.adapter is not None), "")


def _told(index: int, token: Token) -> tuple[Any, ...]:
    if isinstance(token, ScoredToken):
        return index, token.id, token.logprob, list(token.candidates)
    return index, token.id, token.logprob, [(top.id, top.logprob) for top in token.top_tokens]
