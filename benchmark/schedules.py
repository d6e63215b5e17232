"""The order in which more sequences than a step has go through a model: row, zig-zag, diagonal, continuous.

The first three are FlexGen's schedules (Sheng et al. 2023, arXiv 2303.06865) as this engine has them. A *batch* is so
many sequences, a *block* is n batches. By row, one batch runs to its end, then the next: every step brings the weights
for one batch. In zig-zag, the batches of a block advance together, so that a layer's weights serve all n before the
next layer's come; the next block begins when the whole block has ended. In the diagonal order they enter one after the
other, as many as the KV memory of a zig-zag block of n then has room for (`diagonal.py`). Continuous is what a server
does: under that block's KV budget, sequences enter as soon as those before have ended. The tokens are the same by each.

What a run was, or would be, is a list of steps; what they make of it in FlexGen's headings is arithmetic here.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from benchmark import diagonal
from benchmark.cost import Cost, StepWork
from benchmark.fleet import Replica, Simulated, Tally
from benchmark.prompts import Prompt
from benchmark.timed_shards import StepRecord
from benchmark.traffic import NEVER
from router.entry import ValidRequest
from router.limits import Limits
from router.queue import RequestSize
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

    def plan(self, prompts: Sequence[Prompt], block_size: int) -> diagonal.Plan:
        """The run of the diagonal order, with as many batches as fit for the longest prompt and output of all."""
        given = max(len(prompt.token_ids) for prompt in prompts)
        generated = max(prompt.max_new_tokens for prompt in prompts)
        count = diagonal.fitting_batches(given, generated, self.num_gpu_batches, block_size)
        return diagonal.planned(prompts, count, self.gpu_batch_size, block_size)

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


# ------------------------------------------------------------------------------------------------------- accounting


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


# ------------------------------------------------------------------------------------------------------- prediction


@dataclass(frozen=True)
class StreamedCost:
    """`server.offload.cost` for steps as the scheduler plans them."""

    cost: StepCost

    def seconds(self, work: StepWork) -> float:
        """See `cost.Cost`."""
        sizes = self.cost.sizes
        read = sum(
            share * (work.prompt_keys(window)[0] - work.prompt_tokens + work.decode_keys(window)[0])
            for window, share in sizes.windows.items()
        )
        return self.cost.seconds(
            tokens=work.prompt_tokens + work.decoding, sampled=work.sampled, kv_bytes=read * sizes.kv_per_token
        )


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
