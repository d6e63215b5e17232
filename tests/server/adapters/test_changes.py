"""What an adapter makes of a layer, on one rank or divided over several: the product of the changed weight."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from server.adapters.changes import Changes
from server.adapters.config import AdapterError
from server.adapters.files import AdapterFiles
from server.backends.protocol import LinearChange
from server.backends.reference.adapters import changed, changed_rows
from server.checkpoint.formats.protocol import Ranges
from server.checkpoint.weights import Piece

NAME, TABLE, HEAD = "model.layers.0.mlp.up_proj", "model.embed_tokens", "lm_head"
OUTPUTS, INPUTS, RANK, ALPHA, TOKENS = 12, 8, 4, 6, 5
SCALE = ALPHA / RANK
EXPERTS = ["experts.gate_up_proj", "experts.down_proj"]
Tensors = dict[str, Tensor]


def noise(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed + sum(shape)))


@contextmanager
def read(
    folder: Path, tensors: Tensors, dtype: torch.dtype = torch.float32, budget: float = math.inf, **config: Any
) -> Iterator[Changes]:
    """An adapter with these tensors, whose names are without what stands before all."""
    known = {"peft_type": "LORA", "r": RANK, "lora_alpha": ALPHA} | config
    (folder / "adapter_config.json").write_text(json.dumps(known))
    save_file(
        {f"base_model.model.{n}": t.contiguous() for n, t in tensors.items()}, folder / "adapter_model.safetensors"
    )
    files = AdapterFiles(folder)
    try:
        yield Changes(files, dtype, budget)
    finally:
        files.close()


def rows_of(weight: Tensor, ranges: Ranges) -> Tensor:
    return torch.cat([weight[start:stop] for start, stop in ranges])


def piece_of(
    weight: Tensor, bias: Tensor | None, rows: Ranges, columns: tuple[int, int], name: str = NAME, **more: Any
) -> Piece:
    """Part of a layer with this weight [F, D]."""
    read_bias = (lambda ranges: None) if bias is None else partial(rows_of, bias)
    return Piece(
        "up", (name,), (weight.shape[0], weight.shape[1]), rows, columns, 0, partial(rows_of, weight), read_bias, **more
    )


def product(change: LinearChange | None, weight: Tensor, x: Tensor, bias: Tensor | None) -> Tensor:
    plain = x @ weight.t()
    if change is None:
        return plain if bias is None else plain + bias
    return changed(change, x, plain, bias)


def divided(
    changes: Changes, weight: Tensor, bias: Tensor | None, world_size: int, *, by_rows: bool, **more: Any
) -> Tensor:
    """What so many ranks compute of x, each a part."""
    x, parts = noise(3, weight.shape[1], seed=9), []
    for rank in range(world_size):
        outputs, inputs = ((size * rank // world_size, size * (rank + 1) // world_size) for size in weight.shape)
        rows, columns = ([outputs], (0, weight.shape[1])) if by_rows else ([(0, weight.shape[0])], inputs)
        change = changes.linear([piece_of(weight, bias, rows, columns, **more)])
        own = None if bias is None else bias[outputs[0] : outputs[1]] if by_rows else bias if rank == 0 else None
        parts.append(
            product(
                change,
                weight[outputs[0] : outputs[1]] if by_rows else weight[:, slice(*columns)],
                x if by_rows else x[:, slice(*columns)],
                own,
            )
        )
    return torch.cat(parts, dim=1) if by_rows else torch.stack(parts).sum(dim=0)


WEIGHT, BIAS = noise(OUTPUTS, INPUTS), noise(OUTPUTS)
DOWN, UP, MAGNITUDE, UP_BIAS = (
    noise(RANK, INPUTS),
    noise(OUTPUTS, RANK),
    noise(OUTPUTS).abs() + 0.5,
    noise(OUTPUTS, seed=2),
)
OTHER = noise(OUTPUTS, INPUTS, seed=3)
SOME = torch.where(torch.arange(OUTPUTS)[:, None] % 5 == 1, OTHER, WEIGHT)
LORA = {f"{NAME}.lora_A.weight": DOWN, f"{NAME}.lora_B.weight": UP}
MERGED = WEIGHT + SCALE * UP @ DOWN


def lengthened(weight: Tensor) -> Tensor:
    return weight * (MAGNITUDE / weight.norm(dim=1)).unsqueeze(1)


KINDS: dict[str, tuple[Tensors, dict[str, Any], Tensor, Tensor]] = {
    "plain": (LORA, {}, MERGED, BIAS),
    "lengths": (LORA | {f"{NAME}.lora_magnitude_vector": MAGNITUDE}, {"use_dora": True}, lengthened(MERGED), BIAS),
    "biases": (
        LORA | {f"{NAME}.lora_B.bias": UP_BIAS, f"{NAME}.base_layer.bias": 2 * BIAS}, {"lora_bias": True}, MERGED,
        2 * BIAS + SCALE * UP_BIAS,
    ),
    "bias alone": ({f"{NAME}.bias": UP_BIAS}, {}, WEIGHT, UP_BIAS),
    "another weight": ({f"{NAME}.weight": OTHER}, {}, OTHER, BIAS),
    "some other rows": ({f"{NAME}.weight": SOME}, {}, SOME, BIAS),
    "the same weight": ({f"{NAME}.weight": WEIGHT}, {}, WEIGHT, BIAS),
    "another weight, changed": (LORA | {f"{NAME}.base_layer.weight": SOME}, {}, SOME + SCALE * UP @ DOWN, BIAS),
    "another weight, lengthened": (
        LORA | {f"{NAME}.base_layer.weight": SOME, f"{NAME}.lora_magnitude_vector": MAGNITUDE}, {"use_dora": True},
        lengthened(SOME + SCALE * UP @ DOWN), BIAS,
    ),
    "some tokens": (
        {f"{NAME}.token_adapter.trainable_tokens_delta": OTHER[[7, 2]]},
        {"trainable_token_indices": {"up_proj": [7, 2]}},
        torch.where(torch.isin(torch.arange(OUTPUTS), torch.tensor([2, 7]))[:, None], OTHER, WEIGHT), BIAS,
    ),
}  # fmt: skip


@pytest.mark.parametrize("by_rows", [True, False])
@pytest.mark.parametrize("kind", [*KINDS])
def test_ranks_compute_what_the_changed_weight_does(tmp_path: Path, kind: str, by_rows: bool) -> None:
    tensors, config, merged, bias = KINDS[kind]
    expected = noise(3, INPUTS, seed=9) @ merged.t() + bias
    for world_size in (1, 2, 4):
        with read(tmp_path, tensors, **config) as changes:
            found = divided(changes, WEIGHT, BIAS, world_size, by_rows=by_rows)
            torch.testing.assert_close(found, expected, atol=1e-4, rtol=1e-5)
            changes.refuse_leftovers()


def test_pieces_lie_one_below_the_other(tmp_path: Path) -> None:
    with read(tmp_path, LORA) as changes:
        before = piece_of(noise(2, INPUTS), None, [(0, 2)], (0, INPUTS), "model.layers.0.mlp.gate_proj")
        piece = piece_of(WEIGHT, None, [(8, 10), (1, 2)], (0, INPUTS))
        change = changes.linear([before, Piece(**(vars(piece) | {"first": 2}))])
    assert change is not None and change.gain is None and change.bias is None
    (part,) = change.parts
    assert 2 == part.first and torch.equal(UP[[8, 9, 1]], part.up)


def test_a_transposed_weight_is_turned(tmp_path: Path) -> None:
    square = noise(INPUTS, INPUTS, seed=5)
    with read(tmp_path, {f"{NAME}.weight": square.t()}) as changes:
        found = divided(changes, noise(INPUTS, INPUTS), None, 2, by_rows=False, is_transposed=True)
    torch.testing.assert_close(found, noise(3, INPUTS, seed=9) @ square.t(), atol=1e-5, rtol=1e-5)


def test_what_an_adapter_does_not_name_stays(tmp_path: Path) -> None:
    with read(
        tmp_path, {"model.layers.1.mlp.up_proj.lora_A.weight": DOWN, "model.layers.1.mlp.up_proj.lora_B.weight": UP}
    ) as changes:
        assert None is changes.linear([piece_of(WEIGHT, BIAS, [(0, OUTPUTS)], (0, INPUTS))])
        with pytest.raises(
            AdapterError, match=r"tensor .*layers\.1\.mlp\.up_proj\.lora_A\.weight in .* is of no layer"
        ):
            changes.refuse_leftovers()
        changes.refuse_leftovers(["layers.1"])
        with pytest.raises(AdapterError, match="of no layer"):
            changes.refuse_leftovers(["layers.10", "layers.1.mlp.up"])


def test_a_layer_that_was_trained_whole_must_be_there_if_the_model_has_it(tmp_path: Path) -> None:
    """PEFT passes over other names, though those of all tasks may be given."""
    for saved, is_refused in ((["score", "classifier"], False), (["up_proj"], True), (["mlp"], True)):
        with read(tmp_path, LORA, modules_to_save=saved) as changes:
            changes.linear([piece_of(WEIGHT, None, [(0, OUTPUTS)], (0, INPUTS))])
            if is_refused:
                with pytest.raises(AdapterError, match=f"has {saved[0]} in `modules_to_save`, and there is no tensor"):
                    changes.refuse_leftovers()
            else:
                changes.refuse_leftovers()


@pytest.mark.parametrize(
    ("tensors", "config", "expected"),
    [
        ({f"{NAME}.lora_A.weight": DOWN[:, :5], f"{NAME}.lora_B.weight": UP}, {}, "has shape [4, 5], and the model"),
        ({f"{NAME}.lora_A.weight": DOWN, f"{NAME}.lora_B.weight": UP[:7]}, {}, "ask for 12 x 4"),
        ({f"{NAME}.lora_A.weight": DOWN, f"{NAME}.lora_B.weight": UP[:, :3]}, {}, "ask for 12 x 4"),
        (LORA, {"r": 8}, "is of rank 4, and"),
        ({f"{NAME}.weight": OTHER[:7]}, {}, "ask for 12 x 8"),
        ({f"{NAME}.bias": UP_BIAS[:7]}, {}, "ask for 12"),
        ({f"{NAME}.lora_embedding_A": DOWN, f"{NAME}.lora_embedding_B": UP}, {}, "is for another kind of layer than"),
        (LORA | {f"{NAME}.lora_magnitude_vector": MAGNITUDE[:5]}, {"use_dora": True}, "ask for 12"),
    ],
)  # fmt: skip
def test_a_tensor_that_does_not_fit_is_named(
    tmp_path: Path, tensors: Tensors, config: dict[str, Any], expected: str
) -> None:
    with read(tmp_path, tensors, **config) as changes, pytest.raises(AdapterError) as refusal:
        changes.linear([piece_of(WEIGHT, BIAS, [(0, OUTPUTS)], (0, INPUTS))])
    assert expected in str(refusal.value) and f"base_model.model.{NAME}" in str(refusal.value)


def test_a_bias_where_the_model_multiplies_is_refused(tmp_path: Path) -> None:
    with (
        read(tmp_path, {f"{NAME}.bias": UP_BIAS}) as changes,
        pytest.raises(AdapterError, match="where no bias is served"),
    ):
        changes.linear([piece_of(WEIGHT, None, [(0, OUTPUTS)], (0, INPUTS), takes_bias=False)])


def of_vocabulary(known: int, *, rank: int = 0, world_size: int = 1) -> tuple[Tensor, Piece]:
    """A table, and a rank's part of it as a head that is filled up to three ranks' worth."""
    table = noise(known, INPUTS, seed=7)
    share = -(-known // world_size)
    part = (min(rank * share, known), min((rank + 1) * share, known))
    return table, piece_of(table, None, [part], (0, INPUTS), HEAD)


@pytest.mark.parametrize("world_size", [1, 3])
def test_tokens_that_an_adapter_does_not_know_are_never_chosen(tmp_path: Path, world_size: int) -> None:
    table, x = of_vocabulary(OUTPUTS)[0], noise(3, INPUTS, seed=9)
    own = torch.cat([table[:4], noise(6, INPUTS, seed=8)])
    logits = []
    for rank in range(world_size):
        with read(tmp_path, {f"{HEAD}.weight": own}) as changes:
            piece = of_vocabulary(OUTPUTS, rank=rank, world_size=world_size)[1]
            logits.append(product(changes.linear([piece], is_vocabulary=True), rows_of(table, piece.rows), x, None))
    found = torch.cat(logits, dim=1)
    torch.testing.assert_close(found[:, :10], x @ own.t(), atol=1e-5, rtol=1e-5)
    assert found[:, 10:].eq(float("-inf")).all()


@pytest.mark.parametrize("rows", [(8, OUTPUTS), (OUTPUTS, OUTPUTS)])
def test_a_rank_whose_tokens_an_adapter_does_not_know_takes_it_as_others_do(
    tmp_path: Path, rows: tuple[int, int]
) -> None:
    lora = {f"{HEAD}.lora_A.weight": DOWN, f"{HEAD}.lora_B.weight": UP[:3]}
    tensors = lora | {f"{HEAD}.base_layer.weight": OTHER[:3], f"{HEAD}.base_layer.bias": BIAS[:3]}
    lengths = {f"{HEAD}.lora_magnitude_vector": MAGNITUDE[:3]}
    with read(tmp_path, tensors | lengths, use_dora=True) as changes:
        change = changes.linear([piece_of(WEIGHT, BIAS, [rows], (0, INPUTS), HEAD)], 4, is_vocabulary=True)
        changes.refuse_leftovers()
    if rows == (OUTPUTS, OUTPUTS):
        assert change is None
    else:
        assert change is not None and change.bias is not None and not change.parts
        assert change.bias.eq(float("-inf")).all()


def test_more_tokens_than_there_is_room_for_are_refused(tmp_path: Path) -> None:
    tensors = {f"{HEAD}.weight": noise(OUTPUTS + 1, INPUTS)}
    with read(tmp_path, tensors) as changes, pytest.raises(AdapterError, match=r"is of 13 tokens, and .* with 12"):
        changes.linear([of_vocabulary(OUTPUTS)[1]], is_vocabulary=True)


@pytest.mark.parametrize("step", [2, 90])
def test_rows_here_and_there_take_no_more_than_all_of_them(tmp_path: Path, step: int) -> None:
    """Every second token, as training in few bits leaves the others; or a few, which take a matrix of their places."""
    table, x = of_vocabulary(200)[0], noise(3, INPUTS, seed=9)
    own = table.clone()
    own[10::step] += 1
    with read(tmp_path, {f"{HEAD}.weight": own}) as changes:
        change = changes.linear([of_vocabulary(200)[1]], is_vocabulary=True)
    assert change is not None and change.nbytes <= own.nbytes + 4 * len(own)
    torch.testing.assert_close(product(change, table, x, None), x @ own.t(), atol=1e-5, rtol=1e-5)


def test_what_is_larger_than_the_budget_is_not_made_first(tmp_path: Path) -> None:
    """A small file of which a large matrix would become."""
    few = {"trainable_token_indices": [0, 9_999], "budget": 10_000}
    table = piece_of(torch.zeros(10_000, INPUTS), None, [(0, 10_000)], (0, INPUTS), TABLE)
    head = piece_of(torch.zeros(10_000, INPUTS), None, [(0, 10_000)], (0, INPUTS), HEAD)
    wide = {f"{TABLE}.lora_embedding_A": noise(RANK, 1), f"{TABLE}.lora_embedding_B": noise(INPUTS, RANK)}
    with read(tmp_path, wide, budget=10_000) as changes, pytest.raises(AdapterError, match="more than 1e-05 GB"):
        changes.embedding(table)
    tokens = {f"{HEAD}.token_adapter.trainable_tokens_delta": noise(2, INPUTS)}
    with read(tmp_path, tokens, **few) as changes, pytest.raises(AdapterError, match="more than 1e-05 GB"):
        changes.linear([head])


TABLE_DOWN, TABLE_UP, LENGTHS = noise(RANK, OUTPUTS, seed=4), noise(INPUTS, RANK, seed=4), noise(INPUTS).abs() + 0.5
TABLE_LORA = {f"{TABLE}.lora_embedding_A": TABLE_DOWN, f"{TABLE}.lora_embedding_B": TABLE_UP}
DELTA = SCALE * (TABLE_UP @ TABLE_DOWN).t()
TABLES: dict[str, tuple[Tensors, dict[str, Any], Tensor]] = {
    "plain": (TABLE_LORA, {}, WEIGHT + DELTA),
    "lengths": (
        TABLE_LORA | {f"{TABLE}.lora_magnitude_vector": LENGTHS}, {"use_dora": True},
        (WEIGHT + DELTA) * LENGTHS / (WEIGHT + DELTA).norm(dim=0),
    ),
    "some other rows": ({f"{TABLE}.weight": SOME}, {}, SOME),
    "some other rows, lengthened": (
        TABLE_LORA | {f"{TABLE}.base_layer.weight": SOME, f"{TABLE}.lora_magnitude_vector": LENGTHS},
        {"use_dora": True},
        (SOME + DELTA) * LENGTHS / (SOME + DELTA).norm(dim=0),
    ),
    "some tokens": (
        {f"{TABLE}.token_adapter.trainable_tokens_delta": OTHER[[7, 2]]}, {"trainable_token_indices": [7, 2]},
        torch.where(torch.isin(torch.arange(OUTPUTS), torch.tensor([2, 7]))[:, None], OTHER, WEIGHT),
    ),
    "some tokens of a table that was resized": (
        {
            f"{TABLE}.token_adapter.trainable_tokens_delta": OTHER[[7, 2]],
            f"{TABLE}.token_adapter.base_layer.weight": SOME,
        },
        {"trainable_token_indices": [7, 2]},
        torch.where(torch.isin(torch.arange(OUTPUTS), torch.tensor([2, 7]))[:, None], OTHER, SOME),
    ),
    "a table that was resized, as it is saved beside others": (
        {
            f"{TABLE}.weight": SOME,
            f"{TABLE}.modules_to_save.another-one.weight": OTHER,
            f"{TABLE}.modules_to_save.weight": SOME.clone(),
            f"{TABLE}.original_module.weight": WEIGHT,
        },
        {"modules_to_save": ["embed_tokens"]},
        SOME,
    ),
}  # fmt: skip


@pytest.mark.parametrize("world_size", [1, 2, 4])
@pytest.mark.parametrize("kind", [*TABLES])
def test_rows_of_a_table_are_those_of_the_changed_table(tmp_path: Path, kind: str, world_size: int) -> None:
    tensors, config, expected = TABLES[kind]
    found, share = [], OUTPUTS // world_size
    for start in range(0, OUTPUTS, share):
        with read(tmp_path, tensors, **config) as changes:
            change = changes.embedding(piece_of(WEIGHT, None, [(start, start + share)], (0, INPUTS), TABLE))
            own = WEIGHT[start : start + share]
            found.append(own if change is None else changed_rows(change, torch.arange(share), own))
            changes.refuse_leftovers()
    torch.testing.assert_close(torch.cat(found), expected, atol=1e-5, rtol=1e-5)


def test_a_tied_head_follows_what_changes_tokens_of_the_table(tmp_path: Path) -> None:
    tensors, config, expected = TABLES["some tokens"]
    table = piece_of(WEIGHT, None, [(0, OUTPUTS)], (0, INPUTS), TABLE)
    head = piece_of(WEIGHT, None, [(0, OUTPUTS)], (0, INPUTS), HEAD)
    x = noise(3, INPUTS, seed=9)
    with read(tmp_path, tensors, **config) as changes:
        found = product(changes.linear([head], is_vocabulary=True, tied_to=table), WEIGHT, x, None)
        torch.testing.assert_close(found, x @ expected.t(), atol=1e-5, rtol=1e-5)
    own = noise(1, INPUTS, seed=11)
    tokens = {"embed_tokens": list(config["trainable_token_indices"]), "lm_head": [3]}
    with_own = tensors | {"lm_head.token_adapter.trainable_tokens_delta": own}
    with read(tmp_path, with_own, trainable_token_indices=tokens) as changes:  # which the table's tokens are not
        found = product(changes.linear([head], is_vocabulary=True, tied_to=table), WEIGHT, x, None)
        weight = WEIGHT.clone()
        weight[3] = own[0]
        torch.testing.assert_close(found, x @ weight.t(), atol=1e-5, rtol=1e-5)
    for is_tied in (False, True):
        with read(tmp_path, TABLE_LORA, ensure_weight_tying=is_tied) as changes:
            found = product(changes.linear([head], is_vocabulary=True, tied_to=table), WEIGHT, x, None)
            torch.testing.assert_close(found, x @ (WEIGHT + is_tied * DELTA).t(), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("offset", [0.0, 1.0])
def test_a_norm_is_multiplied_and_shifted(tmp_path: Path, offset: float) -> None:
    weight, bias, other, shift = noise(INPUTS).abs() + 0.5, noise(INPUTS), noise(INPUTS, seed=2), noise(INPUTS, seed=3)
    y = noise(3, INPUTS)
    with read(tmp_path, {"model.norm.weight": other, "model.norm.bias": shift}) as changes:
        change = changes.norm(["model.norm"], weight, bias, offset)
    assert change is not None and change.gain is not None and change.bias is not None
    found = (y * weight + bias) * change.gain + change.bias
    torch.testing.assert_close(found, y * (other + offset) + shift, atol=1e-5, rtol=1e-5)
    with read(tmp_path, {"model.norm.weight": weight - offset}) as changes:
        assert None is changes.norm(["model.norm"], weight, bias, offset)
    with (
        read(tmp_path, {"model.norm.weight": other}) as changes,
        pytest.raises(AdapterError, match="is not 0 where the"),
    ):
        changes.norm(["model.norm"], torch.zeros(INPUTS), None)


def test_matrices_of_all_experts_are_taken_apart(tmp_path: Path) -> None:
    """As PEFT stores them: A expert by expert, B rank by rank, the parameter that was wrapped first innermost."""
    count, width, hidden, experts = 3, 5, 8, "model.layers.0.mlp.experts"
    down_a, down_b = noise(count * RANK, width), noise(hidden, RANK * count)
    both_a, both_b = noise(count * RANK, hidden), noise(2 * width, RANK * count)
    tensors = {
        f"{experts}.lora_A.weight": down_a, f"{experts}.lora_B.weight": down_b,
        f"{experts}.base_layer.lora_A.weight": both_a, f"{experts}.base_layer.lora_B.weight": both_b,
    }  # fmt: skip
    deltas = {
        size: torch.einsum("ore,eri->eoi", b.reshape(b.shape[0], RANK, count), a.reshape(count, RANK, a.shape[1]))
        * SCALE
        for size, a, b in (("down", down_a, down_b), ("both", both_a, both_b))
    }
    with read(tmp_path, tensors, target_parameters=EXPERTS) as changes:
        for expert in range(count):
            for role, size, expected in (
                ("expert_gate", (width, hidden), deltas["both"][expert, :width]),
                ("expert_up", (width, hidden), deltas["both"][expert, width:]),
                ("expert_down", (hidden, width), deltas["down"][expert]),
            ):
                name = f"model.layers.0.block_sparse_moe.experts.{expert}.{role}"
                piece = Piece(
                    role,
                    (name,),
                    size,
                    [(1, size[0])],
                    (0, size[1]),
                    0,
                    lambda rows: torch.zeros(0),
                    expert=expert,
                    num_experts=count,
                )
                change = changes.linear([piece])
                assert change is not None and change.parts[0].down is not None
                (part,) = change.parts
                torch.testing.assert_close(part.scale * part.up @ part.down, expected[1:], atol=1e-5, rtol=1e-5)
        changes.refuse_leftovers()
    with (
        read(tmp_path, tensors, r=6, target_parameters=EXPERTS) as changes,
        pytest.raises(AdapterError, match="each of 3 experts has 6"),
    ):
        changes.linear([piece])


def of_experts(role: str, outputs: int, inputs: int, **more: Any) -> Piece:
    """A matrix of the first of two experts."""
    return Piece(
        *(role, (f"model.layers.0.mlp.experts.0.{role}",), (outputs, inputs), [(0, outputs)], (0, inputs), 0),
        *(lambda rows: torch.zeros(0),),
        **{"expert": 0, "num_experts": 2} | more,
    )


def nested(*sizes: tuple[int, int]) -> Tensors:
    """Tensors of two experts with these sizes, the last parameter's first, each with numbers of its own."""
    found = {}
    for level, (outputs, inputs) in enumerate(sizes):
        prefix = "model.layers.0.mlp.experts" + ".base_layer" * level
        found[f"{prefix}.lora_A.weight"] = torch.ones(2, inputs)
        found[f"{prefix}.lora_B.weight"] = torch.full((outputs, 2), level + 1.0)
    return found


