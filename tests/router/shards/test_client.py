"""One contract over the real client, with gRPC servers in the test, and over its double."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import grpc
import grpc.aio
import pytest

from router.scheduling.adapters import Placed
from router.scheduling.request import ValidRequest
from router.shards import client
from router.shards.client import CHANNEL_OPTIONS, Prepared, ShardedClient, ShardError, SignsOfLife, prepared_of
from router.shards.wire import new_sequence, step_request
from server.pb import generate_pb2 as pb
from server.pb.generate_pb2_grpc import ShardServicer, add_ShardServicer_to_server
from server.ranks.relay import StepStream
from tests.router.fake_shards import FakeShardedClient, ProtocolViolation, adapter_seed, fake_next_token

KEY, OTHER_KEY = bytes(range(16)), bytes(16)  # of adapters
ADAPTERS = {"adapter_rows": 3, "adapter_sizes": {"/a": 5, "/b": 7}, "adapter_problems": {"/broken": "its rank is 0"}}


class StubShard(ShardServicer):  # type: ignore[misc]
    """A rank whose arithmetic is the double's. `behaviour` scripts what goes wrong at which step."""

    def __init__(self, rank: int, behaviour: dict[tuple[int, int], str], sockets: Sequence[str] = ()) -> None:
        self.rank = rank
        self.behaviour = behaviour
        self.fake = FakeShardedClient(**ADAPTERS)  # type: ignore[arg-type]
        self.turn = asyncio.Lock()  # one step at a time, in their order
        self.steps = StepStream(rank, sockets, self.start)

    async def Info(self, request: Any, context: Any) -> pb.InfoReply:
        sizes = {"world_size": 2, "vocab_size": 256, "weight_bytes": self.rank, "block_size": 16}
        proposes = {"most_proposals": 3, "proposes": "three heads"} if self.rank else {}  # as of a last stage
        rows = {"adapter_rows": 3 + self.rank, "adapter_bytes": 100 - self.rank}
        return pb.InfoReply(model_type="fake", dtype="float32", **sizes, **proposes, **rows)

    async def Warmup(self, request: Any, context: Any) -> pb.WarmupReply:
        if request.max_batch_total_tokens > 4096:
            await context.abort(grpc.StatusCode.FAILED_PRECONDITION, "only 4096 tokens fit")
        tokens, blocks = 4096 - self.rank * 16, 256 - self.rank
        sizes = {"max_batch_total_tokens": tokens, "block_size": 16, "num_blocks": blocks}
        states = {"num_states": 8, "state_bytes": 80, "checkpoint_blocks": 3} if self.rank else {}
        return pb.WarmupReply(max_total_tokens=request.max_total_tokens, **sizes, **states)

    async def PrepareAdapter(self, request: Any, context: Any) -> pb.PrepareAdapterReply:
        wish = self.behaviour.get((self.rank, 0), "")
        if wish == "hang":
            await asyncio.Event().wait()
        if wish == "abort":
            raise RuntimeError("a bug")
        if wish == "end":
            await context.abort(grpc.StatusCode.UNAVAILABLE, "gone")
        async with self.turn:
            found = await self.fake.prepare_adapter(request.key, request.folder)
        return pb.PrepareAdapterReply(device_bytes=found.num_bytes + self.rank, problem=found.problem or wish)

    async def Health(self, request: Any, context: Any) -> pb.HealthReply:
        return pb.HealthReply(steps_received=3, steps_finished=2, oldest_step_ms=10 * self.rank)

    async def Run(self, requests: Any, context: Any) -> AsyncIterator[pb.StepReply]:
        async for reply in self.steps.run(requests):
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
    yield FakeShardedClient(**ADAPTERS)  # type: ignore[arg-type]


def sequence(
    id: int, prompt: list[int], blocks: list[int] | None = None, adapter: int = 0, **fields: Any
) -> pb.NewSequence:
    request = ValidRequest(prompt, 1, **fields)
    return new_sequence(id, request, [id] if blocks is None else blocks, block_size=16, adapter=adapter)


