"""Adapters with random numbers of the layers of a checkpoint, and the checkpoint with them merged into it."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from server.adapters.identity import content_key
from server.checkpoint import formats

NOT_LINEAR = ("embed", "wte", "wpe", "shared", "norm", "ln_", "conv1d", "relative_attention_bias", "router_bias")
ALPHA = 6


def is_linear(name: str, tensor: Tensor) -> bool:
    """Whether a tensor is what a linear layer multiplies by."""
    return tensor.dim() == 2 and name.endswith(".weight") and not any(part in name for part in NOT_LINEAR)


@dataclass(frozen=True)
class Made:
    """Folders of an adapter, and of the model with it merged."""

    folder: Path
    merged: Path


def make_several(folder: Path, into: Path, *, is_transposed: bool = False) -> list[Made]:
    """Two adapters of different ranks."""
    both = [Made(into / name, into / f"{name}-merged") for name in ("one", "two")]
    for seed, one in enumerate(both):
        make(folder, one.folder, one.merged, rank=4 + 4 * seed, seed=seed, is_transposed=is_transposed)
    return both


def make(
    folder: Path,
    adapter: Path,
    merged: Path | None = None,
    *,
    rank: int = 4,
    seed: int = 0,
    is_transposed: bool = False,
    takes: Callable[[str], bool] = lambda name: True,
    size: float = 0.1,
) -> bytes:
    """Write an adapter of a model's linear layers, and perhaps the merged model; returns the adapter's key."""
    noise = torch.Generator().manual_seed(seed)
    weights = load_file(folder / "model.safetensors")
    lora: dict[str, Tensor] = {}
    for name, weight in sorted(weights.items()):
        if not (is_linear(name, weight) and takes(name)):
            continue
        outputs, inputs = weight.t().shape if is_transposed and "lm_head" not in name else weight.shape
        down, up = (torch.randn(n, generator=noise) for n in ((rank, inputs), (outputs, rank)))
        down, up = down * inputs**-0.5, up * size
        module = name.removesuffix(".weight")
        lora[f"base_model.model.{module}.lora_A.weight"], lora[f"base_model.model.{module}.lora_B.weight"] = down, up
        if merged is None:
            continue
        delta = ALPHA / rank * up @ down
        weights[name] = weight + (delta.t() if is_transposed and "lm_head" not in name else delta)
    assert lora
    adapter.mkdir()
    config = {"peft_type": "LORA", "r": rank, "lora_alpha": ALPHA, "target_modules": "all-linear", "bias": "none"}
    (adapter / "adapter_config.json").write_text(json.dumps(config))
    save_file(lora, adapter / "adapter_model.safetensors")
    if merged is None:
        return content_key(adapter)
    shutil.copytree(folder, merged)
    save_file({name: tensor.contiguous() for name, tensor in weights.items()}, merged / "model.safetensors")
    return content_key(adapter)


def make_of_all_kinds(folder: Path, adapter: Path) -> bytes:
    """Write an adapter whose changes are computed from the model's own numbers; returns its key.

    Of linear layers, by turns, one is lengthened (DoRA) and one trained whole; so are all biases, norms and tables.
    """
    noise = torch.Generator().manual_seed(0)
    weights = load_file(folder / "model.safetensors")
    tensors: dict[str, Tensor] = {}
    linear = [name for name, weight in sorted(weights.items()) if is_linear(name, weight)]
    for place, name in enumerate(linear):
        module, weight = f"base_model.model.{name.removesuffix('.weight')}", weights[name]
        if place % 2:
            tensors[f"{module}.weight"] = weight + torch.randn(weight.shape, generator=noise) * 0.05
            continue
        tensors[f"{module}.lora_A.weight"] = torch.randn(4, weight.shape[1], generator=noise) * 0.1
        tensors[f"{module}.lora_B.weight"] = torch.randn(len(weight), 4, generator=noise) * 0.1
        tensors[f"{module}.lora_magnitude_vector"] = weight.norm(dim=1) * 1.2
    for name in weights.keys() - set(linear):
        tensors[f"base_model.model.{name}"] = weights[name] * 1.1
    adapter.mkdir()
    config = {"peft_type": "LORA", "r": 4, "lora_alpha": ALPHA, "use_dora": True, "bias": "all"}
    (adapter / "adapter_config.json").write_text(json.dumps(config | {"target_modules": "all-linear"}))
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, adapter / "adapter_model.safetensors")
    return content_key(adapter)


def dequantised(folder: Path, quantise: str, into: Path) -> Path:
    """The checkpoint whose dense linear layers, but for the head, are what quantising while loading makes of them."""
    dense = into / "dense"
    shutil.copytree(folder, dense)
    rounding = formats.choose(quantise, folder, json.loads((folder / "config.json").read_text()), "none").quantise
    assert rounding is not None
    weights = load_file(folder / "model.safetensors")
    for name, weight in weights.items():
        if is_linear(name, weight) and "lm_head" not in name:
            stored = rounding(weight)
            weights[name] = (stored if isinstance(stored, Tensor) else stored.dequantised()).float().contiguous()
    save_file(weights, dense / "model.safetensors", {"format": "pt"})
    return dense
