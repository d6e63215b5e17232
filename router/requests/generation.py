"""One request's way through the router: permit, validation, queue, answer.

`Generator.open` does everything that can refuse a request and returns an `OpenRequest`. Its owner reads the answer from
it and must close it, whatever happens. Closing gives the permits back, tells the batching loop if the answer is not
wanted any more, and notes what its log line says. Nothing here knows HTTP shapes, so that several APIs can share it.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from typing import Any, TypeVar

from router.accounts import Account, Permits
from router.batching.batcher import Batcher
from router.errors import DeadlinePassed, RouterError
from router.requests.adapters import Adapters, Allowed
from router.requests.continuing import Journal, Known
from router.requests.schemas import PromptRequest, Rendering
from router.requests.validation import Tokens, Validator, check_streamable
from router.scheduling.adapters import Adapter
from router.scheduling.request import (
    Entry,
    Event,
    Failed,
    Finished,
    MergedEvents,
    PromptScores,
    PromptTokens,
    Token,
    ValidRequest,
)
from router.telemetry.metrics import Metrics
from router.telemetry.tracing import Ended, Tracer

Result = TypeVar("Result")
Shaped = TypeVar("Shaped")


@dataclass(frozen=True, slots=True)
class Caller:
    """Where a request comes from, and how long it may take."""

    account: Account | None = None  # of the key that it came with
    peer: str = ""  # the address that it came from
    timeout_s: float | None = None  # from when it is opened; the request ends with DeadlinePassed after it
    route: str = ""  # by which it came

    @property
    def owner(self) -> str:
        """Among whose requests it waits for what is prepared before the queue: without a key, those of its peer."""
        return self.account.owner if self.account is not None else self.peer

    @property
    def adapters(self) -> Allowed:
        """Names of the adapters that its key may use; None: all."""
        return None if self.account is None else self.account.key.adapters


class Generator:
    """Opens requests: the only way to the batching loop."""

    def __init__(
        self,
        validator: Validator,
        batcher: Batcher,
        metrics: Metrics,
        tracer: Tracer,
        permits: Permits,
        adapters: Adapters,
    ) -> None:
        self._adapters = adapters
        self._validator = validator
        self._batcher = batcher
        self._metrics = metrics
        self._tracer = tracer
        self._permits = permits

    async def open(
        self,
        asked: Sequence[PromptRequest],
        *,
        headers: Mapping[str, str],
        is_stream: bool,
        request_id: str,
        log: dict[str, Any],
        caller: Caller,
        known: Known | None,
    ) -> OpenRequest:
        """Validate and queue all prompts of one request. Raises the RouterError that refuses it.

        Whatever it raises, it has given everything back then. log: gets what the request's log line says, at its end.
        known: what another server has generated of it, which comes again first.
        """
        self._metrics.request_count.inc()
        log["stream"] = is_stream
        is_chat = any(callable(one.prompt) for one in asked)
        parts = (self._permits, self._metrics, self._tracer)
        opened = OpenRequest(log, *parts, headers, caller.account, self._batcher.cancel, is_chat=is_chat)
        with ExitStack() as undo:
            undo.callback(opened.close)
            with opened.noting_failure():
                if is_stream:
                    for one in asked:
                        check_streamable(one.given)
                opened.take_permits(1)
                began = asyncio.get_running_loop().time()
                valid = await self._in_time(self._validate(asked, caller), caller.timeout_s)
                if caller.timeout_s is not None:
                    late = DeadlinePassed(caller.timeout_s)
                    opened.end_at(began + caller.timeout_s, lambda entry: self._batcher.end(entry, late))
                log |= names_of_adapters(valid)
                if known is not None:
                    valid = known.checked(valid, self._batcher.limits.vocab_size)
                opened.take_permits(len(valid) - 1)
                opened.charge(sum(one.size().tokens for one in valid))
                self._submit(opened, valid, caller, request_id, known)
                if is_stream and len(valid) > 1:
                    opened.merge_events()
                for entry in one_per_prompt(opened.entries):
                    self._metrics.input_length.observe(entry.request.input_length)
                    self._metrics.max_new_tokens.observe(entry.request.wanted_tokens)
            undo.pop_all()  # from here on the request's owner closes it
        return opened

    async def _validate(self, asked: Sequence[PromptRequest], caller: Caller) -> list[ValidRequest]:
        # Each name is looked up once, so that all prompts under it have the same adapter.
        named = {(one.model, one.given.adapter_id): None for one in asked}
        chosen = {names: await self._adapters.chosen(*names, caller.adapters) for names in named}
        found: list[ValidRequest] = []
        for one in asked:
            adapter = chosen[one.model, one.given.adapter_id]
            for valid in await self._validator.validate(one, caller.owner):
                found.append(valid if adapter is None else replace(valid, adapter=adapter))
        return found

    async def tokenise(self, asked: PromptRequest, shape: Callable[[str, Tokens], Shaped], caller: Caller) -> Shaped:
        """What `shape` makes of a prompt's text and its tokens; a long one takes a thread as any request does.

        Raises RouterError.
        """

        async def work() -> Shaped:
            await self._check_named(asked.model, asked.given.adapter_id, caller)
            return await self._validator.tokenise(asked, shape, caller.owner)

        with self._permits.hold(caller.account):
            return await self._in_time(work(), caller.timeout_s)

    async def detokenise(self, token_ids: Sequence[int], skip_special_tokens: bool, caller: Caller) -> str:
        """The text of token ids. Raises RouterError."""
        with self._permits.hold(caller.account):
            work = self._validator.detokenise(token_ids, skip_special_tokens, caller.owner)
            return await self._in_time(work, caller.timeout_s)

    async def count(self, prompt: Rendering, model: str | None, caller: Caller) -> int:
        """How many tokens a chat's prompt has, whatever the adapter that it names. Raises RouterError."""

        async def work() -> int:
            await self._check_named(model, None, caller)
            return await self._validator.count(prompt, caller.owner)

        with self._permits.hold(caller.account):
            return await self._in_time(work(), caller.timeout_s)

    async def _check_named(self, model: str | None, adapter_id: str | None, caller: Caller) -> None:
        """Raise RouterError for a name that is nobody's. Without one, a key that is for adapters alone counts too."""
        if model or adapter_id:
            await self._adapters.chosen(model, adapter_id, caller.adapters)

    async def find_adapter(self, name: str, caller: Caller) -> Adapter:
        """The adapter of this name. Raises RouterError."""
        with self._permits.hold(caller.account):
            return await self._in_time(self._adapters.find(name, caller.adapters), caller.timeout_s)

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

    def _submit(
        self,
        opened: OpenRequest,
        valid: Sequence[ValidRequest],
        caller: Caller,
        request_id: str,
        known: Known | None,
    ) -> None:
        """Queue the samples of one request. Raises Overloaded and Unavailable; `opened` then knows those queued."""
        account = caller.account
        owner, weight = ("", 1.0) if account is None else (account.owner, account.share)
        self._batcher.check_room(valid, owner, weight)
        for number, one in enumerate(valid):
            tokens = known.samples[number].tokens if known is not None else ()
            if not owner and one.priority < 0:  # without keys no client may pass others
                one = replace(one, priority=0)
            entry = self._batcher.submit(one, owner=owner, weight=weight, route=caller.route, known=tokens)
            entry.request_id = request_id
            entry.key_name = "" if account is None else account.name
            opened.entries.append(entry)


