"""Requests with adapters: each gets its adapter's tokens, waits without holding up others, and is refused alone."""

from __future__ import annotations

import asyncio
import random
from typing import Any

import pytest

from router.batching.adapter_mover import GUILTY, AdapterMover, AdapterRowMetrics
from router.errors import AdapterRefused, AdapterUnavailable, Unavailable
from router.scheduling.adapters import AdapterRows
from router.scheduling.request import Failed, Finished, ValidRequest
from router.shards.client import Prepared, ShardError
from router.telemetry.metrics import Metrics
from tests.router.batching.test_batcher import is_clean
from tests.router.doubles import (
    FakeMatching,
    Running,
    adapter_of,
    constrained,
    events_of,
    fake_shards,
    make_limits,
    request_of,
    running,
    token_ids_of,
    tokens_alone,
)

ROWS = {"adapter_rows": 3, "adapter_bytes": 10}


def mixed(count: int, num_adapters: int, seed: int = 1) -> list[ValidRequest]:
    """Requests of which one in five has no adapter, and some begin alike."""
    chance = random.Random(seed)
    adapters = [None if chance.random() < 0.2 else adapter_of(chance.randrange(num_adapters)) for _ in range(count)]
    return [
        request_of(chance.choice((4, 20, 40)), chance.randrange(1, 20), chance.randrange(3), adapter=adapter)
        for adapter in adapters
    ]


def shards_with(**overrides: Any) -> Any:
    return fake_shards(make_limits(**ROWS), **overrides)


def is_settled(at_work: Running) -> bool:
    """Nothing is left, and no adapter is held by anybody."""
    rows = at_work.adapters.rows
    return is_clean(at_work) and not (rows._pins or rows._waiting or rows._owed or rows._leaving or rows._claim)


@pytest.mark.parametrize(
    "limits",
    [
        {},
        {"prefix_caching": True},
        {"prefill_chunk": 7, "max_batch_size": 5},
        {"kv_admission": "reserve", "prefix_caching": True},
        {"num_lanes": 2, "prefix_caching": True},
        {"speculate": 3, "prefix_caching": True},
        {"adapter_host_bytes": None},
        {"adapter_host_bytes": 4, "adapter_rows": 1},
    ],
    ids=str,
)
@pytest.mark.parametrize(
    "faults",
    [{}, {"failing_steps": {3: "out of memory", 9: "again"}}, {"deaths": {4, 11, 30}}],
    ids=["undisturbed", "failing steps", "deaths"],
)
async def test_each_gets_the_tokens_of_its_adapter(limits: dict[str, Any], faults: dict[str, Any]) -> None:
    sizes = {f"/{number}": 1 + number % 4 for number in range(12)}
    shards = fake_shards(make_limits(**ROWS | limits), renewals=9, adapter_sizes=sizes, **faults)
    async with running(shards, **ROWS | limits) as at_work:
        requests = mixed(40, 12)
        entries = [at_work.batcher.submit(request, owner=str(n % 2)) for n, request in enumerate(requests)]
        got = await asyncio.gather(*map(token_ids_of, entries))
    assert [tokens_alone(request) for request in requests] == got
    assert is_settled(at_work) and at_work.adapters.rows.counts.num_evictions > 5
    used = at_work.adapters.rows.used_bytes + at_work.adapters.rows.waiting_bytes
    assert used == sum(shards.prepared.values()) <= 10 + (limits.get("adapter_host_bytes", 0) or 0)


async def test_grammars_and_adapters_wait_side_by_side() -> None:
    async with running(shards_with(), FakeMatching(delays=(0, 7, 1, 30, 3)), **ROWS) as at_work:
        requests = [constrained(request) if n % 2 else request for n, request in enumerate(mixed(20, 6))]
        got = await asyncio.gather(*(token_ids_of(at_work.batcher.submit(request)) for request in requests))
    assert [tokens_alone(request) for request in requests] == got
    assert is_settled(at_work)


