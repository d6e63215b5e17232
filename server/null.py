"""The null model: a shard that answers every step with the next word of one sentence. It measures the router.

Steps are answered at once, or, one after the other, as long after they could begin as `null_step_ms` and
`null_token_us` say: a server of known speed. Where prompt tokens take time, the router's prefix cache is on.

What a client sees of `--model-id null` is HTTP, validation, batching, the wire, text and delivery, and nothing of a
model: no weights, no arithmetic, no torch. It keeps the wire contract (retire, adapters, add, extend, chunks, decode,
in this order) and believes what it is sent; the tests' double that checks the protocol is
`tests/router/fake_shards.py`.

An adapter has the sentence's words come in another order, which its key says. Its files are not read.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import math
import sys
import time
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

import grpc

from server.adapters.identity import content
from server.blocks import BLOCK_SIZE, num_blocks
from server.config import ShardConfig
from server.pb import generate_pb2 as pb
from server.pb import generate_pb2_grpc as pb_grpc
from server.ranks.relay import StepStream, shard_server

# " The little fox walked along the river in the morning sun and found a red ball under the old tree." as the embedded
# model's tokenizer writes it, one word each: no end token, so that only length and stop sequences end a request.
SENTENCE = (305, 391, 1122, 855, 1100, 265, 913, 324, 265, 438, 600, 289, 577, 262, 827, 1420, 666, 265, 388, 713, 17)
LOGPROB = -0.5  # of every token: exact in float32, and short as text
MOST_TOKENS = 2**24  # of a cache that takes no memory: the router's lists of its blocks do


@dataclass(slots=True)
class _Sequence:
    id: int
    top_n_tokens: int
    raw_logprobs: bool
    known: int  # tokens of the prompt, with those that a grammar forced
    computed: int
    reported_from: int  # position of the first token whose log-probability is reported
    given: int  # tokens so far
    adapter: bytes  # its key; empty: it has none

    @classmethod
    def of(cls, new: pb.NewSequence, adapter: bytes) -> _Sequence:
        """A sequence that nothing has been computed of here."""
        known = len(new.token_ids)
        raw = new.sampling.raw_logprobs
        reported_from = 1 if new.prompt_logprobs else known - new.forced if raw else sys.maxsize
        return cls(new.id, new.top_n_tokens, raw, known, new.computed, reported_from, new.generated, adapter)

    @property
    def is_complete(self) -> bool:
        """Whether its prompt is computed."""
        return self.computed >= self.known

    def extend(self, num_forced: int) -> None:
        """Go on with tokens that a grammar forces."""
        self.known = self.computed + 1 + num_forced
        self.reported_from = self.computed + 1 if self.raw_logprobs else sys.maxsize
        self.given += num_forced

    def report(self, num_tokens: int, reply: pb.StepReply) -> None:
        """What a chunk of so many tokens, the next ones, finds of tokens that are known."""
        first = max(self.reported_from, self.computed + 1)
        num_reported = min(self.computed + num_tokens + 1, self.known) - first
        if num_reported <= 0:
            return
        n = self.top_n_tokens if self.raw_logprobs else 0
        reply.prompt.add(
            id=self.id,
            logprobs=[LOGPROB] * num_reported,
            top_ids=[SENTENCE[rank % len(SENTENCE)] for rank in range(n)] * num_reported,
            top_logprobs=[LOGPROB - rank for rank in range(n)] * num_reported,
        )

    def next_token(self, mask: pb.TokenMask | None, end_ids: Sequence[int]) -> int:
        """The next word of the sentence. Where a grammar forbids that, the end; and where that too, its first token."""
        token_id = word(self.given, self.adapter)
        self.given += 1
        if mask is None or _allows(mask, token_id):
            return token_id
        return next(id for id in itertools.chain(end_ids, range(MOST_TOKENS)) if _allows(mask, id))


def word(place: int, adapter: bytes = b"") -> int:
    """The token that every answer has at this place, with the adapter that has this key."""
    shift = adapter[place % len(adapter)] if adapter else 0
    return SENTENCE[(place + shift) % len(SENTENCE)]


def _allows(mask: pb.TokenMask, token_id: int) -> bool:
    match mask.WhichOneof("tokens"):
        case "allowed":
            return token_id in mask.allowed.ids
        case "forbidden":
            return token_id not in mask.forbidden.ids
    return token_id < 8 * len(mask.bits) and bool(mask.bits[token_id // 8] >> token_id % 8 & 1)


class NullEngine:
    """Sequences by name and length alone. end_ids: the model's end tokens."""

    def __init__(self, end_ids: Sequence[int] = ()) -> None:
        self._sequences: dict[int, _Sequence] = {}
        self._adapters: dict[int, bytes] = {}  # by their rows
        self._end_ids = end_ids

    def step(self, request: pb.StepRequest) -> pb.StepReply:
        """Apply one step; the reply of rank 0."""
        started = time.perf_counter_ns()
        for id in [*self._sequences] if request.reset else request.retire:
            self._sequences.pop(id, None)
        for place in request.adapters:
            self._adapters[place.row] = place.key
        for new in request.add:
            self._sequences[new.id] = _Sequence.of(new, self._adapters[new.adapter] if new.adapter else b"")
        for extension in request.extend:
            self._sequences[extension.id].extend(len(extension.token_ids) - 1)
        reply = pb.StepReply(step=request.step)
        held = frozenset(request.held)
        held = held.union(draft.id for draft in request.drafts)
        decoding = [s for s in self._sequences.values() if s.is_complete and s.id not in held] if request.decode else []
        for sequence in decoding:
            sequence.computed += 1
        completed = self._advance_prompts(request, reply)
        masks = {
            place: mask
            for mask in request.masks
            for place in zip(mask.ids, mask.rows or [0] * len(mask.ids), strict=True)
        }
        given = [(s, s.next_token(masks.get((s.id, 0)), self._end_ids)) for s in [*decoding, *completed]]
        for draft in request.drafts:
            given += self._checked(draft, masks)
        self._give_tokens(given, reply)
        reply.forward_ns = time.perf_counter_ns() - started
        return reply

    def _advance_prompts(self, request: pb.StepRequest, reply: pb.StepReply) -> list[_Sequence]:
        """Run the chunks; the sequences whose prompts end with them."""
        completed = []
        for id, num_tokens in zip(request.chunk_ids, request.chunk_tokens, strict=True):
            sequence = self._sequences[id]
            sequence.report(num_tokens, reply)
            sequence.computed += num_tokens
            if sequence.is_complete:
                completed.append(sequence)
        return completed

    def _checked(
        self, draft: pb.Extension, masks: Mapping[tuple[int, int], pb.TokenMask]
    ) -> Iterator[tuple[_Sequence, int]]:
        """The tokens of a sequence up to the first that is not what was guessed."""
        sequence = self._sequences[draft.id]
        sequence.computed = draft.position
        for row, guess in enumerate([*draft.token_ids[1:], None]):
            sequence.computed += 1
            token_id = sequence.next_token(masks.get((draft.id, row)), self._end_ids)
            yield sequence, token_id
            if token_id != guess:
                return

    def _give_tokens(self, given: Sequence[tuple[_Sequence, int]], reply: pb.StepReply) -> None:
        token_ids = [token_id for _, token_id in given]
        top_counts = [sequence.top_n_tokens for sequence, _ in given]
        reply.ids.extend([sequence.id for sequence, _ in given])
        reply.token_ids.extend(token_ids)
        reply.logprobs.extend([LOGPROB] * len(given))
        reply.top_counts.extend(top_counts)
        for token_id, count in zip(token_ids, top_counts, strict=True):
            # The candidates are the words from the chosen one on.
            first = SENTENCE.index(token_id) if token_id in SENTENCE else 0
            reply.top_ids.extend(SENTENCE[(first + rank) % len(SENTENCE)] for rank in range(count))
            reply.top_logprobs.extend(LOGPROB - rank for rank in range(count))


