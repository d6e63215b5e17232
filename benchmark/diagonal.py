"""FlexGen's diagonal block schedule: batches enter evenly, so that memory and work are level and a block can be larger.

The anchor is appendix A.2 of FlexGen (Sheng et al. 2023, arXiv 2303.06865). In a zig-zag block all batches are equally
far: their keys and values grow together, and at the last token all have their greatest length at once. In the diagonal
order, batch j of n that are under way enters at step j·g // n, for outputs of g tokens: one step after the other where
n is g. Some are at their beginning then and some at their end, and what one lets go of is taken by the next. In the
memory of a zig-zag block there is room for up to (2s + 2g) / (2s + g) times its sequences, with prompts of s tokens.

Lengths are known, so the KV cache is divided over time: a block belongs to a sequence from the step that writes its
first token there until the sequence has ended, and to others before and after. A sequence's table names all its blocks
from the beginning; nothing looks at one before the sequence has written to it.

Left out: outputs that end where nobody knows, and encoders, which need their blocks at once. A batch whose outputs
differ in length keeps its place until its longest could have ended.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import NamedTuple

from benchmark.cost import StepWork
from benchmark.prompts import Prompt
from benchmark.report import BenchError
from benchmark.steps import REQUESTS_UNDER_WAY
from router.client import ShardError, Shards, StepReply, StepRequest
from router.entry import ValidRequest
from router.queue import blocks_for
from router.wire import mistake_in, new_sequence, step_request


class PlannedStep(NamedTuple):
    """Which prompts, by their number, enter with a step and leave before it, and what it computes."""

    entering: Sequence[int]
    leaving: Sequence[int]
    work: StepWork


@dataclass(frozen=True)
class Plan:
    """All steps of a run. The last one only lets go of what has ended."""

    steps: Sequence[PlannedStep]
    tables: Sequence[Sequence[int]]  # the KV blocks of each prompt's sequence, in order
    num_blocks: int  # that are in use at once at most, which is how many there are
    at_once: int  # sequences at most
    level: range  # the steps in which all batches of the block are under way

    @property
    def works(self) -> list[StepWork]:
        """What the steps compute, without those that compute nothing."""
        return [step.work for step in self.steps if step.work.sampled]

    def level_rate(self, seconds: Sequence[float]) -> float | None:
        """Generated tokens a second while the block is whole; None where it never is. seconds: of each step."""
        if not self.level:
            return None
        return sum(self.steps[n].work.sampled for n in self.level) / sum(seconds[n] for n in self.level)


def planned(prompts: Sequence[Prompt], num_batches: int, batch_size: int, block_size: int) -> Plan:
    """A run of all prompts in their order. num_batches: under way at once; block_size: tokens of a KV block."""
    longest = max(prompt.max_new_tokens for prompt in prompts)
    entries = [_entry(number // batch_size, num_batches, longest) for number in range(len(prompts))]
    ends = [entry + prompt.max_new_tokens for entry, prompt in zip(entries, prompts, strict=True)]
    num_steps = max(ends) + 1
    entering: list[list[int]] = [[] for _ in range(num_steps)]
    leaving: list[list[int]] = [[] for _ in range(num_steps)]
    for number, (entry, end) in enumerate(zip(entries, ends, strict=True)):
        entering[entry].append(number)
        leaving[end].append(number)
    at_once = max(accumulate(len(new) - len(old) for new, old in zip(entering, leaving, strict=True)))
    works = _works(prompts, entries, entering, leaving)
    tables, num_blocks = _divided(prompts, entries, block_size)
    level = range(
        _entry(num_batches - 1, num_batches, longest),
        _entry(blocks_for(len(prompts), batch_size), num_batches, longest),
    )
    steps = [PlannedStep(*step) for step in zip(entering, leaving, works, strict=True)]
    return Plan(steps, tables, num_blocks, at_once, level)


def _entry(batch: int, num_batches: int, longest: int) -> int:
    """The step with which a batch enters; longest: generated tokens, and so steps, of a sequence."""
    return batch * longest // num_batches


def _works(
    prompts: Sequence[Prompt],
    entries: Sequence[int],
    entering: Sequence[Sequence[int]],
    leaving: Sequence[Sequence[int]],
) -> Iterator[StepWork]:
    """What each step computes. A sequence that entered `age` steps ago looks at its prompt's keys and `age` more."""
    decoding, offset = 0, 0  # a sequence's context is its prompt's length less its entry, plus the step
    fresh: Sequence[int] = ()  # those of the step before, which decode from now on
    for step, (new, old) in enumerate(zip(entering, leaving, strict=True)):
        for numbers, sign in ((fresh, 1), (old, -1)):
            decoding += sign * len(numbers)
            offset += sign * sum(len(prompts[number].token_ids) - entries[number] for number in numbers)
        fresh, lengths = new, [len(prompts[number].token_ids) for number in new]
        pairs = sum(length**2 / 2 for length in lengths)
        yield StepWork(sum(lengths), pairs, 0, decoding, offset + decoding * step, decoding + len(new))