async def test_a_slow_adapter_holds_up_nobody_else() -> None:
    may_come = asyncio.Event()

    async def sleep(seconds: float) -> None:
        await (may_come.wait() if seconds else asyncio.sleep(0))

    shards = shards_with(adapter_delays_s={"/0": 1.0}, sleep=sleep)
    async with running(shards, max_batch_size=3, **ROWS) as at_work:
        slow = [at_work.batcher.submit(request_of(4, 5, adapter=adapter_of(0))) for _ in range(5)]
        others = [*(request_of(4, 30) for _ in range(4)), *(request_of(4, 30, adapter=adapter_of(1)) for _ in range(4))]
        got = await asyncio.gather(*(token_ids_of(at_work.batcher.submit(request)) for request in others))
        assert [tokens_alone(request) for request in others] == got
        assert [[]] * 5 == [entry.generated_ids for entry in slow] and 5 == at_work.adapters.rows.num_awaiting
        may_come.set()
        got = await asyncio.gather(*map(token_ids_of, slow))
    assert [tokens_alone(slow[0].request)] * 5 == got
    assert 2 == shards.num_prepared and is_settled(at_work)


async def test_one_that_cannot_be_served_ends_those_who_wait_for_it_and_nobody_else() -> None:
    shards = shards_with(adapter_problems={"/0": "its tensor lora_A is NaN", "/1": "cannot read /srv/secret/file"})
    async with running(shards, **ROWS) as at_work:
        requests = [request_of(4 + n, 5, adapter=adapter_of(n % 3)) for n in range(9)]
        ends = await asyncio.gather(*(events_of(at_work.batcher.submit(request)) for request in requests))
        same_content = [adapter_of(0)] * 2
        served = type(same_content[1])("other", same_content[1].key, "/2")  # its files are whole
        again = request_of(4, 5, adapter=served)
        assert tokens_alone(again) == await token_ids_of(at_work.batcher.submit(again))
    told = [[str(e.error) for e in events if isinstance(e, Failed)] for events in ends]
    expected = "Input validation error: the adapter adapter-0 cannot be served: its tensor lora_A is NaN"
    assert [[expected]] * 3 == told[::3]
    assert all("secret" not in text and "the server's log says why" in text for [text] in told[1::3])
    assert [[]] * 3 == told[2::3]
    [error] = {type(e.error) for events in ends for e in events if isinstance(e, Failed)}
    assert AdapterRefused is error and 422 == error.status
    assert is_settled(at_work) and 2 == at_work.adapters.num_refused


@pytest.mark.parametrize(
    ("may_pass", "status", "words", "reads"),
    [(False, 422, "cannot be served: it is damaged", 1), (True, 503, "cannot be served now: it is damaged", 2)],
)
async def test_what_can_never_be_served_is_read_once_and_what_may_pass_again(
    may_pass: bool, status: int, words: str, reads: int, caplog: pytest.LogCaptureFixture
) -> None:
    shards, folders = shards_with(), []
    prepare = shards.prepare_adapter

    async def prepare_adapter(key: bytes, folder: str) -> Prepared:
        folders.append(folder)
        return Prepared(0, "it is damaged", may_pass) if folder == "/0" else await prepare(key, folder)

    shards.prepare_adapter = prepare_adapter
    async with running(shards, **ROWS) as at_work:
        for _ in range(2):
            [failed] = await events_of(at_work.batcher.submit(request_of(4, 5, adapter=adapter_of(0))))
            assert isinstance(failed, Failed) and status == failed.error.status and words in str(failed.error)
        if may_pass:
            with pytest.raises(AdapterUnavailable, match=words):
                await at_work.adapters.prepare(adapter_of(0))
        else:
            assert "it is damaged" == await at_work.adapters.prepare(adapter_of(0))
        assert at_work.adapters.refuses(adapter_of(0)) is not may_pass and not at_work.adapters.refuses(adapter_of(1))
    assert reads + may_pass == folders.count("/0") == sum("cannot be served" in line for line in caplog.messages)
    assert is_settled(at_work)


async def test_one_that_is_larger_than_the_budget_is_refused_with_both_and_a_remedy() -> None:
    shards = shards_with(adapter_sizes={"/0": 3_000_000_000}, adapter_bytes=2_000_000_000)
    async with running(shards, adapter_rows=3, adapter_bytes=2_000_000_000) as at_work:
        [failed] = await events_of(at_work.batcher.submit(request_of(4, 5, adapter=adapter_of(0))))
        other = request_of(4, 5, adapter=adapter_of(1))
        assert tokens_alone(other) == await token_ids_of(at_work.batcher.submit(other))
    assert isinstance(failed, Failed)
    assert "it takes 3 GB of a device, and --adapter-memory is 2 GB: raise --adapter-memory" in str(failed.error)
    assert {adapter_of(1).key} == {*shards.prepared}


