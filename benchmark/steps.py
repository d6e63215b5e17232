"""Drives shards step by step, as the router does, for one batch at a time: a whole-prompt step, then decode steps.

Two requests are under way while decoding, so that the shards compute one while the next already waits in their queue.
No tokens are looked at and nothing is admitted or stopped: this measures the shards, not a scheduler.
"""

from __future__ import annotations

import itertools
import random
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from benchmark.report import BenchError
from benchmark.shards import FIRST_ID
from router.client import Shards, StepReply, StepRequest, new_sequence, step_request
from router.entry import Sampling

REQUESTS_UNDER_WAY = 2  # as in router/batcher.py


@dataclass(frozen=True)
class Times:
    """One run of one batch, in seconds."""

    prefill: float
    decode: float  # from the first request sent to the last reply, D-1 steps
    intervals: Sequence[float]  # between the replies of decode steps


def random_prompts(count: int, length: int, vocab_size: int, seed: int) -> list[list[int]]:
    """The same ids for the same numbers, on every machine."""
    draw = random.Random(seed)
    return [[draw.randrange(vocab_size) for _ in range(length)] for _ in range(count)]


class StepDriver:
    """The one user of some shards. Raises ShardError when they are lost, BenchError when a step fails."""

    def __init__(
        self, shards: Shards, block_size: int, num_blocks: int, clock: Callable[[], float] = time.perf_counter
    ) -> None:
        self._shards = shards
        self._block_size = block_size
        self._num_blocks = num_blocks
        self._clock = clock
        self._ids = itertools.count(FIRST_ID)
        self._step_numbers = itertools.count(1)

    def check(self, batch_size: int, length: int) -> None:
        """Raise BenchError when `batch_size` sequences of `length` tokens do not fit into the KV cache."""
        needed, cached = batch_size * self._blocks_for(length), self._num_blocks
        if needed > cached:
            fits = cached // self._blocks_for(length)
            raise BenchError(
                f"--batch-size {batch_size} with {length} tokens each needs a KV cache of {needed * self._block_size} "
                f"tokens, but the shards have {cached * self._block_size}: use a --batch-size of at most {fits}, "
                "shorter lengths, or a server with a larger --max-batch-total-tokens"
            )

    async def run(
        self, prompts: Sequence[Sequence[int]], decode_length: int, sampling: Sequence[Sampling], top_n_tokens: int = 0
    ) -> Times:
        """Prefill all prompts in one step, decode to `decode_length` tokens each, and let go of them."""
        ids = [next(self._ids) for _ in prompts]
        first = self._prefill(ids, prompts, decode_length, sampling, top_n_tokens)
        started = self._clock()
        await self._exchange(first, len(ids))
        prefill = self._clock() - started
        replies = await self._decode(decode_length - 1, len(ids))
        await self._exchange(step_request(next(self._step_numbers), retire=ids), 0)
        intervals = [late - early for early, late in itertools.pairwise(replies)]
        return Times(prefill, replies[-1] - replies[0], intervals)

    def _prefill(
        self,
        ids: Sequence[int],
        prompts: Sequence[Sequence[int]],
        decode_length: int,
        sampling: Sequence[Sampling],
        top_n_tokens: int,
    ) -> StepRequest:
        blocks = itertools.count()
        add = [
            new_sequence(
                id,
                prompt,
                list(itertools.islice(blocks, self._blocks_for(len(prompt) + decode_length))),
                choice,
                top_n_tokens=top_n_tokens,
            )
            for id, prompt, choice in zip(ids, prompts, sampling, strict=True)
        ]
        chunks = [(id, len(prompt)) for id, prompt in zip(ids, prompts, strict=True)]
        return step_request(next(self._step_numbers), add=add, chunks=chunks)

    async def _decode(self, num_steps: int, batch_size: int) -> list[float]:
        """The time of the first request, then of every reply."""
        times = [self._clock()]
        sent = 0
        for received in range(num_steps):
            while sent < min(received + REQUESTS_UNDER_WAY, num_steps):
                self._shards.send(step_request(next(self._step_numbers), decode=True))
                sent += 1
            _check_reply(await self._shards.receive(), batch_size)
            times.append(self._clock())
        return times

    async def _exchange(self, request: StepRequest, num_tokens: int) -> None:
        self._shards.send(request)
        _check_reply(await self._shards.receive(), num_tokens)

    def _blocks_for(self, tokens: int) -> int:
        return -(-tokens // self._block_size)


def _check_reply(reply: StepReply, num_tokens: int) -> None:
    if reply.error:
        raise BenchError(f"a step failed on the shards: {reply.error}")
    if len(reply.ids) != num_tokens:
        raise BenchError(f"a step gave {len(reply.ids)} tokens where {num_tokens} were due: the server is not idle")
