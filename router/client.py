"""The router's side of the wire: one ordered stream of steps to every shard.

`ShardedClient` sends each StepRequest to all ranks and answers with one StepReply a step, in order. Any rank that is
lost, or that alone reports an error, ends the stream with a ShardError naming the rank: the ranks no longer agree on
which sequences exist, and only a restart mends that. `FakeShardedClient` is the public double: the same interface, in
memory, deterministic, and strict about the protocol; one contract test runs over both.

Together with `server/service.py` and `server/batch.py` this is the only place that knows protobuf classes. `batcher.py`
builds its requests with `step_request` and `new_sequence` below.
"""

from __future__ import annotations

import asyncio
import os
import time
import zlib
from array import array
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import grpc
import grpc.aio

from router.entry import ValidRequest
from router.queue import blocks_for
from server.pb.generate_pb2 import (
    HealthRequest,
    InfoRequest,
    NewSequence,
    ProfileRequest,
    PromptLogprobs,
    SamplingParameters,
    WarmupRequest,
)
from server.pb.generate_pb2 import StepReply as StepReply  # re-exported for batcher.py
from server.pb.generate_pb2 import StepRequest as StepRequest
from server.pb.generate_pb2_grpc import ShardStub

# The largest message is a step that adds many long prompts: 1 M token ids are about 4 MB. gRPC's own bound is 4 MiB.
MAX_MESSAGE_BYTES = 64 * 2**20
HEALTH_DEADLINE_S = 2.0
# Ranks report one step's error within one step of each other; a rank that hangs in a collective never does.
AGREEMENT_DEADLINE_S = 10.0
SOCKET_POLL_S = 0.05
CHANNEL_OPTIONS = (
    ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
    ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
    ("grpc.initial_reconnect_backoff_ms", 50),  # a shard that still loads must not cost a long back-off
    ("grpc.max_reconnect_backoff_ms", 500),
)


class ShardError(Exception):
    """A shard is lost or broke the protocol. Nothing can run until the shards are started again."""

    def __init__(self, rank: int, cause: str) -> None:
        super().__init__(f"shard {rank}: {cause}")
        self.rank = rank
        self.cause = cause


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
    weight_bytes: tuple[int, ...]
    kv_bytes_per_token: int
    block_size: int  # tokens per KV block
    num_blocks: int  # KV blocks that an earlier warmup allocated, 0 before it
    decoder_start: int | None = None  # of an encoder-decoder: the token that every generation starts from
    shares_prefixes: bool = False  # whether a block serves every sequence that begins with the same tokens


@dataclass(frozen=True, slots=True)
class KvCache:
    """What the warmup allocated: the smallest of all ranks."""

    max_batch_total_tokens: int
    block_size: int
    num_blocks: int
    kv_bytes: int
    free_bytes: int
    step_bytes: int = 0  # of the free ones, what the largest step takes; 0: not known
    graph_bytes: int = 0  # of captured decode steps; 0: not known
    captured: str = "none"  # which decode steps are


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


class Shards(Protocol):
    """What the router needs of its shards, real or fake."""

    async def info(self) -> ModelInfo: ...

    async def warmup(
        self,
        *,
        max_batch_prefill_tokens: int,
        max_total_tokens: int,
        max_batch_total_tokens: int,
        useful_tokens: int,
        max_top_n_tokens: int,
    ) -> KvCache: ...

    async def health(self) -> ShardHealth: ...

    async def start_profile(self) -> None:
        """Record what the first rank computes from here on."""

    async def stop_profile(self, trace_path: str = "") -> list[OperatorTime]:
        """Where its time went, longest first; a trace goes to `trace_path`."""

    def send(self, request: StepRequest) -> None:
        """Hand over the next step. Does not wait; the shards take the requests in this order."""

    async def receive(self) -> StepReply:
        """The reply to the oldest request without one. Raises ShardError when the stream has ended."""

    async def close(self) -> None: ...


def new_sequence(
    id: int, request: ValidRequest, blocks: Sequence[int], block_size: int, *, computed: int = 0
) -> NewSequence:
    """A sequence in wire form; `computed` tokens of its prompt are in its blocks. blocks: an encoded prompt's first."""
    sampling = request.sampling
    first = blocks_for(len(request.encoder_ids), block_size)
    return NewSequence(
        id=id,
        token_ids=request.token_ids,
        computed=computed,
        blocks=blocks[first:],
        sampling=SamplingParameters(
            do_sample=sampling.do_sample,
            temperature=sampling.temperature,
            top_k=sampling.top_k,
            top_p=sampling.top_p,
            typical_p=sampling.typical_p,
            repetition_penalty=sampling.repetition_penalty,
            frequency_penalty=sampling.frequency_penalty,
            watermark=sampling.watermark,
            seed=sampling.seed,
        ),
        top_n_tokens=request.top_n_tokens,
        prompt_logprobs=request.prompt_logprobs,
        encoder_token_ids=request.encoder_ids,
        encoder_blocks=blocks[:first],
    )


