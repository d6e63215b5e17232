"""Checkpoints whose tensors have the names that today's tools write: they are those of the live model.

The same weights under other names give the same logits, dense and in fewer bits.
"""

from __future__ import annotations

import re
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from server.checkpoint.weights import CheckpointError
from tests.server.quantisation.cases import Quantised, logits
from tests.server.tiny import save_tiny

Rename = Callable[[Mapping[str, Tensor]], dict[str, Tensor]]
PACKERS = {"w1": "gate_proj", "w3": "up_proj", "w2": "down_proj"}


def of_packers(block: str) -> Rename:
    """Experts as llm-compressor and GPTQModel name them, below `block`."""

    def renamed(name: str) -> str:
        return re.sub(r"\.(w[123])\.", lambda match: f".{PACKERS[match[1]]}.", name.replace("block_sparse_moe", block))

    return lambda tensors: {renamed(name): tensor for name, tensor in tensors.items()}


def fused(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Experts as transformers 5 holds them: one tensor of gates and ups, one of downs."""
    named = of_packers("mlp")(tensors)
    found = {name: tensor for name, tensor in named.items() if ".experts." not in name}
    for layer in range(2):
        stem = f"model.layers.{layer}.mlp.experts"
        experts = range(sum(name.startswith(stem) and name.endswith("gate_proj.weight") for name in named))
        if not experts:  # a layer without a mixture
            continue
        rows = [torch.cat([named[f"{stem}.{e}.{name}_proj.weight"] for name in ("gate", "up")]) for e in experts]
        found[f"{stem}.gate_up_proj"] = torch.stack(rows)
        found[f"{stem}.down_proj"] = torch.stack([named[f"{stem}.{e}.down_proj.weight"] for e in experts])
    return found


def apart(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Phi-3's gates and ups as GPTQModel writes them."""
    found = {}
    for name, tensor in tensors.items():
        if "gate_up_proj" not in name:
            found[name] = tensor
            continue
        gate, up = tensor.chunk(2)
        found |= {name.replace("gate_up", "gate"): gate, name.replace("gate_up", "up"): up}
    return found


def as_llama(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """GPT-NeoX's head as GPTQModel names it."""
    return {name.replace("embed_out", "lm_head"): tensor for name, tensor in tensors.items()}


def renamed(folder: Path, to: Path, rename: Rename) -> Path:
    shutil.copytree(folder, to)
    tensors = {name: tensor.contiguous() for name, tensor in rename(load_file(folder / "model.safetensors")).items()}
    save_file(tensors, to / "model.safetensors")
    return to


@pytest.mark.parametrize(
    ("family", "rename"),
    [
        ("mixtral", of_packers("block_sparse_moe")),
        ("mixtral", of_packers("mlp")),
        ("mixtral", fused),
        ("qwen3_moe", fused),
        ("phi3", apart),
        ("gpt_neox", as_llama),
    ],
    ids=["packers", "packers, mlp", "fused", "fused, Qwen", "gate and up", "head"],
)
def test_other_names_give_the_same_logits(family: str, rename: Rename, tmp_path: Path) -> None:
    (tmp_path / "published").mkdir()
    save_tiny(family, tmp_path / "published", num_hidden_layers=2)
    other = renamed(tmp_path / "published", tmp_path / "other", rename)
    assert torch.equal(logits(tmp_path / "published"), logits(other))


@pytest.mark.parametrize("name", ["mixtral-awq", "mixtral-gptq", "mixtral-int8"])
@pytest.mark.parametrize("block", ["block_sparse_moe", "mlp"])
def test_so_do_experts_in_fewer_bits(quantised_models: Quantised, name: str, block: str, tmp_path: Path) -> None:
    folder, _ = quantised_models(name)
    other = renamed(folder / "quantised", tmp_path / "other", of_packers(block))
    assert torch.equal(logits(folder / "quantised"), logits(other))


def with_experts(count: int) -> Rename:
    def rename(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        found = fused(tensors)
        return {name: tensor[:count] if ".experts." in name else tensor for name, tensor in found.items()}

    return rename


def beside(suffix: str) -> Rename:
    def rename(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        found = fused(tensors)
        return found | {f"{name}{suffix}": torch.ones(4) for name in found if ".experts." in name}

    return rename


@pytest.mark.parametrize(
    ("rename", "told"),
    [
        (with_experts(3), r"experts.gate_up_proj has shape \[3, .*but config.json says 4 experts"),
        (beside("_scale"), r"are in fewer bits, by .*_scale, and experts in one tensor are served dense"),
    ],
    ids=["too few", "in fewer bits"],
)
def test_other_experts_in_one_tensor_are_refused(rename: Rename, told: str, tmp_path: Path) -> None:
    (tmp_path / "published").mkdir()
    save_tiny("mixtral", tmp_path / "published", num_hidden_layers=2)
    with pytest.raises(CheckpointError, match=told):
        logits(renamed(tmp_path / "published", tmp_path / "other", rename))
