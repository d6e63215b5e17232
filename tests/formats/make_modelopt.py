"""Checkpoints that NVIDIA's ModelOpt writes: `python make_modelopt.py FOLDER` in its environment.

NVFP4 is simulated on GPUs alone, so that its tensors are those of the library's class, under the names of its exporter.
"""

from __future__ import annotations

import copy
import json
from pathlib import Path

import modelopt.torch.quantization as mtq
import tiny_model
import torch
from modelopt.torch.export import export_hf_checkpoint
from modelopt.torch.quantization.qtensor import FP8QTensor, NVFP4QTensor
from safetensors.torch import load_file, save_file

SCHEMES = {"fp8": mtq.FP8_DEFAULT_CFG, "fp8-rows": mtq.FP8_PER_CHANNEL_PER_TOKEN_CFG, "nvfp4": None}


def quantise(source: Path, to: Path, config: dict | None) -> dict[str, torch.Tensor]:
    if config is None:
        return nvfp4(source, to)

    def calibrate(model: torch.nn.Module) -> None:
        for ids in torch.tensor(tiny_model.TOKENS).split(1):
            model(ids, **({"decoder_input_ids": ids} if model.config.is_encoder_decoder else {}))

    model = mtq.quantize(tiny_model.load(source).eval(), copy.deepcopy(config), calibrate)
    export_hf_checkpoint(model, export_dir=to)
    layers = tiny_model.layers_of(load_file(to / "model.safetensors"), "weight_scale")
    return {name: in_float8(parts["weight"], parts["weight_scale"]) for name, parts in layers}


def in_float8(codes: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    scale = scale.unsqueeze(-1) if scale.ndim else scale  # of rows, or of all
    return FP8QTensor(codes.shape, torch.float32, codes).dequantize(scale=scale)


def nvfp4(source: Path, to: Path) -> dict[str, torch.Tensor]:
    tensors, dense = load_file(source / "model.safetensors"), {}
    for name in [name for name in tensors if name.endswith("_proj.weight")]:
        quantised, scale, of_all = NVFP4QTensor.quantize(tensors[name], 16)
        dense[name] = quantised.dequantize(scale=scale, double_scale=of_all, block_sizes={-1: 16})
        tensors |= {name: quantised._quantized_data, f"{name}_scale": scale, f"{name}_scale_2": of_all}
    to.mkdir()
    save_file(tensors, to / "model.safetensors")
    config = json.loads((source / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "modelopt", "quant_algo": "NVFP4", "ignore": ["lm_head"]}
    (to / "config.json").write_text(json.dumps(config))
    return dense


if __name__ == "__main__":
    tiny_model.make(quantise, SCHEMES, SCHEMES["fp8"])
