"""The gRPC face: steps in order, replies per rank, errors as replies, and health beside the model."""

from __future__ import annotations

import asyncio
import math
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from functools import partial
from pathlib import Path
from threading import Event
from types import SimpleNamespace
from typing import Any

import grpc
import pytest
import torch

from server.adapters.adapters import Adapters
from server.adapters.config import AdapterError, AdapterUnreadable
from server.adapters.identity import content_key
from server.config import ShardConfig
from server.loading import load
from server.pb import generate_pb2 as pb
from server.pb import generate_pb2_grpc as pb_grpc
from server.ranks.collectives import Shard
from server.service import ShardService, serve
from server.stepping.warmup import warm_up
from tests.adapter_folders import adapter_folder
from tests.cpu_kernels import asked
from tests.server.driver import GREEDY

Served = AbstractAsyncContextManager[tuple[pb_grpc.ShardStub, ShardService]]
LIMITS = pb.WarmupRequest(max_batch_prefill_tokens=64, max_total_tokens=128, useful_tokens=1024)


def config_of(folder: Path, socket: Path, **changes: object) -> ShardConfig:
    changes = {"cpu_kernels": asked(), **changes}
    return ShardConfig(
        model_path=str(folder),
        weights_path=str(folder),
        rank=0,
        world_size=1,
        socket_path=str(socket),
        rendezvous="",
        **changes,  # type: ignore[arg-type]
    )


@pytest.fixture
def shard(tiny_bloom: Path, tmp_path: Path) -> Iterator[Served]:
    """A shard to be served, once a test's loop runs."""

    @asynccontextmanager
    async def served() -> AsyncIterator[tuple[pb_grpc.ShardStub, ShardService]]:
        socket = tmp_path / "shard.sock"
        service = ShardService(*load(config_of(tiny_bloom, socket)), cuda_memory_fraction=1.0)
        server = await serve(service, str(socket))
        async with grpc.aio.insecure_channel(f"unix://{socket}") as channel:
            yield pb_grpc.ShardStub(channel), service
        await server.stop(grace=0)

    threads = torch.get_num_threads()
    yield served()
    torch.set_num_threads(threads)


async def until(holds: Callable[[], bool]) -> None:
    async with asyncio.timeout(60):  # a bound of liveness
        while not holds():
            await asyncio.sleep(0.001)


async def requests_of(*requests: pb.StepRequest) -> AsyncIterator[pb.StepRequest]:
    for request in requests:
        yield request


def first_step(id: int = 1, prompt: tuple[int, ...] = (5, 6, 7), chunk: int = 3) -> pb.StepRequest:
    request = pb.StepRequest(step=1, chunk_ids=[id], chunk_tokens=[chunk])
    request.add.add(id=id, token_ids=prompt, blocks=[0], sampling=GREEDY, top_n_tokens=2)
    return request


async def test_what_steps_have_found_is_noted_in_their_order(shard: Served) -> None:
    """Though a step is done at once while the one before it is still waited for, as on a GPU."""
    order: list[str] = []
    may_end = Event()

    def finish(name: str) -> str:
        assert name != "first" or may_end.wait(60)
        order.append(name)
        return name

    async with shard as (_, service):
        steps = [
            SimpleNamespace(is_done=is_done, finish=partial(finish, name))
            for name, is_done in (("first", False), ("second", True))
        ]
        finishing = [asyncio.create_task(service._finished(step)) for step in steps]  # type: ignore[arg-type]
        await asyncio.sleep(0.05)
        may_end.set()
        assert ["first", "second"] == await asyncio.gather(*finishing) == order


async def test_info_says_what_was_loaded(shard: Served) -> None:
    async with shard as (stub, _):
        info = await stub.Info(pb.InfoRequest())
        assert ("bloom", "float32", "cpu", 103) == (info.model_type, info.dtype, info.device, info.vocab_size)
        assert info.weight_bytes > 0
        assert 2 * 3 * 64 * 4 == info.kv_bytes_per_token


