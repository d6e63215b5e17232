"""Has the shards move blocks of the prefix cache between host and disk, beside the steps, and counts that.

The index says what should move, and is told what has. At most two fetches and one store are under way, of a few MB
each, so that a request that waits gets what has come, and a store never keeps it waiting for long. A request waits for
the disk as long as computing the same would take, by the steps before, and then it is computed. A disk that does not
answer is not asked again.

Left out: what is worth keeping (`router/scheduling/prefix_index.py`), and how blocks come to the disk
(`server/prefix/`).
"""

from __future__ import annotations

import asyncio
import logging
import secrets
import time
from collections.abc import Callable, Coroutine, Iterable, Mapping
from functools import partial
from typing import Protocol

from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from router.scheduling.prefix_index import TierIndex, smoothed
from router.scheduling.prefix_moves import DiskWait, Move, Moved, TierContents, TierCounts
from router.shards.client import ShardError

MOST_FETCHES = 2
MOST_STORES = 1
MOVE_BYTES = 16 * 2**20  # of a rank, in one move
MOST_BLOCKS = 64  # in one move
LEAST_WAIT_S, MOST_WAIT_S = 0.5, 20.0  # of a request for the disk
UNKNOWN_WAIT_S = 5.0  # while it is not known how long computing takes
HIT_TOKENS = "tgi_prefix_tier_hit_tokens"
WRITTEN = "tgi_prefix_tier_written_bytes"
READ = "tgi_prefix_tier_read_bytes"
DAMAGED = "tgi_prefix_tier_damaged_blocks"
DROPPED = "tgi_prefix_tier_dropped_blocks"
GIVEN_UP = "tgi_prefix_tier_given_up"

logger = logging.getLogger(__name__)


class TieredShards(Protocol):
    """Shards with tiers behind the device."""

    async def open_tiers(self, session: int) -> TierContents:
        """Begin a session. Raises ShardError."""

    async def move_blocks(self, session: int, move: Move) -> Moved:
        """Do it on every rank. Raises ShardError, also where a rank takes too long."""


