"""Admission of waiting requests into the running batch.

Pure arithmetic over plain integers: no clock, no asyncio, no gRPC, so every rule here can be tested with literals. The
order is strictly first in, first out: a head that does not fit stops the scan, because skipping it would starve it.
The ratio and waiting rules follow TGI (`waiting_served_ratio`, `max_waiting_tokens`); a prompt that does not fit into
the step's prompt budget is admitted with a first chunk of what is left.

A request reserves a sequence in two measures: tokens, against `max_batch_total_tokens`, and whole KV blocks, against
the pool. It is the longest possible, prompt + `max_new_tokens`, so that nothing can run out while it runs; or, where
blocks are given on demand, what it has and a little more, and `forecast.py` has a say before. A prefix that is in the
cache saves its computation; in both measures it counts for everyone who uses it.

The prompt of an encoder-decoder is read by its encoder, which takes it whole: it waits until the step has room for all
of it. Its decoder starts from one token of its own; that one and the generated tokens without the last, which is never
read again, take as many places in the KV cache as there are tokens to generate.
"""

from __future__ import annotations

import itertools
import math
import operator
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TypeVar

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Budget:
    """What this step may still take in."""

    prefill_tokens: int  # Prompt tokens that the step may still compute.
    tokens: int  # The part of max_batch_total_tokens that no running request has reserved.
    blocks: int  # Free KV blocks.
    places: int | None  # Requests that may still join under max_batch_size; None if there is no such limit.
    block_size: int


@dataclass(frozen=True, slots=True)
class RequestSize:
    """What one waiting request needs."""

    input_length: int
    max_new_tokens: int
    is_encoded: bool = False  # Whether an encoder reads the prompt.
    cached: int = 0  # Tokens at the beginning of the prompt whose keys and values are in the KV cache already.
    rebuilt: int = 0  # Tokens generated before the shards were lost, which are computed again behind the prompt.
    most_at_once: int = 0  # Tokens of its first chunk at most; 0: any number.
    passing: int = 0  # Blocks that it needs in its first step alone.

    @property
    def tokens(self) -> int:
        """The longest sequence that the request can reach."""
        return self.input_length + self.max_new_tokens

    @property
    def prefill(self) -> int:
        """Prompt tokens to compute, and tokens to rebuild; behind an encoder the next steps rebuild them."""
        return self.input_length - self.cached + (0 if self.is_encoded else self.rebuilt)

    @property
    def least_prefill(self) -> int:
        """Prompt tokens that the first step must have room for."""
        return self.prefill if self.is_encoded else min(self.prefill, 1)

    def blocks(self, block_size: int) -> int:
        """Whole KV blocks: an encoded prompt has its own."""
        if self.is_encoded:
            return blocks_for(self.input_length, block_size) + blocks_for(self.max_new_tokens, block_size)
        return blocks_for(self.tokens, block_size)


def blocks_for(tokens: int, block_size: int) -> int:
    """Whole blocks that hold this many tokens."""
    return -(-tokens // block_size)


def next_batch(
    waiting: Iterable[RequestSize],
    budget: Budget,
    min_size: int | None,
    num_expected: Callable[[int, int], int] = max,
) -> list[int]:
    """The first prompt chunk of each request to admit now, from the head of the queue; empty: admit none.

    `waiting` may be lazy: nothing beyond the first request that does not fit is looked at. num_expected: given two
    numbers of requests from the head, of which the first fit until all have ended, how many do up to the second. It is
    asked of twice as many each time, and only of what fits into `budget`.
    """
    least, chunks = min_size or 0, list[int]()
    fitting = _fitting_chunks(waiting, budget)
    while more := list(itertools.islice(fitting, max(least - len(chunks), len(chunks), 1))):
        known = len(chunks)
        chunks += more
        if len(chunks) < least or (num_joining := num_expected(known, len(chunks))) < least:
            return []
        if num_joining < len(chunks):
            return chunks[:num_joining]
    return chunks


def _fitting_chunks(waiting: Iterable[RequestSize], budget: Budget) -> Iterator[int]:
    prefill, tokens, blocks = budget.prefill_tokens, budget.tokens, budget.blocks
    for num_before, size in enumerate(waiting):
        tokens -= size.tokens
        blocks -= size.blocks(budget.block_size) + size.passing
        if num_before == budget.places or tokens < 0 or blocks < 0 or prefill < size.least_prefill:
            return
        wanted = min(size.prefill, size.most_at_once or size.prefill)
        yield min(wanted, prefill)
        prefill -= wanted
        if prefill < 0:  # this one starts with a chunk: the step is full
            return


def min_size(running: int, steps_since_admission: int, ratio: float, max_waiting_tokens: int) -> int | None:
    """How many must wait before they may join the running batch; None: any number may.

    `steps_since_admission` counts the admitting step itself, as TGI's counter does.
    """
    if running == 0 or steps_since_admission >= max_waiting_tokens:
        return None
    return math.floor(running * ratio)


def take_from(queue: deque[T], entries: Sequence[T]) -> None:
    """Remove `entries` from a queue; mostly they are its first."""
    if all(map(operator.is_, entries, queue)):
        for _ in entries:
            queue.popleft()
    else:
        gone = set(map(id, entries))
        kept = [entry for entry in queue if id(entry) not in gone]
        queue.clear()
        queue.extend(kept)