@pytest.mark.parametrize(
    ("names", "levels", "expected"),
    [
        (["experts.up_proj", "experts.down_proj"], 2, {"expert_up": 2.0, "expert_down": 1.0}),
        (["mlp.experts.down_proj"], 1, {"expert_down": 1.0}),
        (["up_proj"], 1, {"expert_up": 1.0}),
        (["gate_up_proj"], 1, {"expert_gate_up": 1.0}),
        (["gate_up_proj", "down_proj", "up_proj"], 3, {"expert_gate_up": 2.0, "expert_down": 1.0}),
        (["up_proj", "down_proj"], 1, None),
        ([], 1, None),
    ],
)
def test_of_experts_whose_matrices_have_the_same_sizes_the_config_names_those_that_are_changed(
    tmp_path: Path, names: list[str], levels: int, expected: dict[str, float] | None
) -> None:
    with read(tmp_path, nested(*[(4, 4)] * levels), r=1, lora_alpha=1, target_parameters=names) as changes:
        for role in ("expert_down", "expert_gate_up" if "gate_up_proj" in names else "expert_up"):
            if expected is None:
                with pytest.raises(AdapterError, match=rf"one of 1 parameters .* names {len(names)} that are served"):
                    changes.linear([of_experts(role, 4, 4)])
                continue
            change = changes.linear([of_experts(role, 4, 4)])
            assert expected.get(role, 0.0) == (0.0 if change is None else float(change.parts[0].up.max()))
        if len(expected or ()) == levels:
            changes.refuse_leftovers()


