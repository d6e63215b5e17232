"""Runs prompts through the router's batching loop, without HTTP: all at once, or in gangs one after the other.

The rules of admission are the server's. What a command measures about it is its own business: the shards that it hands
in note every step (`timed_shards.py`).
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence

from benchmark.prompts import Prompt
from benchmark.report import BenchError
from benchmark.timed_shards import TimedShards
from router.batcher import Batcher
from router.entry import Entry, Failed, Finished, ValidRequest
from router.limits import Limits
from router.metrics import Metrics
from router.text import ModelTokenizer

DRAIN_SECONDS = 30.0  # for the last sequences to be let go of; nothing is left to compute


async def generate(
    timed: TimedShards,
    tokenizer: ModelTokenizer,
    limits: Limits,
    prompts: Sequence[Prompt],
    decoder_start: int | None = None,
    gang: int | None = None,
) -> list[list[int]]:
    """Run all prompts to their ends; the tokens of each. Raises ShardError, or BenchError for a sequence that failed.

    gang: so many enter together, each time when all that entered before have ended; None: each when there is room.
    """
    logging.getLogger("router").addHandler(logging.NullHandler())  # failures are raised here, not logged
    batcher = Batcher(timed, tokenizer, limits, Metrics(limits))
    loop = asyncio.create_task(batcher.run())
    entries: list[Entry] = []
    failures: list[str] = []
    for start in range(0, len(prompts), gang or len(prompts)):
        entering = prompts[start : start + gang] if gang else prompts
        requests = [ValidRequest(prompt.token_ids, prompt.max_new_tokens) for prompt in entering]
        entered = [batcher.submit(request.read_by_encoder(decoder_start)) for request in requests]
        failures += [error for error in await asyncio.gather(*map(_finish, entered)) if error]
        entries += entered
        if failures:
            break
    await batcher.drain(DRAIN_SECONDS)
    await loop
    if batcher.failure is not None:
        raise batcher.failure
    if failures:
        raise BenchError(f"{len(failures)} of {len(prompts)} sequences failed: {failures[0]}")
    return [entry.generated_ids for entry in entries]


async def _finish(entry: Entry) -> str | None:
    """Take an entry's events to the last; why it failed, if it did."""
    while True:
        event = await entry.events.get()
        if isinstance(event, Finished):
            return None
        if isinstance(event, Failed):
            return str(event.error)
