"""The continuous-batching loop: admit, step, deliver, retire.

One task owns all scheduling state. It plans a step, sends it, and goes on planning until two requests are under way:
the shards compute one while the other already waits in their queue, so they never wait for Python. Then it takes the
oldest reply, hands its tokens to the requests while the shards compute on, and plans the next step.

Planning one step ahead of the replies has two consequences. A request that ends by length is retired exactly after its
last token was scheduled, because that is known beforehand. One that ends by EOS, stop sequence or cancellation is
retired one step late; its surplus token is dropped here. Retired blocks may be given away in the same StepRequest:
the shards apply retire before add.

What this module leaves out: the arithmetic of admission (`queue.py`), text (`text.py`), HTTP, the wire (`client.py`).
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from router.blocks import BlockAllocator
from router.client import ShardError, Shards, StepReply, StepRequest, new_sequence, step_request
from router.entry import Entry, Failed, Finished, PromptTokens, Timings, Token, ValidRequest
from router.errors import GenerationError, IncompleteGeneration, RouterError, Unavailable
from router.limits import Limits
from router.metrics import Metrics, StepTrace
from router.queue import Budget, min_size, next_batch
from router.text import FinishReason, GeneratedText, ModelTokenizer

MAX_REQUESTS_UNDER_WAY = 2  # one computing, one waiting in the shards' queue; more would only delay finishes

logger = logging.getLogger(__name__)


@dataclass(slots=True)
class _Step:
    """A request under way and whom it concerns."""

    request: StepRequest
    entries: list[Entry]  # with a chunk or a token in this step: they are gone from the shards if it fails
    sent_at: float

    @property
    def method(self) -> str:
        return "prefill" if self.request.chunk_ids else "decode"


class Batcher:
    """Runs requests on the shards. `submit` and `drain` are for the HTTP layer, `run` is the loop's one task."""

    def __init__(
        self,
        shards: Shards,
        tokenizer: ModelTokenizer,
        limits: Limits,
        metrics: Metrics,
        *,
        clock: Callable[[], float] = time.perf_counter,
        trace: Callable[[StepTrace], None] | None = None,
    ) -> None:
        self.failure: ShardError | None = None
        self._shards = shards
        self._tokenizer = tokenizer
        self._limits = limits
        self._metrics = metrics
        self._clock = clock
        self._trace = trace
        self._allocator = BlockAllocator(limits.num_blocks)
        self._ids = itertools.count(1)
        self._step_numbers = itertools.count(1)
        self._waiting: deque[Entry] = deque()
        self._running: dict[int, Entry] = {}  # sequences on the shards, in order of admission
        self._live: dict[int, Entry] = {}  # entries that still owe their reader a last event
        self._under_way: deque[_Step] = deque()
        self._reserved_tokens = 0
        self._steps_since_admission = 0
        self._work = asyncio.Event()
        self._ended = asyncio.Event()
        self._is_draining = False

    # ------------------------------------------------------------------------------------ for the HTTP layer

    @property
    def is_accepting(self) -> bool:
        """Whether new requests are let in: neither draining nor ended."""
        return not self._is_draining and not self._ended.is_set()

    @property
    def num_free_blocks(self) -> int:
        return self._allocator.num_free

    def submit(self, request: ValidRequest) -> Entry:
        """Queue a request. Raises Unavailable when draining or when the shards are gone."""
        if not self.is_accepting:
            raise Unavailable(
                "The server is shutting down" if self._is_draining else "The model shards are not running"
            )
        generated = GeneratedText(self._tokenizer, request.token_ids, request.stop, request.max_new_tokens)
        entry = Entry(next(self._ids), request, generated, queued_at=self._clock())
        self._live[entry.id] = entry
        self._waiting.append(entry)
        self._work.set()
        return entry

    async def drain(self, timeout: float) -> None:
        """Let nothing in, wait for what runs, fail what is left after `timeout` seconds."""
        self._is_draining = True
        self._work.set()
        try:
            async with asyncio.timeout(timeout):
                await self._ended.wait()
        except TimeoutError:
            self._fail_all(Unavailable("The server is shutting down and this request took too long to finish"))

    async def run(self) -> None:
        """The loop. Returns after a drain, or with `failure` set when the shards are lost."""
        try:
            while await self._turn():
                pass
        except ShardError as error:
            self.failure = error
            logger.error("lost the model shards: %s", error)
        finally:
            self._ended.set()
            self._fail_all(GenerationError(str(self.failure or "the batching loop ended")))

    async def _turn(self) -> bool:
        """Send a step, or take a reply, or wait for work. False: there is none, and none will come."""
        if len(self._under_way) < MAX_REQUESTS_UNDER_WAY and (step := self._plan()) is not None:
            self._shards.send(step.request)
            self._under_way.append(step)
        elif self._under_way:
            reply = await self._shards.receive()
            self._deliver(self._under_way.popleft(), reply)
        elif self._is_draining:
            return False
        else:
            self._work.clear()
            await self._work.wait()
        return True

    # ------------------------------------------------------------------------------------------------ plan

    def _plan(self) -> _Step | None:
        """The next step, or None when there is nothing to send."""
        retire = self._retire()
        decoding = [entry for entry in self._running.values() if not entry.num_prompt_left]
        chunks = self._continue_prompts()
        admitted = self._admit(self._limits.max_batch_prefill_tokens - sum(chunks.values()))
        num_prefill_tokens = sum(chunks.values()) + sum(num_tokens for _, num_tokens in admitted)
        chunks |= {entry.id: min(num_tokens, entry.num_prompt_left) for entry, num_tokens in admitted}
        if not (retire or decoding or chunks):
            return None
        self._schedule(decoding, chunks)
        request = step_request(
            next(self._step_numbers),
            retire=retire,
            add=[new_sequence(entry.id, entry.request, entry.blocks, self._limits.block_size) for entry, _ in admitted],
            chunks=list(chunks.items()),
            decode=bool(decoding),
        )
        self._report(request, len(decoding), num_prefill_tokens)
        return _Step(request, [*decoding, *(self._running[id] for id in chunks)], self._clock())

    def _retire(self) -> list[int]:
        """Take out who has ended, will have ended with the requests under way, or is not wanted any more."""
        leaving = [e for e in self._running.values() if e.is_over or e.cancelled or e.is_scheduled_to_its_end]
        for entry in leaving:
            self._release(entry)
            if entry.cancelled:
                self._drop(entry)
        return [entry.id for entry in leaving]

    def _continue_prompts(self) -> dict[int, int]:
        """Chunks of prompts that were begun in an earlier step, in order of admission: sequence -> tokens."""
        left = self._limits.max_batch_prefill_tokens
        chunks = {}
        for entry in self._running.values():
            if left and entry.num_prompt_left:
                chunks[entry.id] = min(left, entry.num_prompt_left)
                left -= chunks[entry.id]
        return chunks

    def _admit(self, prefill_tokens: int) -> list[tuple[Entry, int]]:
        """Move requests from the queue into the batch, each with its first prompt chunk."""
        self._steps_since_admission += 1
        self._forget_cancelled()
        limits = self._limits
        minimum = min_size(
            len(self._running), self._steps_since_admission, limits.waiting_served_ratio, limits.max_waiting_tokens
        )
        budget = Budget(
            prefill_tokens=prefill_tokens,
            tokens=limits.max_batch_total_tokens - self._reserved_tokens,
            blocks=self._allocator.num_free,
            places=None if limits.max_batch_size is None else limits.max_batch_size - len(self._running),
            block_size=limits.block_size,
        )
        chunks = next_batch((entry.request.demand for entry in self._waiting), budget, minimum)
        if not chunks:
            return []
        if self._running:
            self._metrics.joined("wait_exceeded" if minimum is None else "backpressure")
        self._steps_since_admission = 0
        return [(self._reserve(self._waiting.popleft()), num_tokens) for num_tokens in chunks]

    def _forget_cancelled(self) -> None:
        if any(entry.cancelled for entry in self._waiting):
            for entry in self._waiting:
                if entry.cancelled:
                    self._drop(entry)
            self._waiting = deque(entry for entry in self._waiting if not entry.is_over)

    def _reserve(self, entry: Entry) -> Entry:
        demand = entry.request.demand
        entry.blocks = self._allocator.allocate(demand.blocks(self._limits.block_size))
        entry.admitted_at = self._clock()
        self._reserved_tokens += demand.tokens
        self._running[entry.id] = entry
        return entry

    def _release(self, entry: Entry) -> None:
        del self._running[entry.id]
        self._reserved_tokens -= entry.request.demand.tokens
        self._allocator.free(entry.blocks)
        entry.blocks = []

    def _schedule(self, decoding: Sequence[Entry], chunks: dict[int, int]) -> None:
        """Note what the shards will have done once this step is computed."""
        for entry in decoding:
            entry.num_scheduled += 1
        for id, num_tokens in chunks.items():
            entry = self._running[id]
            entry.num_prompt_scheduled += num_tokens
            entry.num_scheduled = 0 if entry.num_prompt_left else 1  # the last chunk yields the first token

    def _report(self, request: StepRequest, num_decoding: int, num_prefill_tokens: int) -> None:
        trace = StepTrace(
            step=request.step,
            batch_size=len(self._running),
            num_waiting=len(self._waiting),
            num_admitted=len(request.add),
            num_retired=len(request.retire),
            num_decoding=num_decoding,
            prefill_tokens=num_prefill_tokens,
            reserved_tokens=self._reserved_tokens,
            free_blocks=self._allocator.num_free,
        )
        self._metrics.planned(trace)
        if self._trace is not None:
            self._trace(trace)

    # --------------------------------------------------------------------------------------------- deliver

    def _deliver(self, step: _Step, reply: StepReply) -> None:
        received_at = self._clock()
        if reply.step != step.request.step:
            raise ShardError(0, f"answered step {reply.step} when step {step.request.step} was due")
        if reply.error:
            self._fail_step(step, reply.error)
            return
        for prompt in reply.prompt:
            if (entry := self._live.get(prompt.id)) is not None:
                entry.prompt_logprobs.extend(prompt.logprobs)
        top_ids, top_logprobs, top_start = reply.top_ids, reply.top_logprobs, 0
        for id, token_id, logprob, top_count in zip(
            reply.ids, reply.token_ids, reply.logprobs, reply.top_counts, strict=True
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
                self._deliver_token(entry, token_id, logprob, top_tokens, received_at)
        self._metrics.delivered(
            step.method, received_at - step.sent_at, reply.forward_ns / 1e9, self._clock() - received_at
        )

    def _deliver_token(
        self, entry: Entry, token_id: int, logprob: float, top_tokens: list[tuple[int, float]], now: float
    ) -> None:
        """Turn a token into text and events. Whatever goes wrong here is this request's alone."""
        try:
            text, reason = entry.generated.push(token_id)
            self._note_time(entry, now)
            is_special = token_id in self._tokenizer.special_ids
            top = tuple(self._lone_token(id, logprob) for id, logprob in top_tokens)
            entry.events.put_nowait(Token(token_id, text, logprob, is_special, top))
            if reason is not None:
                self._finish(entry, reason)
        except Exception:
            logger.exception("a token of sequence %d could not be delivered", entry.id)
            self._fail(entry, IncompleteGeneration())

    def _note_time(self, entry: Entry, now: float) -> None:
        if entry.first_token_at:
            self._metrics.inter_token.observe(now - entry.last_token_at)
        else:
            entry.first_token_at = now
            self._metrics.time_to_first_token.observe(now - entry.queued_at)
            if entry.request.prompt_logprobs:
                logprobs = [None, *entry.prompt_logprobs]
                prompt = zip(entry.request.token_ids, logprobs, strict=True)
                entry.events.put_nowait(PromptTokens(tuple(self._lone_token(id, logprob) for id, logprob in prompt)))
        entry.last_token_at = now

    def _lone_token(self, id: int, logprob: float | None) -> Token:
        return Token(id, self._tokenizer.token_text(id), logprob, id in self._tokenizer.special_ids)

    # ------------------------------------------------------------------------------------------------- end

    def _finish(self, entry: Entry, reason: FinishReason) -> None:
        timings = Timings(entry.queued_at, entry.admitted_at, entry.first_token_at, self._clock())
        self._end(entry)
        entry.events.put_nowait(Finished(reason, entry.generated.text, entry.generated.num_tokens, timings))

    def _fail(self, entry: Entry, error: RouterError) -> None:
        self._end(entry)
        entry.events.put_nowait(Failed(error))

    def _drop(self, entry: Entry) -> None:
        """End an entry that nobody waits for."""
        if not entry.is_over:
            self._end(entry)

    def _end(self, entry: Entry) -> None:
        entry.is_over = True
        del self._live[entry.id]

    def _fail_step(self, step: _Step, cause: str) -> None:
        """The shards have dropped this step's sequences, and only those: the others go on."""
        logger.error("step %d failed: %s", step.request.step, cause)
        self._metrics.step_failures.labels(step.method).inc()
        for entry in step.entries:
            if entry.id in self._running:
                self._release(entry)
            if not entry.is_over:
                self._fail(entry, GenerationError(cause))

    def _fail_all(self, error: RouterError) -> None:
        for entry in list(self._live.values()):
            self._fail(entry, error)
        self._waiting.clear()