@pytest.mark.parametrize(
    ("stored", "size", "is_turned", "expected"),
    [
        ((6, 8), (8, 6), False, True),
        ((8, 6), (8, 6), True, False),
        ((8, 8), (8, 8), False, False),
        ((8, 8), (8, 8), True, True),
    ],
)
def test_matrices_that_peft_has_for_inputs_and_outputs_are_turned(
    tmp_path: Path, stored: tuple[int, int], size: tuple[int, int], is_turned: bool, expected: bool
) -> None:
    """Where sizes do not say it, the family does; and that they are another parameter's means nothing."""
    (outputs, inputs), (up, down) = size, (noise(stored[0], 2), noise(2, stored[1]))
    tensors = {f"model.layers.0.mlp.experts.lora_{part}.weight": t for part, t in (("A", down), ("B", up))}
    with read(tmp_path, tensors, r=1, lora_alpha=1, target_parameters=["down_proj"]) as changes:
        assert None is changes.linear([of_experts("expert_up", inputs, outputs)])
        change = changes.linear([of_experts("expert_down", outputs, inputs, is_turned=is_turned)])
        changes.refuse_leftovers()
    assert change is not None and change.parts[0].down is not None
    delta = up[:, :1] @ down[:1]
    torch.testing.assert_close(change.parts[0].up @ change.parts[0].down, delta.t() if expected else delta)


