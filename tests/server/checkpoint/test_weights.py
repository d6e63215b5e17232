"""Checkpoints: slices readable by eye, and what is wrong with a file said in one sentence."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from server.arch import families
from server.arch.names import NameMap, QkvLayout
from server.backends.cpu.device import CpuDevice
from server.backends.reference import ReferenceBackend
from server.backends.reference.linear import DenseFormat
from server.checkpoint.weights import Checkpoint, CheckpointError, Weights, head_ranges
from server.layers.embedding import load_embedding, load_head
from server.layers.linear import load_column, load_row
from server.ranks.collectives import Shard
from tests.server.driver import CPU, load_engine

NAMES = NameMap(roles={"embed": "words", "mlp_up": "up.{i}", "mlp_down": "down.{i}"}, prefixes=("model.", ""))
LINEAR = ReferenceBackend(CpuDevice()).linear


def save(folder: Path, **tensors: torch.Tensor) -> Path:
    save_file(
        {name.replace("__", "."): tensor.clone() for name, tensor in tensors.items()}, folder / "model.safetensors"
    )
    return folder


def weights_of(folder: Path, rank: int = 0, world_size: int = 1) -> Weights:
    return Weights.open(Checkpoint(folder), NAMES, Shard(rank, world_size), torch.float32, CPU).of_layer(0)


@pytest.fixture
def four_by_four(tmp_path: Path) -> Path:
    square = torch.arange(16.0).reshape(4, 4)
    return save(
        tmp_path, words__weight=square, up__0__weight=square, up__0__bias=square[0].clone(), down__0__weight=square
    )


def test_a_column_layer_takes_rows_and_their_bias(four_by_four: Path) -> None:
    layer = load_column(weights_of(four_by_four, 1, 2), "mlp_up", (4, 4), LINEAR, bias=True)
    assert isinstance(layer.weight, DenseFormat)
    assert [[8, 9, 10, 11], [12, 13, 14, 15]] == layer.weight.weight.tolist()
    assert layer.bias is not None
    assert [2, 3] == layer.bias.tolist()


def test_a_row_layer_takes_columns(four_by_four: Path) -> None:
    layer = load_row(weights_of(four_by_four, 1, 2), "mlp_down", (4, 4), LINEAR, bias=False)
    assert isinstance(layer.weight, DenseFormat)
    assert [[2, 3], [6, 7], [10, 11], [14, 15]] == layer.weight.weight.tolist()


def test_fused_heads_are_put_side_by_side() -> None:
    # Four heads of one row share two kv heads. Grouped: q0 q1 k0 v0 q2 q3 k1 v1; concatenated: q0 … q3 k0 k1 v0 v1.
    def rows(layout: QkvLayout, q: range, kv: range) -> list[int]:
        return [row for start, stop in head_ranges(layout, 4, 2, 1, q, kv) for row in range(start, stop)]

    assert [0, 1, 4, 5, 2, 6, 3, 7] == rows(QkvLayout.GROUPED, range(4), range(2))
    assert [4, 5, 6, 7] == rows(QkvLayout.GROUPED, range(2, 4), range(1, 2))
    assert [0, 1, 2, 3, 4, 5, 6, 7] == rows(QkvLayout.CONCAT, range(4), range(2))
    assert [2, 3, 5, 7] == rows(QkvLayout.CONCAT, range(2, 4), range(1, 2))
    assert [(0, 8)] == head_ranges(QkvLayout.CONCAT, 4, 2, 1, range(4), range(2))  # neighbours are read at once


def test_stored_inputs_first_is_turned_around(four_by_four: Path) -> None:
    names = NameMap(roles=NAMES.roles, prefixes=NAMES.prefixes, transposed=True)
    weights = Weights.open(Checkpoint(four_by_four), names, Shard(1, 2), torch.float32, CPU).of_layer(0)
    layer = load_column(weights, "mlp_up", (4, 4), LINEAR, bias=False)
    assert isinstance(layer.weight, DenseFormat)
    assert [[2, 6, 10, 14], [3, 7, 11, 15]] == layer.weight.weight.tolist()


def test_a_rank_reads_its_share_of_the_bytes(tiny_bloom: Path) -> None:
    def bytes_read(rank: int, world_size: int) -> int:
        checkpoint = Checkpoint(tiny_bloom)
        family, spec = families.find(json.loads((tiny_bloom / "config.json").read_text()))
        weights = Weights.open(checkpoint, family.names, Shard(rank, world_size), torch.float32, CPU)
        load_embedding(weights, spec)
        for i in range(spec.num_layers):
            layer = weights.of_layer(i)
            load_column(layer, "mlp_up", (256, 64), LINEAR, bias=True)
            load_row(layer, "mlp_down", (64, 256), LINEAR, bias=True)
        return checkpoint.bytes_read

    whole = bytes_read(0, 1)
    assert all(bytes_read(rank, 4) < whole / 4 * 1.05 for rank in range(4))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_what_is_read_is_converted_as_torch_does(tmp_path: Path, dtype: torch.dtype) -> None:
    square = torch.randn(5, 7, generator=torch.manual_seed(0))
    checkpoint = Checkpoint(save(tmp_path, words__weight=square, number=torch.tensor(0.3)))
    for dim, part in ((0, None), (0, (1, 4)), (1, (2, 6))):
        stored = checkpoint.read("words.weight", (5, 7), dim=dim, part=part)
        found = checkpoint.read("words.weight", (5, 7), dim=dim, part=part, dtype=dtype)
        assert torch.equal(stored.to(dtype), found) and found.dtype == dtype and found.is_contiguous()
    before = checkpoint.bytes_read
    checkpoint.read("words.weight", (5, 7), dtype=dtype)
    assert square.nbytes == checkpoint.bytes_read - before  # of the file
    assert torch.tensor(0.3).to(dtype) == checkpoint.read("number", (), dtype=dtype)


def test_what_may_be_the_file_itself_is_not_copied_and_counts_as_read(four_by_four: Path) -> None:
    checkpoint = Checkpoint(four_by_four)
    for dim, part in ((0, (1, 3)), (1, (2, 4)), (0, None)):
        copied = checkpoint.read("up.0.weight", (4, 4), dim=dim, part=part)
        before = checkpoint.bytes_read
        found = checkpoint.read("up.0.weight", (4, 4), dim=dim, part=part, mapped=True)
        assert torch.equal(copied, found)
        assert copied.nbytes == checkpoint.bytes_read - before
    mapped = [checkpoint.read("up.0.weight", (4, 4), mapped=True).data_ptr() for _ in range(2)]
    assert mapped[0] == mapped[1]
    assert mapped[0] != copied.data_ptr()


def test_a_padded_vocabulary_ends_in_zeros(tiny_bloom: Path) -> None:
    family, spec = families.find(json.loads((tiny_bloom / "config.json").read_text()))  # 103 rows over 4 ranks: 26 each
    weights = Weights.open(Checkpoint(tiny_bloom), family.names, Shard(3, 4), torch.float32, CPU)
    table = load_embedding(weights, spec).table
    assert (26, 64) == tuple(table.shape)
    assert table[24].any()
    assert not table[25].any()


def test_logits_do_not_show_the_padding(tiny_bloom: Path) -> None:
    engine = load_engine(tiny_bloom)
    head = load_head(
        Weights.open(Checkpoint(tiny_bloom), families.FAMILIES["bloom"].names, Shard(), torch.float32, CPU),
        engine.model.spec,
        engine.model.decoder.embedding,
        LINEAR,
    )
    assert (2, 103) == tuple(head(torch.zeros(2, 64)).shape)


def test_a_checkpoint_without_the_prefix_loads_too(tiny_bloom: Path, tmp_path: Path) -> None:
    tensors = load_file(tiny_bloom / "model.safetensors")
    save_file({n.removeprefix("transformer."): t for n, t in tensors.items()}, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text((tiny_bloom / "config.json").read_text())
    assert load_engine(tmp_path).model.spec.vocab_size == 103


def test_a_wrong_shape_names_tensor_and_both_shapes(four_by_four: Path) -> None:
    with pytest.raises(CheckpointError, match=r"up\.0\.weight .* shape \[4, 4\], but config.json says \[8, 4\]"):
        load_column(weights_of(four_by_four), "mlp_up", (8, 4), LINEAR, bias=False)


def test_a_role_that_a_family_forgets_is_named(four_by_four: Path) -> None:
    with pytest.raises(CheckpointError, match="has no role 'mlp_gate', which its spec needs: add it to NAMES"):
        load_column(weights_of(four_by_four), "mlp_gate", (4, 4), LINEAR, bias=False)


def test_a_file_without_tensors_is_refused(tmp_path: Path) -> None:
    save_file({}, tmp_path / "model.safetensors")
    with pytest.raises(CheckpointError, match="hold no tensors: fetch the model again"):
        Checkpoint(tmp_path)


def test_a_tensor_in_two_files_is_refused(four_by_four: Path) -> None:
    (four_by_four / "model.safetensors").rename(four_by_four / "one.safetensors")
    save_file({"words.weight": torch.zeros(1)}, four_by_four / "other.safetensors")
    with pytest.raises(CheckpointError, match=r"tensor words\.weight is in .* and in another file"):
        Checkpoint(four_by_four)


def test_weights_of_another_model_are_refused(tiny_bloom: Path, four_by_four: Path) -> None:
    with pytest.raises(CheckpointError, match="are of different models"):
        Weights.open(Checkpoint(tiny_bloom), NAMES, Shard(), torch.float32, CPU)


def test_a_family_that_is_not_served_is_refused_with_the_list() -> None:
    with pytest.raises(ValueError, match=r"model_type 'mamba'; served are: afmoe, .*, bloom, .*, t5$"):
        families.find({"model_type": "mamba"})


def test_a_config_without_a_key_is_refused_by_name() -> None:
    with pytest.raises(ValueError, match="lacks the key 'vocab_size', which bloom models have: download it again"):
        families.find({"model_type": "bloom", "hidden_size": 8, "n_head": 1, "n_layer": 1})


def test_a_tensor_that_a_file_notes_as_another_is_read_as_that_one(tmp_path: Path) -> None:
    table = torch.arange(12.0).view(4, 3)
    save_file(
        {"embed.weight": table},
        tmp_path / "model.safetensors",
        metadata={"format": "pt", "head.weight": "embed.weight"},
    )
    checkpoint = Checkpoint(tmp_path)
    assert "head.weight" in checkpoint
    assert "format" not in checkpoint
    assert torch.equal(table[1:3], checkpoint.read("head.weight", (4, 3), part=(1, 3)))
    assert [] == checkpoint.leftovers(())


def test_a_dtype_is_that_of_the_largest_tensor_and_numbers_have_one_too(tmp_path: Path) -> None:
    save(
        tmp_path,
        a__scale=torch.tensor(1.0),  # the first by name, and without dimensions
        b__scale=torch.ones(3),
        codes=torch.zeros(99, dtype=torch.int8),
        words__weight=torch.ones(4, 4).bfloat16(),
    )
    checkpoint = Checkpoint(tmp_path)
    assert checkpoint.dtype_of("a.scale") == torch.float32
    assert checkpoint.dtype_of_most() == torch.bfloat16
    assert [] == checkpoint.zeros(["scale"])
