"""What of a model is quantised, and whether it can be: known from the names and shapes of its tensors.

Matrices of a layer that read the same inputs are quantised together: a `MatrixSet`. Attention, a recurrence in its
place, and both beside each other begin at one place; experts that lie in one tensor are as many matrices.

Shapes: F output features, D input features.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from server.arch.spec import ArchSpec, LayerSpec, Moe
from server.checkpoint.weights import Checkpoint, Weights
from server.quantisation.packing import unit_of
from server.quantize.edited_checkpoint import Piece
from server.quantize.recipe import Recipe

# Place -> the field of a layer, and the roles that may stand there, of which a layer has the first that the checkpoint
# has.
PLACES: Mapping[str, tuple[str, Sequence[tuple[str, ...]]]] = {
    "qkv": (
        "attention",
        (
            ("q", "k", "v", "mamba_in"),
            *(("qkv",), ("q", "k", "v"), ("q_a", "kv_a"), ("q", "kv_a")),
            *(("delta_qkvz",), ("delta_qkv", "delta_z"), ("conv_in",), ("mamba_in",)),
        ),
    ),
    "q_b": ("attention", (("q_b",),)),
    "attention_out": ("attention", (("attention_out",),)),
    "recurrence_out": ("attention", (("delta_out",), ("conv_out",), ("mamba_out",))),
    "up": ("mlp", (("mlp_gate_up",), ("mlp_gate", "mlp_up"), ("mlp_up",))),
    "down": ("mlp", (("mlp_down",),)),
}
EXPERT_ROLES = {"up": ("expert_gate", "expert_up"), "down": ("expert_down",)}
# Roles of matrices that stay as they are.
SHARED = ("shared_router", "shared_gate", "shared_up", "shared_gate_up", "shared_down")
OF_MIXERS = ("attention_gate", "kv_b", "delta_b", "delta_a", "delta_ba")
KEPT = ("head", *OF_MIXERS, "router", *SHARED, "project_in", "project_out")


@dataclass(frozen=True)
class MatrixSet:
    """Matrices of one layer that read the same inputs, by what the checkpoint calls them. expert: 0 without experts."""

    place: str
    expert: int
    names: Mapping[str, str]  # by role


def matrix_sets_of(weights: Weights, spec: ArchSpec, index: int) -> Iterator[MatrixSet]:
    """All of one layer, in the order in which a step comes through them."""
    of_layer = weights.of_layer(index)
    mlp = spec.layers[index].mlp
    for place, (part, alternatives) in PLACES.items():
        if isinstance(mlp, Moe) and place in EXPERT_ROLES:
            roles = [role for role in EXPERT_ROLES[place] if mlp.gated or role != "expert_gate"]
            for expert in range(mlp.num_experts):
                yield MatrixSet(place, expert, {role: of_layer.name_of(role, expert) for role in roles})
            continue
        present = ([role for role in roles if _is_of(role, spec.layers[index])] for roles in alternatives)
        found = next((roles for roles in present if all(_has(of_layer, role) for role in roles)), None)
        if found is not None and not (part == "mlp" and mlp is None):
            yield MatrixSet(place, 0, {role: of_layer.name_of(role) for role in found})


def pieces_of(weights: Weights, spec: ArchSpec) -> dict[str, Piece]:
    """The matrices of experts that lie in one tensor for all, each by a name of its own.

    Raises CheckpointError where the tensor has other experts than config.json says.
    """
    found = {}
    for index, mlp in enumerate(layer.mlp for layer in spec.layers):
        of_layer = weights.of_layer(index)
        if not isinstance(mlp, Moe):
            continue
        of_layer.refuse_other_experts(mlp.num_experts)
        for role in weights.names.fused_experts:
            if (fused := of_layer.fused(role)) is not None:
                for expert in range(mlp.num_experts):
                    name = f"{of_layer.name_of(role, expert)}.weight"
                    found[name] = Piece(fused.name, expert, fused.place, fused.of)
    return found


def _is_of(role: str, layer: LayerSpec) -> bool:
    return role != "v" or not layer.keys_are_values


def _has(weights: Weights, role: str) -> bool:
    """Whether the family names this role and the checkpoint has it: T5's gate is named for all."""
    return weights.has(role) and f"{weights.name_of(role)}.weight" in weights.checkpoint


@dataclass(frozen=True)
class Plan:
    """matrix_sets: of each layer; sizes: (F, D) of each matrix by its name; ignore: patterns of matrices that stay."""

    matrix_sets: tuple[tuple[MatrixSet, ...], ...]
    sizes: dict[str, tuple[int, int]]
    ignore: tuple[str, ...]


def make_plan(weights: Weights, spec: ArchSpec, recipe: Recipe) -> Plan:
    """Raises ValueError for a model that cannot be quantised so."""
    if spec.encoder is not None:
        raise ValueError(
            "the model is an encoder-decoder, which text alone does not calibrate: serve it with --quantize int8, "
            "which quantises while loading"
        )
    if weights.names.stacks:
        raise ValueError(
            "the model's experts have no names of their own, by which quantised ones could be told apart: serve it "
            "with --quantize int4 or int8, which quantise while loading"
        )
    if spec.per_layer_inputs or any(layer.kv_from for layer in spec.layers):
        raise ValueError(
            "the model's layers are given inputs of their own or share keys and values, which calibration does not "
            "know: serve it with --quantize int8, which quantises while loading"
        )
    matrix_sets = tuple(tuple(matrix_sets_of(weights, spec, index)) for index in range(spec.num_layers))
    sizes = {
        name: _size(weights, name) for layer in matrix_sets for matrices in layer for name in matrices.names.values()
    }
    if problem := next(_problems(sizes, recipe), None):
        raise ValueError(problem)
    return Plan(matrix_sets, sizes, tuple(_ignored(weights, sizes)))


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


def _ignored(weights: Weights, sizes: Mapping[str, tuple[int, int]]) -> Iterator[str]:
    """Readers match these with the names of a model's modules, among them a head that is tied to the embedding.

    What all tokens of a mixture go to may be called in other layers what is quantised there.
    """
    yield "lm_head"
    assert isinstance(weights.checkpoint, Checkpoint), "what is quantised has been read"
    stored = {name.removesuffix(".weight") for name in weights.checkpoint.names()}
    for role in KEPT:
        entry = weights.names.roles.get(role, ())
        for name in (entry,) if isinstance(entry, str) else entry:
            if name in ("lm_head", weights.names.roles.get("embed")):
                continue
            pattern = ".*" + re.escape(name).replace(r"\{i\}", r"\d+") + "$"
            if any(re.match(pattern, quantised) for quantised in sizes):
                yield from sorted(own for own in stored - set(sizes) if re.match(pattern, own))
            else:
                yield f"re:{pattern}"