def test_a_tied_head_with_changes_of_its_own_adds_them_to_tokens_of_the_table(tmp_path: Path) -> None:
    """As PEFT computes."""
    tensors, config, expected = TABLES["some tokens"]
    tensors = tensors | {f"{HEAD}.lora_A.weight": DOWN, f"{HEAD}.lora_B.weight": UP}
    table = piece_of(WEIGHT, None, [(0, OUTPUTS)], (0, INPUTS), TABLE)
    head, x = piece_of(WEIGHT, None, [(0, OUTPUTS)], (0, INPUTS), HEAD), noise(3, INPUTS, seed=9)
    with read(tmp_path, tensors, **config) as changes:
        found = product(changes.linear([head], tied_to=table), WEIGHT, x, None)
    torch.testing.assert_close(found, x @ (expected + SCALE * UP @ DOWN).t(), atol=1e-4, rtol=1e-4)


def test_numbers_are_in_the_models_dtype(tmp_path: Path) -> None:
    with read(tmp_path, LORA, torch.bfloat16) as changes:
        change = changes.linear([piece_of(WEIGHT, None, [(0, OUTPUTS)], (0, INPUTS))])
    assert change is not None and change.parts[0].down is not None
    assert torch.bfloat16 == change.parts[0].up.dtype == change.parts[0].down.dtype
    assert 2 * (UP.numel() + DOWN.numel()) == change.nbytes
