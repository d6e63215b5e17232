"""Pipeline stages as `plan` counts them: which part of a model each has, and what links between them add to a step.

A step of one micro-batch goes through all stages and links, and its tokens go back to the first stage before the next
step of that micro-batch can begin: that round is the least that a token takes. While one micro-batch is on its way, the
stages compute the others', so that with enough of them the slowest stage, or the slowest link, says how long a round
takes (GPipe, Huang et al. 2019, arXiv 1811.06965).

Left out: what the processes of a link cost, which is below a tenth of a millisecond.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from benchmark import options
from benchmark.report import BenchError
from benchmark.roofline import ServedModel
from benchmark.shapes import DTYPE_BYTES
from router.config import MOST_MICRO_BATCHES

TOKEN_BYTES = 8  # of a token that goes back to the first stage


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options of a pipeline."""
    group = parser.add_argument_group("pipeline stages, each on its own devices")
    group.add_argument(
        "--pipeline-parallel", type=options.positive, default=1, metavar="N", help="as in the server (1)"
    )
    group.add_argument(
        "--micro-batches", type=options.positive, metavar="N", help="as in the server (as many as there are stages)"
    )
    group.add_argument(
        "--link-ms", type=options.number(at_least=0), default=0.0, metavar="MS",
        help="latency between stages, half of a ping's round trip (0)",
    )  # fmt: skip
    group.add_argument(
        "--link-gbit", type=options.number(above=0), metavar="GBIT",
        help="bandwidth of a link in Gbit/s (default: unlimited)",
    )  # fmt: skip


@dataclass(frozen=True)
class Pipeline:
    """The stages of a model with the links between them; one stage has none."""

    stages: tuple[ServedModel, ...]
    micro_batches: int = 1
    link_ms: float = 0.0
    link_bytes_per_ms: float = math.inf

    def split(self, ranks: int) -> Pipeline:
        """The same where each stage is split over so many ranks."""
        return replace(self, stages=tuple(replace(stage, ranks=ranks) for stage in self.stages))

    def without_links(self) -> Pipeline:
        """The same over links that take no time."""
        return replace(self, link_ms=0.0, link_bytes_per_ms=math.inf)

    def sentence(self) -> str:
        """What was assumed, for people."""
        carries = "" if math.isinf(self.link_bytes_per_ms) else f" and carry {self.link_bytes_per_ms * 8e-6:g} Gbit/s"
        return (
            f"{len(self.stages)} pipeline stages, each on its own devices, for {self.micro_batches} micro-batches "
            f"that take turns; weights and KV are those of the stage that has most of them. Links take "
            f"{self.link_ms:g} ms in each direction{carries}; where all of a round takes longer than the slowest stage "
            "for all micro-batches, more of those fill the gap."
        )

    def lanes(self, batch_size: int) -> int:
        """Micro-batches that a batch is divided into."""
        return min(self.micro_batches, batch_size)

    def links_ms(self, batch_size: int, tokens: int) -> tuple[float, float]:
        """What all links of a round take, and for how long the busiest one is taken, by one micro-batch of a step.

        batch_size: its sequences. tokens: that each of them has in the step.
        """
        if len(self.stages) == 1:
            return 0.0, 0.0
        first = self.stages[0]
        hidden = batch_size * tokens * first.shape.spec.hidden_size * DTYPE_BYTES[first.dtype]
        if first.shape.spec.encoder is not None and tokens > 1:  # the prompt's states go along with the first token's
            hidden += batch_size * first.shape.spec.hidden_size * DTYPE_BYTES[first.dtype]
        taken = hidden / self.link_bytes_per_ms
        back = batch_size * TOKEN_BYTES / self.link_bytes_per_ms
        return len(self.stages) * self.link_ms + (len(self.stages) - 1) * taken + back, taken

    def decode_ms(self, stages_ms: Sequence[float], batch_size: int) -> float:
        """The time between two tokens of a sequence. stages_ms: each stage's, for one micro-batch."""
        lanes = self.lanes(batch_size)
        links, taken = self.links_ms(-(-batch_size // lanes), 1)
        return max(sum(stages_ms) + links, lanes * max(*stages_ms, taken))

    def prefill_ms(self, stages_ms: Sequence[float], batch_size: int, length: int) -> float:
        """The time until the last of `batch_size` prompts has its first token. stages_ms: as for `decode_ms`."""
        lanes = self.lanes(batch_size)
        links, taken = self.links_ms(-(-batch_size // lanes), length)
        return sum(stages_ms) + links + (lanes - 1) * max(*stages_ms, taken)


def pipeline(args: argparse.Namespace, served: ServedModel) -> Pipeline:
    """What the options say of a model. Raises BenchError."""
    count = args.pipeline_parallel
    useless = ["--micro-batches"] * (args.micro_batches is not None) + ["--link-ms"] * (args.link_ms > 0)
    useless += ["--link-gbit"] * (args.link_gbit is not None)
    if count == 1 and useless:
        raise BenchError(f"{useless[0]} says something of pipeline stages, and --pipeline-parallel is 1: raise it")
    micro_batches = args.micro_batches or min(count, MOST_MICRO_BATCHES)
    if micro_batches > MOST_MICRO_BATCHES:
        raise BenchError(f"--micro-batches is {micro_batches}, and a server has {MOST_MICRO_BATCHES} at most")
    try:
        parts = served.stages(count)
    except ValueError as error:
        raise BenchError(str(error)) from None
    bytes_per_ms = math.inf if args.link_gbit is None else args.link_gbit * 1e9 / 8 / 1000
    return Pipeline(tuple(parts), micro_batches, args.link_ms, bytes_per_ms)
