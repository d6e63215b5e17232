"""Checkpoints that AMD Quark writes: `python make_quark.py FOLDER` in its environment.

Of a scheme that rounds inputs FOLDER/SCHEME.logits.safetensors has what the library itself computes.
"""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

import tiny_model
import torch
from quark.torch import LLMTemplate, ModelQuantizer, export_safetensors, import_model_from_safetensors
from quark.torch.export.nn.modules.qparamslinear import QParamsLinear
from quark.torch.quantization.config import config as specs
from quark.torch.quantization.config.config import DataTypeSpec, QConfig, QLayerConfig
from quark.torch.utils.llm import preprocess_for_quantization
from safetensors.torch import save_file

GROUPS = {"ch_axis": 1, "group_size": 32, "is_dynamic": False}
ROWS = {"ch_axis": 0, "is_dynamic": False}
OF_ALL = {"is_dynamic": False, "observer_method": "min_max"}
SYMMETRIC, ASYMMETRIC = {"symmetric": True}, {"symmetric": False}
INT4 = specs.Int4PerGroupSpec(**GROUPS)
FLOAT4 = specs.OCP_MXFP4Spec(ch_axis=-1, is_dynamic=False)
FLOAT8 = specs.FP8E4M3PerTensorSpec(**OF_ALL)
DENSE = ["*lm_head", "*embed_out", "*.gate"]


class Scheme(NamedTuple):
    """How weights are rounded, and lie in words, how inputs are, and whether keys and values have scales.

    down: how weights of down_proj are; where it is given, the attention of the second layer is dense.
    """

    weight: DataTypeSpec
    order: str = "reorder"
    inputs: DataTypeSpec | None = None
    has_kv_scales: bool = False
    down: DataTypeSpec | None = None

    @property
    def config(self) -> QConfig:
        inputs = self.inputs and self.inputs.to_quantization_spec()
        layer = QLayerConfig(weight=self.weight.to_quantization_spec(), input_tensors=inputs)
        if self.down is not None:
            down = QLayerConfig(weight=self.down.to_quantization_spec())
            return QConfig(layer, layer_quant_config={"*down_proj": down}, exclude=[*DENSE, "*layers.1.self_attn*"])
        if not self.has_kv_scales:
            return QConfig(layer, exclude=DENSE)
        config = LLMTemplate.get("llama").get_config("fp8", kv_cache_scheme="fp8")
        config.global_quant_config = layer
        for entries in (config.layer_quant_config, config.kv_cache_quant_config):
            for entry in entries.values():
                entry.weight, entry.input_tensors = layer.weight, layer.input_tensors
        return config


SCHEMES = {
    "uint4-groups": Scheme(specs.Uint4PerGroupSpec(**GROUPS)),
    "uint4-groups-in-order": Scheme(specs.Uint4PerGroupSpec(**GROUPS), "order"),
    "int4-groups": Scheme(INT4),
    "int4-groups-in-order": Scheme(INT4, "order"),
    "int4-groups-asymmetric": Scheme(specs.Int4PerGroupSpec(**GROUPS, **ASYMMETRIC)),
    "int4-rows": Scheme(specs.Int4PerChannelSpec(**ROWS)),
    "int4-rows-asymmetric": Scheme(specs.Int4PerChannelSpec(**ROWS, **ASYMMETRIC), "order"),
    "int4-of-all-asymmetric": Scheme(specs.Int4PerTensorSpec(**OF_ALL, **ASYMMETRIC)),
    "uint4-rows-in-order": Scheme(specs.Uint4PerChannelSpec(**ROWS), "order"),
    "uint4-of-all": Scheme(specs.Uint4PerTensorSpec(**OF_ALL)),
    "int8-groups": Scheme(specs.Int8PerGroupSpec(**GROUPS)),
    "int8-groups-asymmetric": Scheme(specs.Int8PerGroupSpec(**GROUPS, **ASYMMETRIC)),
    "uint8-groups": Scheme(specs.Uint8PerGroupSpec(**GROUPS)),
    "int8-rows": Scheme(specs.Int8PerChannelSpec(**ROWS, **SYMMETRIC)),
    "int8-rows-asymmetric": Scheme(specs.Int8PerChannelSpec(**ROWS, **ASYMMETRIC)),
    "uint8-rows": Scheme(specs.Uint8PerChannelSpec(**ROWS, **ASYMMETRIC)),
    "uint8-of-all": Scheme(specs.Uint8PerTensorSpec(**OF_ALL)),
    "fp8-of-all": Scheme(FLOAT8, has_kv_scales=True),
    "fp8-rows": Scheme(specs.FP8E4M3PerChannelSpec(**ROWS)),
    "mxfp4": Scheme(FLOAT4),
    "mxfp4-inputs": Scheme(FLOAT4, inputs=specs.OCP_MXFP4Spec(ch_axis=-1)),
    "mixed": Scheme(INT4, down=FLOAT4),
    "fp8-fixed": Scheme(FLOAT8, inputs=FLOAT8, has_kv_scales=True),
    "fp8-tokens": Scheme(
        specs.FP8E4M3PerChannelSpec(**ROWS), inputs=specs.FP8E4M3PerChannelSpec(ch_axis=1, is_dynamic=True)
    ),
    "int8-fixed": Scheme(
        specs.Int8PerChannelSpec(**ROWS, **SYMMETRIC), inputs=specs.Int8PerTensorSpec(**OF_ALL, **SYMMETRIC)
    ),
    "int8-fixed-asymmetric": Scheme(
        specs.Int8PerChannelSpec(**ROWS, **ASYMMETRIC), inputs=specs.Int8PerTensorSpec(**OF_ALL, **ASYMMETRIC)
    ),
}


def quantise(source: Path, to: Path, scheme: Scheme) -> dict[str, torch.Tensor]:
    model = tiny_model.load(source).eval()
    preprocess_for_quantization(model)  # each expert has layers of its own
    ids = torch.tensor(tiny_model.TOKENS).split(1)
    has_encoder = model.config.is_encoder_decoder
    quantizer = ModelQuantizer(scheme.config)
    quantizer.quantize_model(
        model, [{"input_ids": one, "decoder_input_ids": one} for one in ids] if has_encoder else ids
    )
    export_safetensors(quantizer.freeze(model), str(to), custom_mode="quark", pack_method=scheme.order)
    read = import_model_from_safetensors(tiny_model.load(source).eval(), str(to))
    layers = {f"{name}.weight": module for name, module in read.named_modules() if isinstance(module, QParamsLinear)}
    if scheme.inputs is not None:
        for module in layers.values():
            module.output_quantizer = None  # of keys and values, which are served as they are
        asked = torch.arange(32) * 37 % 100
        with torch.inference_mode():
            save_file({"ids": asked, "logits": read(asked[None]).logits[0]}, f"{to}.logits.safetensors")
    return {
        name: module.weight_quantizer(module.weight)
        for name, module in layers.items()
        if module.weight_quantizer is not None
    }


if __name__ == "__main__":
    tiny_model.make(quantise, SCHEMES, SCHEMES["uint4-groups"])
