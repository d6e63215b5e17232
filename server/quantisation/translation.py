"""Configs of tools that write another tool's layout, in that tool's terms.

auto-round packs as GPTQ and AWQ do, or as compressed-tensors does (`packing_format`); NVIDIA's ModelOpt writes what fp8
and compressed-tensors are here (`quant_algo`). No torch here. Left out: what neither of these layouts holds, which is
refused by name: rotations, ModelOpt's layers of several algorithms, and inputs that a layer scales for itself.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from server.quantisation.configs import AGAIN, FormatError, shown, strings
from server.quantisation.exclusions import HEADS_AND_ROUTERS

Config = Mapping[str, Any]
DENSE_BITS = 16  # of a layer that auto-round left alone
NAME = r"[\w.]+"  # of a layer; whatever has other characters is an expression

# auto-round: by `packing_format`, which older versions call `backend`, what GPTQ's versions are called here. Only of
# the first are codes of 0 stored less one.
PACKED_AS_GPTQ = {
    "auto_round:auto_gptq": "gptq",
    "auto_round:gptq": "gptq",
    "auto_round:gptq:exllamav2": "gptq",
    "auto_round:gptq:tritonv2": "gptq",
    "gptq:exllamav2": "gptq",
    "auto_round": "gptq_v2",
    "auto_round:gptqmodel": "gptq_v2",
    "auto_round:exllamav2": "gptq_v2",
    "auto_round:tritonv2": "gptq_v2",
}
PACKED_AS_AWQ = ("auto_round:auto_awq", "auto_round:awq")
PACKED_AS_COMPRESSED = "auto_round:llm_compressor"
SERVED_PACKINGS = ("auto_round", "auto_round:auto_gptq", "auto_round:gptqmodel", PACKED_AS_AWQ[0], PACKED_AS_COMPRESSED)

FLOAT4 = {"num_bits": 4, "type": "float", "symmetric": True}
NVFP4 = ("nvfp4-pack-quantized", FLOAT4 | {"strategy": "tensor_group", "group_size": 16})
MXFP4 = ("mxfp4-pack-quantized", FLOAT4 | {"strategy": "group", "group_size": 32})
MXFP8 = ("mxfp8-quantized", FLOAT4 | {"num_bits": 8, "strategy": "group", "group_size": 32})
# auto-round: by `data_type` and `bits`.
MICROSCALED = {("mx_fp", "4"): MXFP4, ("mx_fp", "8"): MXFP8, ("nv_fp", "4"): NVFP4}
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
    is_known = packing in (*PACKED_AS_GPTQ, *PACKED_AS_AWQ, PACKED_AS_COMPRESSED)
    if not is_known or config.get("rotation_config") or config.get("super_bits"):
        asked = next((key for key in ("rotation_config", "super_bits") if config.get(key)), "packing_format")
        raise FormatError(
            f"`{asked}` {shown(config.get(asked) or packing)} of an auto-round checkpoint is not served: "
            f"{', '.join(SERVED_PACKINGS)} without rotations are, export it so"
        )
    others = config.get("extra_config") or {}
    if not isinstance(others, Mapping) or not all(isinstance(change, Mapping) for change in others.values()):
        raise FormatError(
            f"`extra_config` of an auto-round checkpoint must be an object of objects. Given: {shown(others)}; {AGAIN}"
        )
    for name, change in others.items():
        _refuse_other_kinds(name, change, config, packing)
    if packing == PACKED_AS_COMPRESSED:
        return _microscaled(config, others)
    data_type = config.get("data_type", "int")
    if data_type != "int" or not _is_dense(config.get("act_bits")):
        raise FormatError(
            f"`data_type` {shown(data_type)} with inputs of {shown(config.get('act_bits'))} bits of an auto-round "
            f"checkpoint is not served in {packing}: int with inputs as they are is, export it so"
        )
    common = {key: config[key] for key in ("bits", "group_size", "modules_to_not_convert") if key in config}
    if packing in PACKED_AS_AWQ:
        _refuse_other_packing(others, common, packing)
        return {"quant_method": "awq", "version": "gemm", **common}
    # A name counts more than an expression.
    rules = [_rule(*entry) for entry in sorted(others.items(), key=lambda entry: not re.fullmatch(NAME, entry[0]))]
    has_head = bool(config.get("lm_head")) or not _is_dense((others.get("lm_head") or {"bits": None}).get("bits", 0))
    version = {"checkpoint_format": PACKED_AS_GPTQ[packing], "lm_head": has_head}
    return {"quant_method": "gptq", **version, "dynamic": dict(rules), **common}


def _refuse_other_packing(others: Mapping[str, Mapping[str, Any]], common: Config, packing: str) -> None:
    """Raise FormatError where a layer has other bits or groups than all, for which AWQ's config has no place."""
    for name, change in others.items():
        differs = any(change.get(key, usual) != usual for key, usual in common.items())
        if differs and not _is_dense(change.get("bits", 0)):
            raise FormatError(
                f"`extra_config` of an auto-round checkpoint packs {shown(name)} otherwise than its other layers, "
                f"which is not served in {packing}: export it in auto_round"
            )


