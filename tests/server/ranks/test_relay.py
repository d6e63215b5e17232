"""How steps reach all ranks through rank 0: in one order, without waiting, and with the name of a rank that fails."""

from __future__ import annotations

import asyncio
import stat
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import grpc
import pytest
import uvloop

from router.shards.client import ShardClient, ShardError
from server.pb import generate_pb2 as pb
from server.pb import generate_pb2_grpc as pb_grpc
from server.ranks.relay import LENGTH_BYTES, MAX_UNANSWERED, Deadlines, StepStream, shard_server

HOLD = "hold"  # a step that is never done
ENDED = "its connection ended"
SHORT = Deadlines(connect=0.2, agreement=0.2, cause=0.1, lag=0.2, leave=0.05)
PATIENT = Deadlines(connect=5, agreement=5, cause=5, lag=5, leave=0.05)  # longer than a test that passes


@dataclass
class ScriptedRank:
    """A rank without a model. `script` says by step what it answers: nothing yet, or an error."""

    script: dict[int, str | pb.StepReply] = field(default_factory=dict)
    steps: list[int] = field(default_factory=list)
    futures: dict[int, asyncio.Future[pb.StepReply]] = field(default_factory=dict)

    def start(self, request: pb.StepRequest) -> asyncio.Future[pb.StepReply]:
        self.steps.append(request.step)
        future: asyncio.Future[pb.StepReply] = asyncio.get_running_loop().create_future()
        self.futures[request.step] = future
        wish = self.script.get(request.step, "")
        if wish != HOLD:
            reply = pb.StepReply(step=request.step, error=wish) if isinstance(wish, str) else wish
            future.set_result(reply)
        return future


@dataclass
class Ranks:
    """Ranks that speak to each other, and the router's end of the stream."""

    ranks: list[ScriptedRank]
    streams: list[StepStream]
    requests: asyncio.Queue[pb.StepRequest | None] = field(default_factory=asyncio.Queue)

    def run(self, *steps: int) -> AsyncIterator[pb.StepReply]:
        """Open a stream with these steps in it."""
        self.requests = asyncio.Queue()
        self.send(*steps)
        return self.streams[0].run(self._sent(self.requests))

    def send(self, *steps: int) -> None:
        for step in steps:
            self.requests.put_nowait(pb.StepRequest(step=step))

    @staticmethod
    async def _sent(requests: asyncio.Queue[pb.StepRequest | None]) -> AsyncIterator[pb.StepRequest]:
        while (request := await requests.get()) is not None:
            yield request


Script = dict[int, str | pb.StepReply]
Story = Callable[[Ranks], Awaitable[None]]


@asynccontextmanager
async def connected(
    folder: Path, scripts: Sequence[Script], deadlines: Deadlines, absent: Sequence[int] = ()
) -> AsyncIterator[Ranks]:
    sockets = [str(folder / f"steps-{rank}") for rank in range(1, len(scripts))]
    ranks = [ScriptedRank(script) for script in scripts]
    streams = [StepStream(n, sockets, rank.start, deadlines) for n, rank in enumerate(ranks)]
    try:
        for n, stream in enumerate(streams):
            if n not in absent:
                await stream.open()
        yield Ranks(ranks, streams)
    finally:
        for stream in streams:
            stream.close()
        await asyncio.sleep(0.01)  # closed connections are given back in the loop's next turns


def play(
    story: Story, folder: Path, *scripts: Script, deadlines: Deadlines = PATIENT, absent: Sequence[int] = ()
) -> None:
    async def run() -> None:
        async with asyncio.timeout(30), connected(folder, scripts, deadlines, absent) as ranks:
            await story(ranks)

    uvloop.run(run())


async def eventually(holds: Callable[[], bool]) -> None:
    async with asyncio.timeout(5):
        while not holds():
            await asyncio.sleep(0.005)


def fatal(rank: int, error: str) -> pb.StepReply:
    return pb.StepReply(error=error, failed_rank=rank)


def victim(rank: int) -> pb.StepReply:
    return pb.StepReply(error="another shard went away", failed_rank=rank, lost_peer=True)


async def failure(replies: AsyncIterator[pb.StepReply]) -> tuple[int, str]:
    """The rank to blame and the cause, which must be the stream's last reply."""
    last = [reply async for reply in replies][-1]
    assert last.HasField("failed_rank"), last
    return last.failed_rank, last.error


# ----------------------------------------------------------------------------------------------- one order, no waiting


