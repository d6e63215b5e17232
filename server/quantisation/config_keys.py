"""Keys of a `quantization_config` that change what codes mean, and the values of them that are served.

A reader (`server/checkpoint/formats/`) looks at those that it can serve several values of. A key that is not looked at
would be read as if it were not there, so that every other one stands here: with the values that mean what is read, or
among those that mean nothing for codes. Keys of the tools that write checkpoints are held against these lists by tests.
No torch here.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from server.quantisation.configs import FormatError, shown
from server.quantisation.quark import parts_of
from server.quantisation.torchao import class_of

Values = Sequence[object]
TRUTH: Values = (False, True)
OFF: Values = (False,)
NOTHING: Values = ()

# By `quant_method`, and by key what is served; null, and a key that is not there, always are.
SERVED: Mapping[str, Mapping[str, Values]] = {
    "gptq": {
        "desc_act": TRUTH,  # tensors tell the order
        "sym": TRUTH,  # tensors have the codes of 0
        "static_groups": TRUTH,
        "lm_head": TRUTH,
        "rotation": NOTHING,  # what inputs are multiplied with
        "adapter": NOTHING,  # what is added to a layer's output
    },
    "awq": {
        "sym": OFF,
        "desc_act": OFF,
        "lm_head": TRUTH,
        "pack_dtype": ("int32",),
        "method": ("awq",),
        "pack_method": ("reorder",),
    },
    "compressed-tensors": {},
    "fp8": {"scale_fmt": ("float", "ue8m0"), "expert_dtype": ("fp8",)},
    "fbgemm_fp8": {},
    "bitsandbytes": {
        "load_in_4bit": TRUTH,
        "load_in_8bit": TRUTH,
        "_load_in_4bit": TRUTH,
        "_load_in_8bit": TRUTH,
        "llm_int8_has_fp16_weight": OFF,
    },
    "mxfp4": {},
    "quark": {"quant_mode": ("eager_mode",), "softmax_quant_spec": NOTHING, "kv_cache_post_rope": TRUTH},
    # Tensors tell which tables and heads are in fewer bits.
    "torchao": {"include_input_output_embeddings": TRUTH, "untie_embedding_weights": TRUTH},
}
# Of `weights` and `input_activations` in the groups of compressed-tensors.
SERVED_OF_WEIGHTS: Mapping[str, Values] = {
    "dynamic": OFF,
    "symmetric": TRUTH,
    "actorder": (False, True, "group", "weight", "static", "dynamic"),  # tensors tell the order
}
SERVED_OF_INPUTS: Mapping[str, Values] = {"dynamic": (False, True, "local"), "symmetric": TRUTH, "actorder": NOTHING}
# Of the parts of Quark's config, which names everything that its tensors have. `output_tensors` are keys and values.
OF_QUARK: dict[str, Values] = {"is_scale_quant": OFF, "mx_element_dtype": NOTHING, "zero_point_type": ("int32",)}
SERVED_OF_QUARK: Mapping[str, Mapping[str, Values]] = {
    "export": {"weight_format": ("real_quantized",)},
    "entry": {"bias": NOTHING},
    "weight": OF_QUARK | {"is_dynamic": OFF, "symmetric": TRUTH},
    "input_tensors": OF_QUARK | {"is_dynamic": TRUTH, "symmetric": TRUTH},
    "output_tensors": OF_QUARK | {"is_dynamic": OFF, "symmetric": (True,), "dtype": ("fp8_e4m3",),
                                  "qscheme": ("per_tensor",), "scale_format": ("float32",)},
}  # fmt: skip

# Of the classes in torchao's `quant_type`, as `torchao.py` gives their values.
SERVED_OF_TORCHAO: Mapping[str, Mapping[str, Values]] = {
    "Int4WeightOnlyConfig": {},
    "Int8WeightOnlyConfig": {"group_size": NOTHING},  # of older versions
    "Float8WeightOnlyConfig": {"weight_dtype": ("float8_e4m3fn",)},
    "IntxWeightOnlyConfig": {"intx_packing_format": ("UNPACKED_TO_INT8",)},
}

# Keys that readers look at themselves.
READ: Mapping[str, Sequence[str]] = {
    "gptq": ("bits", "group_size", "checkpoint_format", "format", "pack_dtype", "dynamic", "is_marlin_format",
             "modules_in_block_to_quantize"),
    "awq": ("bits", "w_bit", "group_size", "q_group_size", "version", "checkpoint_format", "format", "backend",
            "zero_point",
            "is_marlin_format"),
    "compressed-tensors": ("config_groups", "format", "sparsity_config", "transform_config"),
    "fp8": ("activation_scheme", "weight_block_size", "fmt", "activation_scale_ub"),
    "fbgemm_fp8": ("activation_scale_ub", "activation_scheme", "weight_block_size", "fmt"),
    "bitsandbytes": ("bnb_4bit_quant_type", "bnb_4bit_quant_storage"),
    "mxfp4": (),
    "quark": ("global_quant_config", "layer_type_quant_config", "layer_quant_config", "kv_cache_quant_config",
              "exclude", "algo_config", "export"),
    "torchao": ("quant_type",),
}  # fmt: skip
READ_OF_QUARK: Mapping[str, Sequence[str]] = {
    "export": ("pack_method", "kv_cache_group"),
    "entry": ("weight", "input_tensors", "output_tensors"),
    "weight": ("dtype", "qscheme", "ch_axis", "group_size", "scale_format"),
    "input_tensors": ("dtype", "qscheme", "ch_axis"),
    "output_tensors": (),
}
# What the rules of GPTQModel's `dynamic` may not change: it is read for all layers alike.
THE_SAME_FOR_ALL = ("format", "checkpoint_format", "method", "quant_method", "adapter", "rotation")
READ_OF_WEIGHTS = ("num_bits", "type", "strategy", "group_size", "block_structure")
READ_OF_TORCHAO: Mapping[str, Sequence[str]] = {
    "Int4WeightOnlyConfig": ("group_size", "int4_packing_format"),
    "Int8WeightOnlyConfig": ("granularity",),
    "Float8WeightOnlyConfig": ("granularity",),
    "IntxWeightOnlyConfig": ("weight_dtype", "granularity", "mapping_type"),
}
READ_OF_ALL = ("quant_method", "modules_to_not_convert", "ignore", "ignored_layers", "llm_int8_skip_modules")

# What says how codes were found, or how a server should compute, and nothing of what they mean.
WITHOUT_MEANING: Mapping[str, Sequence[str]] = {
    "gptq": ("damp_percent", "damp_auto_increment", "true_sequential", "act_group_aware", "meta", "method", "device",
             "mse", "parallel_packing", "model_seqlen", "model_name_or_path", "model_file_base_name", "tokenizer",
             "module_name_preceding_first_block", "block_name_to_quantize", "backend", "batch_size", "dataset",
             "pad_token_id", "max_input_length", "cache_block_outputs", "use_cuda_fp16", "use_exllama",
             "exllama_config", "disable_exllama"),
    "awq": ("meta", "do_fuse", "fuse_max_seq_len", "modules_to_fuse", "exllama_config"),
    "compressed-tensors": ("kv_cache_scheme", "quantization_status", "global_compression_ratio", "version",
                           "run_compressed", "dequantize", "use_optimized_inference"),
    "fp8": ("dequantize", "modules_to_convert", "kv_cache_scheme", "quantization_scheme"),
    "fbgemm_fp8": (),
    "bitsandbytes": ("llm_int8_threshold", "llm_int8_enable_fp32_cpu_offload", "bnb_4bit_compute_dtype",
                     "bnb_4bit_use_double_quant"),
    "mxfp4": ("dequantize",),
    "quark": ("version",),
    "torchao": (),
}  # fmt: skip
ROUNDED = ("round_method", "scale_type", "scale_calculation_mode", "observer_cls", "enable_buffer_reuse",
           "max_input_numel", "block_size")  # fmt: skip
WITHOUT_MEANING_OF_QUARK: Mapping[str, Sequence[str]] = {
    "export": ("weight_merge_groups", "min_kv_scale"),
    "entry": ("target_device",),
    "weight": ROUNDED,
    "input_tensors": (*ROUNDED, "group_size", "scale_format"),
    "output_tensors": (*ROUNDED, "group_size", "ch_axis"),
}
WITHOUT_MEANING_OF_TORCHAO = ("set_inductor_config", "scale_dtype", "int4_choose_qparams_algorithm",
                              "int4_tile_packed_ntile", "intx_choose_qparams_algorithm")  # fmt: skip
WITHOUT_MEANING_OF_WEIGHTS = ("observer", "observer_kwargs", "scale_dtype", "zp_dtype")


def refuse_unserved(config: Mapping[str, Any], method: str) -> None:
    """Raise FormatError for a value that would make the codes of this `quant_method` mean something else."""
    article = "an" if method in ("awq", "fp8") else "a"
    _check(config, SERVED[method], f"{article} {method} checkpoint")
    if method == "compressed-tensors":
        for group in (config.get("config_groups") or {}).values():
            _check(group.get("weights") or {}, SERVED_OF_WEIGHTS, "`weights`")
            _check(group.get("input_activations") or {}, SERVED_OF_INPUTS, "`input_activations`")
    if method == "quark":
        _refuse_others_of_quark(config)
    if method == "torchao":
        name, data = class_of(config)
        _check(data, SERVED_OF_TORCHAO[name], f"{name} of a torchao checkpoint")
        known = (*SERVED_OF_TORCHAO[name], *READ_OF_TORCHAO[name], *WITHOUT_MEANING_OF_TORCHAO)
        if (other := next((key for key in data if key not in known and data[key] is not None), None)) is not None:
            raise FormatError(
                f"{shown(other)} of {name} of a torchao checkpoint is not known, and may change what codes mean: save "
                "the model anew without it"
            )
    for pattern, change in (config.get("dynamic") or {}).items() if method == "gptq" else ():
        if other := next((key for key in THE_SAME_FOR_ALL if key in change and change[key] != config.get(key)), None):
            raise FormatError(
                f"`{other}` {shown(change[other])} of {shown(pattern)} in `dynamic` of a gptq checkpoint is not "
                "served: all layers must have the same, take another checkpoint of this model"
            )
    in_8_bits, in_4_bits = (any(config.get(f"{start}load_in_{bits}bit") for start in ("", "_")) for bits in (8, 4))
    if method == "bitsandbytes" and in_8_bits and in_4_bits:
        raise FormatError("`load_in_8bit` and `load_in_4bit` of a bitsandbytes checkpoint exclude each other: give one")


def _refuse_others_of_quark(config: Mapping[str, Any]) -> None:
    """Likewise for the parts of its config, and for every key that is not known: its config says all of its tensors."""
    known = [*SERVED["quark"], *READ["quark"], *WITHOUT_MEANING["quark"], "quant_method"]
    _refuse_unknown(config, known, "a quark checkpoint")
    for kind, part in parts_of(config):
        of = "a quark checkpoint" if kind == "entry" else f"`{kind}` of a quark checkpoint"
        _refuse_unknown(part, [*SERVED_OF_QUARK[kind], *READ_OF_QUARK[kind], *WITHOUT_MEANING_OF_QUARK[kind]], of)
        _check(part, SERVED_OF_QUARK[kind], of)


def _refuse_unknown(config: Mapping[str, Any], known: Sequence[str], of: str) -> None:
    for key in config:
        if key not in known:
            raise FormatError(
                f"`{key}` {shown(config[key])} of {of} is not known, and might change what codes mean: take another "
                "checkpoint of this model"
            )


def _check(config: Mapping[str, Any], served: Mapping[str, Values], of: str) -> None:
    for key, values in served.items():
        found = config.get(key)
        if found is None or found in ("", {}, []):
            continue
        if not any(type(found) is type(value) and found == value for value in values):
            told = " or ".join(str(value).lower() if isinstance(value, bool) else str(value) for value in values)
            raise FormatError(
                f"`{key}` {shown(found)} of {of} is not served: {told or 'null'} is; take another checkpoint of this "
                "model"
            )