def _refuse_other_kinds(name: str, change: Config, config: Config, packing: str) -> None:
    """Raise FormatError where a layer's own settings are of more than its bits and groups."""
    if _is_dense(change.get("bits", 0)):
        return
    # Where floats have scales for neighbours, layers may be of several kinds, and inputs are taken as they are.
    same = ("rotation_config", "super_bits", *(() if packing == PACKED_AS_COMPRESSED else ("data_type", "act_bits")))
    usual = {"data_type": "int"} | {key: config[key] for key in same if config.get(key) is not None}
    for key in same:
        found = change.get(key)
        if found is None or found == usual.get(key) or (key == "act_bits" and _is_dense(found)):
            continue
        raise FormatError(
            f"`{key}` {shown(found)} of {shown(name)} in `extra_config` of an auto-round checkpoint is not served: all "
            "layers must have the same, export it so"
        )


def _is_dense(bits: Any) -> bool:
    """Whether so many bits mean that a tensor was left alone; null does."""
    return bits is None or (isinstance(bits, int) and bits >= DENSE_BITS)


def _microscaled(config: Config, others: Mapping[str, Mapping[str, Any]]) -> Config:
    """auto-round's floats with scales for neighbouring inputs: each layer may have one of several formats."""
    dense = [*strings(config, "modules_to_not_convert")]
    groups = {}
    for name, change in {"Linear": config, **others}.items():
        data_type, bits = (change.get(key, config.get(key)) for key in ("data_type", "bits"))
        target = name if re.fullmatch(NAME, name) else f"re:{_anywhere(name)}"
        if name != "Linear" and _is_dense(bits):
            dense.append(target)
            continue
        kind = next((kind for kind, _ in MICROSCALED if str(data_type).startswith(kind)), "")
        if (found := MICROSCALED.get((kind, str(bits)))) is None:
            raise FormatError(
                f"`data_type` {shown(data_type)} with {shown(bits)} bits of an auto-round checkpoint is not served in "
                f"{PACKED_AS_COMPRESSED}: mx_fp with 4 or 8 and nv_fp with 4 are, export it so"
            )
        format, weights = found
        groups[name] = {"targets": [target], "format": format, "weights": weights}
    ignored = [*HEADS_AND_ROUTERS, *dense]
    return {"quant_method": "compressed-tensors", "config_groups": groups, "ignore": ignored}


def _rule(name: str, change: Mapping[str, Any]) -> tuple[str, Mapping[str, Any]]:
    """A layer's own settings as GPTQModel's `dynamic` has them. A name with other characters is an expression."""
    pattern = f"{re.escape(name)}$" if re.fullmatch(NAME, name) else _anywhere(name)
    if _is_dense(change.get("bits", 0)):
        return f"-:{pattern}", {}
    return f"+:{pattern}", {key: change[key] for key in ("bits", "group_size") if key in change}


def _anywhere(expression: str) -> str:
    """The expression, which auto-round looks for anywhere in a name, as one for the beginning of a name."""
    return expression if expression.startswith((".*", "^")) else f".*(?:{expression})"


def _of_modelopt(config: Config) -> Config:
    inner = config.get("quantization")
    config = inner if isinstance(inner, Mapping) and inner else config  # as in hf_quant_config.json
    algorithm = config.get("quant_algo")
    dense = [name for key in ("exclude_modules", "ignore") for name in strings(config, key)]
    exclusions = [f"re:{'.*'.join(map(re.escape, name.split('*')))}$" if "*" in name else name for name in dense]
    if not isinstance(algorithm, str | None):
        raise FormatError(f"`quant_algo` of a modelopt checkpoint must be a name. Given: {shown(algorithm)}; {AGAIN}")
    if algorithm in IN_FLOAT8:
        return {"quant_method": "fp8", "activation_scheme": IN_FLOAT8[algorithm], "ignore": exclusions}
    if algorithm in IN_GROUPS:
        format, weights = IN_GROUPS[algorithm]
        size = config.get("group_size") or weights["group_size"]
        group = {"targets": ["Linear"], "format": format, "weights": {**weights, "group_size": size}}
        return {"quant_method": "compressed-tensors", "config_groups": {"group_0": group}, "ignore": exclusions}
    if algorithm is None and (config.get("kv_cache_quant_algo") or config.get("kv_cache_scheme")):
        return {"quant_method": "compressed-tensors", "config_groups": {}, "kv_cache_scheme": {"num_bits": 8}}
    raise FormatError(
        f"`quant_algo` {shown(algorithm)} of a modelopt checkpoint is not served: "
        f"{', '.join((*IN_FLOAT8, *IN_GROUPS))} are, take another checkpoint of this model"
    )
