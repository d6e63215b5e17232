"""What several router tests build: small tokenizers, limits, and a running batcher over fake shards."""

from __future__ import annotations

import asyncio
import json
import signal
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, field
from functools import cache
from typing import Any
from unittest.mock import patch

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from router.aside import TaskError
from router.aside.pool import Aside
from router.batcher import Batcher
from router.entry import Entry, Event, Failed, Finished, Sampling, Token, ValidRequest
from router.limits import Limits
from router.metrics import Metrics, StepTrace
from router.text import ModelTokenizer
from tests.router.fake_shards import FakeShardedClient, fake_next_token

EOS = 256  # in byte_tokenizer


@cache
def byte_tokenizer() -> ModelTokenizer:
    """One token for each byte, 0 … 255 in byte order, then `</s>`."""
    vocab = {character: byte for byte, character in bytes_to_characters().items()}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken("</s>", special=True)])
    return ModelTokenizer.of(tokenizer, frozenset({EOS}))


def bytes_to_characters() -> dict[int, str]:
    """GPT-2's printable stand-ins for the 256 bytes."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in printable]
    return {byte: chr(byte) for byte in printable} | {byte: chr(256 + n) for n, byte in enumerate(others)}


def word_tokenizer(*words: str) -> ModelTokenizer:
    """One token for each word, in order, whose `▁` is a space that vanishes at the start of a text; then `</s>`."""
    tokenizer = Tokenizer(models.WordLevel({word: id for id, word in enumerate(words)}, unk_token=words[0]))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.decoder = decoders.Metaspace()
    tokenizer.add_special_tokens([AddedToken("</s>", special=True)])
    return ModelTokenizer.of(tokenizer, frozenset({len(words)}))


def make_limits(**overrides: Any) -> Limits:
    values: dict[str, Any] = {
        "max_input_length": 64,
        "max_total_tokens": 128,
        "max_batch_total_tokens": 1024,
        "max_batch_prefill_tokens": 64,
        "block_size": 16,
        "max_concurrent_requests": 128,
        "max_batch_size": None,
        "waiting_served_ratio": 0.3,
        "max_waiting_tokens": 20,
        "max_best_of": 2,
        "max_stop_sequences": 4,
        "max_top_n_tokens": 5,
        "vocab_size": 257,
    }
    values |= overrides
    values.setdefault("num_blocks", -(-values["max_batch_total_tokens"] // values["block_size"]))
    return Limits(**values)


def fake_shards(limits: Limits, **overrides: Any) -> FakeShardedClient:
    """Shards that check exactly these limits."""
    return FakeShardedClient(
        **{
            "vocab_size": 256,
            "block_size": limits.block_size,
            "max_batch_total_tokens": limits.max_batch_total_tokens,
            "max_batch_prefill_tokens": limits.max_batch_prefill_tokens,
            "max_batch_size": limits.max_batch_size,
            **overrides,
        }
    )


def request_of(prompt: Sequence[int] | int, max_new_tokens: int = 4, seed: int = 0, **fields: Any) -> ValidRequest:
    token_ids = list(range(1, prompt + 1)) if isinstance(prompt, int) else list(prompt)
    return ValidRequest(token_ids, max_new_tokens, Sampling(do_sample=seed != 0, seed=seed), **fields)


def tokens_alone(request: ValidRequest, vocab_size: int = 256) -> list[int]:
    """What fake shards generate for the request when nothing else runs and no EOS comes."""
    token_ids = [*request.encoder_ids, *request.token_ids]
    for _ in range(request.max_new_tokens):
        token_ids.append(fake_next_token(token_ids, request.sampling.seed, vocab_size))
    return token_ids[-request.max_new_tokens :]


@dataclass
class Running:
    """A batcher at work."""

    batcher: Batcher
    shards: FakeShardedClient
    limits: Limits
    traces: list[StepTrace] = field(default_factory=list)


@asynccontextmanager
async def running(shards: FakeShardedClient | None = None, **overrides: Any) -> AsyncIterator[Running]:
    """Drained at the end, so that every invariant of a clean end can be checked after the block."""
    limits = make_limits(**overrides)
    shards = shards or fake_shards(limits)
    traces: list[StepTrace] = []
    batcher = Batcher(shards, byte_tokenizer(), limits, Metrics(limits), trace=traces.append)
    task = asyncio.create_task(batcher.run())
    try:
        yield Running(batcher, shards, limits, traces)
        await batcher.drain(5)
        assert batcher._ended.is_set(), "the loop did not end by itself"
    finally:
        task.cancel()
        await asyncio.wait({task})
        if not task.cancelled():
            task.result()


async def events_of(entry: Entry) -> list[Event]:
    """All events up to the last."""
    events = [await entry.events.get()]
    while not isinstance(events[-1], Finished | Failed):
        events.append(await entry.events.get())
    return events


async def token_ids_of(entry: Entry) -> list[int]:
    return [event.id for event in await events_of(entry) if isinstance(event, Token)]


class TasksInProcess:
    """Does tasks aside as a process for them does, but in this one."""

    async def ask(self, order: dict[str, Any], seconds: float) -> dict[str, Any]:
        """Its answer, through JSON like that of a process."""
        from router.aside.__main__ import _answer  # what does the work is large

        with ended_after(seconds):
            answer = _answer(json.loads(json.dumps(order)))
        told: dict[str, Any] = json.loads(json.dumps(answer))
        return told

    async def end(self) -> None:
        """There is nothing to end."""


@contextmanager
def ended_after(seconds: float) -> Iterator[None]:
    """A block in the main thread that takes longer, waiting aside, ends with a TaskError."""

    def end(*_: object) -> None:
        raise TaskError(f"it takes longer than {seconds:g} s")

    before = signal.signal(signal.SIGVTALRM, end)
    signal.setitimer(signal.ITIMER_VIRTUAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_VIRTUAL, 0)
        signal.signal(signal.SIGVTALRM, before)


@contextmanager
def tasks_in_process() -> Iterator[None]:
    """Servers in this block start no process for tasks aside, which takes longer than most tests."""

    async def start(pool: Aside) -> TasksInProcess:
        return TasksInProcess()

    with patch.object(Aside, "_start", start):
        yield
