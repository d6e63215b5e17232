"""What giving KV blocks on demand gains and costs, in virtual time: three loads under four rules.

`python -m tests.benchmark.fleet.kv_admission` prints a table for each load. The rules are the scheduler's `demand` and
`reserve`, and those of vLLM: who fits now is admitted, with or without a twentieth of the blocks left free (its
watermark), and the one that was admitted last leaves where blocks run out.
"""

from __future__ import annotations

import argparse
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import replace
from itertools import accumulate
from random import Random
from typing import Any

from benchmark.cost import shapes
from benchmark.cost.devices import DEVICES
from benchmark.cost.roofline import ServedModel
from benchmark.cost.step_times import EFFICIENCY, Roofline
from benchmark.fleet.prediction import figures
from benchmark.fleet.replica import Replica, Simulated, Tally
from benchmark.fleet.traffic import NEVER, Request
from router.scheduling.limits import Limits
from router.scheduling.request import ValidRequest
from router.scheduling.scheduler import Scheduler

WATERMARK = 0.05


class NowFitting(Scheduler[Simulated]):
    """vLLM's rules without a watermark."""

    watermark = 0.0

    def _is_expected_to_fit(self, entry: Simulated, leaving: Collection[Simulated]) -> bool:
        return self._num_expected([entry], 0, 1) == 1

    def _num_expected(self, waiting: Sequence[Simulated], known: int, num: int) -> int:
        size, free = self.limits.block_size, self.num_free_blocks - self.watermark * self.limits.num_blocks
        blocks = [one.request.size(new_tokens=self._first_grant(one)).blocks(size) for one in waiting[:num]]
        return max(not self.running, sum(sum_ <= free for sum_ in accumulate(blocks)))

    def _first_grant(self, entry: Simulated) -> int:
        return entry.request.filled_up(entry.num_known + 1, self.limits.block_size)

    def _who_leaves(self, entry: Simulated, new_tokens: int) -> list[Simulated]:
        missing, leaving = self._missing(entry, new_tokens), list[Simulated]()
        for one in reversed(self.running.values()):
            leaving.append(one)
            if one is entry or self._is_free(*missing, leaving):
                break
        return leaving

    def _give_ahead(self, running: Iterable[Simulated], grown: Any) -> None:
        return


class Watermarked(NowFitting):
    """vLLM's rules."""

    watermark = WATERMARK


RULES: dict[str, tuple[str, type[Scheduler[Simulated]]]] = {
    "demand": ("demand", Scheduler),
    "reserve": ("reserve", Scheduler),
    "what fits now": ("demand", NowFitting),
    "with a watermark": ("demand", Watermarked),
}


def limits_of(tokens: int, longest: int, kv_admission: str, *, prefix_caching: bool = False) -> Limits:
    """Those of a server with defaults and a cache of so many tokens."""
    return Limits(
        max_input_length=longest,
        max_total_tokens=longest,
        max_batch_total_tokens=tokens,
        max_batch_prefill_tokens=4096,
        block_size=16,
        num_blocks=tokens // 16,
        max_concurrent_requests=10_000,
        max_batch_size=None,
        waiting_served_ratio=0.0,
        max_waiting_tokens=20,
        max_best_of=1,
        max_stop_sequences=0,
        max_top_n_tokens=0,
        vocab_size=1,
        prefill_chunk="auto",
        prefix_caching=prefix_caching,
        kv_admission=kv_admission,
    )


def played(
    requests: Sequence[tuple[str, Request]], at_once: int, limits: Limits, rules: type[Scheduler[Simulated]]
) -> dict[str, Any]:
    """What becomes of these requests of keys, of which so many are under way."""
    tally = Tally()
    replica = Replica(limits, cost_of("mistral-7b", "h100"), tally, rules)
    waiting: Iterator[Simulated] = iter(
        [
            Simulated(
                number,
                ValidRequest(range(one.input_length), one.max_new_tokens),
                owner=owner,
                output_length=one.output_length,
                arrived_at=0.0,
                asked=one,
            )
            for number, (owner, one) in enumerate(requests, 1)
        ]
    )

    def send(count: int, now: float) -> None:
        entries = [entry for _, entry in zip(range(count), waiting, strict=False)]
        for entry in entries:
            entry.arrived_at = now
            tally.arrived(now)
        replica.submit_together(entries, now)

    send(at_once, 0.0)
    while (now := replica.next_reply_at) < NEVER:
        ended = replica.reply(now)
        if ended:
            send(len(ended), now)
    found, counts = figures(tally, 1, (None, None)), replica.counts
    assert len(tally.e2e) == len(requests), "some never ended"
    tokens = tally.num_step_tokens
    pauses = tally.pauses
    return {
        "tokens/s": round(found["output_tokens_per_second"]),
        "seconds": round(found["seconds"], 1),
        "batch": round(found["batch_size"]["mean"], 1),
        "sent away": counts.num_sent_away,
        "again %": round(100 * counts.tokens_again / tokens, 2),
        "TTFT p50 s": round(found["ttft_ms"]["p50"] / 1000, 1),
        "TTFT p99 s": round(found["ttft_ms"]["p99"] / 1000, 1),
        "gap p99 ms": round(found["inter_token_ms"]["p99"], 1),
        "pause, mean s": round(sum(pauses) / max(1, len(pauses)), 1),
        "longest s": round(max(pauses, default=0.0), 1),
        "outgrown": counts.num_outgrown,
        "error": round(counts.error_tokens / max(1, counts.num_answers)),
    }