@pytest.mark.parametrize("num_ranks", [1, 2, 8])
def test_every_rank_starts_every_step_in_one_order(num_ranks: int, tmp_path: Path) -> None:
    async def story(ranks: Ranks) -> None:
        replies = ranks.run(*range(1, 51))
        ranks.requests.put_nowait(None)
        assert list(range(1, 51)) == [reply.step async for reply in replies]
        await eventually(lambda: all(len(rank.steps) == 50 for rank in ranks.ranks))
        assert all(rank.steps == list(range(1, 51)) for rank in ranks.ranks)

    play(story, tmp_path, *[{}] * num_ranks)


def test_a_step_reaches_the_others_while_rank_0_computes_the_one_before(tmp_path: Path) -> None:
    async def story(ranks: Ranks) -> None:
        waiting = asyncio.ensure_future(anext(ranks.run(1, 2)))
        await eventually(lambda: ranks.ranks[1].steps == [1, 2])
        assert not waiting.done()
        ranks.ranks[0].futures[1].set_result(pb.StepReply(step=1))
        assert 1 == (await waiting).step

    play(story, tmp_path, {1: HOLD}, {})


def test_what_all_refused_alike_for_a_router_that_died_is_nothing_to_the_next(tmp_path: Path) -> None:
    """Whether the others' refusals came before the next router or come behind its first step."""

    async def story(ranks: Ranks) -> None:
        first = ranks.run(1, 2, 3)
        assert 1 == (await anext(first)).step
        await eventually(lambda: all(len(rank.steps) == 3 for rank in ranks.ranks))
        await first.aclose()  # type: ignore[attr-defined]
        second = ranks.run(4, 5)
        waiting = asyncio.ensure_future(anext(second))
        await eventually(lambda: all(len(rank.steps) == 5 for rank in ranks.ranks))
        ranks.ranks[2].futures[3].set_result(pb.StepReply(step=3, error=refusal))
        assert [4, 5] == [(await waiting).step, (await anext(second)).step]
        ranks.send(6, 7, 8)  # which rank 0 may answer before it hears of the sixth
        assert (2, "a tile was lost") == await failure(second)

    refusal = "ValueError: sequence 9 is one too many"
    refused: Script = {2: refusal, 3: refusal}
    play(story, tmp_path, refused, refused, refused | {3: HOLD, 6: "a tile was lost"})


def test_a_reply_waits_for_the_others_step_before_alone(tmp_path: Path) -> None:
    async def story(ranks: Ranks) -> None:
        replies = ranks.run(1, 2)
        assert 1 == (await anext(replies)).step
        second = asyncio.ensure_future(anext(replies))
        await asyncio.sleep(0.05)
        assert not second.done()
        ranks.ranks[1].futures[1].set_result(pb.StepReply(step=1))
        assert 2 == (await second).step

    play(story, tmp_path, {}, {1: HOLD, 2: HOLD})


def test_a_long_message_passes(tmp_path: Path) -> None:
    async def story(ranks: Ranks) -> None:
        replies = ranks.run()
        long = pb.StepRequest(step=1)
        long.add.add(id=1, token_ids=[2**28] * 4_000_000)
        assert long.ByteSize() == pytest.approx(20e6, rel=0.01)
        ranks.requests.put_nowait(long)
        ranks.send(2)
        assert [1, 2] == [(await anext(replies)).step, (await anext(replies)).step]
        assert [1, 2] == ranks.ranks[1].steps

    play(story, tmp_path, {}, {})


def test_a_stream_that_is_cancelled_leaves_its_steps_alone_and_another_follows(tmp_path: Path) -> None:
    async def story(ranks: Ranks) -> None:
        waiting = asyncio.ensure_future(anext(ranks.run(1)))
        await eventually(lambda: ranks.ranks[1].steps == [1])
        waiting.cancel()
        await asyncio.wait({waiting})
        assert not any(rank.futures[1].cancelled() for rank in ranks.ranks)
        for rank in ranks.ranks:
            rank.futures[1].set_result(pb.StepReply(step=1))
        replies = ranks.run(2, 3)
        assert [2, 3] == [(await anext(replies)).step, (await anext(replies)).step]
        assert [1, 2, 3] == ranks.ranks[1].steps

    play(story, tmp_path, {1: HOLD}, {1: HOLD})


def test_the_socket_of_steps_is_its_owners_alone(tmp_path: Path) -> None:
    async def story(ranks: Ranks) -> None:
        assert 0o600 == stat.S_IMODE((tmp_path / "steps-1").stat().st_mode)

    play(story, tmp_path, {}, {})


