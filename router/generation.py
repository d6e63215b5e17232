"""One request's way through the router: permit, validation, queue, answer.

`Generator.open` does everything that can refuse a request and returns an `OpenRequest`. Its owner reads the answer from
it and must close it, whatever happens. Closing gives the permits back, tells the batching loop if nobody wants the
answer any more, and writes the one log line. Nothing here knows HTTP shapes, so that several APIs can share it.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import TypeVar

from router.accounts import Account
from router.batcher import Batcher
from router.entry import Entry, Event, Failed, Finished, PromptTokens, Token, ValidRequest
from router.errors import DeadlinePassed, Overloaded, RouterError
from router.fairness import may_take, most_held
from router.metrics import Metrics
from router.schemas import GenerateRequest
from router.tracing import RequestSpan, Tracer
from router.validation import Tokens, Validator, check_streamable

logger = logging.getLogger(__name__)

Result = TypeVar("Result")
Shaped = TypeVar("Shaped")


@dataclass(frozen=True, slots=True)
class Answer:
    """One complete sample."""

    prompt: tuple[Token, ...]
    tokens: list[Token]
    finished: Finished
    seed: int | None  # None when nothing was drawn at random

    @property
    def mean_logprob(self) -> float:
        """By this the likeliest of several samples is chosen."""
        return sum(token.logprob or 0.0 for token in self.tokens) / len(self.tokens)


class Permits:
    """Counts requests against `max_concurrent_requests`. Never waits.

    Where several API keys are known, none takes them all: some are always left for a key that has none.
    """

    def __init__(self, total: int, seconds_until_free: Callable[[int], int]) -> None:
        self._left = total
        self._seconds_until_free = seconds_until_free

    def take(self, count: int, account: Account | None = None) -> None:
        """Take `count` permits, all or none. Raises Overloaded."""
        if count > self._left:
            raise Overloaded(retry_after_s=self._seconds_until_free(count))
        if account is not None:
            if account.owner and not may_take(count, held=account.num_held, free=self._left, weight=account.share):
                account.refusals["share"] += 1
                most = most_held(free=self._left - count, weight=account.share)
                detail = (
                    f"Model is overloaded: API key {account.name} has {account.num_held} requests in it; while "
                    f"{self._left} places are free it may have {most} with this one"
                )
                raise Overloaded(detail, self._seconds_until_free(count))
            account.take_permits(count)
        self._left -= count

    def give_back(self, count: int, account: Account | None = None) -> None:
        """Return permits that `take` gave."""
        self._left += count
        if account is not None:
            account.give_back_permits(count)

    @contextmanager
    def hold(self, account: Account | None = None) -> Iterator[None]:
        """Hold one permit for the length of a block. Raises Overloaded."""
        self.take(1, account)
        try:
            yield
        finally:
            self.give_back(1, account)


class OpenRequest:
    """A request under way, from its permit to its log line."""

    def __init__(
        self,
        request_id: str,
        received_at: float,
        permits: Permits,
        metrics: Metrics,
        span: RequestSpan,
        account: Account | None = None,
    ) -> None:
        self.received_at = received_at
        self.entries: list[Entry] = []
        self._request_id = request_id
        self._permits = permits
        self._num_permits = 0
        self._account = account
        self._num_charged = 0
        self._timer: asyncio.TimerHandle | None = None
        self._metrics = metrics
        self._span = span
        self._finished: Finished | None = None
        self._error: RouterError | None = None
        self._has_token = False
        self._is_closed = False

    @property
    def input_length(self) -> int:
        """Tokens of the prompt."""
        return self.entries[0].request.input_length

    @property
    def seed(self) -> int | None:
        """The seed to show to the client; None where nothing was drawn at random."""
        return _visible_seed(self.entries[0])

    def take_permits(self, count: int) -> None:
        """Take more permits, which `close` gives back. Raises Overloaded."""
        self._permits.take(count, self._account)
        self._num_permits += count

    def charge(self, tokens: int) -> None:
        """Take tokens of the key's limit; `close` gives those back that were not used. Raises Overloaded."""
        if self._account is not None:
            self._account.charge(tokens)
            self._num_charged = tokens

    def end_at(self, when: float, end: Callable[[Entry], None]) -> None:
        """Call `end` for each sample that is not over at `when`, a time of the event loop. `close` forgets it."""
        self._timer = asyncio.get_running_loop().call_at(when, self._end_entries, end)

    def _end_entries(self, end: Callable[[Entry], None]) -> None:
        unfinished = [entry for entry in self.entries if not entry.is_over]
        if unfinished:
            self._metrics.timeouts.labels("running" if unfinished[0].admitted_at else "queued").inc()
        for entry in unfinished:
            end(entry)

    async def answers(self) -> list[Answer]:
        """All samples, the likeliest first and the others in order. Raises the error of the first that fails.

        They are generated together, whatever the order in which they are collected here: events wait in their queues.
        """
        answers = [await self._collect(entry) for entry in self.entries]
        best = max(answers, key=lambda answer: answer.mean_logprob)
        self._finished = best.finished
        return [best, *(answer for answer in answers if answer is not best)]

    @property
    def is_over(self) -> bool:
        """Whether the last event has been taken."""
        return self._finished is not None or self._error is not None

    async def next_events(self) -> list[Event]:
        """What has come of the first sample since the last call, at least one event; for streams.

        The last token and the event that ends the request always come together.
        """
        events = self.entries[0].events
        arrived = [await events.get()]
        while not events.empty():
            arrived.append(events.get_nowait())
        self._note(arrived)
        return arrived

    def fail(self, error: RouterError) -> None:
        """Note why there will be no answer. The first reason counts."""
        self._error = self._error or error

    @contextmanager
    def noting_failure(self) -> Iterator[None]:
        """Note why the block failed. What is not ours is a bug, not a client that left."""
        try:
            yield
        except RouterError as error:
            self.fail(error)
            raise
        except Exception:
            self.fail(RouterError("Internal Server Error"))
            raise

    def close(self) -> None:
        """Give everything back. May be called twice."""
        if self._is_closed:
            return
        self._is_closed = True
        if self._timer is not None:
            self._timer.cancel()
        self._permits.give_back(self._num_permits, self._account)
        if self._account is not None:
            prompt = sum(entry.request.input_length for entry in self.entries)
            self._account.settle(self._num_charged, prompt, sum(e.generated.num_tokens for e in self.entries))
        for entry in self.entries:
            entry.cancelled = not entry.is_over
        if self._finished is not None:
            self._metrics.succeeded(self.received_at, self._finished)
        else:
            self._metrics.failed(self._error.failure_label if self._error else "dropped")
        self._write_log()

    async def _collect(self, entry: Entry) -> Answer:
        prompt: tuple[Token, ...] = ()
        tokens: list[Token] = []
        while True:
            event = await entry.events.get()
            if isinstance(event, Token):
                tokens.append(event)
                self._note_first_token()
            elif isinstance(event, PromptTokens):
                prompt = event.tokens
            elif isinstance(event, Finished):
                return Answer(prompt, tokens, event, _visible_seed(entry))
            else:
                self.fail(event.error)
                raise event.error

    def _note(self, events: list[Event]) -> None:
        if isinstance(events[0], Token):
            self._note_first_token()
        last = events[-1]
        if isinstance(last, Finished):
            self._finished = last
        elif isinstance(last, Failed):
            self.fail(last.error)

    def _note_first_token(self) -> None:
        if not self._has_token:
            self._has_token = True
            self._span.event("first token")

    def _write_log(self) -> None:
        entry = self.entries[0] if self.entries else None
        error_type = self._error.error_type if self._error else "cancelled"
        reason = str(self._finished.reason) if self._finished else error_type
        fields: dict[str, int | str] = {"request_id": self._request_id, "reason": reason}
        if self._account is not None:
            fields["key"] = self._account.name
        if entry is not None:
            fields |= {"prompt_tokens": self.input_length, "generated_tokens": entry.generated.num_tokens}
        if self._finished is not None:
            times = self._finished.timings
            fields |= {
                "validation_ms": _ms(times.queued - self.received_at),
                "queue_ms": _ms(times.admitted - times.queued),
                "first_token_ms": _ms(times.first_token - self.received_at),
                "total_ms": _ms(times.finished - self.received_at),
            }
        self._span.end(reason, fields)
        logger.info("request ended: %s", reason, extra=fields)


