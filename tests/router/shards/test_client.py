"""One contract over the real client, with gRPC servers in the test, and over its double."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import pytest

from router.scheduling.request import ValidRequest
from router.shards.client import CHANNEL_OPTIONS, ShardedClient, ShardError, Shards
from router.shards.wire import new_sequence, step_request
from server.pb import generate_pb2 as pb
from server.pb.generate_pb2_grpc import ShardServicer, add_ShardServicer_to_server
from server.ranks.relay import StepStream
from tests.router.fake_shards import FakeShardedClient, ProtocolViolation, fake_next_token


class StubShard(ShardServicer):  # type: ignore[misc]
    """A rank whose arithmetic is the double's. `behaviour` scripts what goes wrong at which step."""

    def __init__(self, rank: int, behaviour: dict[tuple[int, int], str], sockets: Sequence[str] = ()) -> None:
        self.rank = rank
        self.behaviour = behaviour
        self.fake = FakeShardedClient()
        self.turn = asyncio.Lock()  # one step at a time, in their order
        self.steps = StepStream(rank, sockets, self.start)

    async def Info(self, request: Any, context: Any) -> pb.InfoReply:
        sizes = {"world_size": 2, "vocab_size": 256, "weight_bytes": self.rank, "block_size": 16}
        proposes = {"most_proposals": 3, "proposes": "three heads"} if self.rank else {}  # as of a last stage
        return pb.InfoReply(model_type="fake", dtype="float32", **sizes, **proposes)

    async def Warmup(self, request: Any, context: Any) -> pb.WarmupReply:
        if request.max_batch_total_tokens > 4096:
            await context.abort(grpc.StatusCode.FAILED_PRECONDITION, "only 4096 tokens fit")
        tokens, blocks = 4096 - self.rank * 16, 256 - self.rank
        sizes = {"max_batch_total_tokens": tokens, "block_size": 16, "num_blocks": blocks}
        states = {"num_states": 8, "state_bytes": 80, "checkpoint_blocks": 3} if self.rank else {}
        return pb.WarmupReply(max_total_tokens=request.max_total_tokens, **sizes, **states)

    async def Health(self, request: Any, context: Any) -> pb.HealthReply:
        return pb.HealthReply(steps_received=3, steps_finished=2, oldest_step_ms=10 * self.rank)

    async def Run(self, requests: Any, context: Any) -> AsyncIterator[pb.StepReply]:
        async for reply in self.steps.run(requests, context):
            wish = self.behaviour.get((self.rank, reply.step))
            if wish == "end":
                return
            if wish == "abort":
                await context.abort(grpc.StatusCode.INTERNAL, "segmentation fault, nearly")
            yield reply

    def start(self, request: pb.StepRequest) -> asyncio.Task[pb.StepReply]:
        return asyncio.create_task(self._answer(request))

    async def _answer(self, request: pb.StepRequest) -> pb.StepReply:
        wish = self.behaviour.get((self.rank, request.step), "")
        if wish == "hang":
            await asyncio.Event().wait()
        if wish == "end" and self.rank:
            self.steps.close()
        elif wish not in ("", "end", "abort"):
            return pb.StepReply(step=request.step, error=wish)
        async with self.turn:
            self.fake.send(request)
            reply = await self.fake.receive()
        return reply if self.rank == 0 else pb.StepReply(step=reply.step)


@asynccontextmanager
async def real_shards(
    folder: Path, behaviour: dict[tuple[int, int], str] | None = None, num_ranks: int = 2
) -> AsyncIterator[ShardedClient]:
    paths = [str(folder / f"rank-{rank}") for rank in range(num_ranks)]
    steps = [str(folder / f"steps-{rank}") for rank in range(1, num_ranks)]
    async with AsyncExitStack() as stack:
        for rank, path in enumerate(paths):
            stub = StubShard(rank, behaviour or {}, steps)
            stack.callback(stub.steps.close)
            await stub.steps.open()
            server = grpc.aio.server(options=CHANNEL_OPTIONS)
            add_ShardServicer_to_server(stub, server)  # type: ignore[no-untyped-call]
            server.add_insecure_port(f"unix://{path}")
            stack.push_async_callback(server.stop, None)
            await server.start()
        client = ShardedClient(paths)
        stack.push_async_callback(client.close)
        await client.wait_ready(timeout=300)
        yield client


@asynccontextmanager
async def fake_shards(_: Path) -> AsyncIterator[FakeShardedClient]:
    yield FakeShardedClient()


def sequence(id: int, prompt: list[int], blocks: list[int] | None = None, **fields: Any) -> pb.NewSequence:
    return new_sequence(id, ValidRequest(prompt, 1, **fields), [id] if blocks is None else blocks, block_size=16)


@pytest.mark.parametrize("open_shards", [fake_shards, real_shards])
async def test_contract_of_the_step_stream(open_shards: Any, tmp_path: Path) -> None:
    """Two requests under way, replies in order, tokens as documented, retired sequences gone."""

    async def story(shards: Shards) -> None:
        shards.send(step_request(1, add=[sequence(1, [5, 6, 7]), sequence(2, [8])], chunks=[(1, 2), (2, 1)]))
        shards.send(step_request(2, chunks=[(1, 1)], decode=True))
        first = await shards.receive()
        assert (first.step, list(first.ids), list(first.token_ids)) == (1, [2], [fake_next_token([8], 0, 256)])
        shards.send(step_request(3, retire=[2], decode=True))
        second, third = await shards.receive(), await shards.receive()
        assert (second.step, third.step) == (2, 3)
        assert dict(zip(second.ids, second.token_ids, strict=True))[1] == fake_next_token([5, 6, 7], 0, 256)
        assert list(third.ids) == [1]
        assert (await shards.health()).steps_received == 3

    async with open_shards(tmp_path) as shards:
        await story(shards)