async def test_warmup_reports_the_cache_and_refuses_what_does_not_fit(shard: Served) -> None:
    async with shard as (stub, _):
        too_many = pb.WarmupRequest(max_batch_prefill_tokens=64, max_total_tokens=128, max_batch_total_tokens=2**31)
        with pytest.raises(grpc.aio.AioRpcError) as error:
            await stub.Warmup(too_many)
        assert grpc.StatusCode.INVALID_ARGUMENT == error.value.code()
        assert "use --max-batch-total-tokens" in str(error.value.details())
        reply = await stub.Warmup(LIMITS)
        assert (1024, 16, 64) == (reply.max_batch_total_tokens, reply.block_size, reply.num_blocks)
        info = await stub.Info(pb.InfoRequest())
        assert (16, 64) == (info.block_size, info.num_blocks)


@pytest.mark.parametrize("kind", [RuntimeError, TypeError, OSError, Exception])
async def test_whatever_a_warm_up_fails_with_is_told_in_a_line(
    shard: Served, monkeypatch: pytest.MonkeyPatch, kind: type[Exception]
) -> None:
    def fail(*_: object, **__: object) -> None:
        raise kind("a kernel was not compiled\nand more lines")

    monkeypatch.setattr("server.service.warm_up", fail)
    async with shard as (stub, service):
        with pytest.raises(grpc.aio.AioRpcError) as raised:
            await stub.Warmup(LIMITS)
        expected = (grpc.StatusCode.INTERNAL, f"{kind.__name__}: a kernel was not compiled")
        assert expected == (raised.value.code(), raised.value.details())
        assert isinstance(failure := service.failed.result(), RuntimeError)
        assert kind is RuntimeError or expected[1] == str(failure)


async def test_a_shard_that_is_warm_answers_the_next_router_as_the_first(shard: Served) -> None:
    async with shard as (stub, _):
        reply = await stub.Warmup(LIMITS)
        assert reply == await stub.Warmup(LIMITS)
        another = pb.WarmupRequest()
        another.CopyFrom(LIMITS)
        for wanted, useful in (
            (1024, 2048),
            (0, 512),
            (8192, 8192),
        ):  # the settings, and what a group before could hold
            another.max_batch_total_tokens, another.useful_tokens = wanted, useful
            assert reply == await stub.Warmup(another)
        another.max_total_tokens = LIMITS.max_total_tokens + 1
        another.may_be_shorter = True  # of a router that is started beside a group in the first one's place
        assert reply == await stub.Warmup(another)
        another.may_be_shorter = False
        with pytest.raises(grpc.aio.AioRpcError) as error:
            await stub.Warmup(another)
        assert f"max_total_tokens is {another.max_total_tokens}, but this shard is warm for" in str(
            error.value.details()
        )


async def test_a_new_router_begins_with_no_sequences(shard: Served) -> None:
    async with shard as (stub, _):
        await stub.Warmup(LIMITS)
        assert [r async for r in stub.Run(requests_of(first_step(), pb.StepRequest(step=2, decode=True)))]
        fresh = first_step()
        fresh.reset = True
        decode = pb.StepRequest(step=2, decode=True)
        replies = [r async for r in stub.Run(requests_of(fresh, decode))]
        assert [[1], [1]] == [list(r.ids) for r in replies]
        again = [r async for r in stub.Run(requests_of(first_step()))]
        assert "sequence 1 is on this shard already" in again[0].error


async def test_reply_k_answers_request_k_though_the_next_was_sent_before(shard: Served) -> None:
    async with shard as (stub, _):
        await stub.Warmup(LIMITS)
        decodes = [pb.StepRequest(step=k, decode=True) for k in (2, 3)]
        replies = [r async for r in stub.Run(requests_of(first_step(), *decodes, pb.StepRequest(step=4, retire=[1])))]
        assert [1, 2, 3, 4] == [r.step for r in replies]
        assert [[1], [1], [1], []] == [list(r.ids) for r in replies]
        assert all(r.top_ids[0] == r.token_ids[0] and list(r.top_counts) == [2] for r in replies[:3])
        assert all(r.forward_ns > 0 for r in replies[:3])


