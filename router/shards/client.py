"""The router's side of the wire: one ordered stream of steps for all shards.

`ShardedClient` sends each StepRequest to rank 0, which passes it on to the others, and answers with one StepReply a
step, in order: a step costs the router the same however many ranks there are. Any rank that is lost, or that alone
reports an error, ends the stream with a ShardError naming the rank: the ranks no longer agree on which sequences exist,
and nothing can mend that while they run. Rank 0 says which rank that is (`server/ranks/relay.py`). The double of
`ShardedClient` for tests is `tests/router/fake_shards.py`; one contract test runs over both. What goes over the wire is
built in `wire.py`; on the router's side only these two modules know protobuf classes.
"""

from __future__ import annotations

import asyncio
import logging
import os
import time
from collections.abc import AsyncIterator, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import grpc
import grpc.aio

from router.scheduling.limits import UINT32_MAX, Room
from router.scheduling.prefix_moves import Move, Moved, TierContents, contents_of, moved_of
from server.pb import MESSAGE_SIZES
from server.pb.generate_pb2 import (
    HealthRequest,
    InfoRequest,
    MoveBlocksRequest,
    OpenTiersRequest,
    PrepareAdapterRequest,
    ProfileRequest,
    StreamedRequest,
    WarmupRequest,
)
from server.pb.generate_pb2 import StepReply as StepReply  # re-exported for batcher.py
from server.pb.generate_pb2 import StepRequest as StepRequest
from server.pb.generate_pb2 import StreamedReply as StreamedReply
from server.pb.generate_pb2_grpc import ShardStub

HEALTH_DEADLINE_S = 2.0
PREPARE_DEADLINE_S = 120.0  # of a disk for an adapter, a GB at most
TIERS_DEADLINE_S = 60.0  # of a disk for a few MB, behind a step that may be a long one
# How gRPC reports that the process at the other end is gone, or is going; INTERNAL is a shard's own word elsewhere.
CONNECTION_ENDED = (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.CANCELLED)
STREAM_ENDED = (*CONNECTION_ENDED, grpc.StatusCode.INTERNAL)
SOCKET_POLL_S = 0.05
REUSED_S = 0.1  # how old an answer about health may be: probes ask every few seconds, and to them this is now
CHANNEL_OPTIONS = (
    *MESSAGE_SIZES,
    ("grpc.initial_reconnect_backoff_ms", 50),  # a shard that still loads must not cost a long back-off
    ("grpc.max_reconnect_backoff_ms", 500),
)

logger = logging.getLogger(__name__)


class ShardError(Exception):
    """A shard is lost or broke the protocol. Nothing can run on these shards any more.

    rank: of the one that is to blame; None: the launcher ended them all and has said why.
    is_known: whether the cause is complete. That a connection ended is not: the launcher knows better why its process
    did.
    """

    def __init__(self, rank: int | None, cause: str, *, is_known: bool = True) -> None:
        super().__init__(cause if rank is None else f"shard {rank}: {cause}")
        self.rank = rank
        self.cause = cause
        self.is_known = is_known


@dataclass(frozen=True, slots=True)
class SignsOfLife:
    """Of all ranks. laggard: the least advanced, for which the others wait; activity: `HealthReply.activity` of all."""

    silent: int | None  # the first rank that gives none
    laggard: int = 0
    activity: int = 0


@dataclass(frozen=True, slots=True)
class ModelInfo:
    """What the shards loaded; sizes are per rank."""

    model_type: str
    dtype: str
    dtype_reason: str
    device: str
    world_size: int
    vocab_size: int
    max_positions: int  # 0: no limit of its own
    backend: str
    backend_reason: str
    threads: int
    threads_reason: str
    quantize: str
    kv_cache_dtype: str
    weight_bytes: tuple[int, ...]
    kv_bytes_per_token: int
    block_size: int  # tokens per KV block
    num_blocks: int  # KV blocks that an earlier warmup allocated, 0 before it
    decoder_start: int | None = None  # the token that every generation of an encoder-decoder starts from
    offloaded: str = ""  # which weights stream, in words
    has_tiers: bool = False  # whether the prefix cache goes on behind the device
    shares_prefixes: bool = False  # whether a block serves every sequence that begins with the same tokens
    takes_drafts: bool = False  # whether sequences may go on with guesses
    most_proposals: int = 0  # tokens that a speculative model proposes for a sequence at most; 0: there is none
    proposes: str = ""  # what it is, in words
    adapter_rows: int = 0  # adapters that can be on the device at once; 0: none can be served
    adapter_bytes: int = 0  # memory for them on the device
    no_adapters: str = ""  # why none can be served although they were asked for