def test_a_rank_that_listens_late_is_waited_for(tmp_path: Path) -> None:
    async def story(ranks: Ranks) -> None:
        first = asyncio.ensure_future(anext(ranks.run(1)))
        await asyncio.sleep(0.1)
        assert not first.done()
        await ranks.streams[2].open()
        assert 1 == (await first).step

    play(story, tmp_path, {}, {}, {}, absent=[2])


# ------------------------------------------------------------------------------------------------ whose failure it is


def test_an_error_of_all_ranks_is_an_answer_and_the_stream_goes_on(tmp_path: Path) -> None:
    async def story(ranks: Ranks) -> None:
        replies = ranks.run(1, 2, 3)
        first, second = await anext(replies), await anext(replies)
        assert ("no memory", False, "") == (first.error, first.HasField("failed_rank"), second.error)
        assert 3 == (await anext(replies)).step

    play(story, tmp_path, {1: "no memory"}, {1: "no memory"}, {1: "no memory"})


@pytest.mark.parametrize(
    ("scripts", "expected"),
    [
        ([{}, {1: "lost a tile"}, {}], (1, "lost a tile")),
        ([{1: "lost a tile"}, {}, {}], (0, "lost a tile")),
        ([{1: "lost a tile"}, {1: "lost a tile"}, {}], (0, "lost a tile")),
        ([{}, {2: "later"}, {1: "lost a tile"}], (2, "lost a tile")),
        ([{1: HOLD}, {}, {1: fatal(2, "out of memory")}], (2, "out of memory")),
        ([{1: fatal(0, "out of memory")}, {1: HOLD}, {1: HOLD}], (0, "out of memory")),
        ([{1: victim(0)}, {1: victim(1)}, {1: fatal(2, "out of memory")}], (2, "out of memory")),
    ],
)
def test_a_rank_that_fails_alone_is_named(scripts: list[Script], expected: Any, tmp_path: Path) -> None:
    """At the latest with the next step: what rank 0 has finished by itself may have been answered by then."""

    async def story(ranks: Ranks) -> None:
        assert expected == await failure(ranks.run(1, 2))

    play(story, tmp_path, *scripts)


@pytest.mark.parametrize(
    ("scripts", "expected"),
    [
        ([{1: HOLD}, {}, {1: "lost a tile"}], (2, "lost a tile")),  # rank 0 waits for it in a collective
        ([{1: victim(0)}, {1: victim(1)}, {1: HOLD}], (2, "it has not answered its last 1 steps")),
        ([{}, {}, {1: HOLD, 2: HOLD}], (2, "it has not answered its last 2 steps")),
    ],
)
def test_a_rank_that_others_wait_for_is_named_in_time(scripts: list[Script], expected: Any, tmp_path: Path) -> None:
    async def story(ranks: Ranks) -> None:
        assert expected == await failure(ranks.run(1, 2))

    play(story, tmp_path, *scripts, deadlines=SHORT)


@pytest.mark.parametrize("own", [{1: HOLD}, {}, {1: victim(0)}])
def test_a_rank_that_ends_is_named_at_once(own: Script, tmp_path: Path) -> None:
    async def story(ranks: Ranks) -> None:
        failed = asyncio.ensure_future(failure(ranks.run(1, 2)))
        await eventually(lambda: ranks.ranks[2].steps == [1, 2])
        ranks.streams[2].close()
        assert (2, ENDED) == await failed

    play(story, tmp_path, own, {1: HOLD}, {1: HOLD})


def test_a_rank_that_lost_another_may_end_before_it(tmp_path: Path) -> None:
    async def story(ranks: Ranks) -> None:
        failed = asyncio.ensure_future(failure(ranks.run(1)))
        await eventually(lambda: ranks.ranks[2].steps == [1])
        ranks.ranks[1].futures[1].set_result(victim(1))
        await asyncio.sleep(0.02)
        ranks.streams[1].close()
        await asyncio.sleep(0.02)
        assert not failed.done()
        ranks.streams[2].close()
        assert (2, ENDED) == await failed

    play(story, tmp_path, {1: HOLD}, {1: HOLD}, {1: HOLD})


def test_a_rank_that_ended_between_steps_is_named_with_the_next(tmp_path: Path) -> None:
    async def story(ranks: Ranks) -> None:
        replies = ranks.run(1)
        assert 1 == (await anext(replies)).step
        ranks.streams[1].close()
        await asyncio.sleep(0.05)
        ranks.send(2)
        assert (1, ENDED) == await failure(replies)
        assert (1, ENDED) == await failure(ranks.run(3))

    play(story, tmp_path, {}, {}, {})