async def test_an_error_is_a_reply_and_the_stream_goes_on(shard: Served) -> None:
    async with shard as (stub, service):
        await stub.Warmup(LIMITS)
        bad, good = first_step(chunk=4), first_step(id=2)
        good.step = 2
        replies = [r async for r in stub.Run(requests_of(bad, good))]
        assert "sequence 1 has 3 prompt tokens left, not 4" in replies[0].error
        assert [2] == list(replies[1].ids)
        assert not service.failed.done()


async def test_whoever_retires_leaves_though_the_step_is_refused(shard: Served) -> None:
    async with shard as (stub, _):
        await stub.Warmup(LIMITS)
        bad = first_step(id=2, chunk=4)
        bad.step = 2
        bad.retire.append(1)
        decode = pb.StepRequest(step=3, decode=True)
        replies = [r async for r in stub.Run(requests_of(first_step(), bad, decode))]
        assert "sequence 2 has 3 prompt tokens left, not 4" in replies[1].error
        assert [[1], [], []] == [list(r.ids) for r in replies]


async def test_health_counts_steps(shard: Served) -> None:
    async with shard as (stub, _):
        await stub.Warmup(LIMITS)
        assert [r async for r in stub.Run(requests_of(first_step()))]
        health = await stub.Health(pb.HealthRequest())
        assert (1, 1, 0) == (health.steps_received, health.steps_finished, health.oldest_step_ms)


async def test_a_profile_covers_the_steps_between_start_and_stop(shard: Served) -> None:
    async with shard as (stub, _):
        with pytest.raises(grpc.aio.AioRpcError, match="no profile was started"):
            await stub.Profile(pb.ProfileRequest())
        await stub.Warmup(LIMITS)
        await stub.Profile(pb.ProfileRequest(start=True))
        assert [r async for r in stub.Run(requests_of(first_step()))]
        reply = await stub.Profile(pb.ProfileRequest())
        assert any(name.startswith(("aten::", "lockstep::")) for name in reply.names)
        assert sorted(reply.self_ns, reverse=True) == list(reply.self_ns)
        assert min(reply.calls) >= 1