async def test_a_rank_that_dies_while_it_reads_costs_nobody_his_answer() -> None:
    shards = shards_with(renewals=5)
    deaths = iter([True, True])

    async def sleep(seconds: float) -> None:
        await asyncio.sleep(0)
        if seconds and next(deaths, False):
            shards.die("killed while it read")

    shards.sleep = sleep
    shards.adapter_delays_s = {"/0": 1.0}
    async with running(shards, **ROWS) as at_work:
        requests = [
            request_of(4, 30),
            request_of(4, 30, adapter=adapter_of(1)),
            request_of(4, 9, adapter=adapter_of(0)),
        ]
        got = await asyncio.gather(*(token_ids_of(at_work.batcher.submit(request)) for request in requests))
    assert [tokens_alone(request) for request in requests] == got
    assert 3 == shards.renewals and is_settled(at_work)


async def test_what_kills_the_shards_again_and_again_is_not_read_any_more() -> None:
    shards = shards_with(renewals=9, fatal_folders={"/0"})
    async with running(shards, **ROWS) as at_work:
        fatal = at_work.batcher.submit(request_of(4, 5, adapter=adapter_of(0)))
        others = [request_of(4, 40, adapter=adapter_of(n)) for n in (1, 2, 3, 4)] + [request_of(4, 40)]
        got = asyncio.gather(*(token_ids_of(at_work.batcher.submit(request)) for request in others))
        [failed] = await events_of(fatal)
        assert [tokens_alone(request) for request in others] == await got
        assert 9 - GUILTY == shards.renewals
        [again] = await events_of(at_work.batcher.submit(request_of(4, 5, adapter=adapter_of(0))))
    assert isinstance(failed, Failed) and isinstance(again, Failed)
    assert "the shards were lost 3 times while they read it" in str(failed.error)
    assert str(failed.error) == str(again.error) and 9 - GUILTY == shards.renewals
    assert is_settled(at_work)


@pytest.mark.parametrize("is_cancelled", [True, False])
async def test_whoever_waits_in_vain_leaves_nothing_behind(is_cancelled: bool) -> None:
    shards = shards_with(adapter_delays_s={"/0": 1e9})
    async with running(shards, **ROWS) as at_work:
        entry = at_work.batcher.submit(request_of(4, 5, adapter=adapter_of(0)))
        while not at_work.adapters._reading:
            await asyncio.sleep(0)
        if is_cancelled:
            entry.cancelled = True
        else:
            at_work.batcher.end(entry, Unavailable("enough"))
        request = request_of(4, 5, adapter=adapter_of(1))
        assert tokens_alone(request) == await token_ids_of(at_work.batcher.submit(request))
        assert not at_work.adapters.rows.is_awaited
    assert is_settled(at_work)


async def test_a_drain_waits_for_those_who_wait_for_adapters() -> None:
    async with running(shards_with(adapter_delays_s={"/0": 0.05}), **ROWS) as at_work:
        request = request_of(4, 5, adapter=adapter_of(0))
        entry = at_work.batcher.submit(request)
        await at_work.batcher.drain(5)
        assert isinstance((await events_of(entry))[-1], Finished)
    assert tokens_alone(request) == entry.generated_ids


@pytest.mark.parametrize("changed", ["content", "nothing"])
async def test_a_name_with_other_content_finds_no_prefix_of_what_it_had(changed: str) -> None:
    async with running(shards_with(), prefix_caching=True, **ROWS) as at_work:
        first = request_of(40, 8, adapter=adapter_of(0))
        second = request_of(40, 8, adapter=adapter_of(0, "new" if changed == "content" else ""))
        for request in (first, second, request_of(40, 8)):
            entry = at_work.batcher.submit(request)
            assert tokens_alone(request) == await token_ids_of(entry)
            expected = 32 if request is second and changed == "nothing" else 0
            assert expected == entry.num_cached


# --------------------------------------------------------------------------------------------------- without requests


async def test_those_that_nobody_waits_for_are_read_too() -> None:
    shards = shards_with(adapter_problems={"/0": "it is damaged"})
    async with running(shards, adapter_host_bytes=1, **ROWS) as at_work:
        assert "it is damaged" == await at_work.adapters.prepare(adapter_of(0))
        assert ["", "", ""] == [await at_work.adapters.prepare(adapter_of(number)) for number in (1, 2, 1)]
        while at_work.adapters._forgetting:
            await asyncio.sleep(0)
        assert {adapter_of(1).key} == {*shards.prepared}  # as much as there is memory for
        entry = at_work.batcher.submit(request_of(4, 5, adapter=adapter_of(1)))
        assert tokens_alone(entry.request) == await token_ids_of(entry)


