"""The continuous-batching loop: plan, send, deliver.

One task owns all state. It plans a step, sends it, and goes on planning until two steps are under way:
the shards compute one while the other already waits in their queue, so they never wait for Python. Then it takes the
oldest reply, hands its tokens to the requests while the shards compute on, and plans the next step.

Planning one step ahead of the replies has two consequences. A request that ends by length is retired exactly after its
last token was scheduled, because that is known beforehand. One that ends by EOS, stop sequence or cancellation is
retired one step late; its surplus token is dropped here. Retired blocks may be given away in the same StepRequest:
the shards apply retire before add.

A sequence is its tokens: what the shards lose, all of it with one that dies or hangs, the step's part where a step
fails, is queued again in its order, with the tokens that it has got, and its stream goes on with the very same ones.
A sequence that was in such a step twice without getting a token between runs alone, and fails alone if it is lost then
too. Where one API key's request makes room for another's, it leaves the shards and waits to be rebuilt in the same way;
the tokens of steps that are under way are then dropped, and come again.

A sequence with a grammar is held from each token until it is known what may come next, which is found out in another
process. Steps go on without it meanwhile, two under way as ever. Tokens that its grammar forces come with the next one
that it gets.

A request whose adapter is not on the device waits for it while steps go on. One that cannot be served ends those that
wait for it.

Left out: which requests run when (`router/scheduling/scheduler.py`), how text grows (`router/text/generated.py`), HTTP,
the wire (`router/shards/client.py`), and how grammars are followed (`router/grammars/follower.py`).
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from functools import partial
from itertools import pairwise
from typing import Any

from router.batching.adapter_mover import AdapterMover
from router.batching.batch_view import BatchView
from router.batching.prefix_mover import Mover
from router.drafting.proposals import Proposal
from router.errors import (
    AdapterRefused,
    AdapterUnavailable,
    GenerationError,
    IncompleteGeneration,
    Overloaded,
    RouterError,
    Unavailable,
)
from router.scheduling.adapters import Adapter
from router.scheduling.drain_rate import DrainRate
from router.scheduling.grammar import Continuation, Matching
from router.scheduling.limits import Limits
from router.scheduling.plan import StepPlan
from router.scheduling.request import (
    Entry,
    Failed,
    Finished,
    PromptScores,
    PromptTokens,
    ScoredToken,
    Timings,
    Token,
    ValidRequest,
)
from router.scheduling.scheduler import Scheduler
from router.shards.client import KvCache, Prepared, ShardError, Shards, StepReply
from router.shards.wire import mistake_in_step, planned_request, proposals_of
from router.telemetry.metrics import Metrics, StepTrace
from router.text.generated import FinishReason, GeneratedText
from router.text.tokenizer import ModelTokenizer

Candidates = list[tuple[int, float]]
KnownToken = tuple[int, float | None, Candidates]  # id, log-probability, candidates

logger = logging.getLogger(__name__)


class Batcher:
    """Runs requests on the shards. `submit` and `drain` are for the HTTP layer, `run` is the loop's one task."""

    def __init__(
        self,
        shards: Shards,
        tokenizer: ModelTokenizer,
        limits: Limits,
        metrics: Metrics,
        *,
        matching: Matching | None = None,
        mover: Mover | None = None,
        adapters: AdapterMover | None = None,
        clock: Callable[[], float] = time.perf_counter,
        trace: Callable[[StepTrace], None] | None = None,
    ) -> None:
        self.is_leaving = False  # about to drain: a health check should send clients elsewhere
        self.outage: ShardError | None = None  # why nothing runs at the moment
        self.failure: ShardError | None = None  # why nothing will run again
        self.matching = matching  # None: no request has a grammar
        self._shards = shards
        self._tokenizer = tokenizer
        self._metrics = metrics
        self._replies = Replies(shards)
        self._clock = clock
        self._trace = trace
        self._mover = mover or Mover()  # which has been opened
        self._mover.wake = self.wake
        self._adapters = adapters or AdapterMover()
        self._adapters.wake, self._adapters.refuse = self.wake, self._refuse
        self._scheduler: Scheduler[Entry] = Scheduler(limits, self._mover.index, self._adapters.rows)
        self._delivery = Delivery(self._scheduler, tokenizer, metrics)
        self._grammar_waits = GrammarWaits(matching, self._scheduler.allow, self.end, self.wake)
        metrics.watch(self._scheduler, self._grammar_waits.waiting)
        self.view = BatchView(self._scheduler, metrics)
        self._drain_rate = DrainRate(clock)
        self._live: dict[int, Entry] = {}  # entries that still owe their reader a last event
        # One computing for each micro-batch, one waiting in the shards' queue; more would only delay finishes.
        self._most_under_way = limits.num_lanes + 1
        self._under_way: deque[_SentStep] = deque()
        self._replied_at = 0.0
        self._is_behind_awaited = False  # whether the step that is under way could not be planned before `_replied_at`
        self._work = asyncio.Event()
        self._ended = asyncio.Event()
        self._is_draining = False

    # ------------------------------------------------------------------------------------ for the HTTP layer

    @property
    def is_accepting(self) -> bool:
        """Whether new requests are let in: neither draining nor ended."""
        return not self._is_draining and not self._ended.is_set()

    @property
    def limits(self) -> Limits:
        """Those of the shards that serve now."""
        return self._scheduler.limits

    @property
    def num_free_blocks(self) -> int:
        """KV blocks that no running request has reserved."""
        return self._scheduler.num_free_blocks

    def seconds_until_free(self, count: int) -> int:
        """How long it will take until so many requests have ended, by how it went of late; for `Retry-After`."""
        return self._drain_rate.seconds_for_requests(count)

    def check_room(self, requests: Sequence[ValidRequest], owner: str, weight: float) -> None:
        """Raises Overloaded if the samples of one request would make the queue longer than `max_queue_tokens`."""
        if self.outage is not None:
            self._forget_gone()
        most, tokens = self.limits.max_queue_tokens, sum(request.size().tokens for request in requests)
        if most is not None and not self._scheduler.ledger.has_room(tokens, most, owner, weight):
            seconds = self._drain_rate.seconds_for_tokens(tokens)
            raise Overloaded(f"Model is overloaded: more than {most} tokens would wait (max_queue_tokens)", seconds)

    def submit(
        self,
        request: ValidRequest,
        *,
        owner: str = "",
        weight: float = 1.0,
        route: str = "",
        known: Sequence[KnownToken] = (),
    ) -> Entry:
        """Queue a request of the API key `owner`. Raises Unavailable when draining or when the shards are gone.

        known: its first tokens, which another server has generated; their events are there at once.
        """
        if not self.is_accepting:
            raise self._unavailable()
        generated = GeneratedText(
            self._tokenizer, request.token_ids, request.stop, request.max_new_tokens, request.ends
        )
        id, now = self._scheduler.new_id(), self._clock()
        entry = Entry(id, request, owner=owner, weight=weight, route=route, generated=generated, queued_at=now)
        self._live[entry.id] = entry
        self._drain_rate.began()
        reason = self._delivery.take_known(entry, known)
        if reason is not None:
            entry.admitted_at = entry.first_token_at = now
            self._finish(entry, reason)
            return entry
        self._grammar_waits.begin(entry)
        self._scheduler.add(entry)
        self._work.set()
        return entry

    async def leave(self, delay: float) -> None:
        """Say that the server is about to drain, and go on for `delay` seconds, or until the loop ends."""
        self.is_leaving = True
        with suppress(TimeoutError):
            async with asyncio.timeout(delay):
                await self._ended.wait()

    def _unavailable(self) -> Unavailable:
        if self._is_draining:
            return Unavailable("The server is stopping or restarting", self.seconds_until_free(len(self._live)))
        return Unavailable("The model shards are not running")

    def end(self, entry: Entry, error: RouterError) -> None:
        """End a request with an error, queued or running; the next step frees what it holds."""
        if not entry.is_over:
            self._fail(entry, error)
            self._work.set()

    def cancel(self, entry: Entry) -> None:
        """End a request that nobody waits for any more; the next step frees what it holds."""
        if not entry.is_over:
            entry.cancelled = True
            self._work.set()

    async def drain(self, timeout: float) -> None:
        """Let nothing in, wait for what runs, fail what is left after `timeout` seconds."""
        self._is_draining = True
        self._work.set()
        try:
            async with asyncio.timeout(timeout):
                await self._ended.wait()
        except TimeoutError:
            self._fail_all(Unavailable("The server is stopping or restarting, and this request took too long"))

    async def run(self) -> None:
        """The loop. Returns after a drain, or with `failure` set when the shards are lost for good."""
        is_needed = True
        try:
            while is_needed:
                try:
                    is_needed = await self._turn()
                except ShardError as error:
                    is_needed = await self._recover(error)
        except ShardError as error:
            self.failure = error
            logger.error("gave up: %s", error)
        finally:
            self._replies.forget()
            self._ended.set()
            self._fail_all(GenerationError(str(self.failure or "the batching loop ended")))

    def wake(self) -> None:
        """Look at the shards again, even where there is no work."""
        self._work.set()

    async def _recover(self, error: ShardError) -> bool:
        """Wait for other shards and queue again what these had. Raises ShardError when there will be none.

        Returns whether there is anything to do for them: a server that stops waits for none without requests.
        """
        self.outage = error
        since = self._clock()
        logger.warning("lost the model shards: %s", error)
        self._replies.forget()
        self._adapters.lost()
        num_running = self._requeue_all(error)
        cache = await self._renewed(error)
        if cache is None:
            return False
        tiers = await self._mover.open()
        self._adapters.renewed()
        self._scheduler.resize(cache.max_batch_total_tokens, cache.num_blocks, tiers, cache.num_states)
        seconds = self._clock() - since
        self._metrics.recovered(seconds, self._scheduler.limits)
        self.outage = None
        logger.info("recovered in %.1f s (%s); requests that go on: %d", seconds, error, num_running)
        return True

    async def _renewed(self, error: ShardError) -> KvCache | None:
        """The KV cache of other shards. None where the server drains and nobody waits for them. Raises ShardError."""
        renewing = asyncio.ensure_future(self._shards.renew(error))
        try:
            while not renewing.done():
                self._work.clear()
                self._forget_gone()
                if self._is_draining and not self._live:
                    return None
                waking = asyncio.ensure_future(self._work.wait())
                try:
                    await asyncio.wait({renewing, waking}, return_when=asyncio.FIRST_COMPLETED)
                finally:
                    waking.cancel()
            return renewing.result()
        finally:
            renewing.cancel()
            with suppress(asyncio.CancelledError, ShardError):
                await renewing

    async def _turn(self) -> bool:
        """Send a step, or take a reply, or wait for work. Returns False when there is no work and none will come."""
        self._work.clear()  # what comes from here on is another turn's
        self._shards.check()
        self._adapters.check()
        plan = self._plan() if len(self._under_way) < self._most_under_way else None
        self._mover.pump()
        self._adapters.pump()
        if plan is not None:
            self._shards.send(planned_request(plan, self.limits.block_size, self._mover.session))
            self._under_way.append(_SentStep(plan, self._clock()))
        elif self._under_way:
            may_send = self._awaits_others and len(self._under_way) < self._most_under_way
            if (reply := await self._replies.next(self._work if may_send else None)) is None:
                return True  # a sequence that was held may go on before it comes
            if mistake := mistake_in_step(reply, self._under_way[0].plan, self.limits.vocab_size):
                raise ShardError(0, mistake)
            self._deliver(self._under_way.popleft(), reply)
        elif self._is_draining and not self._awaits_others:
            return False
        else:
            await self._work.wait()
        return True

    @property
    def _awaits_others(self) -> bool:
        """Whether requests wait for a grammar, a disk or an adapter, and no step."""
        scheduler = self._scheduler
        return bool(self._grammar_waits.waiting) or scheduler.awaits_disk or scheduler.adapters.is_awaited

    # ------------------------------------------------------------------------------------------------ plan

    def _plan(self) -> StepPlan[Entry] | None:
        """The next step, or None when there is nothing to send."""
        self._forget_gone()
        plan = self._scheduler.plan()
        if plan is not None:
            for entry in plan.retired:
                if entry.cancelled:
                    self._drop(entry)
            for id, entry in plan.preempted.items():
                self._renumber(id, entry)
            for entry in plan.admitted:
                self._metrics.prefix_hit_tokens.inc(plan.cached(entry))
                if not entry.admitted_at:  # later its own tokens are cached too
                    entry.admitted_at = self._clock()
                    entry.num_cached = plan.cached(entry)
            self._report(plan)
        return plan

    def _forget_gone(self) -> None:
        """Take those out of the queue that nobody waits for: while there are no shards, no plan does."""
        for entry in self._scheduler.forget_cancelled():
            self._drop(entry)

    def _renumber(self, id: int, entry: Entry) -> None:
        """The sequence `id` has left the shards before its end, and waits again as `entry`."""
        self._live[entry.id] = self._live.pop(id)
        entry.forget_logprobs()
        self._metrics.preempted.inc()

    def _report(self, plan: StepPlan[Entry]) -> None:
        trace = StepTrace.of(plan, self._scheduler)
        self._metrics.planned(trace)
        if plan.join_reason is not None:
            self._metrics.joined(plan.join_reason)
        if self._trace is not None:
            self._trace(trace)
        if logger.isEnabledFor(logging.DEBUG):
            logger.debug("step planned", extra=asdict(trace))

    # --------------------------------------------------------------------------------------------- deliver

    def _deliver(self, step: _SentStep, reply: StepReply) -> None:
        received_at = self._clock()
        began_at = max(step.sent_at, self._replied_at)
        if self._is_behind_awaited or (step.plan.drafts and not step.plan.constrained):
            began_at = self._replied_at  # it could be planned only then: that took its time too
        self._replied_at = received_at
        self._is_behind_awaited = step.plan.proposals > 0 and not self._under_way
        if reply.error:
            self._fail_step(step, reply.error)
            return
        self._scheduler.computed(step.plan)
        propose_seconds, forward_seconds = reply.propose_ns / 1e9, reply.forward_ns / 1e9
        # Of replies that came while this process had no core, the second seems to have taken no time.
        seconds = max(received_at - began_at, propose_seconds + forward_seconds)
        is_telling = reply.forward_ns > 0  # shards compute nothing for sequences that they lost in the step before
        if is_telling:
            self._scheduler.timed(step.plan, seconds - propose_seconds)
        for prompt in reply.prompt:
            if (entry := self._live.get(prompt.id)) is not None:
                entry.note_logprobs(prompt.logprobs, prompt.top_ids, prompt.top_logprobs)
        top_ids, top_logprobs, top_start = reply.top_ids, reply.top_logprobs, 0
        going_on: dict[Entry, list[int]] = {}  # what those got that wait for what it leads to
        # Of a sequence that got several tokens, all but the last were guessed.
        guessed = (this == next for this, next in pairwise([*reply.ids, None]))
        for id, token_id, logprob, top_count, is_guess in zip(
            reply.ids, reply.token_ids, reply.logprobs, reply.top_counts, guessed, strict=True
        ):
            top = slice(top_start, top_start + top_count)
            top_start += top_count
            entry = self._live.get(id)
            if entry is not None and entry.cancelled:
                self._drop(entry)
            if entry is None or entry.is_over:
                self._metrics.surplus_tokens.inc()
            else:
                top_tokens = list(zip(top_ids[top], top_logprobs[top], strict=True)) if top_count else []
                self._deliver_tokens(entry, token_id, logprob, top_tokens, received_at, is_guess=is_guess)
                if entry.match is not None or self._scheduler.speculation is not None:
                    going_on.setdefault(entry, []).append(token_id)
        proposals = proposals_of(reply)
        for entry, token_ids in going_on.items():
            self._go_on(entry, token_ids, proposals.get(entry.id))
        num_right = self._scheduler.stepped(step.plan, seconds if is_telling else None, propose_seconds, len(proposals))
        if step.plan.drafts:
            self._metrics.guessed(step.plan.num_guesses, num_right)
        if step.plan.proposals:
            self._metrics.proposed(len(reply.proposal_tokens), propose_seconds)
        if step.plan.chunks or step.plan.num_decoding:  # others only say who leaves
            delivery = self._clock() - received_at
            self._metrics.delivered(step.method, received_at - step.sent_at, forward_seconds, delivery)

    def _go_on(self, entry: Entry, token_ids: Sequence[int], proposal: Proposal | None) -> None:
        """Find out what may come behind tokens that were delivered, and guess what will; a model proposes this."""
        if self._scheduler.speculation is not None:
            self._metrics.skipped_tokens.observe(len(token_ids) - 1)
        if not entry.is_over:
            guess = self._scheduler.guess(entry, proposal)
            self._grammar_waits.ask(entry, token_ids, guess)

    def _deliver_tokens(
        self, entry: Entry, token_id: int, logprob: float, top: Candidates, now: float, *, is_guess: bool
    ) -> None:
        """Turn a token, and those that were forced before it, into text and events.

        Whatever goes wrong here is this request's alone.
        """
        try:
            for known in self._delivery.take_forced(entry):
                self._deliver_token(entry, *known, now)
            self._deliver_token(entry, token_id, logprob, top, now, is_guess=is_guess)
        except Exception:
            logger.exception("a token of sequence %d could not be delivered", entry.id)
            self._fail(entry, IncompleteGeneration())

    def _deliver_token(
        self, entry: Entry, token_id: int, logprob: float, top: Candidates, now: float, *, is_guess: bool = False
    ) -> None:
        if entry.is_over:  # a forced token before this one has ended it
            self._metrics.surplus_tokens.inc()
        elif (reason := self._delivery.deliver(entry, token_id, logprob, top, now, is_guess=is_guess)) is not None:
            self._finish(entry, reason)

    # ------------------------------------------------------------------------------------------------- end

    def _finish(self, entry: Entry, reason: FinishReason) -> None:
        timings = Timings(entry.queued_at, entry.admitted_at, entry.first_token_at, self._clock())
        self._scheduler.finished(entry, is_cut=reason is FinishReason.LENGTH)
        self._end(entry)
        stopped_by = entry.stopped_by if reason is FinishReason.STOP_SEQUENCE else None
        told = Finished(reason, entry.generated.text, entry.generated.num_tokens, timings, stopped_by)
        entry.events.put_nowait(told)

    def _fail(self, entry: Entry, error: RouterError) -> None:
        self._end(entry)
        entry.events.put_nowait(Failed(error))

    def _drop(self, entry: Entry) -> None:
        """End an entry whose client has gone."""
        if not entry.is_over:
            self._end(entry)

    def _end(self, entry: Entry) -> None:
        entry.is_over = True
        self._grammar_waits.end(entry)
        del self._live[entry.id]
        self._drain_rate.ended(entry.max_tokens)

    def _fail_step(self, step: _SentStep, cause: str) -> None:
        """The shards have dropped this step's sequences, and only those: the others go on."""
        logger.error("step %d failed: %s", step.plan.number, cause)
        self._metrics.step_failures.labels(step.method).inc()
        lost = self._scheduler.failed(step.plan)
        self._requeue(lost, set(lost), cause)

    def _requeue_all(self, error: ShardError) -> int:
        """Nothing is left on the shards. Returns how many requests they had that are wanted."""
        plans = [step.plan for step in self._under_way]
        self._under_way.clear()
        computed = {entry for plan in plans for entry in plan.concerned.values()}
        return self._requeue(self._scheduler.restart(plans), computed, str(error))

    def _requeue(self, lost: Iterable[Entry], computed: set[Entry], cause: str) -> int:
        """Queue again what the shards lost, of which they were computing `computed`. Returns how many those are."""
        again = []
        self._live = {entry.id: entry for entry in self._live.values()}
        for entry in lost:
            if entry.is_over or entry.cancelled:
                self._drop(entry)
            elif entry in computed and entry.is_guilty:
                self._fail(entry, GenerationError(cause))
            else:
                entry.num_losses += entry in computed
                entry.forget_logprobs()
                again.append(entry)
        self._scheduler.add_again(again)
        return len(again)

    def _refuse(self, adapter: Adapter, found: Prepared) -> None:
        """End the requests that wait for an adapter which cannot be served."""
        error = AdapterUnavailable if found.may_pass else AdapterRefused
        for entry in self._scheduler.waiting:
            its = entry.adapter
            if its is not None and (its.key, its.folder) == (adapter.key, adapter.folder):
                self.end(entry, error(its.name, found.problem, its.folder))

    def _fail_all(self, error: RouterError) -> None:
        for entry in list(self._live.values()):
            self._fail(entry, error)
        self._scheduler.forget_cancelled()


