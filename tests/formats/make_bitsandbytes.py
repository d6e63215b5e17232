"""Checkpoints that bitsandbytes writes: `python make_bitsandbytes.py FOLDER` in its environment."""

from __future__ import annotations

from pathlib import Path

import tiny_model
import torch
from bitsandbytes.functional import QuantState, dequantize_4bit, int8_vectorwise_dequant
from safetensors.torch import load_file
from transformers import BitsAndBytesConfig

FOUR = {"load_in_4bit": True, "bnb_4bit_compute_dtype": torch.float32}
SCHEMES = {
    "nf4": FOUR | {"bnb_4bit_quant_type": "nf4", "bnb_4bit_use_double_quant": True},
    "fp4": FOUR | {"bnb_4bit_quant_type": "fp4"},
    "int8": {"load_in_8bit": True},
}


def quantise(source: Path, to: Path, settings: dict) -> dict[str, torch.Tensor]:
    tiny_model.load(source, quantization_config=BitsAndBytesConfig(**settings), device_map="cpu").save_pretrained(to)
    tensors = load_file(to / "model.safetensors")
    eight = tiny_model.layers_of(tensors, "SCB")
    four = tiny_model.layers_of(tensors, f"weight.quant_state.bitsandbytes__{settings.get('bnb_4bit_quant_type')}")
    return {name: int8_vectorwise_dequant(parts["weight"], parts["SCB"]) for name, parts in eight} | {
        name: of_four_bits({part.removeprefix("weight."): tensor for part, tensor in parts.items() if part != "bias"})
        for name, parts in four
    }


def of_four_bits(parts: dict[str, torch.Tensor]) -> torch.Tensor:
    return dequantize_4bit(parts.pop("weight"), QuantState.from_dict(parts, torch.device("cpu")))


if __name__ == "__main__":
    tiny_model.make(quantise, SCHEMES, SCHEMES["nf4"])
