"""Has the shards read the adapters that requests wait for, beside the steps, and forget those that have no room.

The arithmetic says what is wanted next (`router/scheduling/adapters.py`), and is told what has come; a later step then
puts it into a row. A few are read at once. One that cannot be served is refused: the requests that wait for it end with
the reason, and no others. That is remembered, but where a rank was slow or its disk failed; only where a rank is gone
are the shards lost. Other shards have read nothing, and begin anew. What they were reading when the ones before
were lost, twice, they read alone; and not at all what has then ended them once more.

Left out: names and what is allowed (`router/requests/adapters.py`), how files are read (`server/adapters/`).
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable
from typing import Protocol

from prometheus_client import Histogram
from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from router.errors import AdapterUnavailable, Unavailable
from router.scheduling.adapters import Adapter, AdapterRows
from router.shards.client import Prepared, ShardError
from router.telemetry.metrics import DURATION_BUCKETS

MOST_AT_ONCE = 2  # adapters that are read for requests: one by a shard, and one that it goes on with
MOST_REFUSED = 1_000  # that are remembered
SUSPICIOUS, GUILTY = 2, 3  # losses of the shards while they read an adapter: it is read alone, or not at all
LOADS, EVICTIONS, REFUSALS = "tgi_adapter_loads", "tgi_adapter_evictions", "tgi_adapter_refusals"
PREPARE_DURATION = "tgi_adapter_prepare_duration"

logger = logging.getLogger(__name__)


class AdaptedShards(Protocol):
    """Shards that serve adapters."""

    async def prepare_adapter(self, key: bytes, folder: str) -> Prepared:
        """Have every rank read one, or without a folder forget it. Raises ShardError where a rank is lost."""

    async def forget_adapters(self, kept: Iterable[bytes]) -> None:
        """Have every rank forget all but these. Raises ShardError likewise."""


class AdapterMover:
    """Keeps what `rows` wants at hand. shards: None where no adapters are served."""

    def __init__(self, shards: AdaptedShards | None = None, rows: AdapterRows | None = None) -> None:
        self.rows = rows or AdapterRows()
        self.wake: Callable[[], None] = lambda: None  # called when something has come, or is refused
        # Called with one that cannot be served, and why: those who wait for it are to be told.
        self.refuse: Callable[[Adapter, Prepared], None] = lambda adapter, found: None
        self.num_refused = 0
        what = "Reading an adapter, seconds"
        self.durations = Histogram(PREPARE_DURATION, what, buckets=DURATION_BUCKETS, registry=None)
        self._shards = shards
        self._reading: dict[bytes, asyncio.Task[Prepared]] = {}
        self._forgetting: dict[bytes, asyncio.Task[None]] = {}
        self._refused: OrderedDict[tuple[bytes, str], str] = OrderedDict()  # why, by content and folder
        self._losses: Counter[bytes] = Counter()  # of the shards, while they read an adapter that has not come since
        self._loss: ShardError | None = None
        self._is_waiting = False  # for other shards
        self._one_by_one = asyncio.Lock()  # those that nobody waits for

    # ------------------------------------------------------------------------------------- for the batching loop

    def pump(self) -> None:
        """Have read what should be read now, and forgotten what has no room. Cheap where there is nothing."""
        if self._is_waiting or self._loss is not None:
            return
        for key in self.rows.forgotten():
            self._forget(key)
        for adapter in self.rows.wanted:
            if not self._begin(adapter):
                break

    def check(self) -> None:
        """Raises ShardError where a rank was found to be gone."""
        if self._loss is not None:
            raise self._loss

    def lost(self) -> None:
        """The shards are gone, and others come in their place. Nothing is asked of them until `renewed`."""
        self._is_waiting, self._loss = True, None
        self._losses.update(key for key, reading in self._reading.items() if not reading.done())
        for task in (*self._reading.values(), *self._forgetting.values()):
            task.cancel()
        self._reading, self._forgetting = {}, {}

    def renewed(self) -> None:
        """Others are here, which have read nothing."""
        self._is_waiting, self._loss = False, None

    # ------------------------------------------------------------------------------------------------- for others

    async def prepare(self, adapter: Adapter) -> str:
        """Have an adapter read that no request waits for; returns why it cannot be served, or nothing.

        One after the other. Raises Unavailable where the shards are lost meanwhile, or it may be served another time.
        """
        async with self._one_by_one:
            try:
                found = await self._prepared(adapter)
            except (ShardError, asyncio.CancelledError):
                if (task := asyncio.current_task()) is not None and task.cancelling():
                    raise
                raise Unavailable("The model shards are lost, and others begin: load the adapter again") from None
        if found.may_pass:
            raise AdapterUnavailable(adapter.name, found.problem, adapter.folder)
        return found.problem

    async def prepare_all(self, adapters: Iterable[Adapter]) -> None:
        """Have the shards read all once, and nothing else at hand. Raises ValueError for those that cannot be served.

        The shards may be those of a router before this one, and have what its clients asked for. Of these adapters as
        many stay at hand as there is memory for. Where the shards are lost meanwhile, `check` says so.
        """
        adapters = list(adapters)
        try:
            if self._shards is not None:
                await self._shards.forget_adapters([adapter.key for adapter in adapters])
        except ShardError as error:
            self._loss = error
            return
        problems = []
        for adapter in adapters:
            try:
                found = await self._prepared(adapter)
            except ShardError:
                return
            if found.problem:
                problems.append(f"adapter {adapter.name}: {found.problem}")
        if problems:
            raise ValueError("; ".join(problems))

    async def _prepared(self, adapter: Adapter) -> Prepared:
        key = adapter.key
        if self._is_waiting:
            raise ShardError(0, "others begin in their place")
        if self.rows.is_prepared(key):
            return Prepared(0)
        if (forgetting := self._forgetting.get(key)) is not None:
            await asyncio.wait({forgetting})
            return await self._prepared(adapter)  # for other shards may be here meanwhile
        if key not in self._reading:
            self._start(adapter)
        return await asyncio.shield(self._reading[key])

    def discard(self, key: bytes) -> None:
        """No request will name an adapter any more: it makes room before all others."""
        self.rows.discard(key)

    async def close(self) -> None:
        """End what is under way."""
        tasks = [*self._reading.values(), *self._forgetting.values()]
        self.lost()
        if tasks:
            await asyncio.wait(tasks)

    # ------------------------------------------------------------------------------------------------------ tasks

    def _begin(self, adapter: Adapter) -> bool:
        """Read an adapter for those who wait for it; whether another one may be read beside it."""
        key = adapter.key
        if key in self._reading or key in self._forgetting:
            return not self._is_suspect(key)
        is_alone = self._is_suspect(key) or any(map(self._is_suspect, self._reading))
        if len(self._reading) >= (1 if is_alone else MOST_AT_ONCE):
            return False
        self._start(adapter)
        return not is_alone

    def _is_suspect(self, key: bytes) -> bool:
        return self._losses[key] >= SUSPICIOUS

    def _start(self, adapter: Adapter) -> None:
        task = asyncio.get_running_loop().create_task(self._read(adapter))
        self._reading[adapter.key] = task
        task.add_done_callback(lambda done: self._done(adapter, done))

    async def _read(self, adapter: Adapter) -> Prepared:
        """It is at hand, or has a problem. Raises ShardError."""
        assert self._shards is not None
        if problem := self._refused.get((adapter.key, adapter.folder)):
            return Prepared(0, problem)
        if self._losses[adapter.key] >= GUILTY:
            return self._noted(adapter, Prepared(0, f"the shards were lost {GUILTY} times while they read it"))
        began = time.perf_counter()
        found = await self._shards.prepare_adapter(adapter.key, adapter.folder)
        self.durations.observe(time.perf_counter() - began)
        if not found.problem and not self.rows.fits(found.num_bytes):
            has, needs = self.rows.device_bytes / 1e9, found.num_bytes / 1e9
            problem = (
                f"it takes {needs:.3g} GB of a device, and --adapter-memory is {has:.3g} GB: raise --adapter-memory, "
                "or give it a lower rank"
            )
            found = Prepared(found.num_bytes, problem)
        if found.problem:
            self._forget(adapter.key)  # of ranks that have read it
            return self._noted(adapter, found)
        self.rows.prepared(adapter.key, found.num_bytes)
        del self._losses[adapter.key]
        return found

    def refuses(self, adapter: Adapter) -> bool:
        """Whether it is known that it can never be served."""
        return (adapter.key, adapter.folder) in self._refused

    def _noted(self, adapter: Adapter, found: Prepared) -> Prepared:
        """What can never be served is neither read nor logged for every request that names it."""
        logger.warning("adapter %s in %s cannot be served: %s", adapter.name, adapter.folder, found.problem)
        if not found.may_pass:
            self._refused[adapter.key, adapter.folder] = found.problem
            if len(self._refused) > MOST_REFUSED:
                self._refused.popitem(last=False)
        return found

    def _done(self, adapter: Adapter, task: asyncio.Task[Prepared]) -> None:
        if self._reading.get(adapter.key) is not task:
            if not task.cancelled():
                task.exception()  # of shards that are gone
            return
        del self._reading[adapter.key]
        if task.cancelled():
            return
        if (error := task.exception()) is None:
            if (found := task.result()).problem:
                self._refuse(adapter, found)
        elif isinstance(error, ShardError):
            self._losses[adapter.key] += 1
            self._loss = error
        else:
            logger.error("adapter %s could not be read", adapter.name, exc_info=error)
            self._refuse(
                adapter, Prepared(0, "this server could not have it read, and its log says why", may_pass=True)
            )
        self.pump()
        self.wake()

    def _refuse(self, adapter: Adapter, found: Prepared) -> None:
        self.num_refused += 1
        self.rows.not_wanted(adapter.key)
        self.refuse(adapter, found)

    def _forget(self, key: bytes) -> None:
        task = asyncio.get_running_loop().create_task(self._have_forgotten(key))
        self._forgetting[key] = task
        task.add_done_callback(lambda done: self._has_forgotten(key, done))

    async def _have_forgotten(self, key: bytes) -> None:
        assert self._shards is not None
        try:
            await self._shards.prepare_adapter(key, "")
        except ShardError as error:
            self._loss = self._loss or error

    def _has_forgotten(self, key: bytes, task: asyncio.Task[None]) -> None:
        if self._forgetting.get(key) is task:
            del self._forgetting[key]
            self.pump()
            self.wake()


class AdapterRowMetrics(Collector):
    """Which adapters are where, for Prometheus: numbers alone, for names are what anybody may have loaded."""

    COUNTERS = (LOADS, EVICTIONS, REFUSALS)

    def __init__(self, mover: AdapterMover) -> None:
        self._mover = mover

    def collect(self) -> Iterable[Metric]:
        """Every series, at 0 where there is nothing."""
        rows, counts = self._mover.rows, self._mover.rows.counts
        yield CounterMetricFamily(LOADS, "Adapters that came to the device", value=counts.num_loads)
        yield CounterMetricFamily(EVICTIONS, "Adapters that made room there for others", value=counts.num_evictions)
        yield CounterMetricFamily(REFUSALS, "Adapters that could not be served", value=self._mover.num_refused)
        values = {
            "waiting_requests": ("Requests that wait for their adapter", rows.num_awaiting),
            "rows_used": ("Adapters on the device", rows.num_used),
            "rows": ("Adapters that can be there at once", rows.num_rows),
            "bytes": ("Memory that they take on each shard's device", rows.used_bytes),
            "bytes_total": ("Memory that there is for them", rows.device_bytes),
            "host_bytes": ("What those take that are at hand in the host's memory alone", rows.waiting_bytes),
        }
        for name, (what, value) in values.items():
            yield GaugeMetricFamily(f"tgi_adapter_{name}", what, value=value)
        yield from self._mover.durations.collect()
