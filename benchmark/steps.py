"""Drives shards step by step, as the router does, for one batch at a time: a whole-prompt step, then decode steps.

Two requests are under way while decoding, so that the shards compute one while the next already waits in their queue.
No tokens are looked at and nothing is admitted or stopped: this measures the shards, not a scheduler. TGI's own tool
measures more: its shards make text of every token, and the next step is sent when that is done (`detokenise`).
"""

from __future__ import annotations

import itertools
import random
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractAsyncContextManager, nullcontext
from dataclasses import dataclass

from benchmark.report import BenchError
from benchmark.shards import FIRST_ID
from router.client import Shards, StepReply, StepRequest
from router.entry import Sampling, ValidRequest
from router.wire import new_sequence, step_request

REQUESTS_UNDER_WAY = 2  # as in router/batcher.py


@dataclass(frozen=True)
class Times:
    """The times of one run of one batch, in seconds. The first rank says how much of each it computed."""

    prefill: float
    decode: float  # from the first request sent to the last reply, D-1 steps
    intervals: Sequence[float]  # between the replies of decode steps
    prefill_computed: float  # part of `prefill` in which the first rank computed
    decode_computed: float  # part of `decode` in which the first rank computed


Watch = Callable[[str], AbstractAsyncContextManager[None]]
Detokenise = Callable[[Sequence[int]], Callable[[int], str]]  # of a prompt, what makes text of each token behind it


def unwatched(phase: str) -> AbstractAsyncContextManager[None]:
    """A `Watch` that does nothing in any phase."""
    return nullcontext()


def random_prompts(count: int, length: int, vocab_size: int, seed: int) -> list[list[int]]:
    """`count` prompts of `length` random token ids; equal arguments give equal prompts on every machine."""
    draw = random.Random(seed)
    return [[draw.randrange(vocab_size) for _ in range(length)] for _ in range(count)]


class StepDriver:
    """The one user of some shards. Raises ShardError when they are lost, BenchError when a step fails."""

    def __init__(
        self,
        shards: Shards,
        block_size: int,
        num_blocks: int,
        decoder_start: int | None = None,
        clock: Callable[[], float] = time.perf_counter,
        detokenise: Detokenise | None = None,
    ) -> None:
        """detokenise: what makes text of a step's tokens before its time ends and the next is sent; None: nothing."""
        self._shards = shards
        self._block_size = block_size
        self._num_blocks = num_blocks
        self._decoder_start = decoder_start
        self._clock = clock
        self._detokenise = detokenise
        self._most_under_way = REQUESTS_UNDER_WAY if detokenise is None else 1
        self._texts: dict[int, Callable[[int], str]] = {}
        self._ids = itertools.count(FIRST_ID)
        self._step_numbers = itertools.count(1)

    def check(self, batch_size: int, sequence_length: int, decode_length: int) -> None:
        """Raise BenchError when so many sequences do not fit into the KV cache."""
        request = ValidRequest([0] * sequence_length, decode_length).read_by_encoder(self._decoder_start)
        each, cached = request.size().blocks(self._block_size), self._num_blocks
        if batch_size * each > cached:
            raise BenchError(
                f"--batch-size {batch_size} with {request.size().tokens} tokens each needs a KV cache of "
                f"{batch_size * each * self._block_size} tokens, but the shards have {cached * self._block_size}: use "
                f"a --batch-size of at most {cached // each}, shorter lengths, or a server with a larger "
                "--max-batch-total-tokens"
            )

    async def run(
        self,
        prompts: Sequence[Sequence[int]],
        decode_length: int,
        sampling: Sequence[Sampling],
        top_n_tokens: int = 0,
        watch: Watch = unwatched,
    ) -> Times:
        """Prefill all prompts in one step, decode to `decode_length` tokens each, and let go of them.

        watch: entered around the prefill and around the decodes.
        """
        ids = [next(self._ids) for _ in prompts]
        if (detokenise := self._detokenise) is not None:
            self._texts = {id: detokenise(prompt) for id, prompt in zip(ids, prompts, strict=True)}
        first = self._prefill(ids, prompts, decode_length, sampling, top_n_tokens)
        async with watch("prefill"):
            started = self._clock()
            computed = await self._exchange(first, len(ids))
            prefill = self._clock() - started
        async with watch("decode"):
            replies, steps = await self._decode(decode_length - 1, len(ids))
        await self._exchange(step_request(next(self._step_numbers), retire=ids), 0)
        intervals = [late - early for early, late in itertools.pairwise(replies)]
        return Times(prefill, replies[-1] - replies[0], intervals, computed, steps)

    def _prefill(
        self,
        ids: Sequence[int],
        prompts: Sequence[Sequence[int]],
        decode_length: int,
        sampling: Sequence[Sampling],
        top_n_tokens: int,
    ) -> StepRequest:
        blocks = itertools.count()
        requests = [
            ValidRequest(prompt, decode_length, choice, top_n_tokens=top_n_tokens).read_by_encoder(self._decoder_start)
            for prompt, choice in zip(prompts, sampling, strict=True)
        ]
        add = [
            new_sequence(
                id, request, list(itertools.islice(blocks, request.size().blocks(self._block_size))), self._block_size
            )
            for id, request in zip(ids, requests, strict=True)
        ]
        chunks = [(id, len(request.token_ids)) for id, request in zip(ids, requests, strict=True)]
        return step_request(next(self._step_numbers), add=add, chunks=chunks)

    async def _decode(self, num_steps: int, batch_size: int) -> tuple[list[float], float]:
        """The time of the first request, then of every reply; and the seconds that the first rank computed."""
        times, computed = [self._clock()], 0.0
        sent = 0
        for received in range(num_steps):
            while sent < min(received + self._most_under_way, num_steps):
                self._shards.send(step_request(next(self._step_numbers), decode=True))
                sent += 1
            reply = self._read(await self._shards.receive(), batch_size)
            times.append(self._clock())
            computed += reply.forward_ns / 1e9
        return times, computed

    async def _exchange(self, request: StepRequest, num_tokens: int) -> float:
        """One step on its own; returns the seconds that the first rank computed."""
        self._shards.send(request)
        return self._read(await self._shards.receive(), num_tokens).forward_ns / 1e9

    def _read(self, reply: StepReply, num_tokens: int) -> StepReply:
        """A reply that is as it must be, with its tokens in the texts where there are any."""
        _checked(reply, num_tokens)
        if self._texts:
            for id, token_id in zip(reply.ids, reply.token_ids, strict=True):
                self._texts[id](token_id)
        return reply


def _checked(reply: StepReply, num_tokens: int) -> StepReply:
    if reply.error:
        raise BenchError(f"a step failed on the shards: {reply.error}")
    if len(reply.ids) != num_tokens:
        raise BenchError(f"a step gave {len(reply.ids)} tokens where {num_tokens} were due: the server is not idle")
    return reply
