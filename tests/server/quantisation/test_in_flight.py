"""Weights that are quantised while they are loaded: what the rounding is, and that no part of its inputs changes it."""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest
import torch
from torch import Tensor

from server.checkpoint.formats import IN_FLIGHT
from server.quantisation.rounding import fp4_levels, int4_groups, int8_rows, nf4_levels
from server.quantisation.stored import padded
from tests.server.checkpoints import Checkpoints
from tests.server.driver import Prompt, all_logits, generate, load_engine

GROUPS = {"int4": 128, "bitsandbytes-nf4": 64, "bitsandbytes-fp4": 64}


def drawn(rows: int, inputs: int, seed: int = 0) -> Tensor:
    torch.manual_seed(seed)
    return torch.randn(rows, inputs) * (torch.rand(rows, 1) + 0.1)


@pytest.mark.parametrize("name", IN_FLIGHT)
@pytest.mark.parametrize("inputs", [1, 64, 200, 384])
def test_a_row_is_rounded_alone_and_a_part_of_its_inputs_is_a_part_of_it(name: str, inputs: int) -> None:
    weight = drawn(9, inputs)
    whole = IN_FLIGHT[name](weight)
    assert (9, inputs) == whole.shape
    values = whole.dequantised()
    assert torch.equal(values[3:5], IN_FLIGHT[name](weight[3:5]).dequantised())
    assert torch.equal(values[:, inputs // 3 :], whole.columns(inputs // 3, inputs).dequantised())
    assert torch.equal(values[[4, 0, 4]], whole.rows(torch.tensor([4, 0, 4])))
    assert torch.equal(values, padded(whole, 2).dequantised()[:9])
    assert 0 == padded(whole, 2).dequantised()[9:].abs().sum()


@pytest.mark.parametrize("name", IN_FLIGHT)
def test_zeros_stay_zeros(name: str) -> None:
    assert torch.equal(torch.zeros(3, 200), IN_FLIGHT[name](torch.zeros(3, 200)).dequantised())


@pytest.mark.parametrize("name", GROUPS)
def test_groups_end_with_rows(name: str) -> None:
    size = GROUPS[name]
    weight = drawn(2, 2 * size + 8)
    weight[:, -8:] *= 1000  # of a group of their own: else what is before them would be lost
    quantised = IN_FLIGHT[name](weight)
    assert [0] * size + [1] * size + [2] * 8 == quantised.groups.tolist()
    error = (quantised.dequantised() - weight).square().sum(1) / weight.square().sum(1)
    before = (quantised.dequantised() - weight)[:, :-8].square().sum() / weight[:, :-8].square().sum()
    assert error.max() < 0.02 and before < 0.02


def test_levels_of_nf4_are_equally_likely() -> None:
    """As the paper's appendix prints them; between two neighbours lies the same share of a normal number."""
    levels = nf4_levels()
    printed = [
        -1.0, -0.6962, -0.5251, -0.3949, -0.2844, -0.1848, -0.0911, 0.0,
        0.0796, 0.1609, 0.2461, 0.3379, 0.4407, 0.5626, 0.7230, 1.0,
    ]  # fmt: skip
    assert printed == pytest.approx(levels.tolist(), abs=1e-4)
    widest = float(torch.special.ndtri(torch.tensor(1 - (1 / 32 + 1 / 30) / 2, dtype=torch.float64)))
    shares = torch.special.ndtr(levels.double() * widest).diff()
    assert torch.allclose(shares[:7], shares[0]) and torch.allclose(shares[7:], shares[-1])


def test_levels_of_fp4_are_twelfths() -> None:
    twelfths = [0, 0.0625, 8, 12, 4, 6, 2, 3]
    assert torch.allclose(torch.tensor([*twelfths, *(-n for n in twelfths)]) / 12, fp4_levels())


@pytest.mark.parametrize("name", ["bitsandbytes-nf4", "bitsandbytes-fp4"])
def test_each_weight_gets_the_nearest_level(name: str) -> None:
    weight = drawn(4, 128)
    quantised = IN_FLIGHT[name](weight)
    levels = quantised.levels
    assert levels is not None
    largest = weight.unflatten(1, (2, 64)).abs().amax(2).repeat_interleave(64, 1)
    nearest = levels[(weight[..., None] - levels * largest[..., None]).abs().argmin(-1)] * largest
    assert torch.equal(nearest, quantised.dequantised())


def errors(exact: Tensor, shrinks: list[tuple[float, float]]) -> Tensor:
    """The squared error of one group for each pair of what its lower and its upper end are multiplied by."""
    found = []
    for lower, upper in shrinks:
        low, high = exact.min() * lower, exact.max() * upper
        scale = (high - low) / 15
        zero = (-low / scale).round()
        found.append((((exact / scale + zero).round().clamp(0, 15) - zero) * scale - exact).square().sum())
    return torch.stack(found)


@pytest.mark.parametrize(("tail", "most"), [(1.0, 0.92), (3.0, 0.96)])
def test_int4_clips_about_as_well_as_one_can(tail: float, most: float) -> None:
    """Within 2 % of the best of 900 pairs of ends, summed over the groups, and at most so much of the whole range's."""
    torch.manual_seed(5)
    weight = torch.randn(1, 128 * 12)
    weight = weight.sign() * weight.abs() ** tail
    found = (int4_groups(weight).dequantised() - weight).square().sum()
    grid = [0.3 + 0.7 * step / 29 for step in range(30)]
    groups = weight.view(-1, 128)
    best = sum(errors(group, list(itertools.product(grid, grid))).min() for group in groups)
    whole = sum(errors(group, [(1.0, 1.0)])[0] for group in groups)
    assert found < 1.02 * best
    assert found < most * whole


def test_the_size_of_pieces_changes_nothing() -> None:
    weight = drawn(37, 300)
    expected, found = int4_groups(weight), int4_groups(weight, piece=2048)
    assert torch.equal(expected.codes, found.codes) and torch.equal(expected.scale, found.scale)
    assert expected.zero is not None and found.zero is not None and torch.equal(expected.zero, found.zero)


def test_int4_zeros_are_codes_and_scales_have_16_bits() -> None:
    """So that a kernel can subtract the ones from codes and keep the others; also of numbers of one sign."""
    for weight in (drawn(4, 256), drawn(4, 256).abs() + 1, -drawn(4, 256).abs() - 1):
        quantised = int4_groups(weight)
        zero, scale = quantised.zero, quantised.scale
        assert zero is not None and torch.equal(zero, zero.round()) and 0 <= zero.min() and zero.max() <= 15
        assert torch.equal(scale, scale.half().float())
    tiny = drawn(4, 256) * 1e-6  # for which 16 bits have too few digits
    assert (int4_groups(tiny).dequantised() - tiny).norm() < 0.15 * tiny.norm()


# A tied table, one of another width, one whose head has a bias, an encoder-decoder that scales before its head, a head
# of its own, and one whose rows have length 1.
HEADS = ["bloom", "opt-350m", "gemma2", "t5", "stablelm", "gpt_neox", "baichuan2-7b"]


@pytest.mark.parametrize("case", HEADS)
@pytest.mark.parametrize("name", ["int8", "int4"])
def test_the_head_is_in_int8_and_a_table_tied_to_it(checkpoints: Checkpoints, case: str, name: str) -> None:
    folder, _ = checkpoints(case)
    kept = load_engine(folder, quantise=name, quantise_head="none", warms_up=False).model
    engine = load_engine(folder, quantise=name, warms_up=False)
    model = engine.model
    table = kept.decoder.embedding(torch.arange(5, 40))
    if kept.spec.tied_head:
        table = int8_rows(table).dequantised()
        assert 0 == model.decoder.embedding.table.nbytes
    assert torch.equal(table, model.decoder.embedding(torch.arange(5, 40)))
    hidden = torch.randn(3, kept.spec.embed_dim or kept.spec.hidden_size)
    expected, found = kept.logits(hidden), model.logits(hidden)
    assert 0 < (expected - found).abs().max() < 0.03 * expected.abs().max()
    assert model.nbytes < kept.nbytes
    (done,) = generate(engine, [Prompt(list(range(4, 30)), max_new_tokens=4)])
    assert 4 == len(done.tokens)


def test_other_formats_leave_the_head(tiny_bloom: Path) -> None:
    dense = load_engine(tiny_bloom, warms_up=False).model
    for name in IN_FLIGHT.keys() - {"int8", "int4"}:
        model = load_engine(tiny_bloom, quantise=name, warms_up=False).model
        assert torch.equal(dense.decoder.embedding.table, model.decoder.embedding.table), name


@pytest.mark.parametrize(("name", "most"), [("eetq", 0.05), ("bitsandbytes-nf4", 0.3), ("bitsandbytes-fp4", 0.45)])
def test_logits_are_those_of_what_the_weights_stand_for(tiny_bloom: Path, name: str, most: float) -> None:
    dense = load_engine(tiny_bloom, warms_up=False)
    token_ids = list(range(4, 60))
    expected = all_logits(dense, token_ids)
    found = all_logits(load_engine(tiny_bloom, quantise=name, warms_up=False), token_ids)
    assert 0 < (expected - found).abs().mean() < most * expected.std()
