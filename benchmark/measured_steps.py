"""Measured step times for `plan`: what is expected of a device of which one has results of `latency`.

Stages of a pipeline take their shares of a whole model's step, so that a pipeline over several machines can be foreseen
from a run on one of them. Left out: what a step takes however little it computes; it is divided among the stages, too.
"""

from __future__ import annotations

import argparse
from dataclasses import dataclass

from benchmark.cost import Fitted, StepWork, fit, read_latency
from benchmark.report import BenchError
from benchmark.roofline import ServedModel, mean_context


@dataclass(frozen=True)
class MeasuredSteps:
    """Steps of the whole model on the shards that were measured."""

    cost: Fitted

    def step_ms(self, is_prefill: bool, sequences: int, sequence_length: int, decode_length: int) -> float:
        """A step of so many sequences: their whole prompts, or a token of each at the mean context."""
        work = StepWork(decoding=sequences, context=int(sequences * mean_context(sequence_length, decode_length)))
        if is_prefill:
            tokens = sequences * sequence_length
            work = StepWork(prompt_tokens=tokens, prompt_pairs=tokens * sequence_length / 2, sampled=sequences)
        return 1000 * self.cost.seconds(work)


def measured_steps(args: argparse.Namespace, model: str, served: ServedModel) -> MeasuredSteps | None:
    """What --cost says; None without. Raises BenchError where it is of something else than what is planned."""
    if args.cost is None:
        return None
    results = [read_latency(path) for path in args.cost]
    planned = {
        "model": model.rstrip("/").rsplit("/", 1)[-1],
        "num_shard": args.num_shard[0] if len(args.num_shard) == 1 else args.num_shard,
        "dtype": served.dtype,
        "quantize": served.quantize or "dense",
    }
    for result in results:
        was = dict(result) | {"model": str(result["model"]).rstrip("/").rsplit("/", 1)[-1]}
        for name, wanted in planned.items():
            if was[name] != wanted:
                raise BenchError(
                    f"--cost has a result with {name} {was[name]}, and this plan has {wanted}: give latency results of "
                    "what is planned"
                )
    cost = fit(results)
    cost.check(args.sequence_length, args.decode_length)
    return MeasuredSteps(cost)