@pytest.mark.parametrize("open_shards", [fake_shards, real_shards])
async def test_contract_of_the_step_stream(open_shards: Any, tmp_path: Path) -> None:
    """Two requests under way, replies in order, tokens as documented, retired sequences gone."""

    async def story(shards: Any) -> None:
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
async def test_contract_of_adapters(open_shards: Any, tmp_path: Path) -> None:
    """Each is prepared, comes to a row with a step, and changes the tokens of the sequences that name that row."""

    def token(*prompt: int, key: bytes = b"") -> int:
        return fake_next_token(prompt, adapter_seed(0, key), 256)

    async with open_shards(tmp_path) as shards:
        assert 3 == (await shards.info()).adapter_rows
        assert "its rank is 0" == (await shards.prepare_adapter(KEY, "/broken")).problem
        for _ in range(2):
            found = [await shards.prepare_adapter(KEY, "/a"), await shards.prepare_adapter(OTHER_KEY, "/b")]
            assert [False, False] == [bool(one.problem) for one in found]
            assert 5 <= found[0].num_bytes < found[1].num_bytes
        add = [sequence(1, [5]), sequence(2, [5], adapter=3), sequence(3, [5], adapter=1)]
        rows = [Placed(3, KEY), Placed(1, OTHER_KEY)]
        shards.send(step_request(1, adapters=rows, add=add, chunks=[(1, 1), (2, 1), (3, 1)]))
        reply = await shards.receive()
        expected = {1: token(5), 2: token(5, key=KEY), 3: token(5, key=OTHER_KEY)}
        assert expected == dict(zip(reply.ids, reply.token_ids, strict=True)) and 3 == len({*expected.values()})
        again = sequence(4, [5], adapter=1)
        moved = [Placed(3, b""), Placed(1, KEY)]
        shards.send(step_request(2, retire=[2, 3], adapters=moved, add=[again], chunks=[(4, 1)]))
        assert [token(5, key=KEY)] == list((await shards.receive()).token_ids)
        for _ in range(2):  # whatever it was that is to be forgotten
            assert "" == (await shards.prepare_adapter(OTHER_KEY, "")).problem


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
        assert (info.adapter_rows, info.adapter_bytes, info.no_adapters) == (3, 99, "")
        assert Prepared(6) == await shards.prepare_adapter(KEY, "/a")  # where it takes most
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


@pytest.mark.parametrize(
    ("behaviour", "problem", "deadline_s"),
    [
        ("it is damaged", "it is damaged", 120.0),
        ("hang", "shard 1: it does not answer", 0.5),
        ("abort", "shard 1: unknown: Unexpected <class 'RuntimeError'>: a bug", 120.0),
    ],
)
async def test_a_rank_that_cannot_prepare_an_adapter_refuses_it_and_goes_on(
    behaviour: str, problem: str, deadline_s: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(client, "PREPARE_DEADLINE_S", deadline_s)
    async with real_shards(tmp_path, {(1, 0): behaviour}) as shards:
        assert problem == (await shards.prepare_adapter(KEY, "/a")).problem
        shards.send(step_request(1, add=[sequence(1, [5])], chunks=[(1, 1)]))
        assert [1] == list((await shards.receive()).ids)


async def test_a_rank_that_is_lost_while_it_prepares_an_adapter_is_named(tmp_path: Path) -> None:
    async with real_shards(tmp_path, {(1, 0): "end"}) as shards:
        with pytest.raises(ShardError, match="shard 1: its connection ended") as caught:
            await shards.prepare_adapter(KEY, "/a")
        assert not caught.value.is_known


def test_what_ranks_say_of_an_adapter_is_taken_together() -> None:
    replies = [pb.PrepareAdapterReply(device_bytes=count) for count in (3, 9, 4)]
    assert Prepared(9) == prepared_of(replies)
    refusals = [ShardError(1, "it does not answer"), pb.PrepareAdapterReply(problem="it is damaged")]
    assert Prepared(0, "it is damaged") == prepared_of([replies[0], *refusals])
    assert Prepared(0, "shard 1: it does not answer", may_pass=True) == prepared_of([replies[0], refusals[0]])
    assert Prepared(0, "shard 1: it does not answer", may_pass=True) == prepared_of([*replies, ValueError(refusals[0])])
    lost = ShardError(2, "its connection ended", is_known=False)
    with pytest.raises(ShardError, match="shard 2"):
        prepared_of([*refusals, lost])


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
        ([step_request(1, adapters=[Placed(1, KEY)])], "an adapter that is not prepared"),
        ([step_request(1, add=[sequence(1, [5], adapter=1)])], "an adapter from an empty row"),
    ],
)
async def test_double_refuses_what_a_shard_must_never_get(requests: list[pb.StepRequest], violation: str) -> None:
    shards = FakeShardedClient(adapter_rows=3)
    with pytest.raises(ProtocolViolation, match=violation):
        for request in requests:
            shards.send(request)


@pytest.mark.parametrize(
    ("replies", "laggard"),
    [
        ([(9, 0, 40), (9, 0, 38)], 1),  # rank 0 waits in a collective
        ([(9, 0, 40), (9, 0, 40), (9, 1, 7), (9, 1, 7)], 0),  # the last stage, of few layers, waits for the first
        ([(11, 0, 40), (11, 0, 40), (9, 1, 90), (9, 1, 88)], 3),
        ([(10, 0, 40), (9, 1, 7), (9, 2, 3)], 1),
    ],
)
async def test_who_lags_has_finished_the_fewest_steps_of_the_earliest_stage(
    replies: list[tuple[int, int, int]], laggard: int
) -> None:
    def answering(steps: int, stage: int, collectives: int) -> Any:
        async def call(*_: object) -> pb.HealthReply:
            return pb.HealthReply(steps_finished=steps, stage=stage, collectives=collectives)

        return SimpleNamespace(call=call)

    shards = ShardedClient([])
    shards._ranks = [answering(*reply) for reply in replies]
    assert SignsOfLife(None, laggard, 0) == await shards.signs_of_life(1.0)