def test_shards_that_heads_do_not_fill_are_refused_before_weights_are_read(tiny_bloom: Path, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(
        (tiny_bloom / "config.json").read_text().replace('"n_head": 8', '"n_head": 6')
    )
    config = ShardConfig(str(tmp_path), str(tmp_path), 0, 4, "", "")
    with pytest.raises(ValueError, match="6 attention heads, which --num-shard 4 does not divide"):
        load(config)


def test_random_weights_need_no_checkpoint(tiny_bloom: Path, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text((tiny_bloom / "config.json").read_text())
    threads = torch.get_num_threads()
    engine, info = load(config_of(tmp_path, tmp_path / "s", random_weights=True))
    torch.set_num_threads(threads)
    assert ("float32", 103) == (info.dtype, info.vocab_size)
    sizes = {"prefill_tokens": 64, "total_tokens": 64, "wanted_tokens": 256, "useful_tokens": 256, "sequences": 0}
    warm_up(engine, top_n_tokens=5, fraction=1.0, **sizes)
    launched = engine.launch(first_step())
    assert launched is not None
    assert all(math.isfinite(value) for value in launched.finish().logprobs)


@pytest.mark.parametrize(
    ("error", "is_lost"),
    [
        (torch.AcceleratorError("CUDA error: an illegal memory access was encountered\nand more lines"), True),
        (torch.AcceleratorError("CUDA error: device-side assert triggered"), True),
        (torch.AcceleratorError("HIP error: unspecified launch failure"), True),
        (RuntimeError("CUDA error: uncorrectable ECC error encountered"), True),
        (RuntimeError("Triton Error [CUDA]: misaligned address"), True),
        (torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB"), False),
        (torch.AcceleratorError("CUDA error: operation not permitted when stream is capturing"), False),
        (RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"), False),
        (ValueError("sequence 1 has an illegal memory access"), False),
    ],
    ids=str,
)
async def test_a_lost_device_ends_the_shard(
    shard: Served, monkeypatch: pytest.MonkeyPatch, error: Exception, is_lost: bool
) -> None:
    """Every later step would fail, while the health of one shard stayed good."""
    async with shard as (stub, service):
        await stub.Warmup(LIMITS)

        def fail(request: pb.StepRequest) -> None:
            raise error

        monkeypatch.setattr(service._engine, "launch", fail)
        replies = [r async for r in stub.Run(requests_of(first_step()))]
        assert str(error).splitlines()[0] in replies[0].error or "out of memory" in replies[0].error
        assert is_lost == service.failed.done()
        if is_lost:
            assert str(error).splitlines()[0] in str(service.failed.result())
            assert 1 == len(str(service.failed.result()).splitlines())


async def test_what_all_ranks_refuse_alike_ends_none_of_them(shard: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    async with shard as (stub, service):
        await stub.Warmup(LIMITS)
        monkeypatch.setattr(service, "_engine", SimpleNamespace(launch=service._engine.launch, shard=Shard(0, 2)))
        (reply,) = [r async for r in stub.Run(requests_of(first_step(chunk=4)))]
        assert "sequence 1 has 3 prompt tokens left, not 4" in reply.error
        assert not reply.HasField("failed_rank")
        assert not service.failed.done()


@pytest.mark.parametrize(
    ("wanted", "sentence"),
    [
        (pb.WarmupRequest(), "max_batch_prefill_tokens and max_total_tokens are 0: they must be at least 1"),
        (
            pb.WarmupRequest(max_batch_prefill_tokens=64, max_total_tokens=64, max_sequences=2**31),
            "max_sequences is 2147483648, but a shard has room for 65536",
        ),
    ],
)
async def test_limits_that_no_router_sends_are_refused(shard: Served, wanted: pb.WarmupRequest, sentence: str) -> None:
    async with shard as (stub, _):
        with pytest.raises(grpc.aio.AioRpcError) as raised:
            await stub.Warmup(wanted)
        assert (grpc.StatusCode.INVALID_ARGUMENT, sentence) == (raised.value.code(), raised.value.details())


async def test_what_is_read_for_somebody_who_waits_no_longer_is_forgotten(shard: Served) -> None:
    goes_on, began = Event(), Event()

    def read(key: bytes, folder: Path) -> list[Any]:
        if folder.name == "slow":
            began.set()
            goes_on.wait(60)
        if folder.name == "unreadable":
            raise AdapterUnreadable("its disk is gone")
        return []

    async with shard as (stub, service):
        service._engine.adapters = adapters = Adapters(2, 100, read)

        async def prepare(key: bytes, folder: str = "") -> pb.PrepareAdapterReply:
            reply: pb.PrepareAdapterReply
            reply = await stub.PrepareAdapter(pb.PrepareAdapterRequest(key=key, folder=folder), timeout=60)
            return reply

        await prepare(b"fast", "/fast")
        calls = [asyncio.create_task(prepare(key, "/slow")) for key in (b"slow", b"slower", b"wanted")]
        await until(lambda: began.is_set() and len(service._readers) == len(calls))
        for call in calls:
            call.cancel()
        await asyncio.gather(*calls, return_exceptions=True)
        again = asyncio.create_task(prepare(b"slow", "/slow"))  # by another one, behind the one that waits no longer
        await prepare(b"fast")  # which waits for no disk
        assert not adapters._prepared
        goes_on.set()
        assert not (await again).problem
        await until(lambda: [b"slow"] == [*adapters._prepared] and not service._readers)
        reply = await prepare(b"bad", "/unreadable")
        assert "its disk is gone" == reply.problem and reply.may_pass


async def test_what_was_wrong_with_other_files_than_the_key_s_may_pass(shard: Served, tmp_path: Path) -> None:
    """Files that were being written, as the key's own are back a moment later."""

    def read(key: bytes, folder: Path) -> list[Any]:
        raise AdapterError("it is damaged")

    folder = adapter_folder(tmp_path / "alice")
    async with shard as (stub, service):
        service._engine.adapters = Adapters(2, 100, read)
        found = [
            await stub.PrepareAdapter(pb.PrepareAdapterRequest(key=key, folder=str(folder)))
            for key in (content_key(folder), b"another's")
        ]
    assert [("it is damaged", False), ("it is damaged", True)] == [(one.problem, one.may_pass) for one in found]
