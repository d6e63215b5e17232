"""Quantised weights as the tensors and the config that other readers expect.

compressed-tensors (pack-quantized, int-quantized) is what vLLM and transformers read; its readers unpack 4 and 8 bits,
so 2 and 3 bits are written as GPTQ's own format, in its second version: the first stores the code of 0 less one, which
overflows where that code is 0. The readers of both are in `server/checkpoint/formats/`, and say what each tensor is.

Shapes: F output features, D input features, G groups of inputs.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from server.quant.packing import pack
from server.quant.stored import QuantisedWeight
from server.quantising.recipe import Recipe

GPTQ_SCALES = torch.float16  # of every checkpoint of this format


def scale_dtype(recipe: Recipe, stored: torch.dtype) -> torch.dtype:
    """What scales are stored in, for a model whose dense tensors are `stored`."""
    if recipe.layout == "gptq":
        return GPTQ_SCALES
    return torch.float32 if recipe.layout == "int-quantized" else stored


def _packed(weight: QuantisedWeight, recipe: Recipe, scales: torch.dtype) -> dict[str, Tensor]:
    tensors = {
        "weight_packed": pack(weight.codes, recipe.bits, dim=1),
        "weight_scale": weight.scale.to(scales),
        "weight_shape": torch.tensor(weight.shape, dtype=torch.int64),
    }
    if not recipe.symmetric:
        assert weight.zero is not None
        tensors["weight_zero_point"] = pack(weight.zero, recipe.bits, dim=0)
    return tensors


def _int8(weight: QuantisedWeight, recipe: Recipe, scales: torch.dtype) -> dict[str, Tensor]:
    return {"weight": weight.codes, "weight_scale": weight.scale.to(scales)}


def _gptq(weight: QuantisedWeight, recipe: Recipe, scales: torch.dtype) -> dict[str, Tensor]:
    assert weight.zero is not None
    return {
        "qweight": pack(weight.codes.t(), recipe.bits, dim=0),
        "qzeros": pack(weight.zero.t(), recipe.bits, dim=1),
        "scales": weight.scale.t().to(scales),
        "g_idx": weight.groups.to(torch.int32),
    }


LAYOUTS: Mapping[str, Callable[[QuantisedWeight, Recipe, torch.dtype], dict[str, Tensor]]] = {
    "pack-quantized": _packed,
    "int-quantized": _int8,
    "gptq": _gptq,
}


def tensors_of(name: str, weight: QuantisedWeight, recipe: Recipe, scales: torch.dtype) -> dict[str, Tensor]:
    """The tensors of a layer called `name`, on the host. scales: their dtype."""
    found = LAYOUTS[recipe.layout](weight, recipe, scales)
    host = torch.get_default_device()
    return {f"{name}.{suffix}": tensor.to(host).contiguous() for suffix, tensor in found.items()}


def config_of(recipe: Recipe, ignore: Sequence[str]) -> dict[str, Any]:
    """`quantization_config`."""
    if recipe.layout == "gptq":
        return {
            "quant_method": "gptq",
            "checkpoint_format": "gptq_v2",
            "bits": recipe.bits,
            "group_size": recipe.group_size,
            "sym": recipe.symmetric,
            "desc_act": False,
            "lm_head": False,
            "pack_dtype": "int32",
        }
    is_int8 = recipe.layout == "int-quantized"
    return {
        "quant_method": "compressed-tensors",
        "format": recipe.layout,
        "quantization_status": "compressed",
        "config_groups": {
            "group_0": {
                "targets": ["Linear"],
                "weights": _int8_weights() if is_int8 else _packed_weights(recipe),
                "input_activations": _int8_inputs() if is_int8 else None,
                "output_activations": None,
            }
        },
        "ignore": list(ignore),
        "kv_cache_scheme": None,
    }


def _packed_weights(recipe: Recipe) -> dict[str, Any]:
    has_groups = recipe.group_size > 0
    return {
        "num_bits": recipe.bits,
        "type": "int",
        "symmetric": recipe.symmetric,
        "strategy": "group" if has_groups else "channel",
        "group_size": recipe.group_size if has_groups else None,
        "dynamic": False,
    }


def _int8_weights() -> dict[str, Any]:
    return {"num_bits": 8, "type": "int", "symmetric": True, "strategy": "channel", "dynamic": False}


def _int8_inputs() -> dict[str, Any]:
    return {"num_bits": 8, "type": "int", "symmetric": True, "strategy": "token", "dynamic": True}
