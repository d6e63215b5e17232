"""What of a model is quantised, and whether it can be: known from the names and shapes of its tensors.

Shapes: F output features, D input features.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass

from server.arch.spec import ArchSpec
from server.checkpoint.weights import Checkpoint, Weights
from server.quant.packing import unit_of
from server.quantising.recipe import Recipe
from server.quantising.sites import Site, sites_of

# Roles of matrices that stay as they are.
KEPT = ("head", "router", "project_in", "project_out")


@dataclass(frozen=True)
class Plan:
    """sites: of each layer. size: (F, D) of each matrix by its name. ignore: patterns of the matrices that stay."""

    sites: tuple[tuple[Site, ...], ...]
    sizes: dict[str, tuple[int, int]]
    ignore: tuple[str, ...]


def make_plan(weights: Weights, spec: ArchSpec, recipe: Recipe) -> Plan:
    """Raises ValueError for a model that cannot be quantised so."""
    if spec.encoder is not None:
        raise ValueError(
            "the model is an encoder-decoder, which text alone does not calibrate: serve it with --quantize int8, "
            "which quantises while loading"
        )
    sites = tuple(tuple(sites_of(weights, spec, index)) for index in range(spec.num_layers))
    sizes = {name: _size(weights, name) for layer in sites for site in layer for name in site.names.values()}
    if problem := next(_problems(sizes, recipe), None):
        raise ValueError(problem)
    return Plan(sites, sizes, tuple(_ignored(weights)))


def _size(weights: Weights, name: str) -> tuple[int, int]:
    assert isinstance(weights.checkpoint, Checkpoint), "what is quantised has been read"
    first, second = weights.checkpoint.shape_of(f"{name}.weight")
    return (second, first) if weights.names.transposed else (first, second)


def _problems(sizes: dict[str, tuple[int, int]], recipe: Recipe) -> Iterator[str]:
    for name, (outputs, inputs) in sizes.items():
        if recipe.method != "w8a8" and recipe.group_size > 0 and inputs % recipe.group_size:
            fitting = [size for size in (128, 64, 32, 16, 8) if all(d % size == 0 for _, d in sizes.values())]
            remedy = f"give {fitting[0]} or -1" if fitting else "give -1"
            yield f"--group-size is {recipe.group_size}, which does not divide the {inputs} inputs of {name}: {remedy}"
        unit = unit_of(recipe.bits)
        if recipe.layout == "gptq" and (inputs % unit or outputs % unit):
            yield (
                f"--bits is {recipe.bits}, of which {unit} codes are packed at a time, and {name} has {inputs} inputs "
                f"and {outputs} outputs: give --bits 4 or 8"
            )


def _ignored(weights: Weights) -> Iterator[str]:
    """Readers match these with the names of a model's modules, among them a head that is tied to the embedding."""
    yield "lm_head"
    for role in KEPT:
        entry = weights.names.roles.get(role, ())
        for name in (entry,) if isinstance(entry, str) else entry:
            if name not in ("lm_head", weights.names.roles.get("embed")):
                yield "re:.*" + re.escape(name).replace(r"\{i\}", r"\d+") + "$"