def cost_of(shape: str, device: str) -> Roofline:
    """Steps of a published shape on one device, by its data sheet."""
    named, on = shapes.find(shape), DEVICES[device]
    served = ServedModel(named.shape, named.shape.dtype, None, None, ranks=1)
    return Roofline.of(served, on.ceilings(served), EFFICIENCY, 0.0, on.sums(served))


def long_answers(seed: int) -> list[tuple[str, Request]]:
    """450 prompts of 1,000 tokens and answers of 5,000, each ± 20 %, that ask for 8,192."""
    random = Random(seed)

    def around(mean: int) -> int:
        return round(random.uniform(0.8, 1.2) * mean)

    return [("", Request(0.0, around(1000), around(5000), 8192)) for _ in range(450)]


def agents(seed: int, asked: int | None) -> list[tuple[str, Request]]:
    """Calls of 32 agents: prompts of 4,000 tokens that begin with the same 3,500, answers of 300 ± 200.

    asked: tokens that each asks for; None: as many as it gets.
    """
    random = Random(seed)
    lengths = [round(min(max(random.gauss(300, 200), 16), 900)) for _ in range(32 * 12)]
    shared = tuple(range(1, 7))  # 6 names of 583 tokens: 3,498
    return [("", Request(0.0, 4000, length, asked or length, shared, 583)) for length in lengths]


def adversaries(seed: int) -> list[tuple[str, Request]]:
    """Four keys, one of which asks for half of all: short answers at first, and then each writes all that it may."""
    random = Random(seed)
    owners = ["greedy", "a", "greedy", "b", "greedy", "c"]
    short = [(owners[n % 6], Request(0.0, 500, random.randint(20, 200), 2000)) for n in range(200)]
    return short + [(owners[n % 6], Request(0.0, 500, 2000, 2000)) for n in range(120)]


def compared(requests: Sequence[tuple[str, Request]], at_once: int, limits: Limits) -> dict[str, dict[str, Any]]:
    """The same under each of the rules."""
    return {
        name: played(requests, at_once, replace(limits, kv_admission=admission), rules)
        for name, (admission, rules) in RULES.items()
    }


def table(title: str, rows: dict[str, dict[str, Any]]) -> str:
    names = list(next(iter(rows.values())))
    lines = [f"\n### {title}\n", "| rules | " + " | ".join(names) + " |", "|---|" + "--:|" * len(names)]
    return "\n".join(lines + [f"| {name} | " + " | ".join(map(str, row.values())) + " |" for name, row in rows.items()])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--load", choices=("long", "agents", "adversaries"))
    args = parser.parse_args()
    if args.load in (None, "long"):
        limits = limits_of(299_584, 10_000, "demand")
        print(table("long answers", compared(long_answers(args.seed), 128, limits)), flush=True)
    if args.load in (None, "agents"):
        longest = max(one.output_length for _, one in agents(args.seed, None)) + 4000
        limits = limits_of(12 * longest // 16 * 16, 36_000, "demand", prefix_caching=True)
        limits = replace(limits, max_batch_total_tokens=max(limits.max_batch_total_tokens, 36_000))
        exact = played(agents(args.seed, None), 32, replace(limits, kv_admission="reserve"), Scheduler)
        rows = {"reserve, exact": exact} | compared(agents(args.seed, 32_000), 32, limits)
        print(table("agents", rows), flush=True)
    if args.load in (None, "adversaries"):
        limits = limits_of(60_000, 5_000, "demand")
        print(table("adversaries", compared(adversaries(args.seed), 64, limits)), flush=True)


if __name__ == "__main__":
    main()