class OpenRequest:
    """A request under way, from its permit to what its log line says."""

    def __init__(
        self,
        log: dict[str, Any],
        permits: Permits,
        metrics: Metrics,
        tracer: Tracer,
        headers: Mapping[str, str],
        account: Account | None,
        cancel: Callable[[Entry], None],
        *,
        is_chat: bool,
    ) -> None:
        self.received_at = time.perf_counter()
        self.entries: list[Entry] = []
        self._log = log
        self._is_chat = is_chat
        self._permits = permits
        self._num_permits = 0
        self._account = account
        self._cancel = cancel
        self._num_charged = 0
        self._timer: asyncio.TimerHandle | None = None
        self._metrics = metrics
        self._span = tracer.start("generate_stream" if log["stream"] else "generate", headers, self.received_at)
        self._merged: asyncio.Queue[tuple[int, Event]] | None = None
        self._num_over = 0  # samples of a stream whose last event was taken
        self._finished: Finished | None = None
        self._error: RouterError | None = None
        self._is_closed = False

    @property
    def input_length(self) -> int:
        """Tokens of the prompt."""
        return self.entries[0].request.input_length

    @property
    def adapters(self) -> list[Adapter]:
        """Of its prompts, each once."""
        return adapters_of([entry.request for entry in self.entries])

    @property
    def seed(self) -> int | None:
        """The seed to show to the client; None where nothing was drawn at random."""
        return _visible_seed(self.entries[0])

    @property
    def num_generated(self) -> int:
        """Tokens of all samples so far."""
        return sum(entry.generated.num_tokens for entry in self.entries)

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
        """All samples in order. Raises the error of the first that fails.

        They are generated together, whatever the order in which they are collected here: events wait in their queues.
        """
        answers = [await self._collect(entry) for entry in self.entries]
        self._finished = likeliest_first(answers)[0].finished
        return answers

    @property
    def is_over(self) -> bool:
        """Whether the last event has been taken."""
        return self._finished is not None or self._error is not None

    def merge_events(self) -> None:
        """Let the events of all samples come in one queue; for streams of several. Before any is generated."""
        self._merged = asyncio.Queue()
        for index, entry in enumerate(self.entries):
            known, entry.events = entry.events, MergedEvents(self._merged, index)
            while not known.empty():
                entry.events.put_nowait(known.get_nowait())

    def journal(self, created: int, known: Known | None) -> Journal | None:
        """What tells a balancer of this stream; None where it tells of its prompt, which is not told again."""
        valid = [entry.request for entry in self.entries]
        return None if any(one.prompt_logprobs for one in valid) else Journal(created, valid, known)

    async def next_events(self) -> list[tuple[int, list[Event]]]:
        """What has come since the last call, at least one event, with the number of its sample; for streams.

        The last token of a sample and the event that ends it always come together.
        """
        if self._merged is not None:
            return self._noted(await _drained(self._merged))
        arrived = await _drained(self.entries[0].events)
        self._note(arrived)
        return [(0, arrived)]

    def _noted(self, arrived: list[tuple[int, Event]]) -> list[tuple[int, list[Event]]]:
        by_sample: dict[int, list[Event]] = {}
        for index, event in arrived:
            by_sample.setdefault(index, []).append(event)
        for events in by_sample.values():
            self._note(events)
        return list(by_sample.items())

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
            cached = sum(entry.num_cached for entry in self.entries)
            self._account.settle(self._num_charged, prompt, self.num_generated, cached)
        self._metrics.adapters.count(self.entries)
        for entry in self.entries:
            self._cancel(entry)
        if self._finished is not None:
            self._metrics.succeeded(self.received_at, self._finished, self.num_generated)
        else:
            self._metrics.failed(self._error.failure_label if self._error else "dropped")
        self._note_end()

    async def _collect(self, entry: Entry) -> Answer:
        prompt: tuple[Token, ...] = ()
        scores: PromptScores | None = None
        tokens: list[Token] = []
        while True:
            event = await entry.events.get()
            if isinstance(event, Token):
                tokens.append(event)
            elif isinstance(event, PromptTokens):
                prompt = event.tokens
            elif isinstance(event, PromptScores):
                scores = event
            elif isinstance(event, Finished):
                return Answer(prompt, tokens, event, _visible_seed(entry), scores)
            else:
                self.fail(event.error)
                raise event.error

    def _note(self, events: list[Event]) -> None:
        last = events[-1]
        if isinstance(last, Finished):
            self._num_over += 1
            if self._num_over == len(self.entries):
                self._finished = last
        elif isinstance(last, Failed):
            self.fail(last.error)

    def _note_end(self) -> None:
        """Counts and times, for the log and for traces."""
        error_type = self._error.error_type if self._error else "cancelled"
        reason = str(self._finished.reason) if self._finished else error_type
        fields: dict[str, int] = {}
        if self.entries:
            prompts = one_per_prompt(self.entries)
            fields["prompt_tokens"] = sum(entry.request.input_length for entry in prompts)
            fields["cached_tokens"] = sum(entry.num_cached for entry in prompts)
            fields["generated_tokens"] = self.num_generated
        if guessed := sum(entry.num_guessed for entry in self.entries):
            fields |= {"guessed_tokens": guessed, "right_guesses": sum(entry.num_right for entry in self.entries)}
        if len(self.entries) > 1:
            fields["answers"] = len(self.entries)
        now, is_failure = time.perf_counter(), self._finished is None
        fields |= self._times(now)
        self._span.end(Ended(now, reason, is_failure, self._is_chat, self.entries, fields, self._log))
        self._log |= {"reason": reason, **fields}

    def _times(self, now: float) -> dict[str, int]:
        """How long what took, as far as the request came."""
        if self._finished is not None:
            times = self._finished.timings
            queued, admitted, first_token, finished = times.queued, times.admitted, times.first_token, times.finished
        elif self.entries:
            entry = self.entries[0]
            queued, admitted, first_token, finished = entry.queued_at, entry.admitted_at, entry.first_token_at, now
        else:
            return {"total_ms": _ms(now - self.received_at)}
        found = {"validation_ms": queued - self.received_at, "queue_ms": (admitted or finished) - queued}
        if first_token:
            found["first_token_ms"] = first_token - self.received_at
        return {name: _ms(seconds) for name, seconds in (found | {"total_ms": finished - self.received_at}).items()}