@dataclass(slots=True)
class _SentStep:
    """A step that was sent and whose reply has not come yet."""

    plan: StepPlan[Entry]
    sent_at: float

    @property
    def method(self) -> str:
        return "prefill" if self.plan.chunks else "decode"


class Replies:
    """The replies of the shards, which can be waited for beside something else that may happen before.

    A reply that was waited for in vain is waited for again: nothing is lost.
    """

    def __init__(self, shards: Shards) -> None:
        self._shards = shards
        self._receiving: asyncio.Future[StepReply] | None = None

    async def next(self, waking: asyncio.Event | None) -> StepReply | None:
        """The reply to the oldest step, or None if `waking` is set before it comes. Raises ShardError."""
        if self._receiving is None:
            if waking is None:
                return await self._shards.receive()
            self._receiving = asyncio.ensure_future(self._shards.receive())
        if waking is None:
            await asyncio.wait({self._receiving})
        else:
            await self._either(self._receiving, waking)
        if not self._receiving.done():
            return None
        receiving, self._receiving = self._receiving, None
        return receiving.result()

    @staticmethod
    async def _either(receiving: asyncio.Future[Any], waking: asyncio.Event) -> None:
        woken: asyncio.Future[Any] = asyncio.ensure_future(waking.wait())
        try:
            await asyncio.wait((receiving, woken), return_when=asyncio.FIRST_COMPLETED)
        finally:
            woken.cancel()

    def forget(self) -> None:
        """The shards are lost, or no reply will be asked for again."""
        if self._receiving is not None:
            self._receiving.cancel()
            self._receiving.add_done_callback(lambda receiving: receiving.cancelled() or receiving.exception())
            self._receiving = None