async def test_whoever_has_one_read_is_told_when_the_shards_are_lost() -> None:
    shards = shards_with(renewals=3, adapter_delays_s={"/0": 1e9})
    async with running(shards, **ROWS) as at_work:
        asking = asyncio.create_task(at_work.adapters.prepare(adapter_of(0)))
        while not at_work.adapters._reading:
            await asyncio.sleep(0)
        shards.die("killed from outside")
        at_work.batcher.wake()
        with pytest.raises(Unavailable):
            await asking
        while at_work.batcher.outage is not None:
            await asyncio.sleep(0)
        assert "" == await at_work.adapters.prepare(adapter_of(1))
        cancelled = asyncio.create_task(at_work.adapters.prepare(adapter_of(0)))
        await asyncio.sleep(0)
        cancelled.cancel()
        with pytest.raises(asyncio.CancelledError):
            await cancelled


async def test_whoever_waits_for_one_to_be_forgotten_is_told_when_the_shards_are_lost() -> None:
    asked: list[str] = []

    class Forgetful:
        async def prepare_adapter(self, key: bytes, folder: str) -> Prepared:
            asked.append(folder)
            if not folder:
                await asyncio.Event().wait()
            return Prepared(1)

    mover = AdapterMover(Forgetful(), AdapterRows(1, 10, 0))
    assert "" == await mover.prepare(adapter_of(0))
    while not mover._forgetting:
        await asyncio.sleep(0)
    asking = asyncio.create_task(mover.prepare(adapter_of(0)))
    await asyncio.sleep(0.01)
    mover.lost()
    with pytest.raises(Unavailable):
        await asking
    mover.renewed()
    mover.check()
    assert ["/0", ""] == asked, "the others are asked for nothing before they are here"
    await mover.close()


async def test_a_start_ends_with_all_that_cannot_be_served() -> None:
    shards = shards_with(adapter_problems={"/2": "it is damaged", "/4": "it is NaN"})
    mover = AdapterMover(shards, AdapterRows(3, 10, 2))
    with pytest.raises(ValueError, match=r"^adapter adapter-2: it is damaged; adapter adapter-4: it is NaN$"):
        await mover.prepare_all([adapter_of(number) for number in range(5)])
    await mover.close()
    shards.adapter_problems.clear()
    mover = AdapterMover(shards, AdapterRows(3, 10, 2))
    await mover.prepare_all([adapter_of(number) for number in range(5)])
    while mover._forgetting:
        await asyncio.sleep(0)
    assert 2 == len(shards.prepared) == mover.rows.waiting_bytes
    shards.die("killed from outside")
    mover.check()
    await mover.prepare_all([adapter_of(9)])
    with pytest.raises(ShardError, match="killed from outside"):
        mover.check()  # as the batching loop does, which waits for others
    await mover.close()


async def test_a_router_that_begins_leaves_nothing_of_the_one_before_it_in_the_shards() -> None:
    shards = shards_with()
    before = AdapterMover(shards, AdapterRows(3, 10, 10))
    await before.prepare_all([adapter_of(1)])
    assert "" == await before.prepare(adapter_of(2))
    assert {adapter_of(1).key, adapter_of(2).key} == {*shards.prepared}
    await AdapterMover(shards, AdapterRows(3, 10, 10)).prepare_all([adapter_of(1)])
    assert {adapter_of(1).key} == {*shards.prepared} and 2 == shards.num_prepared, "which was not read again"


async def test_what_is_loaded_is_counted() -> None:
    async with running(shards_with(), **ROWS) as at_work:
        metrics = Metrics(at_work.limits)
        metrics.add(AdapterRowMetrics(at_work.adapters), *AdapterRowMetrics.COUNTERS)
        before = metrics.render().decode()
        for number in range(4):
            await token_ids_of(at_work.batcher.submit(request_of(4, 2, adapter=adapter_of(number))))
        after = metrics.render().decode()
    for line in ("tgi_adapter_loads 0.0", "tgi_adapter_rows 3.0", "tgi_adapter_bytes_total 10.0"):
        assert f"\n{line}\n" in before
    for line in (
        "loads 4.0",
        "evictions 1.0",
        "refusals 0.0",
        "rows_used 3.0",
        "bytes 3.0",
        "prepare_duration_count 4.0",
    ):
        assert f"\ntgi_adapter_{line}\n" in after, line
