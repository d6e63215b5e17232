"""Checkpoints that auto-round writes: `python make_autoround.py FOLDER` in its environment.

Of each kind FOLDER/KIND is the checkpoint, and FOLDER/KIND.dense.safetensors what the library's own layers make of it:
transformers would leave out those that it finds no layer for on a CPU.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import tiny_model
import torch
from auto_round import AutoRound
from auto_round.export.export_to_awq.utils import dequantize_gemm
from auto_round_extension.torch import qlinear_torch, qlinear_torch_zp
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, AutoTokenizer

FOUR = {"bits": 4, "group_size": 128, "iters": 1, "nsamples": 8, "seqlen": 32, "batch_size": 4}
KINDS = {
    "symmetric": (FOUR | {"sym": True}, "auto_round"),
    "asymmetric": (FOUR | {"sym": False}, "auto_round"),
    "as-gptq": (FOUR | {"sym": False, "group_size": 32}, "auto_round:auto_gptq"),
    "two-bits": (FOUR | {"bits": 2, "group_size": 32, "sym": False}, "auto_round"),
}
LAYERS = {"auto_round": qlinear_torch.QuantLinear, "auto_round:auto_gptq": qlinear_torch_zp.QuantLinear}


def main(folder: Path) -> None:
    tiny_model.save(folder / "source" / "llama")
    tokenizer = AutoTokenizer.from_pretrained(folder / "source" / "llama")
    for kind, (settings, format) in KINDS.items():
        model = AutoModelForCausalLM.from_pretrained(folder / "source" / "llama", dtype=torch.float32)
        rounding = AutoRound(model, tokenizer, dataset=tiny_model.TEXTS, device_map="cpu", **settings)
        rounding.quantize_and_save(str(folder / kind), format=format)
        written = next(path.parent for path in (folder / kind).rglob("config.json"))
        for path in written.iterdir() if written != folder / kind else ():  # it makes a folder of its own
            path.rename(folder / kind / path.name)
        config = json.loads((folder / kind / "config.json").read_text())["quantization_config"]
        tensors = load_file(folder / kind / "model.safetensors")
        names = [name.removesuffix(".qweight") for name in tensors if name.endswith(".qweight")]
        save_file(
            {f"{name}.weight": dequantised(tensors, name, config).t().float().contiguous() for name in names},
            folder / f"{kind}.dense.safetensors",
        )


def dequantised(tensors: dict, name: str, config: dict) -> torch.Tensor:
    """[inputs, outputs]: what the layer computes of a unit matrix, or the weight itself."""
    parts = {part: tensors[f"{name}.{part}"] for part in ("qweight", "qzeros", "scales")}
    parts["scales"] = parts["scales"].float()  # so that it dequantises without another rounding
    bits, group = config["bits"], config["group_size"]
    if config["packing_format"].endswith("awq"):
        return dequantize_gemm(*parts.values(), bits, group)
    inputs, outputs = parts["qweight"].shape[0] * 32 // bits, parts["qweight"].shape[1]
    layer = LAYERS[config["packing_format"]](bits, group, inputs, outputs, False)
    for part, tensor in parts.items():
        setattr(layer, part, tensor)
    layer.post_init()
    with torch.inference_mode():
        return layer(torch.eye(inputs))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