def step_request(
    step: int,
    *,
    retire: Sequence[int] = (),
    add: Sequence[NewSequence] = (),
    chunks: Sequence[tuple[int, int]] = (),
    decode: bool = False,
) -> StepRequest:
    """One step, in wire form; chunks are (sequence, prompt tokens)."""
    return StepRequest(
        step=step,
        retire=retire,
        add=add,
        chunk_ids=[id for id, _ in chunks],
        chunk_tokens=[tokens for _, tokens in chunks],
        decode=decode,
    )


class ShardClient:
    """One rank: a channel over its unix socket, and the Run stream on it."""

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
        """A unary call. Raises ValueError for what the shard refuses, else ShardError, with the shard's sentence."""
        try:
            return await getattr(self._stub, method)(request, timeout=timeout)
        except grpc.aio.AioRpcError as error:
            if error.code() is grpc.StatusCode.INVALID_ARGUMENT:
                raise ValueError(error.details()) from None
            raise ShardError(self.rank, _cause(error)) from None

    def send(self, request: StepRequest) -> None:
        if self._call is None:
            self._call = self._stub.Run(self._requests())
        self._outbox.put_nowait(request)

    async def receive(self) -> StepReply:
        try:
            reply: StepReply = await self._call.read()
        except grpc.aio.AioRpcError as error:
            raise ShardError(self.rank, _cause(error)) from None
        except asyncio.CancelledError:
            # grpc.aio raises this also when the call was cancelled by `close`, not the task that waits here.
            task = asyncio.current_task()
            if task is not None and task.cancelling():
                raise
            raise ShardError(self.rank, "the stream was closed") from None
        if reply is grpc.aio.EOF:
            raise ShardError(self.rank, "the stream ended")
        return reply

    async def close(self) -> None:
        self._outbox.put_nowait(None)
        await self._channel.close()

    async def _requests(self) -> AsyncIterator[StepRequest]:
        while (request := await self._outbox.get()) is not None:
            yield request


def _cause(error: grpc.aio.AioRpcError) -> str:
    details = (error.details() or "no details").strip()
    return f"{error.code().name.lower().replace('_', ' ')}: {details}"


class ShardedClient:
    """All ranks as one."""

    def __init__(self, socket_paths: Sequence[str]) -> None:
        self._ranks = [ShardClient(rank, path) for rank, path in enumerate(socket_paths)]

    async def wait_ready(self, timeout: float | None = None) -> None:
        """Wait until every rank answers. Raises TimeoutError."""
        async with asyncio.timeout(timeout):
            await asyncio.gather(*(rank.wait_ready() for rank in self._ranks))

    async def info(self) -> ModelInfo:
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
            weight_bytes=tuple(reply.weight_bytes for reply in replies),
            kv_bytes_per_token=first.kv_bytes_per_token,
            block_size=first.block_size,
            num_blocks=min(reply.num_blocks for reply in replies),
            decoder_start=first.decoder_start if first.HasField("decoder_start") else None,
            shares_prefixes=first.shares_prefixes,
        )

    async def warmup(self, **wanted: int) -> KvCache:
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
        )

    async def health(self) -> ShardHealth:
        replies = await self._all("Health", HealthRequest(), HEALTH_DEADLINE_S)
        return ShardHealth(
            steps_received=min(reply.steps_received for reply in replies),
            steps_finished=min(reply.steps_finished for reply in replies),
            oldest_step_ms=max(reply.oldest_step_ms for reply in replies),
        )

    async def start_profile(self) -> None:
        await self._ranks[0].call("Profile", ProfileRequest(start=True))

    async def stop_profile(self, trace_path: str = "") -> list[OperatorTime]:
        reply = await self._ranks[0].call("Profile", ProfileRequest(trace_path=trace_path))
        return [OperatorTime(*row) for row in zip(reply.names, reply.calls, reply.self_ns, strict=True)]

    def send(self, request: StepRequest) -> None:
        for rank in self._ranks:
            rank.send(request)

    async def receive(self) -> StepReply:
        if len(self._ranks) == 1:
            return await self._ranks[0].receive()
        replies = await self._receive_all()
        steps = {reply.step for reply in replies}
        if len(steps) > 1:
            raise ShardError(0, f"the ranks answer different steps: {sorted(steps)}")
        return replies[0]

    async def close(self) -> None:
        await asyncio.gather(*(rank.close() for rank in self._ranks))

    async def _all(self, method: str, request: Any, timeout: float | None = None) -> list[Any]:
        return list(await asyncio.gather(*(rank.call(method, request, timeout) for rank in self._ranks)))

    async def _receive_all(self) -> list[StepReply]:
        """One reply of each rank, all with an error or none. A lost rank is reported at once: the others may hang."""
        tasks = [asyncio.ensure_future(rank.receive()) for rank in self._ranks]
        failed: tuple[int, str] | None = None
        try:
            pending = set(tasks)
            while pending:
                deadline = AGREEMENT_DEADLINE_S if failed else None
                done, pending = await asyncio.wait(pending, timeout=deadline, return_when=asyncio.FIRST_COMPLETED)
                if failed and (not done or any(task.exception() for task in done)):
                    raise ShardError(*failed)  # the cause, and not its consequence on another rank
                errors = [(tasks.index(task), task.result().error) for task in done if task.result().error]
                failed = failed or next(iter(errors), None)
        finally:
            for task in tasks:
                task.cancel()
                task.add_done_callback(lambda task: task.cancelled() or task.exception())  # seen, if nobody asks
        replies = [task.result() for task in tasks]
        if failed and not all(reply.error for reply in replies):
            raise ShardError(*failed)
        return replies


