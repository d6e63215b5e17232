"""How lines of batches are answered here: by the handlers of OpenAI's routes, without a connection, behind all others.

* They hold no permit of `max_concurrent_requests`, nor of their key's: `batch_concurrency` bounds them.
* One begins only while no other request waits in the queue; batches take turns.
* In the batch they are of an owner of their own with a weight near zero, so that whoever else comes makes them leave it
  (`fairness.py`); they go on later with the same tokens.
* Tokens count against their key's `tokens_per_minute`: a line waits until there are some.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, ClassVar

import orjson
from fastapi import FastAPI, Request
from starlette.types import Message

from router.accounts import NOBODY, Account
from router.errors import RetryLater, RouterError
from router.generation import Generator
from router.guard import EXTENSION
from router.jobs.lines import LineBounds, Problem, Wanted
from router.jobs.results import Reply
from router.key_file import ApiKey
from router.metrics import Metrics
from router.openai import answers
from router.openai.routes import add_openai_routes, most_values_of
from router.permits import Permits
from router.request_log import harmless
from router.serving import Handler, Services
from router.tracing import Tracer

WEIGHT = 0.01  # of a batch beside its key's other requests: next to nothing, and enough to go on where there is room
MOST_WAITING = 4  # requests of batches in the queue: as many as may join in one step or two
LOOK_AGAIN_S = 0.02
ENVELOPE_BYTES, ENVELOPE_VALUES = 4096, 16  # of a line around its body

logger = logging.getLogger(__name__)


class BehindAll(Account):
    """A key's account as its batches have it: its tokens, and none of its places."""

    def __init__(self, of: Account | None) -> None:
        super().__init__(ApiKey(of.name if of is not None else "", NOBODY), time.monotonic)
        self._of = of
        self.share = WEIGHT * (of.share if of is not None else 1.0)

    @property
    def owner(self) -> str:
        """No key has a name with a space."""
        return f"{self.name} batch"

    def take_permits(self, count: int) -> None:
        """They are not the key's."""

    def give_back_permits(self, count: int) -> None:
        """They were not the key's."""

    def charge(self, tokens: int) -> None:
        """Raises Overloaded where the key has no such tokens left this minute."""
        if self._of is not None:
            self._of.charge(tokens)

    def settle(self, charged: int, prompt: int, generated: int, cached: int) -> None:
        """Count what a request came to."""
        if self._of is not None:
            self._of.settle(charged, prompt, generated, cached)


class NoConnection:
    """In place of a client's connection: nobody leaves."""

    @contextmanager
    def needed(self) -> Iterator[None]:
        """As it is."""
        yield


class Answering:
    """The server as its batches see it: handlers by url, and one bound for all that they ask.

    bounds: of lines whose bodies no handler would refuse for their size.
    """

    def __init__(self, services: Services, metrics: Metrics, tracer: Tracer) -> None:
        config, batcher = services.config, services.batcher
        self._view = batcher.view
        self._places = asyncio.Semaphore(config.batch_concurrency)
        self._door = asyncio.Lock()  # who stands in it is the next to begin
        most = config.batch_concurrency * config.max_n * config.max_client_batch_size
        permits = Permits(most, batcher.seconds_until_free)  # never too few: places bound them
        generator = Generator(services.validator, batcher, metrics, tracer, permits)
        chat, completions = add_openai_routes(FastAPI(), replace(services, permits=permits, generator=generator))
        self.bounds = LineBounds(config.payload_limit + ENVELOPE_BYTES, most_values_of(services) + ENVELOPE_VALUES)
        self._handlers: dict[str, Handler] = {"/v1/chat/completions": chat, "/v1/completions": completions}

    async def answer(self, wanted: Wanted, request_id: str, batch: str, account: Account | None) -> Reply:
        """The whole answer to one line, whatever it is."""
        behind = BehindAll(account)
        log: dict[str, Any] = {}
        async with self._places:
            async with self._door:
                while not self._view.has_room_behind(behind.owner, MOST_WAITING):
                    await asyncio.sleep(LOOK_AGAIN_S)
            try:
                response = await self._handlers[wanted.url](_request(wanted, request_id, behind, log))
            except RouterError as error:
                log.setdefault("reason", error.error_type)
                retry_after = float(error.retry_after_s) if isinstance(error, RetryLater) else None
                body = orjson.dumps(answers.error_body(error))
                reply = Reply(answers.status_of(error), request_id, body, retry_after)
            else:
                reply = Reply(response.status_code, request_id, bytes(response.body))
        fields = {"request_id": request_id, "batch": batch, "path": wanted.url, "status": reply.status, **log}
        if account is not None:
            fields["key"] = harmless(account.name)
        logger.info("request of a batch ended: %s", log.get("reason", "answered"), extra=fields)
        return reply


class Refusing:
    """Answers what is left of a batch that was cancelled or is too late."""

    SENTENCES: ClassVar = {
        "batch_cancelled": "the batch was cancelled before this request was answered",
        "batch_expired": "the batch's completion window passed before this request was answered",
    }

    def __init__(self, code: str) -> None:
        self._code = code

    async def send(self, wanted: Wanted, request_id: str) -> Problem:
        """The same for every request."""
        return Problem(wanted.custom_id, self._code, self.SENTENCES[self._code])


def _request(wanted: Wanted, request_id: str, account: Account, log: dict[str, Any]) -> Request:
    state = {"request_id": request_id, "log": log, "account": account, "body": wanted.body}
    scope: dict[str, Any] = {
        "type": "http",
        "method": "POST",
        "path": wanted.url,
        "query_string": b"",
        "headers": [(b"content-type", b"application/json")],
        "client": None,
        "state": state,
        "extensions": {EXTENSION: NoConnection()},
    }
    return Request(scope, _nothing_comes)


async def _nothing_comes() -> Message:
    return {"type": "http.disconnect"}
