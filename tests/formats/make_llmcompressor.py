"""Checkpoints that llm-compressor writes: `python make_llmcompressor.py FOLDER` in its environment.

Of each kind FOLDER/KIND is the checkpoint, and FOLDER/KIND.dense.safetensors what compressed-tensors makes of it.
"""

from __future__ import annotations

import sys
from pathlib import Path

import tiny_model
from compressed_tensors.compressors import BaseCompressor
from compressed_tensors.quantization import QuantizationConfig
from datasets import Dataset
from llmcompressor import oneshot
from llmcompressor.modifiers.gptq import GPTQModifier
from llmcompressor.modifiers.quantization import QuantizationModifier
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoTokenizer, LlamaForCausalLM

KINDS = {
    "W8A8": QuantizationModifier,
    "W4A16": QuantizationModifier,
    "W4A16_ASYM": GPTQModifier,
    "W8A16": QuantizationModifier,
    "FP8": QuantizationModifier,
    "FP8_DYNAMIC": QuantizationModifier,
    "FP8_BLOCK": QuantizationModifier,
}


def main(folder: Path) -> None:
    tiny_model.save(folder / "source")
    tokenizer = AutoTokenizer.from_pretrained(folder / "source")
    texts = Dataset.from_dict({"text": tiny_model.TEXTS})
    for kind, modifier in KINDS.items():
        model = LlamaForCausalLM.from_pretrained(folder / "source")
        is_calibrated = kind in ("FP8", "W4A16_ASYM")
        given = {"dataset": texts, "num_calibration_samples": 16, "max_seq_length": 64} if is_calibrated else {}
        recipe = modifier(targets="Linear", scheme=kind, ignore=["lm_head"])
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
        dense[name] = compressor.decompress(state, scheme)["weight"].float().contiguous()
    return dense


if __name__ == "__main__":
    main(Path(sys.argv[1]))
