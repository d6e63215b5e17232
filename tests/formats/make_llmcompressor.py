"""Checkpoints that llm-compressor writes: `python make_llmcompressor.py FOLDER` in its environment."""

from __future__ import annotations

from pathlib import Path

import tiny_model
import torch
from compressed_tensors.compressors import BaseCompressor
from compressed_tensors.compressors.nvfp4.helpers import unpack_fp4_from_uint8
from compressed_tensors.quantization import QuantizationArgs, QuantizationConfig
from compressed_tensors.quantization.lifecycle.forward import dequantize
from datasets import Dataset
from llmcompressor import oneshot
from llmcompressor.modifiers import Modifier
from llmcompressor.modifiers.gptq import GPTQModifier
from llmcompressor.modifiers.quantization import QuantizationModifier
from safetensors.torch import load_file
from transformers import AutoConfig, AutoTokenizer

SCHEMES = {
    "W8A8": QuantizationModifier,
    "W4A16": QuantizationModifier,
    "W4A16_ASYM": GPTQModifier,
    "W8A16": QuantizationModifier,
    "FP8": QuantizationModifier,
    "FP8_DYNAMIC": QuantizationModifier,
    "FP8_BLOCK": QuantizationModifier,
    "NVFP4A16": QuantizationModifier,
    "MXFP4A16": QuantizationModifier,
}
# As W4A16, whose groups are 128.
IN_GROUPS = {
    "targets": ["Linear"],
    "weights": {"num_bits": 4, "type": "int", "symmetric": True, "strategy": "group", "group_size": 32},
}
DENSE = ["lm_head", "re:.*gate$"]


def quantise(source: Path, to: Path, recipe: Modifier) -> dict[str, torch.Tensor]:
    model = tiny_model.load(source)
    texts = Dataset.from_dict({"text": tiny_model.TEXTS})
    is_calibrated = to.name in ("FP8", "W4A16_ASYM")
    given = {"dataset": texts, "num_calibration_samples": 16, "max_seq_length": 64} if is_calibrated else {}
    oneshot(model=model, processor=AutoTokenizer.from_pretrained(source), recipe=recipe.model_copy(deep=True), **given)
    model.save_pretrained(to, save_compressed=True)
    config = QuantizationConfig.model_validate(AutoConfig.from_pretrained(to).quantization_config)
    (scheme,) = config.config_groups.values()
    compressor = BaseCompressor.get_value_from_registry(scheme.format or config.format)
    layers = dict(tiny_model.layers_of(load_file(to / "model.safetensors"), "weight_scale"))
    assert not any("weight" in parts and parts["weight"].itemsize > 1 for parts in layers.values()), "not compressed"
    return {
        name: in_float32(parts, scheme.weights)
        if "weight_global_scale" in parts
        else compressor.decompress(parts, scheme)["weight"]
        for name, parts in layers.items()
    }


def in_float32(state: dict, weights: QuantizationArgs) -> torch.Tensor:
    """What the library makes of float4 with a scale of all, whose `decompress` multiplies in bfloat16."""
    rows, pairs = state["weight_packed"].shape
    codes = unpack_fp4_from_uint8(state["weight_packed"], rows, 2 * pairs, dtype=torch.float32)
    scales = {"scale": state["weight_scale"].float(), "global_scale": state["weight_global_scale"]}
    return dequantize(codes, **scales, args=weights, dtype=torch.float32).contiguous()


if __name__ == "__main__":
    tiny_model.make(
        quantise,
        {scheme: modifier(targets="Linear", scheme=scheme, ignore=DENSE) for scheme, modifier in SCHEMES.items()},
        QuantizationModifier(config_groups={"group_0": IN_GROUPS}, ignore=DENSE),
    )
