"""The order in which more sequences than a step has go through a model: row, zig-zag, diagonal, continuous.

The first three are FlexGen's schedules (Sheng et al. 2023, arXiv 2303.06865) as this engine has them. A *batch* is so
many sequences, a *block* is n batches. By row, one batch runs to its end, then the next: every step brings the weights
for one batch. In zig-zag, the batches of a block advance together, so that a layer's weights serve all n before the
next layer's come; the next block begins when the whole block has ended. Continuous is what a server does: under that
block's KV budget, sequences enter as soon as those before have ended. The tokens are the same by each.

In the diagonal order (FlexGen's appendix A.2), batch j of n that are under way enters at step j·g // n, for outputs of
g tokens: some are at their beginning then and some at their end, and what one lets go of is taken by the next. In the
memory of a zig-zag block there is room for up to (2s + 2g) / (2s + g) times its sequences, with prompts of s tokens.
Lengths are known, so the KV cache is divided over time: a block belongs to a sequence from the step that writes its
first token there until the sequence has ended, and to others before and after. A sequence's table names all its blocks
from the beginning; nothing looks at one before the sequence has written to it. Left out: outputs that end where nobody
knows, and encoders, which need their blocks at once. A batch whose outputs differ in length keeps its place until its
longest could have ended.

What a run was, or would be, is a list of steps; what they take in prefill and decode is arithmetic here, and so is the
search for the best policy.
"""

from __future__ import annotations

import heapq
import statistics
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import Any, NamedTuple

from benchmark.cost.step_times import Cost, StepWork
from benchmark.engine.generation import Prompt, StepRecord
from benchmark.engine.shards import REQUESTS_UNDER_WAY
from benchmark.fleet.replica import Replica, Simulated, Tally
from benchmark.fleet.traffic import NEVER
from benchmark.result import BenchError
from router.scheduling.limits import Limits
from router.scheduling.queue import RequestSize, blocks_for
from router.scheduling.request import ValidRequest
from router.shards.client import ShardError, Shards, StepReply, StepRequest
from router.shards.wire import mistake_in, new_sequence, step_request
from server.offload.cost import StepCost

ROW, ZIG_ZAG, DIAGONAL, CONTINUOUS = "row", "zig-zag", "diagonal", "continuous"
SCHEDULES = (ROW, ZIG_ZAG, DIAGONAL, CONTINUOUS)


@dataclass(frozen=True)
class Policy:
    """A schedule and its sizes."""

    schedule: str
    num_gpu_batches: int  # of a block; by row 1; in the diagonal order of a zig-zag block that takes as much memory
    gpu_batch_size: int  # sequences

    @property
    def block(self) -> int:
        """Sequences that are computed together; in the diagonal order at least."""
        return self.num_gpu_batches * self.gpu_batch_size

    @property
    def gang(self) -> int | None:
        """How many sequences enter together, when all before have ended; None: that is not what they wait for."""
        return None if self.schedule in (DIAGONAL, CONTINUOUS) else self.block

    def plan(self, prompts: Sequence[Prompt], block_size: int) -> DiagonalPlan:
        """The run of the diagonal order, with as many batches as fit for the longest prompt and output of all."""
        given = max(len(prompt.token_ids) for prompt in prompts)
        generated = max(prompt.max_new_tokens for prompt in prompts)
        count = fitting_batches(given, generated, self.num_gpu_batches, block_size)
        return diagonal_plan(prompts, count, self.gpu_batch_size, block_size)

    def at_once(self, prompts: Sequence[Prompt], block_size: int) -> int:
        """The most sequences that are computed together."""
        return self.plan(prompts, block_size).at_once if self.schedule == DIAGONAL else self.block

    def kv_blocks(self, prompts: Sequence[Prompt], block_size: int, *, is_encoded: bool = False) -> int:
        """The KV budget: a block of the longest sequences; in the diagonal order what its plan has in use at once.

        is_encoded: an encoder reads the prompts.
        """
        if self.schedule == DIAGONAL:
            return self.plan(prompts, block_size).num_blocks
        sizes = (RequestSize(len(one.token_ids), one.max_new_tokens, is_encoded) for one in prompts)
        return self.block * max(size.blocks(block_size) for size in sizes)

    def limits(
        self,
        prompts: Sequence[Prompt],
        *,
        block_size: int,
        vocab_size: int,
        prefill_tokens: int,
        is_encoded: bool = False,
    ) -> Limits:
        """What keeps a block's sequences together. prefill_tokens: prompt tokens of a step."""
        longest = max(length_of(prompt) for prompt in prompts)
        blocks = self.kv_blocks(prompts, block_size, is_encoded=is_encoded)
        return Limits(
            max_input_length=longest,
            max_total_tokens=longest,
            max_batch_total_tokens=blocks * block_size,
            max_batch_prefill_tokens=prefill_tokens,
            block_size=block_size,
            num_blocks=blocks,
            max_concurrent_requests=len(prompts),
            max_batch_size=self.block,
            waiting_served_ratio=0.0,
            max_waiting_tokens=20,
            max_best_of=1,
            max_stop_sequences=0,
            max_top_n_tokens=0,
            vocab_size=vocab_size,
        )


