"""Checkpoints that torchao writes: `python make_torchao.py FOLDER` in its environment.

Its two classes of plain 4-bit codes are made on GPUs alone, so that their tensors are filled here as their definitions
say, and saved by the library. FOLDER/settings.json has the settings of each of its classes of configs.
"""

from __future__ import annotations

import json
import sys
from dataclasses import fields
from pathlib import Path

import tiny_model
import torch
from torchao.core.config import AOBaseConfig
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
from transformers import TorchAoConfig
from transformers.core_model_loading import revert_weight_conversion

GROUP = 32
ASYMMETRIC = IntxWeightOnlyConfig(
    weight_dtype=torch.int4, granularity=PerGroup(GROUP), mapping_type=MappingType.ASYMMETRIC
)
SCHEMES = {
    "int8": Int8WeightOnlyConfig(),
    "int8-groups": Int8WeightOnlyConfig(granularity=PerGroup(GROUP)),
    "int8-all": Int8WeightOnlyConfig(granularity=PerTensor()),
    "float8": Float8WeightOnlyConfig(),
    "float8-groups": Float8WeightOnlyConfig(granularity=PerGroup(GROUP)),
    "float8-all": Float8WeightOnlyConfig(granularity=PerTensor()),
    "four-bits": IntxWeightOnlyConfig(weight_dtype=torch.int4, granularity=PerGroup(GROUP)),
    "four-bits-asymmetric": ASYMMETRIC,
    "three-bits": IntxWeightOnlyConfig(weight_dtype=torch.int3),
    "six-bits": IntxWeightOnlyConfig(weight_dtype=torch.int6, mapping_type=MappingType.ASYMMETRIC),
    "int4": Int4WeightOnlyConfig(group_size=GROUP),
    "int4-words": Int4WeightOnlyConfig(group_size=GROUP, int4_packing_format=Int4PackingFormat.PLAIN_INT32),
}


def quantise(source: Path, to: Path, config: AOBaseConfig) -> dict[str, torch.Tensor]:
    """Of families, heads too."""
    with_heads = to.name not in SCHEMES
    model = tiny_model.load(
        source, quantization_config=TorchAoConfig(config, include_input_output_embeddings=with_heads)
    )
    model.save_pretrained(to)
    dense = {name: tensor.dequantize() for name, tensor in model.state_dict().items() if hasattr(tensor, "qdata")}
    return revert_weight_conversion(model, dense)  # to the names in the file


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
    tiny_model.make(quantise, SCHEMES, ASYMMETRIC)
    settings = {type(config).__name__: [field.name for field in fields(config)] for config in SCHEMES.values()}
    (Path(sys.argv[1]) / "settings.json").write_text(json.dumps(settings))
