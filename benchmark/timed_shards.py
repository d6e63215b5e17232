"""Shards that note when each step was sent and answered, and what it was for: the clock of `offline`.

The router's batching loop drives them as it drives any shards and does not see the difference. What the device needs
at least for a step follows from its request alone: which prompts it advances, and how long its sequences are by then.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

from benchmark.roofline import BytesAndFlops, Piece, ServedModel
from router.client import KvCache, ModelInfo, OperatorTime, ShardError, ShardHealth, Shards, StepReply, StepRequest


@dataclass
class StepRecord:
    """One step: when it was sent and answered, and what it was for."""

    sent_at: float
    prompt_tokens: int
    needed: BytesAndFlops | None
    answered_at: float = 0.0
    generated_tokens: int = 0
    decoding: int = 0  # sequences that got their next token; the other generated tokens are the first of theirs

    @property
    def num_tokens(self) -> int:
        """Tokens that the step computes."""
        return self.prompt_tokens + self.decoding

    @property
    def kind(self) -> str:
        """A step with any prompt chunk counts as prefill, whatever decodes beside it."""
        return "prefill" if self.prompt_tokens else "decode"


@dataclass
class TimedShards:
    """Shards that note every step that passes. The batching loop does not see the difference."""

    shards: Shards
    served: ServedModel | None
    clock: Callable[[], float] = time.perf_counter
    came: Callable[[int], None] | None = None  # told how many tokens each reply has
    records: list[StepRecord] = field(default_factory=list)
    _waiting: deque[StepRecord] = field(default_factory=deque)
    _progress: dict[int, tuple[int, int]] = field(default_factory=dict)  # sequence -> (prompt, tokens computed)

    def send(self, request: StepRequest) -> None:
        """Send the step and note when, and what it is for."""
        prompt_tokens = sum(_encoded(request) or request.chunk_tokens)
        decoding, needed = self._work(request)
        record = StepRecord(self.clock(), prompt_tokens, needed, decoding=decoding)
        self.records.append(record)
        self._waiting.append(record)
        self.shards.send(request)

    async def receive(self) -> StepReply:
        """Take the reply to the oldest step that waits for one, and note when it came. Raises ShardError."""
        reply = await self.shards.receive()
        record = self._waiting.popleft()
        record.answered_at, record.generated_tokens = self.clock(), len(reply.ids)
        if self.came is not None:
            self.came(len(reply.ids))
        return reply

    async def info(self) -> ModelInfo:
        """What the shards loaded. Raises ShardError."""
        return await self.shards.info()

    async def warmup(self, **wanted: int) -> KvCache:
        """Size the KV cache. Raises ShardError."""
        return await self.shards.warmup(**wanted)

    async def health(self) -> ShardHealth:
        """How many steps the shards have received and finished. Raises ShardError."""
        return await self.shards.health()

    def check(self) -> None:
        """Raises ShardError when a shard is known to be lost."""
        self.shards.check()

    async def renew(self, error: ShardError) -> KvCache:
        """Wait for other shards. Raises ShardError where nobody starts any."""
        return await self.shards.renew(error)

    async def start_profile(self) -> None:
        """Start the profiler of the first rank. Raises ShardError."""
        await self.shards.start_profile()

    async def stop_profile(self, trace_path: str = "") -> list[OperatorTime]:
        """Stop the profiler; where the time of its steps went. Raises ShardError."""
        return await self.shards.stop_profile(trace_path)

    async def close(self) -> None:
        """Close the connections to the shards."""
        await self.shards.close()

    def _work(self, request: StepRequest) -> tuple[int, BytesAndFlops | None]:
        """How many sequences decode, and what the step needs at least, from the lengths that its sequences have."""
        for id in request.retire:
            self._progress.pop(id, None)
        for sequence in request.add:
            encoded = len(sequence.encoder_token_ids)  # read by the encoder before the chunks of this step
            self._progress[sequence.id] = (encoded + len(sequence.token_ids), encoded)
        decoding = [id for id, (prompt, done) in self._progress.items() if request.decode and done >= prompt]
        pieces, sampled = [], 0
        for id, count in [*zip(request.chunk_ids, request.chunk_tokens, strict=True), *((id, 1) for id in decoding)]:
            prompt, done = self._progress[id]
            self._progress[id] = (prompt, done + count)
            pieces.append(Piece(done, count))
            sampled += done + count >= prompt
        if self.served is None or not pieces:
            return len(decoding), None
        step = self.served.step(pieces, sampled=sampled)
        lengths = _encoded(request)
        return len(decoding), step.plus(self.served.encode(lengths)) if lengths else step


def _encoded(request: StepRequest) -> list[int]:
    """Lengths of the prompts that an encoder reads in this step."""
    return [len(sequence.encoder_token_ids) for sequence in request.add if sequence.encoder_token_ids]
