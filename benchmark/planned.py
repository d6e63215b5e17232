"""The rows of `plan`: of each step and batch size its floor, what sums and links add, and what the cost model expects.

The expected time is that of `cost.Roofline`, as in `simulate`, so that a step has one prediction, or of measured steps.
Left out: what fits (`plan.py`), and what stages and links do to each other (`pipelines.py`).
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from benchmark import shapes
from benchmark.cost import EFFICIENCY, Roofline, StepWork
from benchmark.devices import DatasheetDevice
from benchmark.measured_steps import MeasuredSteps
from benchmark.pipelines import Pipeline
from benchmark.roofline import BytesAndFlops, ServedModel, mean_context
from router.queue import blocks_for

STEPS = ("Prefill", "Decode (token)", "Decode (total)")


@dataclass(frozen=True)
class Planned:
    """What is planned: a pipeline whose stages know how many ranks each has, and a device for each of those."""

    args: argparse.Namespace
    pipe: Pipeline
    device: DatasheetDevice
    measured: MeasuredSteps | None = None

    @property
    def tokens_of_a_sequence(self) -> int:
        """Slots that one sequence of the planned length takes in the cache: whole blocks."""
        length = self.args.sequence_length + self.args.decode_length
        return blocks_for(length, shapes.BLOCK_SIZE) * shapes.BLOCK_SIZE


def rows(planned: Planned, kv_tokens: int) -> Iterator[dict[str, Any]]:
    """A row for each step and batch size, in the order of the tables. kv_tokens: that fit into the cache."""
    for step in STEPS:
        for batch_size in planned.args.batch_size:
            fits = batch_size * planned.tokens_of_a_sequence <= kv_tokens
            yield _Row(planned, step, batch_size).figures() | {"fits": fits}


@dataclass(frozen=True)
class _Row:
    """One step of so many sequences, which are divided into the pipeline's micro-batches."""

    planned: Planned
    step: str
    batch_size: int

    def figures(self) -> dict[str, Any]:
        """Milliseconds of the whole step, or of all decode steps; what a micro-batch takes is multiplied here."""
        pipe, device = self.planned.pipe, self.planned.device
        ceilings = [device.ceilings(stage) for stage in pipe.stages]
        needs = [self._needs(stage) for stage in pipe.stages]
        floors = [needed.floor_ms(most) for needed, most in zip(needs, ceilings, strict=True)]
        with_sums = [floor + self._sums_ms(stage) for floor, stage in zip(floors, pipe.stages, strict=True)]
        slowest, near = floors.index(max(floors)), pipe.without_links()
        floor_ms = self._whole_ms(floors, near)
        return {
            "num_shard": pipe.stages[0].ranks,
            "step": self.step,
            "batch_size": self.batch_size,
            "floor_ms": floor_ms,
            "bound_by": needs[slowest].bound_by(ceilings[slowest]),
            "expected_ms": self._whole_ms(self._expected_ms(floors), pipe),
            "all_reduce_ms": self._whole_ms(with_sums, near) - floor_ms,
            "links_ms": self._count * pipe.links_ms(self._sequences, self._length)[0],
            "tokens_per_second": 1000 * self.batch_size * self._length * self._count / self._whole_ms(with_sums, pipe),
        }

    @property
    def _is_prefill(self) -> bool:
        return self.step == "Prefill"

    @property
    def _sequences(self) -> int:
        """Of one micro-batch."""
        return -(-self.batch_size // self.planned.pipe.lanes(self.batch_size))

    @property
    def _length(self) -> int:
        """Tokens of a sequence in the step."""
        return self.planned.args.sequence_length if self._is_prefill else 1

    @property
    def _count(self) -> int:
        return self.planned.args.decode_length - 1 if self.step == "Decode (total)" else 1

    def _whole_ms(self, stages_ms: Sequence[float], links: Pipeline) -> float:
        """From what one micro-batch takes on each stage."""
        if self._is_prefill:
            return links.prefill_ms(stages_ms, self.batch_size, self._length)
        return self._count * links.decode_ms(stages_ms, self.batch_size)

    def _needs(self, stage: ServedModel) -> BytesAndFlops:
        """What a micro-batch needs at least; of all decode steps, one."""
        args = self.planned.args
        if self._is_prefill:
            return stage.prefill(self._sequences, args.sequence_length)
        return stage.mean_decode(self._sequences, args.sequence_length, args.decode_length)

    def _sums_ms(self, stage: ServedModel) -> float:
        """What the exchanges of a micro-batch take at least."""
        tokens, encoded = self._sequences * self._length, 0
        if self._is_prefill and stage.shape.spec.encoder is not None:
            tokens, encoded = self._sequences, tokens
        return 1000 * self.planned.device.sums(stage).seconds(tokens, self._sequences, encoded)

    def _expected_ms(self, floors: Sequence[float]) -> list[float]:
        """What a micro-batch is expected to take on each stage."""
        args, stages, measured = self.planned.args, self.planned.pipe.stages, self.planned.measured
        if measured is None:
            return [self._modelled_ms(stage) for stage in stages]
        whole = measured.step_ms(self._is_prefill, self._sequences, args.sequence_length, args.decode_length)
        return [whole * floor / sum(floors) for floor in floors]

    def _modelled_ms(self, stage: ServedModel) -> float:
        """By the cost model; what an encoder does, which that does not know, by the same share of the limits."""
        args, device, count = self.planned.args, self.planned.device, self._sequences
        efficiency, ceilings, sums = args.efficiency or EFFICIENCY, device.ceilings(stage), device.sums(stage)
        cost = Roofline.of(stage, ceilings, efficiency, args.overhead_ms / 1000, sums)
        length, keys = args.sequence_length, mean_context(args.sequence_length, args.decode_length)
        if not self._is_prefill:
            return 1000 * cost.seconds(StepWork(decoding=count, context=int(count * keys), sampled=count))
        if stage.shape.spec.encoder is None:
            work = StepWork(prompt_tokens=count * length, prompt_pairs=count * length**2 / 2, sampled=count)
            return 1000 * cost.seconds(work)
        decoder = cost.seconds(StepWork(decoding=count, context=count * (length + 1), sampled=count))
        encoder_ms = stage.encode([length] * count).floor_ms(ceilings) / efficiency
        return 1000 * (decoder + sums.seconds(0, 0, count * length) - sums.seconds(0, 0)) + encoder_ms
