"""Checkpoints that bitsandbytes writes: `python make_bitsandbytes.py FOLDER` in its environment.

Of each kind FOLDER/KIND is the checkpoint, and FOLDER/KIND.dense.safetensors what the library itself makes of it.
"""

from __future__ import annotations

import sys
from pathlib import Path

import tiny_model
import torch
from bitsandbytes.functional import dequantize_4bit, int8_vectorwise_dequant
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM, BitsAndBytesConfig

FOUR = {"load_in_4bit": True, "bnb_4bit_compute_dtype": torch.float32}
KINDS = {
    "nf4": FOUR | {"bnb_4bit_quant_type": "nf4", "bnb_4bit_use_double_quant": True},
    "fp4": FOUR | {"bnb_4bit_quant_type": "fp4"},
    "int8": {"load_in_8bit": True},
}


def main(folder: Path) -> None:
    tiny_model.save(folder / "source" / "llama")
    for kind, settings in KINDS.items():
        model = AutoModelForCausalLM.from_pretrained(
            folder / "source" / "llama",
            quantization_config=BitsAndBytesConfig(**settings),
            device_map="cpu",
            dtype=torch.float32,
        )
        model.save_pretrained(folder / kind)
        dense = {}
        for name, module in model.named_modules():
            if (state := getattr(getattr(module, "weight", None), "quant_state", None)) is not None:
                dense[f"{name}.weight"] = dequantize_4bit(module.weight.data, state).float().contiguous()
            elif (scale := getattr(getattr(module, "weight", None), "SCB", None)) is not None:
                dense[f"{name}.weight"] = int8_vectorwise_dequant(module.weight.data, scale).float().contiguous()
        save_file(dense, folder / f"{kind}.dense.safetensors")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
