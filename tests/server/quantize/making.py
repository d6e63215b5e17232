"""What the tests share that make quantised checkpoints: a run without a process of its own, and what came of it."""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

from server.backends.cpu.device import CpuDevice
from server.quantize.command import Outcome, run
from server.quantize.layerwise import Progress
from server.quantize.recipe import Job, Recipe
from tests.server.driver import all_logits, load_engine

VOCABULARY = 103  # of the tiny models


def drawn(count: int, length: int, *, seed: int = 0, vocabulary: int = VOCABULARY) -> tuple[tuple[int, ...], ...]:
    """Samples of random tokens."""
    rng = random.Random(seed)
    return tuple(tuple(rng.randrange(4, vocabulary) for _ in range(length)) for _ in range(count))


@dataclass
class Made:
    """A run, and what it reported."""

    outcome: Outcome
    folder: Path
    progress: list[Progress] = field(default_factory=list)


def make(
    recipe: Recipe,
    model: Path,
    output: Path,
    *,
    calibration: tuple[tuple[int, ...], ...] | None = None,
    held_out: tuple[tuple[int, ...], ...] | None = None,
) -> Made:
    """Quantise the model of a folder."""
    files = tuple(str(path) for path in model.glob("tokenizer*.json"))
    calibration = calibration or drawn(8, 48)
    held_out = held_out or drawn(2, 48, seed=1)
    seen: list[Progress] = []
    job = Job(recipe, str(model), str(model), str(output), files, calibration, held_out, "cpu")
    return Made(run(job, CpuDevice(), seen.append), output, seen)


class Served:
    """A checkpoint as Lockstep serves it, in float32."""

    def __init__(self, folder: Path) -> None:
        self._engine = load_engine(folder, warms_up=False, tokens=512)

    def logits(self, tokens: tuple[int, ...]) -> Tensor:
        """[T, V]."""
        return all_logits(self._engine, list(tokens)).float()

    def perplexity(self, samples: tuple[tuple[int, ...], ...]) -> float:
        """Of samples that are equally long."""
        losses = [cross_entropy(self.logits(sample)[:-1], torch.tensor(sample[1:])) for sample in samples]
        return float(torch.stack(losses).mean().exp())