class Pace:
    """When steps end that take so many seconds each, and so many more for each prompt token, one after the other."""

    def __init__(self, step_s: float, token_s: float) -> None:
        self._step_s = step_s
        self._token_s = token_s
        self._free_at = -math.inf

    def ends_at(self, now: float, request: pb.StepRequest) -> float:
        """When a step ends that arrives at `now`, behind those before it. One that only lets go takes no time."""
        seconds = 0.0
        if request.decode or request.chunk_tokens or request.drafts:
            seconds = self._step_s + self._token_s * sum(request.chunk_tokens)
        self._free_at = max(now, self._free_at) + seconds
        return self._free_at


class NullService(pb_grpc.ShardServicer):
    """The gRPC face of the null model: one rank."""

    def __init__(self, config: ShardConfig) -> None:
        self._rank = config.rank
        self._world_size = config.world_size
        model = json.loads((Path(config.model_path) / "config.json").read_bytes())
        self._vocab_size: int = model["vocab_size"]
        end_ids = model.get("eos_token_id")
        self._engine = NullEngine(end_ids if isinstance(end_ids, list) else [] if end_ids is None else [end_ids])
        self._num_blocks = 0
        self._adapter_sizes = ((config.max_adapters if config.has_adapters else 0), int(config.adapter_memory * 1e9))
        self._has_costly_prompts = config.null_token_us > 0
        self._pace = Pace(config.null_step_ms / 1000, config.null_token_us / 1e6)
        self._num_steps = 0
        self._num_finished = 0
        self.steps = StepStream(config.rank, config.step_sockets, self._start)

    async def Info(self, request: pb.InfoRequest, context: grpc.aio.ServicerContext) -> pb.InfoReply:
        """What a shard would say of itself that has loaded nothing."""
        return pb.InfoReply(
            model_type="null",
            dtype="float32",
            dtype_reason="nothing is computed",
            device="cpu",
            world_size=self._world_size,
            vocab_size=self._vocab_size,
            backend="none",
            backend_reason="nothing is computed",
            threads=1,
            threads_reason="nothing is computed",
            quantize="dense",
            kv_cache_dtype="none",
            block_size=BLOCK_SIZE,
            num_blocks=self._num_blocks,
            takes_drafts=True,
            shares_prefixes=self._has_costly_prompts,  # else there is nothing that finding one could save
            adapter_rows=self._adapter_sizes[0],
            adapter_bytes=self._adapter_sizes[1],
        )

    async def PrepareAdapter(
        self, request: pb.PrepareAdapterRequest, context: grpc.aio.ServicerContext
    ) -> pb.PrepareAdapterReply:
        """How large an adapter's files are."""
        if not request.folder:
            return pb.PrepareAdapterReply()
        try:
            sizes = [path.stat().st_size for path in content(Path(request.folder))]
        except OSError as error:
            return pb.PrepareAdapterReply(problem=f"its files cannot be read: {error.strerror}")
        return pb.PrepareAdapterReply(device_bytes=sum(sizes))

    async def Warmup(self, request: pb.WarmupRequest, context: grpc.aio.ServicerContext) -> pb.WarmupReply:
        """A KV cache of the wanted size, which takes no memory."""
        tokens = request.max_batch_total_tokens or min(request.useful_tokens, MOST_TOKENS)
        self._num_blocks = num_blocks(tokens)
        return pb.WarmupReply(
            max_batch_total_tokens=tokens,
            block_size=BLOCK_SIZE,
            num_blocks=self._num_blocks,
            max_total_tokens=request.max_total_tokens,
        )

    async def Health(self, request: pb.HealthRequest, context: grpc.aio.ServicerContext) -> pb.HealthReply:
        """Without a pace, every step is finished when it arrives."""
        return pb.HealthReply(steps_received=self._num_steps, steps_finished=self._num_finished)

    async def Profile(self, request: pb.ProfileRequest, context: grpc.aio.ServicerContext) -> NoReturn:
        """Refused: there is nothing to profile."""
        sentence = "the null model computes nothing that could be profiled: serve a real model, or random weights"
        await context.abort(grpc.StatusCode.INVALID_ARGUMENT, sentence)
        raise AssertionError("abort raises")

    async def Streamed(self, request: pb.StreamedRequest, context: grpc.aio.ServicerContext) -> pb.StreamedReply:
        """There are no weights that could stream."""
        return pb.StreamedReply()

    async def Run(
        self, requests: AsyncIterator[pb.StepRequest], context: grpc.aio.ServicerContext
    ) -> AsyncIterator[pb.StepReply]:
        """The ordered stream of steps."""
        async for reply in self.steps.run(requests):
            yield reply

    def _start(self, request: pb.StepRequest) -> asyncio.Future[pb.StepReply]:
        self._num_steps += 1
        reply = self._engine.step(request)
        if self._rank:
            reply = pb.StepReply(step=request.step)
        loop = asyncio.get_running_loop()
        done: asyncio.Future[pb.StepReply] = loop.create_future()
        now = loop.time()
        ends_at = self._pace.ends_at(now, request)
        if ends_at > now:
            loop.call_at(ends_at, self._finish, done, reply)
        else:
            self._finish(done, reply)
        return done

    def _finish(self, done: asyncio.Future[pb.StepReply], reply: pb.StepReply) -> None:
        self._num_finished += 1
        if not done.done():
            done.set_result(reply)


@asynccontextmanager
async def serving(config: ShardConfig) -> AsyncIterator[NullService]:
    """Serve on the rank's unix socket, which exists while the block runs."""
    service = NullService(config)
    server = shard_server(service, config.socket_path)
    try:
        await service.steps.open()
        await server.start()
        yield service
    finally:
        await server.stop(grace=1)
        service.steps.close()