class Mover:
    """Moves what `index` wants moved. shards: None where there are no tiers. block_size: tokens of a block."""

    def __init__(self, shards: TieredShards | None = None, block_size: int = 1) -> None:
        self.session = 0
        self.index = TierIndex()
        self.contents: TierContents | None = None  # at the start of the session
        self.wake: Callable[[], None] = lambda: None  # called when something has moved, or a request waits no longer
        self._shards = shards
        self._block_size = block_size
        self._fetching: set[asyncio.Task[None]] = set()
        self._storing: set[asyncio.Task[None]] = set()
        self._timers: set[asyncio.TimerHandle] = set()
        self._has_said = False  # that the disk has no room

    @property
    def counts(self) -> TierCounts:
        """What happened, over all sessions."""
        return self.index.counts

    async def open(self) -> TierIndex:
        """Begin with shards that are new, or that a router before this one has used. Without tiers an empty index."""
        self.index = TierIndex(counts=self.counts)
        if self._shards is None:
            return self.index
        self.session, self._has_said = secrets.randbits(31) + 1, False
        try:
            self.contents = await self._shards.open_tiers(self.session)
        except ShardError as error:
            logger.warning("the prefix cache has no host or disk tier: %s", error)
            return self.index
        if self.contents.trouble:
            logger.warning("the prefix cache does not use the disk: %s", self.contents.trouble)
        self.index = TierIndex(self.contents.sizes, self.contents.stored, self.counts)
        return self.index

    def pump(self) -> None:
        """Have moved what should move now. Cheap where there is nothing."""
        index = self.index
        while index.new_waits:
            self._limit(index.new_waits.popleft())
        if self._shards is None or self.contents is None:
            return
        most = max(1, min(MOST_BLOCKS, MOVE_BYTES // max(1, self.contents.rank_bytes)))
        was_wanted = index.is_wanted
        while len(self._fetching) < MOST_FETCHES and (move := index.next_fetch(most)) is not None:
            self._start(self._fetching, self._fetch(self.session, index, move))
        if was_wanted and not (self._fetching or index.is_wanted):
            self.wake()  # the host has no room for what was wanted: who waits for it computes it
        while len(self._storing) < MOST_STORES and (move := index.next_store(most)) is not None:
            self._start(self._storing, self._store(self.session, index, move))

    def _start(self, tasks: set[asyncio.Task[None]], moving: Coroutine[None, None, None]) -> None:
        task = asyncio.get_running_loop().create_task(moving)
        tasks.add(task)
        task.add_done_callback(partial(self._done, tasks, self.index))

    def _done(self, tasks: set[asyncio.Task[None]], index: TierIndex, task: asyncio.Task[None]) -> None:
        """Start the next. An unexpected error costs the disk, and not the requests that wait for the blocks."""
        tasks.discard(task)
        if task.cancelled():
            return
        if (error := task.exception()) is not None:
            index.close_disk()
            logger.error("the prefix cache does not use the disk any more", exc_info=error)
        self.pump()
        self.wake()

    def _limit(self, wait: DiskWait) -> None:
        """End it after as long as computing would take."""
        computing = self.index.seconds_to_compute(wait.num_blocks, self._block_size)
        seconds = UNKNOWN_WAIT_S if computing is None else min(max(computing, LEAST_WAIT_S), MOST_WAIT_S)
        self._timers = {timer for timer in self._timers if timer.when() > asyncio.get_running_loop().time()}
        self._timers.add(asyncio.get_running_loop().call_later(seconds, self._expire, wait))

    def _expire(self, wait: DiskWait) -> None:
        if not wait.is_over:
            wait.is_over = True
            self.counts.given_up += 1
            self.wake()

    async def _fetch(self, session: int, index: TierIndex, move: Move) -> None:
        began, num_fetching, moved = time.perf_counter(), len(self._fetching), None
        try:
            moved = await self._moved(session, index, move)
        finally:
            index.fetched(move, _moved_of(move, moved))
        if moved is None:
            return
        seconds = (time.perf_counter() - began) / len(move.keys) / max(1, num_fetching)
        index.seconds_per_block = smoothed(index.seconds_per_block, seconds)
        index.counts.damaged += moved.num_damaged
        if moved.num_damaged:
            logger.warning("%d blocks of the prefix cache on disk were damaged: they are computed", moved.num_damaged)
        self._note(index, moved)

    async def _store(self, session: int, index: TierIndex, move: Move) -> None:
        moved = None
        try:
            moved = await self._moved(session, index, move)
        finally:
            index.stored(move, _moved_of(move, moved))
        if moved is not None:
            self._note(index, moved)

    async def _moved(self, session: int, index: TierIndex, move: Move) -> Moved | None:
        """What became of it; None if that is not known, and then nothing more is asked of the disk."""
        assert self._shards is not None
        try:
            return await self._shards.move_blocks(session, move)
        except (ShardError, ValueError) as error:
            index.close_disk()
            if not isinstance(error, ShardError) or error.is_known:
                logger.warning("the prefix cache does not use the disk any more: %s", error)
            return None

    def _note(self, index: TierIndex, moved: Moved) -> None:
        """What the disk said, told once."""
        if moved.is_lost:
            index.close_disk()
            logger.warning("the prefix cache does not use the disk any more: %s", moved.trouble)
        elif moved.is_full:
            index.disk_is_full()
            if not self._has_said:
                logger.warning("the prefix cache on disk grows no further: %s", moved.trouble)
            self._has_said = True

    async def flush(self, seconds: float) -> None:
        """Wait until what the host holds is on disk too, but no longer than that."""
        try:
            async with asyncio.timeout(seconds):
                while self._storing:
                    await asyncio.wait(set(self._storing))
                    await asyncio.sleep(0)  # what has ended starts the next
        except TimeoutError:
            logger.info("not all of the prefix cache could be written to disk in %g s", seconds)

    async def close(self) -> None:
        """End what is under way, and start nothing behind it."""
        self._shards = None
        for handle in self._timers:
            handle.cancel()
        tasks = [*self._fetching, *self._storing]
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks)


def _moved_of(move: Move, moved: Moved | None) -> list[bool]:
    """Which blocks have moved; None: not known. A rank that is still at it leaves alone what steps overwrite."""
    return [False] * len(move.keys) if moved is None else moved.is_moved


class TierMetrics(Collector):
    """What the tiers behind the device hold and move, for Prometheus. block_size: tokens of a block."""

    COUNTERS = (HIT_TOKENS, WRITTEN, READ, DAMAGED, DROPPED, GIVEN_UP)

    def __init__(self, mover: Mover, block_size: int) -> None:
        self._mover = mover
        self._block_size = block_size

    def collect(self) -> Iterable[Metric]:
        """Every series, at 0 where there is nothing."""
        counts, index = self._mover.counts, self._mover.index
        hits = {tier: blocks * self._block_size for tier, blocks in counts.hits.items()}
        yield _by_tier(HIT_TOKENS, "Tokens whose keys and values were copied back to the device", hits)
        yield _by_tier(WRITTEN, "Bytes written to a tier, by all shards", counts.written)
        yield _by_tier(READ, "Bytes read from a tier, by all shards", counts.read)
        yield CounterMetricFamily(DAMAGED, "Blocks on disk whose checksums were wrong", value=counts.damaged)
        yield CounterMetricFamily(DROPPED, "Blocks that no tier had room for in time", value=counts.dropped)
        yield CounterMetricFamily(GIVEN_UP, "Requests that stopped waiting for the disk", value=counts.given_up)
        held = GaugeMetricFamily("tgi_prefix_tier_blocks", "Blocks that a tier holds", labels=["tier"])
        most = GaugeMetricFamily("tgi_prefix_tier_blocks_total", "Blocks that a tier has room for", labels=["tier"])
        for tier, count in index.num_blocks.items():
            held.add_metric([tier], count)
            most.add_metric([tier], index.room[tier])
        yield from (held, most)


def _by_tier(name: str, what: str, values: Mapping[str, int]) -> Metric:
    family = CounterMetricFamily(name, what, labels=["tier"])
    for tier, value in values.items():
        family.add_metric([tier], value)
    return family
