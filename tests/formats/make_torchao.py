"""Checkpoints that torchao writes: `python make_torchao.py FOLDER` in its environment.

Of each kind FOLDER/KIND is the checkpoint, and FOLDER/KIND.dense.safetensors what the library itself makes of it. Its
two classes of plain 4-bit codes are made on GPUs alone, so that their tensors are filled here as their definitions say,
and saved by the library.
"""

from __future__ import annotations

import dataclasses
import json
import sys
from pathlib import Path

import tiny_model
import torch
from safetensors.torch import save_file
from torchao.quantization import (
    Float8WeightOnlyConfig,
    Int4PlainInt32Tensor,
    Int4Tensor,
    Int4WeightOnlyConfig,
    Int8WeightOnlyConfig,
    IntxWeightOnlyConfig,
    MappingType,
    PerGroup,
    PerTensor,
)
from torchao.quantization.quantize_.workflows import Int4PackingFormat
from transformers import AutoModelForCausalLM, TorchAoConfig

GROUP = 32
KINDS = {
    "int8": Int8WeightOnlyConfig(),
    "int8-groups": Int8WeightOnlyConfig(granularity=PerGroup(GROUP)),
    "int8-all": Int8WeightOnlyConfig(granularity=PerTensor()),
    "float8": Float8WeightOnlyConfig(),
    "float8-groups": Float8WeightOnlyConfig(granularity=PerGroup(GROUP)),
    "float8-all": Float8WeightOnlyConfig(granularity=PerTensor()),
    "four-bits": IntxWeightOnlyConfig(weight_dtype=torch.int4, granularity=PerGroup(GROUP)),
    "four-bits-asymmetric": IntxWeightOnlyConfig(
        weight_dtype=torch.int4, granularity=PerGroup(GROUP), mapping_type=MappingType.ASYMMETRIC
    ),
    "three-bits": IntxWeightOnlyConfig(weight_dtype=torch.int3),
    "six-bits": IntxWeightOnlyConfig(weight_dtype=torch.int6, mapping_type=MappingType.ASYMMETRIC),
    "int4": Int4WeightOnlyConfig(group_size=GROUP),
    "int4-words": Int4WeightOnlyConfig(group_size=GROUP, int4_packing_format=Int4PackingFormat.PLAIN_INT32),
    "head-float8": Float8WeightOnlyConfig(),
    "phi3-int8": Int8WeightOnlyConfig(),
    "mixtral-float8": Float8WeightOnlyConfig(),
}  # of a Llama, or of the family before the hyphen


def main(folder: Path) -> None:
    for family in ("llama", "mixtral", "phi3"):
        tiny_model.save(folder / "source" / family, family)
    for kind, config in KINDS.items():
        family = kind.split("-")[0] if kind.split("-")[0] in tiny_model.FAMILIES else "llama"
        model = AutoModelForCausalLM.from_pretrained(
            folder / "source" / family,
            dtype=torch.float32,
            quantization_config=TorchAoConfig(config, include_input_output_embeddings=kind.startswith("head")),
        )
        model.save_pretrained(folder / kind)
        quantised = {
            name: tensor.dequantize()
            for name, tensor in model.state_dict().items()
            if type(tensor) is not torch.Tensor and hasattr(tensor, "qdata")
        }
        save_file({name: tensor.float().contiguous() for name, tensor in quantised.items()}, dense_of(folder, kind))
    settings = {
        type(config).__name__: [field.name for field in dataclasses.fields(config)] for config in KINDS.values()
    }
    (folder / "settings.json").write_text(json.dumps(settings))


def dense_of(folder: Path, kind: str) -> Path:
    return folder / f"{kind}.dense.safetensors"


def rounded(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Codes [F, D] from 0 to 15, scale and least weight [F, G]."""
    groups = weight.unflatten(1, (-1, GROUP))
    low, high = groups.amin(2), groups.amax(2)
    scale = (high - low).clamp(min=1e-6) / 15
    codes = ((groups - low[..., None]) / scale[..., None]).round().clamp(0, 15)
    return codes.flatten(1).to(torch.uint8), scale, low


def filled(weight: torch.Tensor, block_size: list[int]) -> Int4Tensor:
    """A code less 8, times the scale, above what stands for 8."""
    codes, scale, low = rounded(weight)
    signed = (codes ^ 8) & 15
    qdata = (signed[:, ::2] | signed[:, 1::2] << 4).view(torch.int8)
    middle = low + 8 * scale
    return Int4Tensor(qdata, scale.t().contiguous(), middle.t().contiguous(), block_size, weight.shape)


def meant(made: Int4Tensor) -> torch.Tensor:
    codes = (nibbles(made) ^ 8).float() - 8
    return (codes.unflatten(1, (-1, GROUP)) * made.scale.t()[..., None] + made.zero_point.t()[..., None]).flatten(1)


def nibbles(made: torch.Tensor) -> torch.Tensor:
    """Halves of bytes [F, D], the low one first."""
    pairs = made.qdata.view(torch.uint8)
    return torch.stack([pairs & 15, pairs >> 4], dim=-1).flatten(1)


def filled_words(weight: torch.Tensor, block_size: list[int]) -> Int4PlainInt32Tensor:
    """A code less that of 0, times the scale."""
    codes, scale, low = rounded(weight)
    zero = (-low / scale).round().clamp(0, 15).to(torch.int8)
    words = (codes[:, ::2] | codes[:, 1::2] << 4).contiguous().view(torch.int32)
    return Int4PlainInt32Tensor(words, scale.t().contiguous(), zero.t().contiguous(), block_size, weight.shape)


def meant_words(made: Int4PlainInt32Tensor) -> torch.Tensor:
    codes = nibbles(made).float().unflatten(1, (-1, GROUP)) - made.zero_point.t()[..., None]
    return (codes * made.scale.t()[..., None]).flatten(1)


if __name__ == "__main__":
    Int4Tensor.from_hp, Int4Tensor.dequantize = staticmethod(filled), meant
    Int4PlainInt32Tensor.from_hp, Int4PlainInt32Tensor.dequantize = staticmethod(filled_words), meant_words
    main(Path(sys.argv[1]))
