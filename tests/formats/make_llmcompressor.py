"""Checkpoints that llm-compressor writes: `python make_llmcompressor.py FOLDER` in its environment.

Of each kind FOLDER/KIND is the checkpoint, and FOLDER/KIND.dense.safetensors what compressed-tensors makes of it.
"""

from __future__ import annotations

import sys
from pathlib import Path

import tiny_model
import torch
from compressed_tensors.compressors import BaseCompressor
from compressed_tensors.compressors.nvfp4.helpers import unpack_fp4_from_uint8
from compressed_tensors.quantization import QuantizationArgs, QuantizationConfig
from compressed_tensors.quantization.lifecycle.forward import dequantize
from datasets import Dataset
from llmcompressor import oneshot
from llmcompressor.modifiers.gptq import GPTQModifier
from llmcompressor.modifiers.quantization import QuantizationModifier
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

KINDS = {
    "W8A8": QuantizationModifier,
    "W4A16": QuantizationModifier,
    "W4A16_ASYM": GPTQModifier,
    "W8A16": QuantizationModifier,
    "FP8": QuantizationModifier,
    "FP8_DYNAMIC": QuantizationModifier,
    "FP8_BLOCK": QuantizationModifier,
    "NVFP4A16": QuantizationModifier,
    "MXFP4A16": QuantizationModifier,
    "mixtral-W4A16": QuantizationModifier,
    "mixtral-NVFP4A16": QuantizationModifier,
    "phi3-W8A16": QuantizationModifier,
}  # of a Llama, or of the family before the hyphen


def main(folder: Path) -> None:
    for family in ("llama", "mixtral", "phi3"):
        tiny_model.save(folder / "source" / family, family)
    tokenizer = AutoTokenizer.from_pretrained(folder / "source" / "llama")
    texts = Dataset.from_dict({"text": tiny_model.TEXTS})
    for kind, modifier in KINDS.items():
        family, scheme = ("llama", kind) if "-" not in kind else kind.split("-")
        model = AutoModelForCausalLM.from_pretrained(folder / "source" / family, dtype=torch.float32)
        is_calibrated = kind in ("FP8", "W4A16_ASYM")
        given = {"dataset": texts, "num_calibration_samples": 16, "max_seq_length": 64} if is_calibrated else {}
        recipe = modifier(targets="Linear", scheme=scheme, ignore=["lm_head", "re:.*gate$"])
        oneshot(model=model, processor=tokenizer, recipe=recipe, **given)
        model.save_pretrained(folder / kind, save_compressed=True)
        save_file(decompressed(folder / kind), folder / f"{kind}.dense.safetensors")


def decompressed(folder: Path) -> dict:
    """Every quantised layer's weight."""
    config = QuantizationConfig.model_validate(AutoConfig.from_pretrained(folder).quantization_config)
    (scheme,) = config.config_groups.values()
    tensors = load_file(folder / "model.safetensors")
    compressor = BaseCompressor.get_value_from_registry(scheme.format or config.format)
    dense = {}
    for name in [key.removesuffix("_scale") for key in tensors if key.endswith(".weight_scale")]:
        stem = name.removesuffix("weight")
        state = {key.removeprefix(stem): tensor for key, tensor in tensors.items() if key.startswith(stem)}
        if "weight_global_scale" in state:
            dense[name] = in_float32(state, scheme.weights)
        else:
            dense[name] = compressor.decompress(state, scheme)["weight"].float().contiguous()
    return dense


def in_float32(state: dict, weights: QuantizationArgs) -> torch.Tensor:
    """What the library makes of float4 with a scale of all, whose `decompress` multiplies in bfloat16."""
    rows, pairs = state["weight_packed"].shape
    codes = unpack_fp4_from_uint8(state["weight_packed"], rows, 2 * pairs, dtype=torch.float32)
    scales = {"scale": state["weight_scale"].float(), "global_scale": state["weight_global_scale"]}
    return dequantize(codes, **scales, args=weights, dtype=torch.float32).contiguous()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
