"""AutoAWQ divides what an activation computes where no weight before it could be: a vector beside the activation.

A model with such vectors computes what one does whose next weights are divided by them, column by column.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from server.checkpoint.weights import CheckpointError
from tests.server.quantisation import quantised
from tests.server.quantisation.cases import WEIGHTS, logits
from tests.server.tiny import save_tiny

# By family: the activation, and the layer that it is followed by.
NAMES = {
    "bloom": ("mlp.gelu_impl", "mlp.dense_4h_to_h"),
    "falcon-7b": ("mlp.act", "mlp.dense_4h_to_h"),
    "mpt": ("ffn.act", "ffn.down_proj"),
    "gpt_bigcode": ("mlp.act", "mlp.c_proj"),
    "starcoder2": ("mlp.act", "mlp.c_proj"),
    "gpt_neox": ("mlp.act", "mlp.dense_4h_to_h"),
}


def with_scales(folder: Path, family: str, *, is_divided: bool) -> None:
    """Add vectors to a checkpoint, or divide the weights by them."""
    activation, following = NAMES[family]
    tensors = load_file(folder / "model.safetensors")
    generator = torch.Generator().manual_seed(7)
    for name in sorted(tensors):
        if name.endswith((f"{following}.weight", f"{following}.qweight")):
            stem = name[: name.rindex(following)]
            size = tensors[name].shape[0] if name.endswith("qweight") else tensors[name].shape[1]
            scales = torch.rand(size, generator=generator) + 0.5
            if is_divided:
                tensors[name] = tensors[name] / scales
            else:
                tensors[f"{stem}{activation}.scales"] = scales
    save_file(tensors, folder / "model.safetensors")


@pytest.mark.parametrize("family", NAMES)
def test_activations_are_divided(family: str, tmp_path: Path) -> None:
    found = {}
    for is_divided in (False, True):
        folder = tmp_path / str(is_divided)
        folder.mkdir()
        save_tiny(family, folder)
        if is_divided:
            plain = logits(folder)
        with_scales(folder, family, is_divided=is_divided)
        found[is_divided] = logits(folder)
    torch.testing.assert_close(found[False], found[True], rtol=0, atol=2e-5)
    assert not torch.allclose(found[True], plain, rtol=0, atol=1e-3)


def test_so_they_are_before_weights_in_fewer_bits(tmp_path: Path) -> None:
    """Codes stay as they are; the dense model that they stand for is divided by the same numbers."""
    (tmp_path / "source").mkdir()
    save_tiny("starcoder2", tmp_path / "source", num_hidden_layers=2)
    quantised.quantise(tmp_path / "source", tmp_path, quantised.awq(32))
    with_scales(tmp_path / "quantised", "starcoder2", is_divided=False)
    with_scales(tmp_path / "dense", "starcoder2", is_divided=True)
    torch.testing.assert_close(logits(tmp_path / "quantised"), logits(tmp_path / "dense"), rtol=0, atol=WEIGHTS)


@pytest.mark.parametrize("wrong", [0.0, float("nan"), float("inf")])
def test_numbers_that_nothing_can_be_divided_by_are_refused(wrong: float, tmp_path: Path) -> None:
    save_tiny("starcoder2", tmp_path)
    with_scales(tmp_path, "starcoder2", is_divided=False)
    tensors = load_file(tmp_path / "model.safetensors")
    next(tensor for name, tensor in tensors.items() if name.endswith(".scales"))[3] = wrong
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(CheckpointError, match="0, nan or infinity among the numbers that activations are divided by"):
        logits(tmp_path)