@pytest.mark.parametrize("open_shards", [fake_shards, real_shards])
async def test_contract_of_the_end(open_shards: Any, tmp_path: Path) -> None:
    async with open_shards(tmp_path) as shards:
        shards.send(step_request(1, add=[sequence(1, [5])], chunks=[(1, 1)]))
        await shards.receive()
        waiting = asyncio.create_task(shards.receive())
        await asyncio.sleep(0.05)
        await shards.close()
        with pytest.raises(ShardError):
            await waiting


async def test_answers_of_all_ranks_are_merged(tmp_path: Path) -> None:
    async with real_shards(tmp_path) as shards:
        info = await shards.info()
        assert (info.weight_bytes, info.most_proposals, info.proposes) == ((0, 1), 3, "three heads")
        cache = await shards.warmup(max_batch_total_tokens=0, max_total_tokens=10)
        assert (cache.max_batch_total_tokens, cache.num_blocks) == (4080, 255)
        assert (cache.num_states, cache.checkpoint_blocks) == (8, 3)  # those of the rank that has some
        health = await shards.health()
        assert (health.oldest_step_ms, health.rank) == (10, 1)
        with pytest.raises(ShardError, match="only 4096 tokens fit"):
            await shards.warmup(max_batch_total_tokens=9999)


async def test_error_of_all_ranks_is_an_answer(tmp_path: Path) -> None:
    async with real_shards(tmp_path, {(0, 1): "no memory", (1, 1): "no memory"}) as shards:
        shards.send(step_request(1, add=[sequence(1, [5])], chunks=[(1, 1)]))
        assert (await shards.receive()).error == "no memory"


@pytest.mark.parametrize(
    ("behaviour", "message"),
    [
        ({(1, 1): "lost a tile"}, "shard 1: lost a tile"),
        ({(0, 1): "lost a tile"}, "shard 0: lost a tile"),
        ({(1, 1): "end"}, "shard 1: its connection ended"),
        ({(1, 1): "end", (0, 1): "hang"}, "shard 1: its connection ended"),
        ({(0, 1): "end"}, "shard 0: it ended its stream of steps"),
        ({(0, 1): "abort"}, "shard 0: its connection ended"),
    ],
)
async def test_one_rank_that_fails_alone_is_named(behaviour: Any, message: str, tmp_path: Path) -> None:
    async with real_shards(tmp_path, behaviour) as shards:
        shards.send(step_request(1, add=[sequence(1, [5])], chunks=[(1, 1)]))
        shards.send(step_request(2, decode=True))
        with pytest.raises(ShardError, match=message) as caught:
            await shards.receive()
            await shards.receive()  # rank 0 may have answered the first step before it knew
        assert ("ended" in message) is not caught.value.is_known


async def test_cancelled_wait_for_a_reply_is_a_cancellation(tmp_path: Path) -> None:
    async with real_shards(tmp_path, {(0, 1): "hang"}, num_ranks=1) as shards:
        shards.send(step_request(1, add=[sequence(1, [5])], chunks=[(1, 1)]))
        waiting = asyncio.create_task(shards.receive())
        await asyncio.sleep(0.05)
        waiting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiting


async def test_wait_for_a_socket_that_appears_late(tmp_path: Path) -> None:
    client = ShardedClient([str(tmp_path / "rank-0")])
    with pytest.raises(TimeoutError):
        await client.wait_ready(timeout=0.1)
    await client.close()


async def test_large_steps_pass(tmp_path: Path) -> None:
    """Above gRPC's own bound of 4 MiB."""

    async with real_shards(tmp_path, num_ranks=1) as shards:
        prompt = [2**31] * 1_000_000
        shards.send(step_request(1, add=[sequence(1, prompt, blocks=[])]))
        assert (await shards.receive()).step == 1


@pytest.mark.parametrize(
    ("requests", "violation"),
    [
        ([step_request(2)], "step 2 follows step 0"),
        ([step_request(1, retire=[7])], "unknown sequence 7"),
        ([step_request(1, chunks=[(7, 1)])], "unknown sequence 7"),
        ([step_request(1, add=[sequence(1, [5, 6])], chunks=[(1, 3)])], "beyond its prompt"),
        ([step_request(1, add=[sequence(1, [5], [3]), sequence(2, [5], [3])])], "blocks of another"),
        ([step_request(1, add=[sequence(1, [5], [999])])], "a block too many"),
        ([step_request(1, add=[sequence(1, [5])]), step_request(2, retire=[1], add=[sequence(1, [5])])], "used again"),
        ([step_request(1, add=[sequence(1, [5] * 17)], chunks=[(1, 17)])], "outgrew its blocks"),
        ([step_request(step) for step in (1, 2, 3)], "more than two requests"),
    ],
)
async def test_double_refuses_what_a_shard_must_never_get(requests: list[pb.StepRequest], violation: str) -> None:
    shards = FakeShardedClient()
    with pytest.raises(ProtocolViolation, match=violation):
        for request in requests:
            shards.send(request)
