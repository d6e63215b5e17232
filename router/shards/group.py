"""The group of model processes that serves now, and the next one when it is lost.

The ranks of a group advance in lockstep: when one of them dies, hangs or answers nonsense, all are ended and the
launcher starts a fresh group, on sockets of its own. `ShardGroup` is the shards as the batching loop knows them,
whichever group that is. It watches the time of each step, finds out which rank hangs, and warms a fresh group up as the
first was.

What the launcher acts on (`group_lost`, `group_ready`, `group_advanced`) are records of the router's log that are not
shown; what it says is one line of JSON in a pipe: a new group, or why there will be none (`NextGroup`).
"""

from __future__ import annotations

import asyncio
import json
import logging
import math
import os
import time
from collections import deque
from collections.abc import Callable, Coroutine, Iterable, Sequence
from contextlib import suppress
from typing import Any, TypeVar

from router.scheduling.prefix_moves import Move, Moved, TierContents
from router.shards.client import (
    KvCache,
    ModelInfo,
    OperatorTime,
    Prepared,
    ShardedClient,
    ShardError,
    ShardHealth,
    StepReply,
    StepRequest,
)

FLOOR_S = 2.0  # no step is late before
GPU_FLOOR_S = 10.0  # likewise, where the first step of its kind compiles kernels or has libraries load theirs
FACTOR = 10.0  # times what the slowest steps of its size took
TICK_S = 0.25  # how often the oldest step is looked at
MOST_S = 600.0  # for a step of a size that has not come yet, or the first of all
ACTIVE_S = 10.0  # a disk that brings nothing for so long is stuck, and so is a compiler that ends no kernel
SAMPLES = 256  # step times kept of each size
PROBE_S = 1.5  # for every rank to give a sign of life while a step goes on for longer than half of the floor
ANSWER_S = 10.0  # for every rank to give one to a router that is started beside them
MOST_LINE_BYTES = 64 * 1024  # of what the launcher says at once
ENDED = "the launcher ended them all, as its log says"

Result = TypeVar("Result")

logger = logging.getLogger(__name__)
lifecycle = logging.getLogger("router.lifecycle")  # what the launcher acts on; it is sent at every log level


