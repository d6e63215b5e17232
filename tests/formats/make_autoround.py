"""Checkpoints that auto-round writes: `python make_autoround.py FOLDER` in its environment."""

from __future__ import annotations

import json
from pathlib import Path

import tiny_model
import torch
from auto_round import AutoRound
from auto_round.export.export_to_awq.utils import dequantize_gemm
from auto_round_extension.torch import qlinear_torch, qlinear_torch_zp
from safetensors.torch import load_file
from transformers import PreTrainedTokenizerFast

FEW = {"iters": 1, "nsamples": 8, "seqlen": 32, "batch_size": 1, "enable_torch_compile": False}
FOUR = {"bits": 4, "group_size": 128, **FEW}
SCHEMES = {
    "symmetric": (FOUR | {"sym": True}, "auto_round"),
    "asymmetric": (FOUR | {"sym": False}, "auto_round"),
    "as-gptq": (FOUR | {"sym": False, "group_size": 32}, "auto_round:auto_gptq"),
    "two-bits": (FOUR | {"bits": 2, "group_size": 32, "sym": False}, "auto_round"),
}
LAYERS = {"auto_round": qlinear_torch.QuantLinear, "auto_round:auto_gptq": qlinear_torch_zp.QuantLinear}


def quantise(source: Path, to: Path, settings: tuple[dict, str]) -> dict[str, torch.Tensor]:
    tokenizer = PreTrainedTokenizerFast.from_pretrained(source)
    rounding = AutoRound(tiny_model.load(source), tokenizer, dataset=tiny_model.TEXTS, device_map="cpu", **settings[0])
    rounding.quantize_and_save(str(to), format=settings[1])
    written = next(path.parent for path in to.rglob("config.json"))
    for path in written.iterdir() if written != to else ():  # it makes a folder of its own
        path.rename(to / path.name)
    config = json.loads((to / "config.json").read_text())["quantization_config"]
    layers = tiny_model.layers_of(load_file(to / "model.safetensors"), "qweight")
    return {name: dequantised(parts, config).t() for name, parts in layers}


def dequantised(tensors: dict[str, torch.Tensor], config: dict) -> torch.Tensor:
    """[inputs, outputs]: what the layer computes of a unit matrix, or the weight itself.

    transformers would leave out those that it finds no layer for on a CPU.
    """
    parts = {part: tensors[part] for part in ("qweight", "qzeros", "scales")}
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
    tiny_model.make(quantise, SCHEMES, SCHEMES["as-gptq"])