def test_a_router_that_still_sends_steps_learns_the_cause(tmp_path: Path) -> None:
    """gRPC gives no reply of a stream any more that has ended under what is sent."""

    class Rank(pb_grpc.ShardServicer):
        def __init__(self) -> None:
            self.steps: list[int] = []
            self.stream = StepStream(0, [], self.start)

        def start(self, request: pb.StepRequest) -> asyncio.Future[pb.StepReply]:
            self.steps.append(request.step)
            reply: asyncio.Future[pb.StepReply] = asyncio.get_running_loop().create_future()
            reply.set_result(fatal(0, "the cause") if request.step == 2 else pb.StepReply(step=request.step))
            return reply

        async def Run(
            self, requests: AsyncIterator[pb.StepRequest], context: grpc.aio.ServicerContext
        ) -> AsyncIterator[pb.StepReply]:
            async for reply in self.stream.run(requests):
                yield reply

    async def story() -> None:
        rank = Rank()
        server = shard_server(rank, str(tmp_path / "rank-0"))
        await server.start()
        client = ShardClient(0, str(tmp_path / "rank-0"))
        try:
            client.send(pb.StepRequest(step=1))
            client.send(pb.StepRequest(step=2))
            assert 1 == (await client.receive()).step
            await asyncio.sleep(0.05)  # the failure has come
            client.send(pb.StepRequest(step=3))
            await asyncio.sleep(0.05)  # so has this, and starts nothing
            with pytest.raises(ShardError, match="the cause"):
                await client.receive()
            assert [1, 2] == rank.steps
        finally:
            await client.close()
            await server.stop(0)

    asyncio.run(asyncio.wait_for(story(), 30))


def test_a_rank_without_a_socket_is_named(tmp_path: Path) -> None:
    async def story(ranks: Ranks) -> None:
        assert (2, "it takes no steps: no answer") == await failure(ranks.run(1))

    play(story, tmp_path, {}, {}, {}, deadlines=SHORT, absent=[2])


def test_half_an_answer_is_the_end_of_its_rank(tmp_path: Path) -> None:
    async def cut(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readexactly(4)
        writer.write(b"\x09\x00")
        writer.close()

    async def story(ranks: Ranks) -> None:
        server = await asyncio.start_unix_server(cut, tmp_path / "steps-1")
        assert (1, ENDED) == await failure(ranks.run(1))
        server.close()

    play(story, tmp_path, {1: HOLD}, {}, absent=[1])


def test_an_answer_without_end_is_the_end_of_its_rank(tmp_path: Path) -> None:
    """Nothing is kept of what claims to be 4 GiB long."""

    async def boast(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readexactly(LENGTH_BYTES)
        writer.write(b"\xff" * LENGTH_BYTES + b"x" * 100)
        with suppress(ConnectionError):
            await reader.read()
        writer.close()

    async def story(ranks: Ranks) -> None:
        server = await asyncio.start_unix_server(boast, tmp_path / "steps-1")
        assert (1, ENDED) == await failure(ranks.run(1))
        server.close()

    play(story, tmp_path, {1: HOLD}, {}, absent=[1])


def test_a_rank_that_reads_nothing_stops_nobody_but_the_stream(tmp_path: Path) -> None:
    """Its socket is full; rank 0 passes on a bounded number of steps, goes on turning, and names it."""

    async def deaf(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.transport.pause_reading()  # type: ignore[attr-defined]
        await ended.wait()
        writer.transport.abort()

    ended = asyncio.Event()

    async def story(ranks: Ranks) -> None:
        server = await asyncio.start_unix_server(deaf, tmp_path / "steps-1")
        replies = ranks.run()
        for step in range(1, MAX_UNANSWERED + 13):
            request = pb.StepRequest(step=step)
            request.add.add(id=step, token_ids=[2**28] * 100_000)
            ranks.requests.put_nowait(request)
        longest, failed = 0.0, asyncio.ensure_future(failure(replies))
        while not failed.done():
            before = time.thread_time()  # a loop that waited for the socket would do so until the test's end
            await asyncio.sleep(0.005)
            longest = max(longest, time.thread_time() - before)
        try:
            assert (1, "it has not answered its last 2 steps") == await failed
            assert longest < 1.0
            assert MAX_UNANSWERED == len(ranks.ranks[0].steps)
        finally:
            ended.set()
            server.close()

    play(story, tmp_path, {}, {}, deadlines=SHORT, absent=[1])
