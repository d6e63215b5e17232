"""Checkpoints that AMD Quark writes: `python make_quark.py FOLDER` in its environment.

Of each kind FOLDER/KIND is the checkpoint, and FOLDER/KIND.dense.safetensors what the library itself makes of it.
"""

from __future__ import annotations

import sys
from pathlib import Path

import tiny_model
import torch
from quark.torch import LLMTemplate, ModelQuantizer, export_safetensors, import_model_from_safetensors
from quark.torch.export.nn.modules.qparamslinear import QParamsLinear
from quark.torch.quantization.config import config as specs
from quark.torch.quantization.config.config import QLayerConfig
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM, AutoTokenizer

GROUPS = {"ch_axis": 1, "group_size": 32, "is_dynamic": False}
ROWS = {"ch_axis": 0, "is_dynamic": False}
OF_ALL = {"is_dynamic": False, "observer_method": "min_max"}
INT4 = specs.Int4PerGroupSpec(**GROUPS)
FLOAT4 = specs.OCP_MXFP4Spec(ch_axis=-1, is_dynamic=False)
# Of a Llama: what weights are, how codes lie in words, what inputs are, and whether keys and values have scales.
KINDS = {
    "uint4-groups": (specs.Uint4PerGroupSpec(**GROUPS), "reorder", None, False),
    "uint4-groups-in-order": (specs.Uint4PerGroupSpec(**GROUPS), "order", None, False),
    "int4-groups": (INT4, "reorder", None, False),
    "int4-groups-in-order": (INT4, "order", None, False),
    "int4-rows": (specs.Int4PerChannelSpec(**ROWS), "reorder", None, False),
    "uint4-rows-in-order": (specs.Uint4PerChannelSpec(**ROWS), "order", None, False),
    "uint4-of-all": (specs.Uint4PerTensorSpec(**OF_ALL), "reorder", None, False),
    "int8-groups": (specs.Int8PerGroupSpec(**GROUPS), "reorder", None, False),
    "uint8-groups": (specs.Uint8PerGroupSpec(**GROUPS), "reorder", None, False),
    "int8-rows": (specs.Int8PerChannelSpec(**ROWS), "reorder", None, False),
    "uint8-rows": (specs.Uint8PerChannelSpec(**ROWS), "reorder", None, False),
    "fp8-of-all": (specs.FP8E4M3PerTensorSpec(**OF_ALL), "reorder", None, True),
    "fp8-rows": (specs.FP8E4M3PerChannelSpec(**ROWS), "reorder", None, False),
    "mxfp4": (FLOAT4, "reorder", None, False),
    "mxfp4-inputs": (FLOAT4, "reorder", specs.OCP_MXFP4Spec(ch_axis=-1), False),
    "mixed": (INT4, "reorder", None, False),
    "fp8-fixed": (specs.FP8E4M3PerTensorSpec(**OF_ALL), "reorder", specs.FP8E4M3PerTensorSpec(**OF_ALL), True),
    "fp8-tokens": (
        specs.FP8E4M3PerChannelSpec(**ROWS), "reorder", specs.FP8E4M3PerChannelSpec(ch_axis=1, is_dynamic=True), False,
    ),
    "int8-fixed": (
        specs.Int8PerChannelSpec(**ROWS), "reorder",
        specs.Int8PerTensorSpec("min_max", False, "float", "half_even", False), False,
    ),
}  # fmt: skip


def main(folder: Path) -> None:
    source = folder / "source" / "llama"
    tiny_model.save(source)
    tokenizer = AutoTokenizer.from_pretrained(source)
    texts = [tokenizer(text, return_tensors="pt").input_ids for text in tiny_model.TEXTS]
    for kind, (weight, order, inputs, has_kv_scales) in KINDS.items():
        template = LLMTemplate.get("llama")
        config = template.get_config(scheme="fp8", kv_cache_scheme="fp8" if has_kv_scales else None)
        layer = QLayerConfig(
            weight=weight.to_quantization_spec(), input_tensors=inputs and inputs.to_quantization_spec()
        )
        config.global_quant_config = layer
        for entries in (config.layer_quant_config, config.kv_cache_quant_config):
            for entry in entries.values():
                entry.weight, entry.input_tensors = layer.weight, layer.input_tensors
        if kind == "mixed":
            config.layer_quant_config["*down_proj"] = QLayerConfig(weight=FLOAT4.to_quantization_spec())
            config.exclude = [*config.exclude, "*layers.1.self_attn*"]
        model = AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32).eval()
        quantizer = ModelQuantizer(config)
        model = quantizer.freeze(quantizer.quantize_model(model, texts))
        export_safetensors(model, str(folder / kind), custom_mode="quark", pack_method=order)
        save_file(dequantised(source, folder / kind), folder / f"{kind}.dense.safetensors")


def dequantised(source: Path, folder: Path) -> dict[str, torch.Tensor]:
    """The weights of the layers that the library makes of a checkpoint."""
    model = AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32).eval()
    model = import_model_from_safetensors(model, str(folder))
    return {
        f"{name}.weight": module.weight_quantizer(module.weight).detach().float().contiguous()
        for name, module in model.named_modules()
        if isinstance(module, QParamsLinear) and module.weight_quantizer is not None
    }


if __name__ == "__main__":
    main(Path(sys.argv[1]))