@dataclass(frozen=True, slots=True)
class Prepared:
    """What became of an adapter whose files the shards were to read."""

    num_bytes: int  # that it takes on the device, where it takes most
    problem: str = ""  # why it cannot be served, in a sentence; empty: it can
    may_pass: bool = False  # whether the same files may be served the next time


@dataclass(frozen=True, slots=True)
class KvCache:
    """What the warmup allocated on the rank that has the least."""

    max_batch_total_tokens: int
    block_size: int
    num_blocks: int
    kv_bytes: int
    free_bytes: int
    step_bytes: int = 0  # how many of the free bytes the largest step takes; 0 if that is not known
    graph_bytes: int = 0  # what captured decode steps take; 0 if that is not known
    captured: str = "none"  # which decode steps are captured, in words
    pads_chunks: bool = False  # whether chunks are filled up to the sizes of captured steps
    offloaded: str = ""  # which blocks are not on the device, in words
    products: tuple[str, ...] = ()  # which way each product is computed that was measured, in words
    clocks: str = ""  # of rank 0's device while it decoded, in words
    max_total_tokens: int = UINT32_MAX  # longest sequence that there is room for
    step_seconds: float = 0.0  # what any step with a prompt takes; 0 if that is not known
    token_seconds: float = 0.0  # and what each of its tokens adds
    num_states: int = 0  # sequences that states or rings have room for; 0: no layer has either
    state_bytes: int = 0  # of these
    # That hold the states of one sequence, or one block of tokens of windowed layers; 0: they cannot be kept.
    checkpoint_blocks: int = 0
    window_blocks: int = 0  # blocks of tokens that windowed layers with rings see; 0: no layer has a ring
    most_at_once: int = 0  # tokens of one sequence in a step at most; 0: any number
    bytes_per_token: int = 0  # on one rank, of layers that keep all tokens

    def room(self, useful_tokens: int) -> Room:
        """What limits are derived from. useful_tokens: that the largest load could fill."""
        tokens = min(self.max_batch_total_tokens, self.block_size * self.num_blocks)
        is_full = self.max_batch_total_tokens >= useful_tokens
        return Room(tokens, self.max_total_tokens, self.step_seconds, self.token_seconds, is_full)


@dataclass(frozen=True, slots=True)
class OperatorTime:
    """One operator of a profile: its calls and its own time, without the operators that it called."""

    name: str
    calls: int
    self_ns: int


@dataclass(frozen=True, slots=True)
class ShardHealth:
    """Proof of life of the slowest rank."""

    steps_received: int
    steps_finished: int
    oldest_step_ms: int
    rank: int = 0


class Shards(Protocol):
    """What the router needs of its shards, real or fake."""

    async def info(self) -> ModelInfo:
        """What was loaded."""

    async def warmup(
        self,
        *,
        max_batch_prefill_tokens: int,
        max_total_tokens: int,
        max_batch_total_tokens: int,
        useful_tokens: int,
        max_top_n_tokens: int,
        max_sequences: int,
        may_be_shorter: bool,
    ) -> KvCache:
        """Size and allocate the KV cache. Raises ValueError with the shard's sentence when the limits cannot be met."""

    async def health(self) -> ShardHealth:
        """Raises ShardError when a shard does not answer in time."""

    def check(self) -> None:
        """Raises ShardError when a shard is known to be lost."""

    async def renew(self, error: ShardError) -> KvCache:
        """Wait for shards that take the place of those that were lost with `error`, and have their steps start from 1.

        Returns their KV cache, which may be another. Raises ShardError when there will be none.
        """

    async def start_profile(self) -> None:
        """Record what the first rank computes from here on."""

    async def stop_profile(self, trace_path: str = "") -> list[OperatorTime]:
        """Where its time went, longest first; a trace goes to `trace_path`."""

    def send(self, request: StepRequest) -> None:
        """Hand over the next step. Does not wait; the shards take the requests in this order."""

    async def receive(self) -> StepReply:
        """The reply to the oldest request without one. Raises ShardError when the stream has ended."""

    async def close(self) -> None:
        """End the stream. A call of `receive` that waits raises ShardError."""