def policies(schedules: Sequence[str], counts: Sequence[int], gpu_batch_size: int) -> list[Policy]:
    """One for each schedule and number of batches in a block, each once: by row there are no blocks."""
    found = [Policy(name, 1 if name == ROW else count, gpu_batch_size) for name in schedules for count in counts]
    return list(dict.fromkeys(found))


def length_of(prompt: Prompt) -> int:
    """Tokens of a prompt's sequence at its end."""
    return len(prompt.token_ids) + prompt.max_new_tokens


def largest_gang(prompts: Sequence[Prompt], policies: Iterable[Policy], block_size: int) -> int:
    """Prompt tokens of those that enter together and must be one step, lest they advance apart; 0: none must."""
    return max((tokens for policy in policies for tokens in _entering(policy, prompts, block_size)), default=0)


def _entering(policy: Policy, prompts: Sequence[Prompt], block_size: int) -> list[int]:
    """The prompt tokens of each of those steps."""
    if policy.schedule == DIAGONAL:
        return [work.prompt_tokens for work in policy.plan(prompts, block_size).works]
    together = gangs(prompts, policy.gang) if policy.gang else ()
    return [sum(len(prompt.token_ids) for prompt in gang) for gang in together]


def gangs(prompts: Sequence[Prompt], gang: int | None) -> Iterator[Sequence[Prompt]]:
    """The prompts that enter together, in their order."""
    size = gang or len(prompts)
    return (prompts[start : start + size] for start in range(0, len(prompts), size))


# ----------------------------------------------------------------------------------------------------------- accounting


@dataclass(frozen=True)
class Phases:
    """FlexGen's figures of a run: seconds and tokens of prefill, of decode, and of all."""

    prefill_s: float
    prefill_tokens: int  # of prompts
    decode_s: float
    decode_tokens: int  # generated behind the first of each sequence
    total_s: float
    total_tokens: int  # generated

    @classmethod
    def of(cls, records: Sequence[StepRecord], total_s: float) -> Phases:
        """From a run's steps and its whole time.

        A step that has prompts and sequences that decode belongs to both: as long as the run's median step without
        prompts takes, it counts as decode, and the rest of it as prefill.
        """
        seconds = step_seconds(records)
        alone = [s for s, record in zip(seconds, records, strict=True) if record.decoding and not record.prompt_tokens]
        most = statistics.median(alone) if alone else max(seconds, default=0.0)
        prefill_s = decode_s = 0.0
        for s, record in zip(seconds, records, strict=True):
            decoding = min(s, most) if record.prompt_tokens and record.decoding else s * bool(record.decoding)
            decode_s += decoding
            prefill_s += s - decoding
        return cls(
            prefill_s,
            sum(record.prompt_tokens for record in records),
            decode_s,
            sum(record.decoding for record in records),
            total_s,
            sum(record.generated_tokens for record in records),
        )

    def projected(self, measured: int, whole: int) -> Phases:
        """Of sequences of `whole` generated tokens, from those of `measured`, two at least: decode goes on alike."""
        factor = (whole - 1) / (measured - 1)
        decode_s, decode_tokens = self.decode_s * factor, round(self.decode_tokens * factor)
        return replace(
            self,
            decode_s=decode_s,
            decode_tokens=decode_tokens,
            total_s=self.total_s + decode_s - self.decode_s,
            total_tokens=self.total_tokens + decode_tokens - self.decode_tokens,
        )

    def row(self) -> dict[str, Any]:
        """The figures by FlexGen's names."""
        figures: dict[str, Any] = {}
        for kind in ("prefill", "decode", "total"):
            seconds, tokens = getattr(self, f"{kind}_s"), getattr(self, f"{kind}_tokens")
            figures[f"{kind}_latency_s"] = seconds
            figures[f"{kind}_tokens"] = tokens
            figures[f"{kind}_tokens_per_second"] = tokens / seconds if seconds else None
        return figures


def step_seconds(records: Sequence[StepRecord]) -> list[float]:
    """How long each step took: from its request, or from the reply before it if that came later, to its reply."""
    found, free_at = [], 0.0
    for record in records:
        found.append(record.answered_at - max(record.sent_at, free_at))
        free_at = record.answered_at
    return found


# ----------------------------------------------------------------------------------------------------------- prediction