# ------------------------------------------------------------------------------------------------ the test double


def fake_next_token(token_ids: Sequence[int], seed: int, vocab_size: int) -> int:
    """The token that FakeShardedClient gives after `token_ids`: their CRC-32, started from the seed.

    A pure function of the sequence so far, its length and the seed, as a real model with counter-based noise is; who
    else runs in the batch cannot matter. Seed 0 stands for greedy.
    """
    return zlib.crc32(array("I", token_ids).tobytes(), seed & 0xFFFFFFFF) % vocab_size


@dataclass(slots=True)
class _FakeSequence:
    id: int
    token_ids: list[int]
    prompt_length: int
    seed: int
    blocks: tuple[int, ...]
    reach: int  # tokens that its own blocks hold
    encoded: tuple[int, ...]
    top_n_tokens: int
    prompt_logprobs: bool
    computed: int
    digest: int  # of the tokens computed


def _digests(token_ids: Sequence[int], digest: int = 0) -> Iterator[int]:
    """Of all tokens up to each one, after those that `digest` stands for."""
    for token_id in token_ids:
        digest = hash((digest, token_id))
        yield digest


class ProtocolViolation(AssertionError):
    """The router sent something that a shard must never get."""


@dataclass
class FakeShardedClient:
    """Shards in memory. Strict about the protocol: raises ProtocolViolation from `send`.

    A step begins when it was sent and the one before it is done, and takes `step_delay_s`; a test that replaces `clock`
    and `sleep` controls time. `requests` keeps all that was sent.
    """

    vocab_size: int = 256
    max_positions: int = 0
    block_size: int = 16
    max_batch_total_tokens: int = 4096
    max_batch_prefill_tokens: int | None = None  # checked when given, as is the next
    max_batch_size: int | None = None
    decoder_start: int | None = None  # plays an encoder-decoder when given
    step_delay_s: float = 0.0
    clock: Callable[[], float] = time.monotonic
    sleep: Callable[[float], Awaitable[None]] = asyncio.sleep
    next_token: Callable[[Sequence[int], int, int], int] = fake_next_token
    failing_steps: dict[int, str] = field(default_factory=dict)  # step -> the error that its reply carries
    keep_requests: bool = True
    requests: list[StepRequest] = field(default_factory=list)
    death: str | None = None  # once set, `receive` and `health` raise ShardError with this cause
    _sequences: dict[int, _FakeSequence] = field(default_factory=dict)
    _gone: set[int] = field(default_factory=set)  # lost with a failed step; the router may not know it yet
    _used_ids: set[int] = field(default_factory=set)
    _written: dict[tuple[int, int], int] = field(
        default_factory=dict
    )  # (block, offset) -> digest of the tokens up to it
    _replies: deque[tuple[float, StepReply]] = field(default_factory=deque)  # with the time when each is ready
    _busy_until: float = 0.0
    _arrived: asyncio.Event = field(default_factory=asyncio.Event)
    _num_steps: int = 0

    @property
    def num_blocks(self) -> int:
        return blocks_for(self.max_batch_total_tokens, self.block_size) + (self.decoder_start is not None)

    @property
    def live_ids(self) -> set[int]:
        """Sequences added and not retired."""
        return set(self._sequences)

    async def wait_ready(self, timeout: float | None = None) -> None:
        return None

    async def info(self) -> ModelInfo:
        return ModelInfo(
            model_type="fake",
            dtype="float32",
            dtype_reason="no arithmetic is done",
            device="cpu",
            world_size=1,
            vocab_size=self.vocab_size,
            max_positions=self.max_positions,
            backend="none",
            backend_reason="",
            threads=1,
            threads_reason="",
            quantize="dense",
            weight_bytes=(0,),
            kv_bytes_per_token=0,
            block_size=self.block_size,
            num_blocks=self.num_blocks,
            decoder_start=self.decoder_start,
            shares_prefixes=True,
        )

    async def warmup(self, **wanted: int) -> KvCache:
        return KvCache(self.max_batch_total_tokens, self.block_size, self.num_blocks, kv_bytes=0, free_bytes=0)

    async def health(self) -> ShardHealth:
        self._raise_if_dead()
        return ShardHealth(self._num_steps, self._num_steps - len(self._replies), oldest_step_ms=0)

    async def start_profile(self) -> None:
        self._raise_if_dead()

    async def stop_profile(self, trace_path: str = "") -> list[OperatorTime]:
        self._raise_if_dead()
        return [OperatorTime("fake", calls=1, self_ns=1000)]

    def send(self, request: StepRequest) -> None:
        if self.keep_requests:
            self.requests.append(request)
        self._num_steps += 1
        _require(request.step == self._num_steps, f"step {request.step} follows step {self._num_steps - 1}")
        self._busy_until = max(self.clock(), self._busy_until) + self.step_delay_s
        self._replies.append((self._busy_until, self._run(request)))
        _require(len(self._replies) <= 2, "more than two requests under way")
        self._arrived.set()

    async def receive(self) -> StepReply:
        while not self._replies and self.death is None:
            self._arrived.clear()
            await self._arrived.wait()
        if self._replies:
            await self.sleep(max(0.0, self._replies[0][0] - self.clock()))
        self._raise_if_dead()
        return self._replies.popleft()[1]

    def die(self, cause: str) -> None:
        """End the stream, as the death of a shard does."""
        self.death = cause
        self._arrived.set()

    async def close(self) -> None:
        self.die("closed")

    def _raise_if_dead(self) -> None:
        if self.death is not None:
            raise ShardError(0, self.death)

    def _run(self, request: StepRequest) -> StepReply:
        reply = StepReply(step=request.step)
        for id in request.retire:
            _require(id in self._sequences or id in self._gone, f"retire of unknown sequence {id}")
            self._sequences.pop(id, None)
        for sequence in request.add:
            self._add(sequence)
        self._check_limits(request)
        decoding = [
            id
            for id, sequence in self._sequences.items()
            if request.decode and sequence.computed >= sequence.prompt_length
        ]
        chunks = [
            (id, n) for id, n in zip(request.chunk_ids, request.chunk_tokens, strict=True) if id not in self._gone
        ]
        if request.step in self.failing_steps:
            return self._fail(reply, [*decoding, *(id for id, _ in chunks)], self.failing_steps[request.step])
        for id, num_tokens in chunks:
            self._prefill(id, num_tokens, reply)
        for id in decoding:
            self._write(self._sequences[id], self._sequences[id].computed + 1)
            self._give_token(id, reply)
        return reply

    def _fail(self, reply: StepReply, ids: Sequence[int], error: str) -> StepReply:
        for id in ids:
            del self._sequences[id]
        self._gone.update(ids)
        reply.error = error
        return reply

    def _add(self, sequence: NewSequence) -> None:
        _require(sequence.id not in self._used_ids, f"id {sequence.id} used again")
        _require(len(sequence.token_ids) > 0, f"sequence {sequence.id} has no prompt")
        self._check_prefix(sequence)
        shared = sequence.computed // self.block_size
        taken = {block for other in self._sequences.values() for block in other.blocks}
        blocks = (*sequence.blocks, *sequence.encoder_blocks)
        _require(not taken.intersection(blocks[shared:]), f"sequence {sequence.id} got blocks of another to write to")
        _require(len(set(blocks)) == len(blocks), f"sequence {sequence.id} got a block twice")
        _require(all(block < self.num_blocks for block in blocks), f"sequence {sequence.id} got a block too many")
        self._check_encoder(sequence)
        self._used_ids.add(sequence.id)
        self._sequences[sequence.id] = _FakeSequence(
            id=sequence.id,
            token_ids=list(sequence.token_ids),
            prompt_length=len(sequence.token_ids),
            seed=sequence.sampling.seed if sequence.sampling.do_sample else 0,
            blocks=blocks,
            reach=len(sequence.blocks) * self.block_size,
            encoded=tuple(sequence.encoder_token_ids),
            top_n_tokens=sequence.top_n_tokens,
            prompt_logprobs=sequence.prompt_logprobs,
            computed=sequence.computed,
            digest=[0, *_digests(list(sequence.token_ids)[: sequence.computed])][-1],
        )

    def _check_prefix(self, sequence: NewSequence) -> None:
        """What is said to be computed has been, for exactly these tokens."""
        ids, computed = list(sequence.token_ids), sequence.computed
        _require(computed % self.block_size == 0 and computed < len(ids), f"sequence {sequence.id} has no full prefix")
        for position, digest in enumerate(_digests(ids[:computed])):
            found = self._written.get((sequence.blocks[position // self.block_size], position % self.block_size))
            _require(found == digest, f"sequence {sequence.id} got a prefix never computed")

    def _write(self, sequence: _FakeSequence, end: int) -> None:
        """Compute up to token `end`, and note what each place of the KV cache holds: all tokens up to it."""
        _require(end <= sequence.reach, f"sequence {sequence.id} outgrew its blocks")
        fresh = range(sequence.computed, end)
        for position, digest in zip(
            fresh, _digests(sequence.token_ids[sequence.computed : end], sequence.digest), strict=True
        ):
            self._written[sequence.blocks[position // self.block_size], position % self.block_size] = digest
            sequence.digest = digest
        sequence.computed = end

    def _check_encoder(self, sequence: NewSequence) -> None:
        given, reach = len(sequence.encoder_token_ids), len(sequence.encoder_blocks) * self.block_size
        if self.decoder_start is None:
            _require(given == reach == 0, f"sequence {sequence.id} is for an encoder")
        else:
            _require(0 < given <= reach, f"sequence {sequence.id} has {reach} places for {given} encoded tokens")
            _require(sequence.token_ids[0] == self.decoder_start, f"sequence {sequence.id} starts from a wrong token")

    def _check_limits(self, request: StepRequest) -> None:
        encoded = [len(sequence.encoder_token_ids) for sequence in request.add]
        size, prefill = len(self._sequences), sum(encoded if self.decoder_start is not None else request.chunk_tokens)
        _require(self.max_batch_size is None or size <= self.max_batch_size, f"{size} sequences in a batch")
        _require(
            self.max_batch_prefill_tokens is None or prefill <= self.max_batch_prefill_tokens,
            f"{prefill} prompt tokens in a step",
        )

    def _prefill(self, id: int, num_tokens: int, reply: StepReply) -> None:
        _require(id in self._sequences, f"chunk of unknown sequence {id}")
        sequence = self._sequences[id]
        start, end = sequence.computed, sequence.computed + num_tokens
        _require(0 < num_tokens and end <= sequence.prompt_length, f"chunk of {id} reaches {end}, beyond its prompt")
        self._write(sequence, end)
        if sequence.prompt_logprobs:
            num_logprobs = min(end, sequence.prompt_length - 1) - start
            reply.prompt.append(PromptLogprobs(id=id, logprobs=[-1.0] * num_logprobs))
        if end == sequence.prompt_length:
            self._give_token(id, reply)

    def _give_token(self, id: int, reply: StepReply) -> None:
        sequence = self._sequences[id]
        token_id = self.next_token([*sequence.encoded, *sequence.token_ids], sequence.seed, self.vocab_size)
        sequence.token_ids.append(token_id)
        reply.ids.append(id)
        reply.token_ids.append(token_id)
        reply.logprobs.append(-0.5)
        reply.top_counts.append(sequence.top_n_tokens)
        for rank in range(sequence.top_n_tokens):
            reply.top_ids.append((token_id + rank) % self.vocab_size)
            reply.top_logprobs.append(-0.5 - rank)


def _require(holds: bool, violation: str) -> None:
    if not holds:
        raise ProtocolViolation(violation)
