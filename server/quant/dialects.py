"""Configs of tools that write another tool's layout, in that tool's terms.

auto-round packs as GPTQ and AWQ do, or as compressed-tensors does (`packing_format`); NVIDIA's ModelOpt writes what fp8
and compressed-tensors are here (`quant_algo`). No torch here. Left out: what neither of these layouts holds, which is
refused by name: rotations, layers of several algorithms, and inputs that a layer scales for itself.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from server.quant.configs import AGAIN, FormatError, shown

Config = Mapping[str, Any]
DENSE_BITS = 16  # of a layer that auto-round left alone

# auto-round: by `packing_format`, what it is called here. Only of the first are codes of 0 stored less one.
PACKED_AS_GPTQ = {"auto_round:auto_gptq": "gptq", "auto_round": "gptq_v2", "auto_round:gptqmodel": "gptq_v2"}
OLDER_PACKED_AS_GPTQ = ("auto_round:gptq", "auto_round:exllamav2", "auto_round:tritonv2")
PACKED_AS_AWQ = "auto_round:auto_awq"
PACKED_AS_COMPRESSED = "auto_round:llm_compressor"
SERVED_PACKINGS = (*PACKED_AS_GPTQ, PACKED_AS_AWQ, PACKED_AS_COMPRESSED)

FLOAT4 = {"num_bits": 4, "type": "float", "symmetric": True}
NVFP4 = ("nvfp4-pack-quantized", FLOAT4 | {"strategy": "tensor_group", "group_size": 16})
MXFP4 = ("mxfp4-pack-quantized", FLOAT4 | {"strategy": "group", "group_size": 32})
MXFP8 = ("mxfp8-quantized", FLOAT4 | {"num_bits": 8, "strategy": "group", "group_size": 32})
# auto-round: by `data_type` and `bits`.
MICROSCALED: Mapping[object, tuple[str, Config]] = {("mx_fp", 4): MXFP4, ("mx_fp", 8): MXFP8, ("nv_fp", 4): NVFP4}
# ModelOpt: by `quant_algo`. Inputs in float4 are taken as they are.
IN_FLOAT8 = {"FP8": "static", "FP8_PER_CHANNEL_PER_TOKEN": "dynamic"}
IN_GROUPS = {"NVFP4": NVFP4, "W4A16_NVFP4": NVFP4, "MXFP8": MXFP8}


def translated(config: Config) -> Config:
    """The config as the layout's own tool would write it, or itself. Raises FormatError."""
    method = str(config.get("quant_method") or ("modelopt" if _is_of_modelopt(config) else "")).lower()
    if method in ("auto-round", "intel/auto-round"):
        return _of_auto_round(config)
    if method in ("modelopt", "modelopt_fp4"):
        return _of_modelopt(config)
    return config


def _is_of_modelopt(config: Config) -> bool:
    producer = config.get("producer")
    return isinstance(producer, Mapping) and producer.get("name") == "modelopt"


def _of_auto_round(config: Config) -> Config:
    packing = str(config.get("packing_format") or config.get("backend") or "auto_round:auto_gptq")
    if packing in OLDER_PACKED_AS_GPTQ:
        packing = "auto_round:auto_gptq"
    if packing not in SERVED_PACKINGS or config.get("rotation_config") or config.get("super_bits"):
        asked = "rotation_config" if config.get("rotation_config") else "packing_format"
        raise FormatError(
            f"`{asked}` {shown(config.get('rotation_config') or packing)} of an auto-round checkpoint is not served: "
            f"{', '.join(SERVED_PACKINGS)} without rotations are, export it so"
        )
    data_type, bits = config.get("data_type", "int"), config.get("bits")
    if packing == PACKED_AS_COMPRESSED:
        if (data_type, bits) not in MICROSCALED:
            raise FormatError(
                f"`data_type` {shown(data_type)} with {shown(bits)} bits of an auto-round checkpoint is not served in "
                f"{packing}: mx_fp with 4 or 8 and nv_fp with 4 are, export it so"
            )
        return _in_groups(*MICROSCALED[data_type, bits])
    if data_type != "int" or (config.get("act_bits") or DENSE_BITS) < DENSE_BITS:
        raise FormatError(
            f"`data_type` {shown(data_type)} with inputs of {shown(config.get('act_bits'))} bits of an auto-round "
            f"checkpoint is not served in {packing}: int with inputs as they are is, export it so"
        )
    common = {key: config[key] for key in ("bits", "group_size", "modules_to_not_convert") if key in config}
    if packing == PACKED_AS_AWQ:
        return {"quant_method": "awq", "version": "gemm", **common}
    others = config.get("extra_config") or {}
    if not isinstance(others, Mapping) or not all(isinstance(change, Mapping) for change in others.values()):
        raise FormatError(
            f"`extra_config` of an auto-round checkpoint must be an object of objects. Given: {shown(others)}; {AGAIN}"
        )
    version = PACKED_AS_GPTQ[packing]
    return {"quant_method": "gptq", "checkpoint_format": version, "dynamic": dict(map(_rule, others.items())), **common}


def _rule(entry: tuple[str, Mapping[str, Any]]) -> tuple[str, Mapping[str, Any]]:
    """A layer's own settings as GPTQModel's `dynamic` has them. A name with other characters is an expression."""
    name, change = entry
    pattern = f"{re.escape(name)}$" if re.fullmatch(r"[\w.]+", name) else name
    if (change.get("bits") or 0) >= DENSE_BITS:
        return f"-:{pattern}", {}
    return f"+:{pattern}", {key: change[key] for key in ("bits", "group_size") if key in change}


def _of_modelopt(config: Config) -> Config:
    config = config.get("quantization") or config  # as in hf_quant_config.json
    algorithm = config.get("quant_algo")
    dense = [name for key in ("exclude_modules", "ignore") for name in config.get(key) or ()]
    left_out = [f"re:{'.*'.join(map(re.escape, name.split('*')))}$" if "*" in name else name for name in dense]
    if algorithm in IN_FLOAT8:
        return {"quant_method": "fp8", "activation_scheme": IN_FLOAT8[algorithm], "ignore": left_out}
    if algorithm in IN_GROUPS:
        return {**_in_groups(*IN_GROUPS[algorithm]), "ignore": left_out}
    raise FormatError(
        f"`quant_algo` {shown(algorithm)} of a modelopt checkpoint is not served: "
        f"{', '.join((*IN_FLOAT8, *IN_GROUPS))} are, take another checkpoint of this model"
    )


def _in_groups(format: str, weights: Mapping[str, Any]) -> Config:
    group = {"targets": ["Linear"], "weights": weights}
    return {"quant_method": "compressed-tensors", "format": format, "config_groups": {"group_0": group}}