class ShardedClient:
    """All ranks as one."""

    def __init__(self, socket_paths: Sequence[str]) -> None:
        self._ranks = [ShardClient(rank, path) for rank, path in enumerate(socket_paths)]

    async def wait_ready(self, timeout: float | None = None) -> None:
        """Wait until every rank answers. Raises TimeoutError."""
        async with asyncio.timeout(timeout):
            await asyncio.gather(*(rank.wait_ready() for rank in self._ranks))

    async def info(self) -> ModelInfo:
        """What all ranks loaded. They agree, but for the sizes, and for what the last pipeline stage alone has."""
        replies = await self._all("Info", InfoRequest())
        first = replies[0]
        return ModelInfo(
            model_type=first.model_type,
            dtype=first.dtype,
            dtype_reason=first.dtype_reason,
            device=first.device,
            world_size=first.world_size,
            vocab_size=first.vocab_size,
            max_positions=first.max_positions,
            backend=first.backend,
            backend_reason=first.backend_reason,
            threads=first.threads,
            threads_reason=first.threads_reason,
            quantize=first.quantize,
            kv_cache_dtype=first.kv_cache_dtype,
            offloaded=first.offloaded,
            weight_bytes=tuple(reply.weight_bytes for reply in replies),
            kv_bytes_per_token=first.kv_bytes_per_token,
            block_size=first.block_size,
            num_blocks=min(reply.num_blocks for reply in replies),
            decoder_start=first.decoder_start if first.HasField("decoder_start") else None,
            shares_prefixes=first.shares_prefixes,
            takes_drafts=all(reply.takes_drafts for reply in replies),
            most_proposals=max(reply.most_proposals for reply in replies),
            proposes=next((reply.proposes for reply in replies if reply.proposes), ""),
            has_tiers=first.has_tiers,
            adapter_rows=min(reply.adapter_rows for reply in replies),
            adapter_bytes=min(reply.adapter_bytes for reply in replies),
            no_adapters=next((reply.no_adapters for reply in replies if reply.no_adapters), ""),
        )

    async def warmup(self, **wanted: Any) -> KvCache:
        """Run the warmup on all ranks together; arguments are the fields of WarmupRequest."""
        replies = await self._all("Warmup", WarmupRequest(**wanted))
        return KvCache(
            max_batch_total_tokens=min(reply.max_batch_total_tokens for reply in replies),
            block_size=replies[0].block_size,
            num_blocks=min(reply.num_blocks for reply in replies),
            kv_bytes=replies[0].kv_bytes,
            free_bytes=min(reply.free_bytes for reply in replies),
            step_bytes=max(reply.step_bytes for reply in replies),
            graph_bytes=max(reply.graph_bytes for reply in replies),
            captured=replies[0].captured or "none",
            pads_chunks=replies[0].pads_chunks,
            offloaded=replies[0].kv_offloaded,
            products=tuple(replies[0].products),
            clocks=replies[0].clocks,
            max_total_tokens=min(reply.max_total_tokens for reply in replies),
            step_seconds=max(reply.step_seconds for reply in replies),
            token_seconds=max(reply.token_seconds for reply in replies),
            num_states=min((reply.num_states for reply in replies if reply.state_bytes), default=0),
            state_bytes=max(reply.state_bytes for reply in replies),
            checkpoint_blocks=_checkpoint_blocks(replies),
            window_blocks=replies[0].window_blocks,
            most_at_once=replies[0].most_at_once,
            bytes_per_token=replies[0].kv_bytes_per_token,
        )

    async def open_tiers(self, session: int) -> TierContents:
        """Begin a session of the tiers behind the device. Raises ShardError."""
        return contents_of(await self._all("OpenTiers", OpenTiersRequest(session=session), TIERS_DEADLINE_S))

    async def move_blocks(self, session: int, move: Move) -> Moved:
        """Move blocks between host and disk on every rank. Raises ShardError, also where one takes too long."""
        request = MoveBlocksRequest(
            session=session,
            after_step=move.after_step,
            is_fetch=move.is_fetch,
            slots=move.slots,
            places=move.places,
            keys=b"".join(move.keys),
            stamps=move.stamps,
        )
        return moved_of(await self._all("MoveBlocks", request, TIERS_DEADLINE_S), len(move.keys))

    async def prepare_adapter(self, key: bytes, folder: str) -> Prepared:
        """Have every rank read an adapter, or without a folder forget it. Raises ShardError where one is lost.

        A rank that takes longer than PREPARE_DEADLINE_S, or that fails otherwise, has a problem that may pass.
        """
        return await self._prepared(PrepareAdapterRequest(key=key, folder=folder))

    async def forget_adapters(self, kept: Iterable[bytes]) -> None:
        """Have every rank forget what a router before this one had it read, but these. Raises ShardError likewise."""
        await self._prepared(PrepareAdapterRequest(kept=kept))

    async def _prepared(self, request: PrepareAdapterRequest) -> Prepared:
        calls = (rank.call("PrepareAdapter", request, PREPARE_DEADLINE_S) for rank in self._ranks)
        return prepared_of(await asyncio.gather(*calls, return_exceptions=True))

    async def health(self) -> ShardHealth:
        """Of the slowest rank. Raises ShardError when one does not answer within HEALTH_DEADLINE_S."""
        replies = await self._all("Health", HealthRequest(), HEALTH_DEADLINE_S)
        slowest = max(replies, key=lambda reply: (reply.oldest_step_ms, -reply.steps_finished))
        return ShardHealth(
            steps_received=min(reply.steps_received for reply in replies),
            steps_finished=min(reply.steps_finished for reply in replies),
            oldest_step_ms=slowest.oldest_step_ms,
            rank=replies.index(slowest),
        )

    async def start_profile(self) -> None:
        """Record what the first rank computes from here on."""
        await self._ranks[0].call("Profile", ProfileRequest(start=True))

    async def stop_profile(self, trace_path: str = "") -> list[OperatorTime]:
        """Where the first rank's time went, longest first; a trace goes to `trace_path`."""
        reply = await self._ranks[0].call("Profile", ProfileRequest(trace_path=trace_path))
        return [OperatorTime(*row) for row in zip(reply.names, reply.calls, reply.self_ns, strict=True)]

    async def streamed(self, *, forget: bool = False) -> StreamedReply:
        """What the first rank's link and streamed layers did when. forget: begin anew behind this answer."""
        reply: StreamedReply = await self._ranks[0].call("Streamed", StreamedRequest(forget=forget))
        return reply

    async def signs_of_life(self, seconds: float) -> SignsOfLife:
        """What all ranks say of themselves within `seconds`."""
        calls = (rank.call("Health", HealthRequest(), seconds) for rank in self._ranks)
        replies: list[Any] = await asyncio.gather(*calls, return_exceptions=True)
        silent = next((rank for rank, reply in enumerate(replies) if isinstance(reply, BaseException)), None)
        if silent is not None:
            return SignsOfLife(silent)
        # Stages differ in how many collectives a step has; their later ones wait for the earlier ones.
        progress = [(reply.steps_finished, reply.stage, reply.collectives) for reply in replies]
        return SignsOfLife(None, progress.index(min(progress)), sum(reply.activity for reply in replies))

    def check(self) -> None:
        """Nothing: what is lost shows in `receive`."""

    async def renew(self, error: ShardError) -> KvCache:
        """Raises `error`: these shards are not started again."""
        raise error

    def abandon(self) -> None:
        """End the stream of steps at once: a call of `receive` that waits raises ShardError."""
        self._ranks[0].abandon()

    def send(self, request: StepRequest) -> None:
        """Hand the next step to rank 0, without waiting."""
        self._ranks[0].send(request)

    async def receive(self) -> StepReply:
        """Rank 0's reply to the oldest step, which the other ranks do not contradict. Raises ShardError."""
        return await self._ranks[0].receive()

    async def close(self) -> None:
        """Close the stream and every rank's channel."""
        await asyncio.gather(*(rank.close() for rank in self._ranks))

    async def _all(self, method: str, request: Any, timeout: float | None = None) -> list[Any]:
        return list(await asyncio.gather(*(rank.call(method, request, timeout) for rank in self._ranks)))


