"""What the router makes of steps that take long, and of what the launcher says."""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from router.__main__ import _listen_to_launcher, _watch
from router.scheduling.plan import Extension
from router.shards.client import KvCache, ShardError, SignsOfLife
from router.shards.group import FLOOR_S, GPU_FLOOR_S, PROBE_S, NextGroup, ShardGroup, StepWatch
from router.shards.wire import step_request
from server.pb.generate_pb2 import NewSequence


class Ranks:
    """Ranks of whom one may be dumb, and one may lag. `clock` goes on by `probe_s` while they are asked."""

    def __init__(self, *, dumb: int | None = None, laggard: int = 0, probe_s: float = 0.01, active: int = 0) -> None:
        self.device = "cpu"
        self.dumb = dumb
        self.lags = laggard
        self.active, self.activity = active, 0
        self.probe_s = probe_s
        self.now = 100.0
        self.is_abandoned = False

    def clock(self) -> float:
        return self.now

    def send(self, request: Any) -> None:
        pass

    async def signs_of_life(self, seconds: float) -> SignsOfLife:
        self.now += self.probe_s
        self.activity += self.active
        return SignsOfLife(self.dumb, self.lags, self.activity)

    async def info(self) -> Any:
        return SimpleNamespace(device=self.device)

    def abandon(self) -> None:
        self.is_abandoned = True


async def watched(ranks: Ranks, tmp_path: Path) -> ShardGroup:
    """A group whose step is under way; such steps usually take a moment."""
    group = ShardGroup([str(tmp_path / "rank-0")], clock=ranks.clock)
    await group.close()
    group._client = ranks  # type: ignore[assignment]
    group._watch.sent(0, ranks.now)
    group._watch.received(ranks.now + 0.01)
    ranks.now += 0.01
    group.send(step_request(1, decode=True))
    return group


def looked_at(ranks: Ranks, tmp_path: Path, *, age: float, looks: int = 1) -> ShardGroup:
    """The group, once it has been looked at so often until its step was so old."""

    async def story() -> ShardGroup:
        group, began = await watched(ranks, tmp_path), ranks.now
        for _ in range(looks):
            ranks.now += age / looks
            await group._examine(group._watch, ranks.now - began)
        return group

    return asyncio.run(story())


def test_a_rank_that_gives_no_sign_of_life_is_lost(tmp_path: Path) -> None:
    ranks = Ranks(dumb=1, probe_s=PROBE_S)
    with pytest.raises(ShardError, match=r"shard 1: it does not answer: a step has taken 2\.7 s"):
        looked_at(ranks, tmp_path, age=1.2).check()
    assert ranks.is_abandoned


def test_where_all_answer_a_late_step_is_the_laggards_fault(tmp_path: Path) -> None:
    looked_at(Ranks(laggard=1), tmp_path, age=FLOOR_S - 0.5).check()
    late = looked_at(Ranks(laggard=1), tmp_path, age=FLOOR_S)
    with pytest.raises(ShardError, match="shard 1: it answers, but its step does not end"):
        late.check()
    assert late._watch.is_given_up


def test_a_late_step_that_waits_for_what_goes_on_is_not_lost(tmp_path: Path) -> None:
    looked_at(Ranks(laggard=1, active=8), tmp_path, age=FLOOR_S, looks=2).check()


def test_a_rank_that_comes_back_late_is_looked_at_once_more(tmp_path: Path) -> None:
    """Its step may have ended by the second answer."""

    class Returning(Ranks):
        ends: Callable[[], None] = staticmethod(lambda: None)
        looks = 0

        async def signs_of_life(self, seconds: float) -> SignsOfLife:
            self.looks += 1
            if self.looks == 2:
                self.ends()
            return await super().signs_of_life(seconds)

    async def story(*, ends: bool) -> None:
        ranks = Returning(laggard=1, probe_s=1.0)
        group = await watched(ranks, tmp_path)
        if ends:
            ranks.ends = lambda: group._watch.received(ranks.now)
        ranks.now += FLOOR_S - 0.5
        await group._examine(group._watch, FLOOR_S - 0.5)
        assert ranks.looks == 2
        group.check()

    asyncio.run(story(ends=True))
    with pytest.raises(ShardError, match="shard 1: it answers, but its step does not end"):
        asyncio.run(story(ends=False))


def test_a_gpu_has_longer_for_a_step(tmp_path: Path) -> None:
    """The first step of its kind compiles kernels."""

    async def story() -> float:
        group = ShardGroup([str(tmp_path / "rank-0")])
        await group.close()
        group._client = ranks  # type: ignore[assignment]
        await group.info()
        return StepWatch(group._watch).floor

    ranks = Ranks()
    assert asyncio.run(story()) == FLOOR_S
    ranks.device = "NVIDIA H200"
    assert asyncio.run(story()) == GPU_FLOOR_S


def test_silence_while_this_process_did_not_run_says_nothing(tmp_path: Path) -> None:
    looked_at(Ranks(dumb=1, probe_s=60.0), tmp_path, age=1.2).check()