@dataclass(frozen=True, slots=True)
class Answer:
    """One complete sample."""

    prompt: tuple[Token, ...]
    tokens: list[Token]
    finished: Finished
    seed: int | None  # None when nothing was drawn at random
    prompt_scores: PromptScores | None = None  # in place of `prompt`, where log-probabilities are the model's own

    @property
    def mean_logprob(self) -> float:
        """By this the likeliest of several samples is chosen."""
        return sum(token.logprob or 0.0 for token in self.tokens) / max(len(self.tokens), 1)


def likeliest_first(answers: Sequence[Answer]) -> list[Answer]:
    """The likeliest sample, and the others in order."""
    best = max(answers, key=lambda answer: answer.mean_logprob)
    return [best, *(answer for answer in answers if answer is not best)]


def likeliest(answers: Sequence[Answer], num_prompts: int, count: int) -> list[int]:
    """The numbers of the `count` likeliest answers to each prompt, the best first; all in order where none is left out.

    answers: to each prompt as many, those to the first prompt first.
    """
    each = len(answers) // num_prompts
    found: list[int] = []
    for first in range(0, len(answers), each):
        numbers = range(first, first + each)
        found += sorted(numbers, key=lambda i: -answers[i].mean_logprob)[:count] if each > count else numbers
    return found


