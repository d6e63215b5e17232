"""Checkpoints that NVIDIA's ModelOpt writes: `python make_modelopt.py FOLDER` in its environment.

Of each kind FOLDER/KIND is the checkpoint, and FOLDER/KIND.dense.safetensors what the library itself makes of it: the
weights of its own simulation, which the exported codes stand for. NVFP4 is simulated on GPUs alone, so that its tensors
are those of the library's class, under the names of its exporter.
"""

from __future__ import annotations

import copy
import json
import sys
from pathlib import Path

import modelopt.torch.quantization as mtq
import tiny_model
import torch
from modelopt.torch.export import export_hf_checkpoint
from modelopt.torch.quantization.qtensor import NVFP4QTensor
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, AutoTokenizer

KINDS = {"fp8": mtq.FP8_DEFAULT_CFG, "fp8-rows": mtq.FP8_PER_CHANNEL_PER_TOKEN_CFG}


def main(folder: Path) -> None:
    source = folder / "source" / "llama"
    tiny_model.save(source)
    tokenizer = AutoTokenizer.from_pretrained(source)
    texts = [tokenizer(text, return_tensors="pt").input_ids for text in tiny_model.TEXTS]

    def calibrate(model: torch.nn.Module) -> None:
        for ids in texts:
            model(ids)

    for kind, config in KINDS.items():
        model = AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32).eval()
        model = mtq.quantize(model, copy.deepcopy(config), calibrate)
        quantizers = {name: getattr(module, "weight_quantizer", None) for name, module in model.named_modules()}
        dense = {
            f"{name}.weight": quantizer(model.get_submodule(name).weight).detach().float().contiguous()
            for name, quantizer in quantizers.items()
            if "layers." in name and quantizer is not None and quantizer.is_enabled
        }
        export_hf_checkpoint(model, export_dir=folder / kind)
        save_file(dense, folder / f"{kind}.dense.safetensors")
    nvfp4(source, folder)


def nvfp4(source: Path, folder: Path) -> None:
    tensors, dense = load_file(source / "model.safetensors"), {}
    for name in [name for name in tensors if name.endswith("_proj.weight")]:
        quantised, scale, of_all = NVFP4QTensor.quantize(tensors[name], 16)
        back = quantised.dequantize(scale=scale, double_scale=of_all, block_sizes={-1: 16})
        dense[name] = back.float().contiguous()
        tensors |= {name: quantised._quantized_data, f"{name}_scale": scale, f"{name}_scale_2": of_all}
    (folder / "nvfp4").mkdir()
    save_file(tensors, folder / "nvfp4" / "model.safetensors")
    config = json.loads((source / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "modelopt", "quant_algo": "NVFP4", "ignore": ["lm_head"]}
    (folder / "nvfp4" / "config.json").write_text(json.dumps(config))
    save_file(dense, folder / "nvfp4.dense.safetensors")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