class ShardGroup:
    """All ranks of the group that serves now. `watch` has to run beside the batching loop.

    news: what the launcher says; None where a lost group is not started again.
    """

    def __init__(
        self, sockets: Sequence[str], news: NextGroup | None = None, *, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.number = news.number if news is not None else 1
        self._client = ShardedClient(sockets)
        self._news = news
        self._clock = clock
        self._watch = StepWatch()
        self._live: set[int] = set()  # sequences on the shards, and some that a failed step took away
        self._loss: ShardError | None = None
        self._wanted: dict[str, Any] = {}  # what the first warmup asked for
        self._has_advanced = False

    # ---------------------------------------------------------------------------------------------- as any shards

    async def wait_ready(self, timeout: float | None = None) -> None:
        """Wait until every rank answers. Raises TimeoutError."""
        await self._client.wait_ready(timeout)

    async def expect_answers(self) -> None:
        """Ask ranks that were ready before. Raises ShardError when one of them does not answer."""
        rank = (await self._client.signs_of_life(ANSWER_S)).silent
        if rank is not None:
            raise ShardError(rank, "it does not answer")

    async def info(self) -> ModelInfo:
        """What was loaded."""
        info = await self._client.info()
        self._watch.floor = FLOOR_S if info.device == "cpu" else GPU_FLOOR_S
        return info

    async def warmup(self, **wanted: Any) -> KvCache:
        """Make the ranks ready; a later group is asked for the KV cache that this one got, or what fits of it."""
        cache = await self._client.warmup(**wanted)
        longest = wanted["max_total_tokens"]
        if wanted["may_be_shorter"]:
            room = cache.room(wanted["useful_tokens"])
            longest = min(longest, room.longest(is_inferred=not wanted["max_batch_total_tokens"]))
        self._wanted = wanted | {
            "max_batch_total_tokens": 0,
            "useful_tokens": cache.max_batch_total_tokens,
            "max_total_tokens": longest,
            "may_be_shorter": False,
        }
        return cache

    async def open_tiers(self, session: int) -> TierContents:
        """Begin a session of the tiers behind the device. Raises ShardError."""
        return await self._client.open_tiers(session)

    async def move_blocks(self, session: int, move: Move) -> Moved:
        """Move blocks between host and disk on every rank. Raises ShardError."""
        return await self._client.move_blocks(session, move)

    async def prepare_adapter(self, key: bytes, folder: str) -> Prepared:
        """Have every rank read an adapter, or without a folder forget it. Raises ShardError where one is lost."""
        return await self._client.prepare_adapter(key, folder)

    async def forget_adapters(self, kept: Iterable[bytes]) -> None:
        """Have every rank forget all but these. Raises ShardError likewise."""
        await self._client.forget_adapters(kept)

    async def health(self) -> ShardHealth:
        """Raises ShardError when a rank does not answer in time, or is known to be lost."""
        self.check()
        return await self._client.health()

    async def start_profile(self) -> None:
        """Record what the first rank computes from here on."""
        await self._client.start_profile()

    async def stop_profile(self, trace_path: str = "") -> list[OperatorTime]:
        """Where the first rank's time went, longest first; a trace goes to `trace_path`."""
        return await self._client.stop_profile(trace_path)

    def check(self) -> None:
        """Raises ShardError when this group is known to be lost."""
        if self._loss is not None:
            raise self._loss.with_traceback(None)  # which each raise would make longer

    def send(self, request: StepRequest) -> None:
        """Hand over the next step, without waiting."""
        request.reset = request.step == 1  # a router before this one may have left sequences
        encoded = sum(len(new.encoder_token_ids) for new in request.add)
        self._live.difference_update(request.retire)
        self._live.update(new.id for new in request.add)
        decoding = len(self._live) - len(request.held) - len(request.drafts) if request.decode else 0
        drafted = sum(len(draft.token_ids) for draft in request.drafts)
        self._watch.sent(encoded + sum(request.chunk_tokens) + drafted + decoding, self._clock())
        self._client.send(request)

    async def receive(self) -> StepReply:
        """The reply to the oldest step. Raises ShardError, also when the step is late."""
        try:
            reply = await self._client.receive()
        except ShardError as error:
            raise self._loss or error from None
        self._watch.received(self._clock())
        if not self._has_advanced and reply.ids:
            self._has_advanced = True
            self._tell("group_advanced")
        return reply

    async def close(self) -> None:
        """Close the stream and every rank's channel."""
        await self._client.close()

    # --------------------------------------------------------------------------------------------------- when lost

    async def watch(self) -> None:
        """Look after the time of steps, for ever."""
        while True:
            await asyncio.sleep(TICK_S)
            age = self._watch.age(self._clock())
            if age > self._watch.floor / 2 and self._loss is None:
                await self._examine(self._watch, age)

    async def _examine(self, watch: StepWatch, age: float) -> None:
        """A step takes long. Lose the group if a rank is silent, or if the step is late for its size."""
        client, step, since = self._client, watch.num_answered, self._clock()
        probe_s = PROBE_S * watch.patience
        signs = await client.signs_of_life(probe_s)
        took = self._clock() - since
        if took > probe_s + 2 * TICK_S:
            return  # this process did not run either, so silence says nothing of the ranks
        rank, cause = signs.silent, "it does not answer"
        age += took
        if rank is None and not watch.is_active(signs.activity, since) and watch.is_late(age):
            if took > TICK_S:  # a rank has just come back, and may end its step by the next answer
                signs = await client.signs_of_life(probe_s)
            if signs.silent is None:
                rank, cause = signs.laggard, "it answers, but its step does not end"
        if rank is not None and self._loss is None and (client, step) == (self._client, watch.num_answered):
            watch.is_given_up = True
            self._lose(ShardError(rank, f"{cause}: a step has taken {age:.1f} s"))

    def noticed(self) -> None:
        """The launcher has said something: if that is a new group, this one is gone."""
        assert self._news is not None
        if self._loss is None and (self._news.number > self.number or self._news.refusal is not None):
            self._lose(ShardError(None, self._news.refusal or ENDED))

    def _lose(self, error: ShardError) -> None:
        self._loss = error
        self._client.abandon()

    async def begin(self, work: Callable[[], Coroutine[Any, Any, Result]]) -> Result:
        """What `work` makes of these ranks, or of those in their place where they are lost meanwhile.

        Raises ShardError when there will be none.
        """
        while True:
            try:
                return await self._unless_ended(work())
            except ShardError as error:
                await self._replace(error)

    async def renew(self, error: ShardError) -> KvCache:
        """Wait for the launcher's next group and make it ready. Raises ShardError when there will be none.

        Its KV cache may be smaller, where less memory is free than there was. It holds the longest request.
        """
        await self._replace(error)
        cache = await self.begin(self._warm_up)
        self._tell("group_ready")
        return cache

    async def _replace(self, error: ShardError) -> None:
        """Wait for the launcher's next group and take it. Raises ShardError when there will be none."""
        self._loss = error
        if error.rank is not None:
            self._tell("group_lost", rank=error.rank, cause=error.cause, is_known=error.is_known)
        await self._client.close()
        if self._news is None:
            raise error
        await self._news.after(self.number)
        if self._news.refusal is not None:
            raise ShardError(error.rank, self._news.refusal)
        self.number = self._news.number
        self._client, self._watch, self._live = ShardedClient(self._news.sockets), StepWatch(self._watch), set()
        self._loss, self._has_advanced = None, False

    def _tell(self, event: str, **fields: int | str) -> None:
        """Tell the launcher by a record of the log that is not shown."""
        lifecycle.info("", extra={"event": event, "group": self.number, "is_silent": True, **fields})

    async def _unless_ended(self, work: Coroutine[Any, Any, Result]) -> Result:
        """Its result. Raises ShardError when the launcher ends this group meanwhile."""
        if self._news is None:
            return await work
        working = asyncio.ensure_future(work)
        ended = asyncio.ensure_future(self._news.after(self.number))
        try:
            await asyncio.wait({working, ended}, return_when=asyncio.FIRST_COMPLETED)
            if not working.done():
                raise ShardError(None, ENDED)
            return await working
        finally:
            for task in (working, ended):
                task.cancel()
                with suppress(asyncio.CancelledError, ShardError):
                    await task

    async def _warm_up(self) -> KvCache:
        """The KV cache that fits now. The first group's size stays the aim, for memory may be free again."""
        await self.wait_ready()
        try:
            cache = await self._client.warmup(**self._wanted)
        except ValueError as error:
            raise ShardError(0, str(error)) from None
        if cache.max_batch_total_tokens < self._wanted["useful_tokens"]:
            wanted = self._wanted["useful_tokens"]
            logger.warning("less memory is free: a KV cache of %d tokens, not %d", cache.max_batch_total_tokens, wanted)
        if cache.max_batch_total_tokens < self._wanted["max_total_tokens"]:
            raise ShardError(
                0,
                f"free memory holds a KV cache of {cache.max_batch_total_tokens} tokens now, fewer than the "
                f"{self._wanted['max_total_tokens']} of --max-total-tokens: free some memory, or lower the latter",
            )
        return cache


class NextGroup:
    """What the launcher says about groups after the first. `on_news` is called when there is any."""

    def __init__(self, number: int) -> None:
        self.number = number
        self.sockets: Sequence[str] = ()
        self.refusal: str | None = None  # why no group will come any more
        self.on_news: Callable[[], None] = lambda: None
        self._news = asyncio.Event()

    async def listen(self, descriptor: int) -> None:
        """Take lines from the launcher until it closes the pipe."""
        reader = asyncio.StreamReader(limit=MOST_LINE_BYTES)
        loop = asyncio.get_running_loop()
        transport, _ = await loop.connect_read_pipe(
            lambda: asyncio.StreamReaderProtocol(reader), os.fdopen(descriptor, "rb", buffering=0)
        )
        try:
            while line := await reader.readline():
                self.take(json.loads(line))
        finally:
            transport.close()

    def take(self, news: dict[str, Any]) -> None:
        """One event: `group` and its `sockets`, or `refusal`."""
        self.refusal = news.get("refusal")
        self.number = news.get("group", self.number)
        self.sockets = news.get("sockets", ())
        self._news.set()
        self.on_news()

    async def after(self, number: int) -> None:
        """Wait for a group later than `number`, or for the refusal."""
        while self.number <= number and self.refusal is None:
            self._news.clear()
            await self._news.wait()


class StepWatch:
    """How long a step may take: after that, shards that answer but do not finish it count as hung.

    A step is late after ten times what the slowest steps of its size took, and never before the floor. Sizes are powers
    of two of the tokens computed, because a step with a long chunk takes a hundred times as long as one that decodes;
    of a size that has not come yet, the next larger one says how long, or a smaller one in proportion. The age of a
    step counts the time that this process was awake: where the whole machine stood still, nothing is late. Nor is a
    step late that waits for weights from a disk, however slow, or for kernels that are compiled. Shards in the place of
    some that were late have twice their patience until they have answered `SAMPLES` steps: where busy cores make every
    step late, other shards would be late for ever. Arithmetic alone, without a clock.
    """

    def __init__(self, before: StepWatch | None = None) -> None:
        """before: of the shards in whose place others are; steps take what they took."""
        self.num_answered = 0
        self.is_given_up = False  # the oldest step was not waited for any longer
        self.floor: float = FLOOR_S if before is None else before.floor
        self.patience = 1.0  # times what a step may take, and the sign of life of a rank
        if before is not None and before.is_given_up:
            self.patience = min(2.0 * before.patience, MOST_S / self.floor)
        self._sizes: deque[int] = deque()  # of the steps under way
        self._began_at = 0.0  # when the oldest could begin: it was sent, and the one before it answered
        self._asleep = 0.0  # of the time since, seconds that this process did not run
        self._seen_at = 0.0
        self._activity = 0  # of the shards, when they were last asked
        self._active_at: float | None = None  # when that was found to have grown
        # Size -> seconds of its latest steps.
        self._times: dict[int, deque[float]] = before._times if before is not None else {}

    def sent(self, tokens: int, now: float) -> None:
        """A step that computes so many tokens, of prompts and of sequences that decode, is under way."""
        if not self._sizes:
            self._begin(now)
        self._sizes.append(tokens.bit_length())

    def received(self, now: float) -> None:
        """The oldest step has been answered."""
        self.num_answered += 1
        if self.num_answered == SAMPLES:
            self.patience = 1.0
        size = self._sizes.popleft()
        times = self._times.get(size)
        if times is None:
            times = self._times[size] = deque(maxlen=SAMPLES)
        times.append(now - self._began_at)
        self._begin(now)

    def age(self, now: float) -> float:
        """Seconds that the oldest step has been under way; 0 where none is. To be called every TICK_S."""
        self._asleep += max(0.0, now - self._seen_at - 2 * TICK_S)
        self._seen_at = now
        return now - self._began_at - self._asleep if self._sizes else 0.0

    def is_late(self, age: float) -> bool:
        """Whether the oldest step may not be so old."""
        return bool(self._sizes) and age > self.patience * self._deadline(self._sizes[0])

    def is_active(self, activity: int, now: float) -> bool:
        """Whether a step that takes long waits for something that goes on. activity: since the shards' start."""
        if activity != self._activity:
            self._activity, self._active_at = activity, now
        return self._active_at is not None and now - self._active_at < ACTIVE_S

    def _deadline(self, size: int) -> float:
        if size in self._times:
            return max(self.floor, FACTOR * self._slowest(size))
        larger = min((other for other in self._times if other > size), default=None)
        if larger is not None:
            return max(self.floor, FACTOR * self._slowest(larger))
        if not self._times:
            return MOST_S
        known = max(self._times)
        return min(max(self.floor, FACTOR * self._slowest(known) * 2.0 ** (size - known)), MOST_S)

    def _slowest(self, size: int) -> float:
        """The 99th percentile of the latest steps of a size."""
        ordered = sorted(self._times[size])
        return ordered[math.ceil(0.99 * len(ordered)) - 1]

    def _begin(self, now: float) -> None:
        self._began_at = self._seen_at = now
        self._asleep = 0.0
