"""Pipeline stages: which of a model's layers a rank has, and where the model is cut.

A stage has a run of the decoder's layers. The first one also has the embedding, and an encoder where there is one; the
last one the head. Cuts go by what a decode step costs, which is the reading of weights: a head of a large vocabulary
can cost as much as ten layers. An encoder counts as nothing, since it computes once for each prompt.

The anchor is GPipe (Huang et al. 2019, arXiv 1811.06965), which cuts so as to have stages of the same cost.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate

from server.arch.footprint import layer_sizes
from server.arch.spec import ArchSpec


@dataclass(frozen=True)
class Stage:
    """Stage `index` of `count`: the decoder's layers `layers`."""

    index: int
    count: int
    layers: range

    @classmethod
    def whole(cls, num_layers: int) -> Stage:
        """All of a model."""
        return cls(0, 1, range(num_layers))

    @property
    def is_first(self) -> bool:
        """Whether it begins with token ids."""
        return self.index == 0

    @property
    def is_last(self) -> bool:
        """Whether it ends with tokens."""
        return self.index == self.count - 1


def stages_of(spec: ArchSpec, count: int) -> list[Stage]:
    """Where a model is cut into so many stages. Raises ValueError where it has too few layers.

    A layer is in one stage with that whose keys and values it attends to.
    """
    layers = layer_sizes(replace(spec, encoder=None)) if count > 1 else [0] * spec.num_layers
    bound = {end for i, layer in enumerate(spec.layers) for end in range(i - layer.kv_from + 1, i + 1)}
    return cut(layers, spec.vocab_size * (spec.embed_dim or spec.hidden_size), count, bound)


def carried_width(spec: ArchSpec, stage: Stage) -> int:
    """Numbers of a token that a stage is given by the one before: the residual stream, and inputs of layers to come."""
    given = spec.per_layer_inputs.dim * (spec.num_layers - stage.layers.start) if spec.per_layer_inputs else 0
    return spec.hidden_size + given


def cut(layers: Sequence[float], head: float, count: int, bound: Collection[int] = ()) -> list[Stage]:
    """The stages of a decoder with layers of these costs, so that the dearest stage costs as little as it can.

    head: the cost of what the last stage has beside its layers; bound: layers that no stage begins with. Raises
    ValueError where there are fewer layers than stages.
    """
    if count > len(layers) - len(bound):
        why = f", of which {len(bound)} belong to those before them" if bound else ""
        raise ValueError(
            f"--pipeline-parallel is {count}, but the model has {len(layers)} layers{why}, and each stage needs one: "
            f"use --pipeline-parallel {len(layers) - len(bound)} or less"
        )
    ends = _ends([0.0, *accumulate(layers)], head, count, bound)
    starts = [0, *ends[:-1]]
    return [Stage(index, count, range(*bounds)) for index, bounds in enumerate(zip(starts, ends, strict=True))]


def _ends(sums: Sequence[float], head: float, count: int, bound: Collection[int]) -> list[int]:
    """Where each stage ends. sums: the cost of the first 0, 1, 2 … layers; bound: layers that none begins with."""
    total = len(sums) - 1
    # best[n]: (cost of the dearest stage, where the stages end) of the first n layers in so many stages.
    best: dict[int, tuple[float, list[int]]] = {0: (0.0, [])}
    for stage in range(count):
        is_last = stage == count - 1
        best = {
            end: min(
                (max(cost, sums[end] - sums[start] + head * is_last), [*ends, end])
                for start, (cost, ends) in best.items()
                if start < end
            )
            for end in ([total] if is_last else range(stage + 1, total - count + stage + 2))
            if end not in bound and any(start < end for start in best)
        }
    return best[total][1]