def prepared_of(answers: Sequence[Any]) -> Prepared:
    """One for each rank, in their order: `PrepareAdapterReply`, or what a call raised. Raises ShardError."""
    found: list[Prepared] = []
    for answer in answers:
        if isinstance(answer, ShardError | ValueError):
            if isinstance(answer, ShardError) and not answer.is_known:
                raise answer
            found.append(Prepared(0, str(answer), may_pass=True))
        elif isinstance(answer, BaseException):
            raise answer
        else:
            found.append(Prepared(answer.device_bytes, answer.problem, answer.may_pass))
    problems = sorted((one for one in found if one.problem), key=lambda one: one.may_pass)
    return problems[0] if problems else max(found, key=lambda one: one.num_bytes)


def _checkpoint_blocks(replies: Sequence[Any]) -> int:
    """Blocks that hold states or parts of rings on every rank that has any; 0: somewhere they cannot be kept."""
    counts = [reply.checkpoint_blocks for reply in replies if reply.state_bytes]
    return max(counts) if counts and all(counts) else 0


class ShardClient:
    """One rank: a channel over its unix socket and, on rank 0, the Run stream on it."""

    def __init__(self, rank: int, socket_path: str) -> None:
        self.rank = rank
        self._socket_path = socket_path
        self._channel = grpc.aio.insecure_channel(f"unix://{os.path.abspath(socket_path)}", options=CHANNEL_OPTIONS)
        self._stub: Any = ShardStub(self._channel)  # type: ignore[no-untyped-call]
        self._outbox: asyncio.Queue[StepRequest | None] = asyncio.Queue()
        self._call: Any = None

    async def wait_ready(self) -> None:
        """Wait for the socket, which appears when the weights are loaded, and for the connection."""
        while not os.path.exists(self._socket_path):
            await asyncio.sleep(SOCKET_POLL_S)
        await self._channel.channel_ready()

    async def call(self, method: str, request: Any, timeout: float | None = None) -> Any:
        """Make a unary call. Raises ValueError if the shard refuses it, else ShardError, both with its sentence."""
        try:
            return await getattr(self._stub, method)(request, timeout=timeout)
        except grpc.aio.AioRpcError as error:
            if error.code() is grpc.StatusCode.INVALID_ARGUMENT:
                raise ValueError(error.details()) from None
            raise self._lost(error, CONNECTION_ENDED) from None
        except (asyncio.CancelledError, grpc.aio.UsageError):  # the channel was closed during the call, or before it
            raise self._closed() from None

    def send(self, request: StepRequest) -> None:
        """Hand over the next step; the first one opens the stream."""
        if self._call is None:
            self._call = self._stub.Run(self._requests())
        self._outbox.put_nowait(request)

    async def receive(self) -> StepReply:
        """The next reply. Raises ShardError when the stream has ended, or when the reply says whose failure ends it."""
        try:
            reply: StepReply = await self._call.read()
        except grpc.aio.AioRpcError as error:
            raise self._lost(error, STREAM_ENDED) from None
        except asyncio.CancelledError:
            raise self._closed() from None
        if reply is grpc.aio.EOF:
            raise ShardError(self.rank, "it ended its stream of steps", is_known=False)
        if reply.HasField("failed_rank"):
            raise ShardError(reply.failed_rank, reply.error, is_known=not reply.lost_peer)
        return reply

    def abandon(self) -> None:
        """End the stream at once: a call of `receive` that waits raises ShardError."""
        if self._call is not None:
            self._call.cancel()

    async def close(self) -> None:
        """End the stream and close the channel."""
        self._outbox.put_nowait(None)
        await self._channel.close()

    def _closed(self) -> BaseException:
        """What to raise for a CancelledError: grpc.aio's own, of a call that was ended here, is a ShardError."""
        task = asyncio.current_task()
        if task is not None and task.cancelling():
            return asyncio.CancelledError()
        return ShardError(self.rank, "its connection was closed", is_known=False)

    def _lost(self, error: grpc.aio.AioRpcError, ended: Sequence[grpc.StatusCode]) -> ShardError:
        """What gRPC's words come to. Its own reach the log alone: they are about connections, and no remedy."""
        logger.debug("shard %d: %s", self.rank, _cause(error))
        if error.code() is grpc.StatusCode.DEADLINE_EXCEEDED:
            return ShardError(self.rank, "it does not answer")
        if error.code() in ended:
            return ShardError(self.rank, "its connection ended", is_known=False)
        return ShardError(self.rank, _cause(error))

    async def _requests(self) -> AsyncIterator[StepRequest]:
        while (request := await self._outbox.get()) is not None:
            yield request


def _cause(error: grpc.aio.AioRpcError) -> str:
    details = (error.details() or "no details").strip()
    return f"{error.code().name.lower().replace('_', ' ')}: {details}"


class SharedHealth:
    """Asks the shards once for all probes that come at nearly the same time.

    A probe that asked the shards itself would cost both sides a call. Ten thousand balancers, or one attacker, would
    keep them from computing tokens.
    """

    def __init__(self, shards: Shards) -> None:
        self._shards = shards
        self._asked_at = 0.0
        self._answer: asyncio.Task[ShardHealth] | None = None

    async def health(self) -> ShardHealth:
        """As `Shards.health`, REUSED_S old at most when it was asked for. Raises ShardError."""
        if self._answer is None or (self._answer.done() and time.monotonic() - self._asked_at > REUSED_S):
            self._asked_at = time.monotonic()
            self._answer = asyncio.create_task(self._shards.health())
            self._answer.add_done_callback(_take_notice)
        return await asyncio.shield(self._answer)


def _take_notice(answer: asyncio.Task[ShardHealth]) -> None:
    """Look at an error, which the probes that asked may not do: they may be gone."""
    if not answer.cancelled():
        answer.exception()
