"""Quantises a model layer by layer, each for the inputs that come once all before it are quantised.

Of weights there is one layer at a time, of texts their hidden states before it. Within a layer the matrices that read
the same inputs are quantised together, in the order in which a step comes through them, and what follows sees their
errors. The perplexity before and after is of texts that calibration does not see. The one before comes first, through
all layers as they are, so that a checkpoint with tensors that no layer uses, or with weights that are not numbers, is
refused before the long part.

Left out: encoder-decoders (`plan.py`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from server.arch.spec import ArchSpec
from server.backends.protocol import Backend
from server.checkpoint.weights import Weights
from server.layers.embedding import load_embedding, load_head
from server.model.layer import Layer
from server.model.load import StackLoader
from server.quantisation.rounding import int8_rows
from server.quantisation.stored import QuantisedWeight
from server.quantize import channel_scales, gptq, grids
from server.quantize.calibration import Inputs, Streams, Texts, watched
from server.quantize.edited_checkpoint import EditedCheckpoint, FinishedFormat
from server.quantize.plan import MatrixSet, Plan
from server.quantize.recipe import Recipe

FEW = 4  # a matrix of D inputs that saw fewer than D / FEW of them is rounded, for they say little of those to come


@dataclass(frozen=True)
class Progress:
    """What has just been done: a place in a layer, and the square error of its outputs as a share of the outputs'.

    Without a place: the layer as it is, for the perplexity before.
    """

    layer: int
    num_layers: int
    place: str = ""
    error: float = 0.0
    rounded: int = 0  # matrices that were only rounded, because they saw few inputs
    share: float = 1.0  # of the layer that is done


Report = Callable[[Progress], None]
Finish = Callable[[Sequence[MatrixSet]], None]  # what is done with a layer once it is quantised: it is written


@dataclass(frozen=True)
class Perplexity:
    """Of the same texts."""

    before: float
    after: float


@dataclass
class Quantiser:
    """One run. `weights` reads an `EditedCheckpoint`, and its format is a `FinishedFormat`."""

    weights: Weights
    checkpoint: EditedCheckpoint
    finished: FinishedFormat
    spec: ArchSpec
    plan: Plan
    backend: Backend
    recipe: Recipe
    report: Report
    finish: Finish

    @cached_property
    def _loader(self) -> StackLoader:
        return StackLoader(self.weights, self.spec, self.backend)

    @torch.inference_mode()
    def run(self, calibration: Texts, held_out: Texts) -> Perplexity:
        """Quantise all layers. Raises ValueError for a model that has no perplexity before or after."""
        before = self._before(held_out)
        seen, quantised = self._streams(calibration, held_out)
        for index, matrix_sets in enumerate(self.plan.matrix_sets):
            places = list(dict.fromkeys(matrices.place for matrices in matrix_sets))
            for number, place in enumerate(places, 1):
                inputs = self._inputs(seen, index, place)
                of_place = [matrices for matrices in matrix_sets if matrices.place == place]
                self._quantise(index, of_place, inputs, number / len(places))
            layer = self._layer(index)
            for streams in (seen, quantised):
                streams.through(layer, index)
            self.finish(matrix_sets)
            names = [name for matrices in matrix_sets for name in matrices.names.values()]
            self.finished.forget(names)
        after = self._perplexity(quantised)
        if math.isnan(after):
            raise ValueError(
                f"the perplexity of the quantised model is {after} and was {before:.4f}: give more --bits, or another "
                "--method"
            )
        return Perplexity(before, after)

    def _before(self, held_out: Texts) -> float:
        """The perplexity of the model as it is, all of whose tensors are read for that."""
        (dense,) = self._streams(held_out)
        for index in range(self.spec.num_layers):
            dense.through(self._layer(index), index)
            self.report(Progress(index, self.spec.num_layers))
        perplexity = self._perplexity(dense)
        kept = self.weights.names_of_predictors(self.spec.num_layers, self.spec.num_predictors)
        self.weights.refuse_leftovers(kept)
        if math.isnan(perplexity):
            raise ValueError(
                f"the perplexity of the model as it is is {perplexity}, which is not a number: its weights are damaged "
                "or overflow float32, fetch the model again"
            )
        return perplexity

    def _perplexity(self, streams: Streams) -> float:
        """Of texts that are through all layers."""
        embedding = load_embedding(self.weights, self.spec)
        frame = self._loader.frame(embedding)
        return streams.perplexity(frame, load_head(self.weights, self.spec, embedding, self.backend.linear))

    def _streams(self, *texts: Texts) -> list[Streams]:
        frame = self._loader.frame(load_embedding(self.weights, self.spec))
        return [Streams(text, frame, self.backend.device) for text in texts]

    def _layer(self, index: int) -> Layer:
        """As it is now."""
        return self._loader.layer(index)

    def _inputs(self, streams: Streams, index: int, place: str) -> dict[int, Inputs]:
        """What comes at one place, by expert."""
        found: dict[int, Inputs] = {}

        def watch(expert: int, x: Tensor) -> None:
            if expert not in found:
                found[expert] = Inputs.of(x.shape[1], x.device)
            found[expert].add(x)

        streams.show(watched(self._layer(index), place, watch), index)
        return found

    def _quantise(self, index: int, matrix_sets: Sequence[MatrixSet], inputs: dict[int, Inputs], done: float) -> None:
        """All matrices at one place of a layer. done: share of the layer with which that is done."""
        if scale := self._fold(index, matrix_sets, inputs):
            inputs = {expert: those.divided(scale[expert]) for expert, those in inputs.items()}
        error = total = 0.0
        rounded = 0
        for matrices in matrix_sets:
            for name in matrices.names.values():
                weight = self._matrix(name)
                width = weight.shape[1]
                of_set = inputs.get(matrices.expert) or Inputs.of(width, weight.device)
                gptq.refuse_infinite(of_set.products, f"the products of the inputs of {name}")
                is_little = of_set.count * FEW < width
                rounded += is_little
                self.finished.weights[name] = stored = self._rounded(name, weight, of_set, is_little=is_little)
                self.checkpoint.changed.pop(f"{name}.weight", None)
                difference = stored.dequantised() - weight
                error += _square(difference, of_set)
                total += _square(weight, of_set)
        share = error / total if total else 0.0
        self.report(Progress(index, self.spec.num_layers, matrix_sets[0].place, share, rounded, done))

    def _rounded(self, name: str, weight: Tensor, inputs: Inputs, *, is_little: bool) -> QuantisedWeight:
        recipe, scale_dtype = self.recipe, self.finished.scale_dtype
        if recipe.method == "w8a8":
            return int8_rows(weight)
        if is_little:
            inputs = Inputs(torch.eye(len(inputs.products), device=weight.device), inputs.magnitudes, inputs.largest, 1)
        if recipe.method == "awq":
            return grids.nearest(weight, inputs.mean_products, recipe, scale_dtype)
        ordered = recipe.activation_order
        curvature = gptq.Curvature.of(inputs.mean_products, activation_order=ordered, name=name)
        return gptq.quantise(weight, curvature, recipe, scale_dtype)

    def _matrix(self, name: str) -> Tensor:
        """[F, D] float32, as it is to be quantised."""
        weight = self.checkpoint.whole_float(f"{name}.weight").to(self.weights.device)
        gptq.refuse_infinite(weight, f"the weights of {name}")
        return weight.t().contiguous() if self.weights.names.transposed else weight

    def _fold(self, index: int, matrix_sets: Sequence[MatrixSet], inputs: Mapping[int, Inputs]) -> dict[int, Tensor]:
        """Move scales into what makes the inputs: those [D] that inputs are divided by, by expert; empty: none were."""
        if self.recipe.method != "awq" and not self.recipe.smooth:
            return {}
        scales: dict[int, Tensor] = {}
        for matrices in matrix_sets:
            origin = channel_scales.origin_of(self.weights, self.spec, index, matrices)
            if origin is None:
                continue
            if origin.matrix is not None:
                if self.recipe.method == "awq" and matrices.expert in inputs:
                    scales[matrices.expert] = self._move(origin, [matrices], inputs)
                continue
            # All experts read what one norm makes, and so may matrices at another place.
            readers = [other for other in self.plan.matrix_sets[index] if other.place in origin.places]
            scale = self._move(origin, readers, inputs)
            return {matrices.expert: scale for matrices in matrix_sets}
        return scales

    def _move(
        self, origin: channel_scales.Origin, readers: Sequence[MatrixSet], inputs: Mapping[int, Inputs]
    ) -> Tensor:
        """Find the scale [D] for what `readers` read, and move it."""
        seen = [
            (name, inputs[matrices.expert])
            for matrices in readers
            if matrices.expert in inputs
            for name in matrices.names.values()
        ]
        matrices = [(self._matrix(name), those) for name, those in seen]
        if self.recipe.method == "awq":
            scale = channel_scales.awq(matrices, self.recipe, self.finished.scale_dtype)
        else:
            scale = channel_scales.smoothing(matrices, self.recipe.smooth)
        scale = channel_scales.within(origin, scale, self.checkpoint, self.finished)
        channel_scales.divide(origin, scale, self.checkpoint, self.finished)
        for name in (name for matrices in readers for name in matrices.names.values()):
            scaled = self._matrix(name) * scale
            self.checkpoint.changed[f"{name}.weight"] = scaled.t() if self.weights.names.transposed else scaled
        return scale


def _square(error: Tensor, inputs: Inputs) -> float:
    """The sum of the square outputs of a matrix [F, D]."""
    return float((error @ inputs.products).mul_(error).sum())