class GrammarWaits:
    """Sequences that are held from a token that has come until it is known what their grammars allow behind it.

    allow: called when it is known what an entry may get; fail: when that cannot be found out; go_on: after either.
    """

    def __init__(
        self,
        matching: Matching | None,
        allow: Callable[[Entry, Continuation], None],
        fail: Callable[[Entry, RouterError], None],
        go_on: Callable[[], None],
    ) -> None:
        self.waiting: set[Entry] = set()  # their matchers have not answered
        self._matching = matching
        self._allow = allow
        self._fail = fail
        self._go_on = go_on

    def begin(self, entry: Entry) -> None:
        """Have a matcher for it, if it has a grammar."""
        if entry.request.grammar is not None:
            assert self._matching is not None, "without matchers, grammars are refused"
            known = entry.generated_ids
            entry.match = self._matching.begin(entry.request.grammar, partial(self._note, entry), known)
            if known:
                self.waiting.add(entry)

    def ask(self, entry: Entry, token_ids: Sequence[int], guess: Sequence[int]) -> None:
        """Find out what its grammar, if it has one, allows behind these tokens. It is held until then."""
        if entry.match is not None:
            self.waiting.add(entry)
            entry.match.advance(token_ids, guess)

    def end(self, entry: Entry) -> None:
        """Nothing more is wanted of it."""
        if entry.match is not None:
            self.waiting.discard(entry)
            entry.match.end()

    def _note(self, entry: Entry, found: Continuation | RouterError) -> None:
        self.waiting.discard(entry)
        if isinstance(found, RouterError):
            self._fail(entry, found)
        elif not entry.is_over:
            self._allow(entry, found)
        self._go_on()