def test_sequences_that_decode_make_a_step_large(tmp_path: Path) -> None:
    async def story() -> list[int]:
        group = ShardGroup([str(tmp_path / "rank-0")])
        await group.close()
        group._client = Ranks()  # type: ignore[assignment]
        sequences = [NewSequence(id=id) for id in range(100)]
        group.send(step_request(1, add=sequences, chunks=[(id, 2) for id in range(100)]))
        group.send(step_request(2, decode=True))
        group.send(step_request(3, retire=range(97), decode=True))
        group.send(step_request(4, decode=True, drafts={99: Extension(5, [1] * 6, ())}))
        return [*group._watch._sizes]

    assert [size.bit_length() for size in (200, 100, 3, 8)] == asyncio.run(story())


class Roomy(Ranks):
    """Ranks whose memory holds so many tokens."""

    def __init__(self, tokens: int) -> None:
        super().__init__()
        self.tokens = tokens
        self.wanted: dict[str, int] = {}

    async def wait_ready(self, timeout: float | None = None) -> None:
        pass

    async def warmup(self, **wanted: int) -> KvCache:
        self.wanted = wanted
        tokens = wanted["max_batch_total_tokens"] or min(self.tokens, wanted["useful_tokens"])
        return KvCache(tokens, 16, tokens // 16, kv_bytes=0, free_bytes=0)


@pytest.mark.parametrize(("fits", "tokens"), [(4096, 1024), (512, 512), (256, None)])
def test_later_shards_get_the_cache_of_the_first_or_what_fits_of_it(
    tmp_path: Path, fits: int, tokens: int | None
) -> None:
    async def story() -> int:
        group = ShardGroup([str(tmp_path / "rank-0")])
        await group.close()
        group._client = Roomy(4096)  # type: ignore[assignment]
        await group.warmup(max_total_tokens=400, max_batch_total_tokens=1024, useful_tokens=9999, may_be_shorter=False)
        group._client = Roomy(fits)  # type: ignore[assignment]
        return (await group._warm_up()).max_batch_total_tokens

    if tokens is not None:
        assert tokens == asyncio.run(story())
    else:
        with pytest.raises(ShardError, match="256 tokens now, fewer than the 400 of --max-total-tokens"):
            asyncio.run(story())


def told(line: bytes, group: NextGroup) -> None:
    async def story() -> None:
        reader, writer = os.pipe()
        os.write(writer, line)
        os.close(writer)
        await group.listen(reader)

    asyncio.run(story())


def test_the_launcher_tells_of_groups_and_of_their_end() -> None:
    group = NextGroup(1)
    told(json.dumps({"group": 2, "sockets": ["/a"]}).encode() + b"\n", group)
    assert (2, ["/a"], None) == (group.number, group.sockets, group.refusal)
    told(json.dumps({"refusal": "enough"}).encode() + b"\n", group)
    assert (2, "enough") == (group.number, group.refusal)


class Awake:
    """A batching loop that is woken for nothing."""

    def wake(self) -> None:
        pass


def test_a_router_that_loads_goes_on_with_the_group_that_takes_the_place(tmp_path: Path) -> None:
    """A death while it loads is no end: whether a rank says so, or the launcher is the first to know."""

    async def story() -> list[int]:
        news, begun = NextGroup(1), []
        group = ShardGroup([str(tmp_path / "rank-0")], news)

        async def work() -> str:
            begun.append(group.number)
            if group.number == 1:
                raise ShardError(0, "it does not answer")
            if group.number == 2:
                await asyncio.Event().wait()
            return "made"

        making = asyncio.create_task(group.begin(work))
        for number in (2, 3):
            while begun[-1:] != [number - 1]:
                await asyncio.sleep(0)
            news.take({"group": number, "sockets": [str(tmp_path / "rank-0")]})
        assert "made" == await making
        await group.close()
        return begun

    assert [1, 2, 3] == asyncio.run(story())


def test_a_router_that_loads_ends_where_no_group_will_come(tmp_path: Path) -> None:
    async def story() -> None:
        news = NextGroup(1)
        group = ShardGroup([str(tmp_path / "rank-0")], news)
        making = asyncio.create_task(group.begin(asyncio.Event().wait))
        await asyncio.sleep(0)
        news.take({"refusal": "enough"})
        try:
            await making
        finally:
            await group.close()

    with pytest.raises(ShardError, match="enough"):
        asyncio.run(story())


def test_what_nobody_expected_ends_the_watch(tmp_path: Path) -> None:
    """And with it the router, which its launcher then starts again: without a watch, a hang would last for ever."""

    async def story() -> None:
        reader, writer = os.pipe()
        os.write(writer, b"nonsense\n")
        news = NextGroup(1)
        group = ShardGroup([str(tmp_path / "rank-0")], news)
        try:
            async with asyncio.timeout(10):
                await _watch(group, news, _listen_to_launcher(news, reader), Awake())  # type: ignore[arg-type]
        finally:
            os.close(writer)
            await group.close()

    with pytest.raises(json.JSONDecodeError):
        asyncio.run(story())