@dataclass(frozen=True)
class StreamedCost:
    """`server.offload.cost` for steps as the scheduler plans them."""

    cost: StepCost

    def seconds(self, work: StepWork) -> float:
        """See `cost.Cost`."""
        sizes = self.cost.sizes
        read = sum(
            num_bytes * (work.prompt_keys(window)[0] - work.prompt_tokens + work.decode_keys(window)[0])
            for window, num_bytes in sizes.seen.items()
        )
        read += 2 * sizes.states * work.sampled
        return self.cost.seconds(tokens=work.prompt_tokens + work.decoding, sampled=work.sampled, kv_bytes=read)


@dataclass
class _Noting:
    """A `Cost` that keeps what it was asked for, and has every step take a second."""

    works: list[StepWork]

    def seconds(self, work: StepWork) -> float:
        self.works.append(work)
        return 1.0


def planned(policy: Policy, prompts: Sequence[Prompt], limits: Limits) -> list[StepWork]:
    """What each step of a run computes, as the router's own scheduler plans them; times are of no matter for that."""
    if policy.schedule == DIAGONAL:
        return policy.plan(prompts, limits.block_size).works
    noting = _Noting([])
    replica, now, number = Replica(limits, noting, Tally()), 0.0, 0
    for gang in gangs(prompts, policy.gang):
        entries = []
        for prompt in gang:
            request = ValidRequest(range(len(prompt.token_ids)), prompt.max_new_tokens)
            number += 1
            entries.append(Simulated(number, request, output_length=prompt.max_new_tokens, arrived_at=now))
        replica.submit_together(entries, now)
        while replica.next_reply_at < NEVER:
            now = replica.next_reply_at
            replica.reply(now)
    return [work for work in noting.works if work.prompt_tokens + work.decoding]


def predicted(works: Sequence[StepWork], cost: Cost) -> Phases:
    """The figures of a run of these steps, one behind the other."""
    records, now = [], 0.0
    for work in works:
        began, now = now, now + cost.seconds(work)
        records.append(StepRecord(began, work.prompt_tokens, None, now, work.sampled, work.decoding))
    return Phases.of(records, now)


@dataclass(frozen=True)
class Found:
    """The best of all policies that fit."""

    policy: Policy
    resident: float  # share of the layers' weights that stays on the device
    phases: Phases
    tried: int


def search(
    candidates: Mapping[Policy, tuple[Sequence[StepWork], float]],
    cost_of: Callable[[float], StepCost],
    memory: float,
    shares: Sequence[float],
) -> Found | None:
    """Try every policy with every share; None where none fits.

    candidates: with the steps of each and the bytes of its KV cache. cost_of: a step's cost at a share; memory: bytes
    for layers that stay, slots, and keys and values. Best is what generates most tokens a second, of equals what
    streams least, of these what comes first.
    """
    found, tried = None, 0
    for policy, (works, kv_bytes) in candidates.items():
        for share in sorted(shares, reverse=True):
            cost = cost_of(share)
            if share * cost.sizes.layers + cost.sizes.slots * (share < 1) + kv_bytes > memory:
                continue
            tried += 1
            phases = predicted(works, StreamedCost(cost))
            rate, best = phases.total_tokens / phases.total_s, found.phases if found else None
            if found is None or best is None or rate > best.total_tokens / best.total_s * (1 + 1e-6):
                found = Found(policy, share, phases, tried)
    return replace(found, tried=tried) if found else None


# --------------------------------------------------------------------------------------------------- the diagonal order


class PlannedStep(NamedTuple):
    """Which prompts, by their number, enter with a step and leave before it, and what it computes."""

    entering: Sequence[int]
    leaving: Sequence[int]
    work: StepWork


@dataclass(frozen=True)
class DiagonalPlan:
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


def diagonal_plan(prompts: Sequence[Prompt], num_batches: int, batch_size: int, block_size: int) -> DiagonalPlan:
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
    return DiagonalPlan(steps, tables, num_blocks, at_once, level)


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


# --------------------------------------------------------------------------------------------------------------- memory


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


# ------------------------------------------------------------------------------------------------------------------ run


async def generate_diagonally(
    shards: Shards, plan: DiagonalPlan, prompts: Sequence[Prompt], block_size: int, vocab_size: int
) -> list[list[int]]:
    """Run all prompts as planned, two steps under way; the tokens of each.

    Raises ShardError when the shards are lost, BenchError when a step fails.
    """
    tokens: list[list[int]] = [[] for _ in prompts]

    def take(reply: StepReply, number: int) -> None:
        if reply.error:
            raise BenchError(f"a step failed on the shards: {reply.error}")
        if mistake := mistake_in(reply, number, vocab_size, drafts={}):
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


def _request(plan: DiagonalPlan, prompts: Sequence[Prompt], number: int, block_size: int) -> StepRequest:
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