class Delivery:
    """From a token to what its request's reader gets: text, events, and the times that are measured.

    Where log-probabilities are the model's own, candidates and prompts stay as compact as they came: an API that tells
    of them knows what their texts are.
    """

    def __init__(self, scheduler: Scheduler[Entry], tokenizer: ModelTokenizer, metrics: Metrics) -> None:
        self._scheduler = scheduler
        self._tokenizer = tokenizer
        self._metrics = metrics

    def deliver(
        self, entry: Entry, token_id: int, logprob: float, top_tokens: Candidates, now: float, *, is_guess: bool
    ) -> FinishReason | None:
        """Give a token to its reader; why it is the last, if it is."""
        if not entry.request.generates:  # nothing is wanted of the token but that the prompt is computed
            self._note_time(entry, now)
            return FinishReason.LENGTH
        text, reason = entry.generated.push(token_id)
        self._scheduler.delivered(entry, token_id)
        self._note_time(entry, now)
        token = self._token(entry, token_id, text, logprob, top_tokens)
        entry.events.put_nowait(replace(token, guessed=True) if is_guess else token)
        return reason

    def take_known(self, entry: Entry, tokens: Sequence[KnownToken]) -> FinishReason | None:
        """Give the reader tokens that another server has generated; why the last of them ends it, if it does."""
        for token_id, logprob, top_tokens in tokens:
            text, reason = entry.generated.push(token_id)
            entry.generated_ids.append(token_id)
            entry.events.put_nowait(self._token(entry, token_id, text, logprob, top_tokens))
            if reason is not None:
                return reason
        return None

    def take_forced(self, entry: Entry) -> Iterator[tuple[int, float, Candidates]]:
        """What its grammar had come before the token that has come, with log-probabilities: none for most requests."""
        return iter(()) if entry.match is None else _forced(entry, self._scheduler.taken(entry))

    def _note_time(self, entry: Entry, now: float) -> None:
        if entry.first_token_at:
            self._metrics.inter_token.observe(now - entry.last_token_at)
        else:
            entry.first_token_at = now
            if entry.request.generates:
                self._metrics.time_to_first_token.observe(now - entry.queued_at)
            if entry.request.prompt_logprobs:
                entry.events.put_nowait(self._prompt(entry))
        entry.last_token_at = now

    def _token(
        self, entry: Entry, token_id: int, text: str, logprob: float | None, candidates: Sequence[tuple[int, float]]
    ) -> Token:
        """A token that was generated, and whose text has just been found. Raises TokenizerError."""
        is_special = token_id in self._tokenizer.special_ids and token_id not in entry.request.ends.shown_ids
        if entry.request.sampling.raw_logprobs:
            piece = entry.generated.piece
            return ScoredToken(token_id, text, logprob, is_special, piece=piece, candidates=candidates)
        return Token(token_id, text, logprob, is_special, tuple(self._lone(id, value) for id, value in candidates))

    def _prompt(self, entry: Entry) -> PromptTokens | PromptScores:
        """The log-probabilities of its prompt, all of which have come. Raises TokenizerError."""
        if entry.request.sampling.raw_logprobs:
            return entry.prompt_scores
        prompt = zip(entry.request.token_ids, [None, *entry.prompt_scores.logprobs], strict=True)
        return PromptTokens(tuple(self._lone(id, logprob) for id, logprob in prompt))

    def _lone(self, id: int, logprob: float | None) -> Token:
        return Token(id, self._tokenizer.token_text(id), logprob, id in self._tokenizer.special_ids)


def _forced(entry: Entry, token_ids: Sequence[int]) -> Iterator[tuple[int, float, Candidates]]:
    """The model's own log-probabilities where these are asked for; else no other token was possible."""
    scores, entry.forced_scores = entry.forced_scores, PromptScores()
    for place, token_id in enumerate(token_ids):
        if entry.request.sampling.raw_logprobs:
            yield token_id, scores.logprobs[place], list(scores.candidates(place))
        else:
            yield token_id, 0.0, [(token_id, 0.0)] if entry.request.top_n_tokens else []