def _divided(prompts: Sequence[Prompt], entries: Sequence[int], block_size: int) -> tuple[list[list[int]], int]:
    """The blocks of each sequence, as few as are ever in use at once, and how many these are."""
    lives = sorted(
        (begin, end, number)
        for number, (prompt, entry) in enumerate(zip(prompts, entries, strict=True))
        for begin, end in _lives(prompt, entry, block_size)
    )
    tables: list[list[int]] = [[] for _ in prompts]
    used: list[tuple[int, int]] = []  # until when, block
    for begin, end, number in lives:  # a sequence's own are in their order
        is_free = bool(used) and used[0][0] <= begin
        block = heapq.heappop(used)[1] if is_free else len(used)
        heapq.heappush(used, (end, block))
        tables[number].append(block)
    return tables, len(used)


def _lives(prompt: Prompt, entry: int, block_size: int) -> Iterator[tuple[int, int]]:
    """For each block of a sequence, the step that first writes to it and the one from which it is free again.

    The prompt is written with the entry, and one token with each step behind it; the last token never is.
    """
    given, end = len(prompt.token_ids), entry + prompt.max_new_tokens
    for first in range(0, given + prompt.max_new_tokens - 1, block_size):
        yield entry + max(0, first - given + 1), end


# ---------------------------------------------------------------------------------------------------------- memory


def level_blocks(given: int, generated: int, num_batches: int, batch_size: int, block_size: int) -> int:
    """KV blocks that are in use at most while so many batches, all of these lengths, are under way and go on entering.

    Sequences only grow between two entries, so the most are in use right before one.
    """
    most = 0
    for number in range(num_batches):
        step = _entry(number, num_batches, generated) - 1
        others = [_entry(number - back, num_batches, generated) for back in range(1, num_batches + 1)]
        if others[0] <= step:
            most = max(most, sum(blocks_for(given + step - entry, block_size) for entry in others))
    return batch_size * most


def fitting_batches(given: int, generated: int, num_batches: int, block_size: int) -> int:
    """The batches that the KV memory of a zig-zag block of `num_batches` holds in the diagonal order; never fewer."""
    room, found = num_batches * blocks_for(given + generated, block_size), num_batches
    while level_blocks(given, generated, found + 1, 1, block_size) <= room:
        found += 1
    return found


# ------------------------------------------------------------------------------------------------------------- run


async def generate(
    shards: Shards, plan: Plan, prompts: Sequence[Prompt], block_size: int, vocab_size: int
) -> list[list[int]]:
    """Run all prompts as planned, two steps under way; the tokens of each.

    Raises ShardError when the shards are lost, BenchError when a step fails.
    """
    tokens: list[list[int]] = [[] for _ in prompts]

    def take(reply: StepReply, number: int) -> None:
        if reply.error:
            raise BenchError(f"a step failed on the shards: {reply.error}")
        if mistake := mistake_in(reply, number, vocab_size):
            raise ShardError(0, mistake)
        for id, token_id in zip(reply.ids, reply.token_ids, strict=True):
            tokens[id - 1].append(token_id)

    count = len(plan.steps)
    for number in range(1, count + REQUESTS_UNDER_WAY + 1):
        shards.check()
        if number > REQUESTS_UNDER_WAY:
            take(await shards.receive(), number - REQUESTS_UNDER_WAY)
        if number <= count:
            shards.send(_request(plan, prompts, number, block_size))
    return tokens


def _request(plan: Plan, prompts: Sequence[Prompt], number: int, block_size: int) -> StepRequest:
    """A step in wire form; a sequence's id is its prompt's number, from 1 on."""
    step = plan.steps[number - 1]
    requests = [ValidRequest(prompts[one].token_ids, prompts[one].max_new_tokens) for one in step.entering]
    return step_request(
        number,
        retire=[one + 1 for one in step.leaving],
        add=[
            new_sequence(one + 1, request, plan.tables[one], block_size)
            for one, request in zip(step.entering, requests, strict=True)
        ],
        chunks=[(one + 1, len(prompts[one].token_ids)) for one in step.entering],
        decode=bool(step.work.decoding),
    )