def _visible_seed(entry: Entry) -> int | None:
    sampling = entry.request.sampling
    return sampling.seed if sampling.do_sample else None


def _owner(account: Account | None) -> str:
    return account.owner if account is not None else ""


def _ms(seconds: float) -> int:
    return round(seconds * 1000)


class Generator:
    """Opens requests: the one door to the batching loop."""

    def __init__(
        self,
        validator: Validator,
        batcher: Batcher,
        metrics: Metrics,
        tracer: Tracer,
        permits: Permits,
        *,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self._validator = validator
        self._batcher = batcher
        self._metrics = metrics
        self._tracer = tracer
        self._permits = permits
        self._clock = clock

    async def open(
        self,
        request: GenerateRequest,
        *,
        request_id: str,
        headers: Mapping[str, str],
        is_stream: bool,
        account: Account | None = None,
        timeout_s: float | None = None,
    ) -> OpenRequest:
        """Validate and queue. Raises the RouterError that refuses the request.

        Whatever it raises, it has given everything back then. account: of the key that it came with. timeout_s: from
        now on; the request ends with DeadlinePassed after it.
        """
        self._metrics.request_count.inc()
        span = self._tracer.start("generate_stream" if is_stream else "generate", headers)
        opened = OpenRequest(request_id, self._clock(), self._permits, self._metrics, span, account)
        with ExitStack() as undo:
            undo.callback(opened.close)
            with opened.noting_failure():
                if is_stream:
                    check_streamable(request.given)
                opened.take_permits(1)
                began = asyncio.get_running_loop().time()
                valid = await self._in_time(self._validator.validate(request, _owner(account)), timeout_s)
                if timeout_s is not None:
                    late = DeadlinePassed(timeout_s)
                    opened.end_at(began + timeout_s, lambda entry: self._batcher.end(entry, late))
                opened.take_permits(len(valid) - 1)
                opened.charge(sum(one.size().tokens for one in valid))
                self._submit(opened, valid, account)
                span.event("queued")
                self._metrics.input_length.observe(opened.input_length)
                self._metrics.max_new_tokens.observe(valid[0].max_new_tokens)
            undo.pop_all()  # from here on the request's owner closes it
        return opened

    async def tokenise(
        self,
        text: str,
        shape: Callable[[Tokens], Shaped],
        *,
        account: Account | None = None,
        timeout_s: float | None = None,
    ) -> Shaped:
        """What `shape` makes of the text's tokens; a long text takes a thread as any request does. Raises RouterError.

        account and timeout_s as for `open`.
        """
        with self._permits.hold(account):
            return await self._in_time(self._validator.tokenise(text, shape, _owner(account)), timeout_s)

    async def _in_time(self, work: Awaitable[Result], timeout_s: float | None) -> Result:
        """What comes of `work`. Raises DeadlinePassed."""
        if timeout_s is None:
            return await work
        try:
            async with asyncio.timeout(timeout_s):
                return await work
        except TimeoutError:
            self._metrics.timeouts.labels("validation").inc()
            raise DeadlinePassed(timeout_s) from None

    def _submit(self, opened: OpenRequest, valid: Sequence[ValidRequest], account: Account | None) -> None:
        """Queue the samples of one request. Raises Overloaded and Unavailable; `opened` then knows those queued."""
        owner, weight = _owner(account), account.share if account is not None else 1.0
        self._batcher.check_room(valid, owner, weight)
        for one in valid:
            opened.entries.append(self._batcher.submit(one, owner=owner, weight=weight))