def one_per_prompt(entries: Sequence[Entry]) -> list[Entry]:
    """The first sample of each prompt: a prompt of several answers counts once."""
    found: dict[int, Entry] = {}
    for entry in entries:
        found.setdefault(id(entry.request.prompt_ids), entry)
    return list(found.values())


def adapters_of(valid: Iterable[ValidRequest]) -> list[Adapter]:
    """The adapters of some requests, each once."""
    return list(dict.fromkeys(one.adapter for one in valid if one.adapter is not None))


def names_of_adapters(valid: Iterable[ValidRequest]) -> dict[str, str]:
    """What a line of the log says of them: names, and which contents these stand for."""
    if not (found := adapters_of(valid)):
        return {}
    return {"adapter": ", ".join(one.name for one in found), "adapter_key": ", ".join(one.key.hex() for one in found)}


def _visible_seed(entry: Entry) -> int | None:
    sampling = entry.request.sampling
    return sampling.seed if sampling.do_sample else None


async def _drained(queue: asyncio.Queue[Result]) -> list[Result]:
    """All that is in a queue, once there is something."""
    arrived = [await queue.get()]
    while not queue.empty():
        arrived.append(queue.get_nowait())
    return arrived


def _ms(seconds: float) -> int:
    return round(seconds * 1000)
