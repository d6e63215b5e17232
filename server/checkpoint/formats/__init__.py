"""Formats of quantised checkpoints: which one a checkpoint has, by its own config."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from server.checkpoint.formats.awq import AwqFormat
from server.checkpoint.formats.bitsandbytes import BitsAndBytesFormat
from server.checkpoint.formats.compressed import CompressedFormat
from server.checkpoint.formats.float8 import Float8Format
from server.checkpoint.formats.gptq import GptqFormat
from server.checkpoint.formats.protocol import Format, FormatError
from server.checkpoint.formats.quark import QuarkFormat
from server.checkpoint.formats.torchao import TorchaoFormat
from server.checkpoint.quantize_config import with_file
from server.quant import configs, sizes
from server.quant.configs import Budget
from server.quant.dialects import translated
from server.quant.meanings import refuse_other_meanings

# By `quant_method`.
FORMATS: Mapping[str, Callable[[Mapping[str, Any], Budget], Format]] = {
    "gptq": GptqFormat,
    "awq": AwqFormat,
    "compressed-tensors": CompressedFormat,
    "fp8": Float8Format,
    "fbgemm_fp8": Float8Format,
    "bitsandbytes": BitsAndBytesFormat,
    "quark": QuarkFormat,
    "torchao": TorchaoFormat,
}


USE_GPTQ = "a gptq, awq or compressed-tensors checkpoint of this model"
USE_FP8 = "an fp8 or compressed-tensors checkpoint of this model"
IN_FLIGHT = "the model as it was published, in 16 bits, with --quantize"
# What else is known by name -> what to use in its place.
REFUSED: Mapping[str, str] = {
    "exl2": USE_GPTQ,
    "exl3": USE_GPTQ,
    "marlin": USE_GPTQ,
    "gguf": USE_GPTQ,
    "quip": USE_GPTQ,
    "aqlm": USE_GPTQ,
    "vptq": USE_GPTQ,
    "higgs": USE_GPTQ,
    "spqr": USE_GPTQ,
    "squeezellm": USE_GPTQ,
    "bitnet": USE_GPTQ,
    "qqq": USE_GPTQ,
    "paroquant": USE_GPTQ,
    "quanto": f"{IN_FLIGHT} int8 or int4",
    "hqq": f"{IN_FLIGHT} int4",
    "eetq": f"{IN_FLIGHT} eetq",
    "deepspeedfp": f"{IN_FLIGHT} fp8",
    "fp_quant": USE_FP8,
    "mxfp4": USE_FP8,
    "nvfp4": USE_FP8,
}


def find(folder: Path, hf_config: Mapping[str, Any]) -> Format | None:
    """The format that a model's config names; None where its weights are dense. Raises FormatError."""
    config = sizes.config_of(with_file(folder, hf_config))
    if not config:
        return None
    if not isinstance(config, Mapping):
        raise FormatError(
            f"`quantization_config` in config.json must be an object. Given: {configs.shown(config)}; {configs.AGAIN}"
        )
    return configs.read_config(_make, config)


def _make(config: Mapping[str, Any], budget: Budget | None = None) -> Format:
    config = translated(config)
    method = sizes.method_of(config)
    make = FORMATS.get(str(method))
    if make is None:
        instead = REFUSED.get(str(method).lower(), "another checkpoint of this model")
        raise FormatError(
            f"`quant_method` {configs.shown(method)} of the checkpoint is not served: {', '.join(FORMATS)} are; take "
            f"{instead}"
        )
    format = make(config, budget or Budget())
    refuse_other_meanings(config, str(method))
    return format
