"""Quantised checkpoints that cannot be served: one sentence each, with the value, the bound and what to do.

What a config tells is refused before any weights are looked at: the folders of those tests hold none. The rest is
found while the rank loads, by the tensors.
"""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from server import loading
from server.checkpoint import formats
from server.checkpoint.formats.bitsandbytes import BitsAndBytesFormat
from server.checkpoint.formats.protocol import FormatError, Part, Tensors
from server.checkpoint.weights import Checkpoint
from server.quantisation import sizes
from server.quantisation.configs import Budget
from server.quantisation.exclusions import Names
from server.quantisation.stored import QuantisedWeight
from tests.server.driver import load_engine
from tests.server.quantisation import packers, quantised
from tests.server.quantisation.cases import Quantised, with_config
from tests.server.quantisation.quantised import How
from tests.server.test_service import config_of
from tests.server.tiny import save_tiny

GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": 128}
FP8, MODELOPT = {"quant_method": "fp8"}, {"quant_method": "modelopt"}
BNB = {"quant_method": "bitsandbytes", "load_in_4bit": True}
AWQ = {"quant_method": "awq", "bits": 4, "group_size": 128}
INT8 = {"num_bits": 8, "type": "int", "symmetric": True, "strategy": "channel"}


QUARK = quantised.quark("int8", -1, is_symmetric=True).config
NAN, INF = float("nan"), float("inf")


def compressed(format: str = "int-quantized", *, inputs: object = None, **weights: object) -> dict[str, Any]:
    group = {"targets": ["Linear"], "weights": INT8 | weights, "input_activations": inputs}
    return {"quant_method": "compressed-tensors", "format": format, "config_groups": {"group_0": group}}


def of_group(**changes: object) -> dict[str, Any]:
    return compressed() | {"config_groups": {"group_0": compressed()["config_groups"]["group_0"] | changes}}


def of_blocks(block: object) -> dict[str, Any]:
    return compressed(strategy="block", block_structure=block)


def of_entry(**changes: object) -> dict[str, Any]:
    """Quark's, with another entry for all layers."""
    return {**QUARK, "global_quant_config": QUARK["global_quant_config"] | changes}


def quark(**changes: object) -> dict[str, Any]:
    return of_entry(weight=QUARK["global_quant_config"]["weight"] | changes)


def of_inputs(**changes: object) -> dict[str, Any]:
    return of_entry(input_tensors={"dtype": "int8", "qscheme": "per_tensor"} | changes)


def auto_round(**more: object) -> dict[str, Any]:
    return {"quant_method": "auto-round", "bits": 4, "group_size": 32} | more


FLOAT4 = {"num_bits": 4, "type": "float"}
CACHED = {"kv_cache_quant_config": {"*k_proj": of_entry(output_tensors={"dtype": "int8"})["global_quant_config"]}}
READ = r"`quantization_config` cannot be read: .*; download config\.json again$"
LISTED = r"must be a list of names\. Given: .*; download config\.json again$"
EXPRESSION = r"an expression for names of layers .*must be a regular one\. Given: '\(' .*; download config\.json again$"
GROUP = r"`group_size` of .* must be .*a number of inputs from 8 to 16777216\. Given: .*; take another"
BLOCK = r"must be two numbers, of rows from 1 and of inputs from 8 on, to 16777216\. Given: .*; take another"
SCALE = r"`activation_scale_ub` .*must be a finite number above 0\. Given: .*; download config\.json again$"

# A config, and what is said of it. First those of formats, and of kinds of them, that are not served.
BY_CONFIG: list[tuple[Any, str]] = [
    ({"quant_method": "exl2", "bits": 4.25}, r"'exl2'.*not served.*take a gptq, awq or compressed"),
    ({"quant_method": "hqq"}, r"'hqq'.*not served.*in 16 bits, with --quantize int4"),
    ({"quant_method": "nvfp4"}, r"'nvfp4'.*not served.*take an fp8 or compressed-tensors"),
    ({"quant_method": "best4"}, r"'best4'.*not served: gptq, awq,.*take another checkpoint"),
    ({"quant_method": "a" * 5000}, r"'aaa.* is not served"),
    ({"quant_method": ["gptq"]}, r"is not served"),
    ({"bits": 4}, r"`quant_method` None.*not served"),
    ("gptq", r"must be an object\. Given: 'gptq'; download config\.json again"),
    ({"weights": "int8", "activations": None}, r"'quanto'.*not served.*--quantize int8 or int4"),
    ({"weight_quant_params": {"nbits": 4}}, r"'hqq'.*not served.*--quantize int4"),
    ({"quant_type": {"default": {}}}, r"`quant_type` of a torchao.*must be an object.*transformers.*anew with 5"),
    ({"sparsity_config": {"format": "sparse-24-bitmask"}}, r"'sparse-24-bitmask', and only .* is .*: write it dense"),
    ({"global_quant_config": {"weight": {}}}, r"`pack_method` in `export` of a .* reorder or order\. Given: None"),
    # gptq and awq
    (GPTQ | {"is_marlin_format": True}, r"'marlin' of a gptq checkpoint.*gptq and gptq_v2 are, take"),
    *((GPTQ | {"checkpoint_format": x}, r"`checkpoint_format` .* is not served") for x in ("marlin", [], {"a": 1}, 5)),
    (GPTQ | {"bits": 5}, r"must be 2, 3, 4 or 8\. Given: 5; take another"),
    (GPTQ | {"dynamic": {"+:.*": {"bits": 6}}}, r"must be 2, 3, 4 or 8\. Given: 6"),
    (GPTQ | {"dynamic": {"+:.*": {"format": "marlin"}}}, r"`format` 'marlin' of '\+:\.\*' .*: all layers must"),
    (GPTQ | {"pack_dtype": "int16"}, r"'int16'.*int32 is, convert it"),
    (GPTQ | {"rotation": "hadamard"}, r"`rotation` 'hadamard' of a gptq checkpoint is not served: null is"),
    (GPTQ | {"adapter": {"path": "a"}}, r"`adapter` .* of a gptq checkpoint is not served"),
    *((GPTQ | {"dynamic": x}, r"`dynamic` .*an object of objects.* Given: ") for x in ([1], "a", {"+:.*": 5})),
    (GPTQ | {"dynamic": {"-:(": {}}}, EXPRESSION),
    (GPTQ | {"dynamic": {"-:" + "a" * 1001: {}}}, r"has 1001 characters, and 1000 at most are served\. Given: "),
    (GPTQ | {"dynamic": {f"-:{n}": {} for n in range(4097)}}, r"has 4097 expressions .*and 4096 at most are served"),
    *((GPTQ | {"modules_in_block_to_quantize": x}, LISTED) for x in (5, [5], [[5]], "q_proj")),
    *((GPTQ | {"group_size": x}, GROUP) for x in (0, 7, True, 1 << 40, 64.0, None)),
    *((AWQ | {"version": x}, rf"'{x}' of an awq checkpoint.*gemm is, take a checkpoint") for x in ("marlin", "gemv")),
    (AWQ | {"backend": "llm-awq"}, r"'llm-awq' of an awq checkpoint.*autoawq is, take"),
    (AWQ | {"bits": 3}, r"must be 4\. Given: 3; take another"),
    (AWQ | {"pack_method": "order"}, r"`pack_method` 'order' of an awq .*: reorder is; take"),
    (AWQ | {"zero_point": False, "pack_method": "reorder"}, r"`zero_point` false .*, .* its codes are signed: export"),
    *((AWQ | {"group_size": x}, GROUP) for x in ("all", 1, [64])),
    *((AWQ | {"modules_to_not_convert": x}, LISTED) for x in (5, [5], "lm_head")),
    *((AWQ | {"zero_point": x}, r"must be true or false\. Given: .*; download") for x in ("yes", None)),
    (AWQ | {"modules_to_not_convert": ["re:("]}, EXPRESSION),
    # fp8 and bitsandbytes
    (FP8 | {"activation_scheme": "best"}, r"must be dynamic or static\. Given: 'best'"),
    (FP8 | {"fmt": "e5m2"}, r"'e5m2'.*e4m3 is, take another"),
    (FP8 | {"scale_fmt": "ue4m3"}, r"`scale_fmt` 'ue4m3' of an fp8 checkpoint is not served: float or ue8m0 is"),
    *((FP8 | {"ignored_layers": x}, LISTED) for x in (5, [5])),
    *((FP8 | {"activation_scale_ub": x}, SCALE) for x in ("x", [1], 10**400, 0, -1, NAN, True)),
    *((FP8 | {"weight_block_size": x}, BLOCK) for x in ([128], [128, 1], [True, 128], [0, 128], [128, 10**30], 5)),
    (BNB | {"load_in_8bit": True}, r"`load_in_8bit` and `load_in_4bit` of .*exclude each other: give one"),
    (BNB | {"bnb_4bit_quant_storage": "complex64"}, r"'complex64'.*not served: uint8, int8, .*, float32, float64 are"),
    (BNB | {"bnb_4bit_quant_type": "int4"}, r"`bnb_4bit_quant_type` 'int4' .*not served: .* and fp4 are, take another"),
    *((BNB | {"llm_int8_skip_modules": x}, LISTED) for x in (5, [None], {"a": 1})),
    # auto-round and ModelOpt
    (auto_round(packing_format="auto_round:fp8_static"), r"`packing_format` 'auto_round:fp8_static' .* served: .* are"),
    (auto_round(rotation_config={"hadamard_type": "a"}), r"`rotation_config` .*not served: .* without rotations are"),
    (auto_round(act_bits=8), r"`data_type` 'int' with inputs of 8 bits of .* with inputs as they are is, export it so"),
    (auto_round(extra_config={"a.b": {"data_type": "mx_fp"}}), r"`data_type` 'mx_fp' of 'a\.b' .* same, export it so"),
    (auto_round(packing_format="auto_round:auto_awq", extra_config={"a.b": {"bits": 8}}), r"packs 'a\.b' .* than"),
    (auto_round(packing_format="auto_round:auto_awq", extra_config=5), r"must be an .* objects\. Given: 5; download"),
    (MODELOPT | {"quant_algo": "W4A8_AWQ"}, r"`quant_algo` 'W4A8_AWQ' of a modelopt .* served: FP8, .*, NVFP4, .* are"),
    (MODELOPT | {"quant_algo": {}}, r"`quant_algo` of a modelopt checkpoint must be a name\. Given"),
    # Quark
    (quark(dtype="fp6_e2m3"), r"`dtype` 'fp6_e2m3' .*: for weights int4, .*, fp4 are; take another"),
    (quark(dtype="fp8_e4m3", qscheme="per_block"), r"'per_block'.*fp8_e4m3 per_tensor, per_channel is"),
    (quark(ch_axis=1), r"`ch_axis` 1 of a quark checkpoint is not served: .*per_channel 0 is; take"),
    (quark(scale_format="e5m3"), r"`scale_format` 'e5m3' .*weights in int8 float32 is"),
    (quark(zero_point_type="float32"), r"`zero_point_type` 'float32' of `weight` .*int32 is"),
    (of_entry(weight=[{}, {}]), r"`weight` \[{}, {}\] .*an object is, of a single step of round"),
    (of_entry(weight=None, input_tensors={"dtype": "int8"}), r"`input_tensors` .*is a `weight`"),
    (of_entry(bias={"dtype": "int8"}), r"`bias` .* of a quark checkpoint is not served: null is"),
    (of_entry(output_tensors={"dtype": "int8"}), r"`output_tensors` .*has them too, and other layers have some: take"),
    (of_inputs(dtype="fp8_e4m3"), r"`dtype` 'fp8_e4m3' .* weights of rows in int8 or fp8_e4m3 the same is, or inputs"),
    (of_inputs(qscheme="per_channel", ch_axis=-1, is_dynamic=True), r"`qscheme` .*are dynamic per_channel along 1"),
    (of_inputs(is_dynamic=True, symmetric=False), r"`symmetric` False .*: for .* that are dynamic true is; take"),
    (QUARK | CACHED, r"`dtype` 'int8' of `output_tensors` of a .* checkpoint is not served: fp8_e4m3 is; take another"),
    (QUARK | {"export": {"pack_method": "order", "weight_format": "fake"}}, r"'fake' .*: real_quantized is"),
    (QUARK | {"export": {"pack_method": "best"}}, r"must be reorder or order\. Given: 'best'"),
    (QUARK | {"algo_config": [{"name": "awq"}, {"name": "rotation", "r4": True}]}, r"'rotation' .* r3, r4, online"),
    *((QUARK | {"algo_config": x}, r"'svdquant' .* is not served") for x in (["svdquant"], {"name": "svdquant"})),
    (QUARK | {"softmax_quant_spec": {"dtype": "fp8_e4m3"}}, r"`softmax_quant_spec` .*null is; take"),
    (QUARK | {"layer_type_quant_config": {"Embedding": {}}}, r"'Embedding' of a quark .*: Linear is; take"),
    (QUARK | {"exclude": ["*.[01].*"]}, r"`exclude` .*: for patterns of names \* and \? are; take"),
    (QUARK | {"best": 1}, r"`best` 1 of a quark checkpoint is not known, and might change what codes"),
    # compressed-tensors
    ({"quant_method": "compressed-tensors"}, r"`config_groups`.*missing.*download config\.json"),
    *((compressed(x), rf"'{x}'.*not served: pack-quantized, int-quant") for x in ("mxfp6-pack-quantized", "marlin-24")),
    (compressed("nvfp4-pack-quantized"), r"type 'int' with 8 bits .*'nvfp4-pack.*: float with 4 are"),
    (compressed("nvfp4-pack-quantized", **FLOAT4), r"'channel' of weights is not .* format .*: tensor_group is, write"),
    (compressed("mxfp4-pack-quantized", **FLOAT4, strategy="group", symmetric=False), r"`symmetric` false .*: true is"),
    (compressed(num_bits=6), r"type 'int' with 6 bits.*int with 4, 8, and float with 8 are"),
    (compressed("pack-quantized", num_bits=5), r"with 5 bits.*int with 2, 3, 4, 8 are"),
    *((compressed(strategy=x), r"`strategy` .*tensor, channel, group, block are") for x in ("tensor_group", {"a": 1})),
    *((compressed(strategy="group", group_size=x), GROUP) for x in (0, True, 4, -1, "x")),
    (compressed(inputs={"num_bits": 4}), r"with 4 bits are not served: int or float with 8 are"),
    (compressed(inputs={"dynamic": True, "symmetric": False}), r"dynamic and not .* it with symmetric ones"),
    (compressed(inputs={"strategy": "channel"}), r"'channel'.*`tensor` is, write"),
    (compressed(inputs={"dynamic": True, "strategy": "group", "group_size": "x"}), GROUP),
    (compressed() | {"sparsity_config": {"format": "sparse-24"}}, r"'sparse-24'.*write it dense"),
    (compressed() | {"sparsity_config": "dense"}, READ),
    *((compressed() | {"config_groups": {"a": x}}, READ) for x in (5, None, [])),
    *((compressed() | {"ignore": x}, LISTED) for x in (5, [5])),
    (compressed() | {"ignore": ["re:("]}, EXPRESSION),
    *((of_group(targets=x), LISTED) for x in (5, [5], "Linear")),
    (of_group(targets=["re:("]), EXPRESSION),
    (of_group(input_activations="x"), READ),
    *((of_blocks(x), BLOCK) for x in ("²x2", "128", [1], [1, 10**30], "9" * 5000 + "x128", [128, True], None)),
]  # fmt: skip


@pytest.fixture(scope="module")
def without_weights(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("without-weights")
    save_tiny("llama", folder, num_hidden_layers=1)
    (folder / "model.safetensors").unlink()
    return folder


def refusal(folder: Path, **changes: object) -> str:
    """What a shard says when it is told to load `folder`: one sentence."""
    with pytest.raises(ValueError) as raised:
        loading.load(config_of(folder, folder / "socket", dtype="float32", threads=1, **changes))
    message = str(raised.value)
    assert "\n" not in message
    return message


def configured(source: Path, folder: Path, config: object) -> Path:
    hf_config = json.loads((source / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(hf_config | {"quantization_config": config}))
    return folder


@pytest.mark.parametrize(("config", "expected"), BY_CONFIG)
def test_what_the_config_tells_is_refused_in_a_sentence(tmp_path: Path, config: Any, expected: str) -> None:
    with pytest.raises(FormatError) as raised:
        formats.find(tmp_path, {"quantization_config": config})
    message = str(raised.value)
    assert re.search(expected, message)
    assert "\n" not in message
    assert 500 > len(message)


def test_it_is_refused_before_weights_are_looked_at(without_weights: Path, tmp_path: Path) -> None:
    said = refusal(configured(without_weights, tmp_path, {"quant_method": "marlin"}))
    assert re.search(r"'marlin'.*not served.*take a gptq, awq or", said)
    said = refusal(configured(without_weights, tmp_path, AWQ), quantize="int8")
    assert re.search("--quantize is int8, but.*quantised already, as awq, 4 bits, groups of 128: leave it out", said)


def nested(depth: int) -> list[Any]:
    found: list[Any] = []
    for _ in range(depth):
        found = [found]
    return found


@pytest.mark.parametrize("config", ["gptq", 5, [1], nested(900), {"quant_method": nested(900)}, GPTQ | {"bits": "x"}])
def test_plans_refuse_what_they_cannot_read(tmp_path: Path, config: object) -> None:
    for read in (sizes.of_config, lambda hf_config: formats.find(tmp_path, hf_config)):
        with pytest.raises(FormatError) as raised:
            read({"quantization_config": config})
        assert 500 > len(str(raised.value))


def test_plans_read_blocks_as_the_reader_does() -> None:
    for block in ("64x128", [64, 128]):
        storage = sizes.of_config({"quantization_config": of_blocks(block)})
        assert storage is not None
        assert 128 == storage.group


def test_layers_that_a_config_leaves_out_are_known_by_name_part_and_expression() -> None:
    names = Names(("mlp.up", "re:.*head$"))
    assert [True, False, True, False] == [names.hold(name) for name in ("a.mlp.up.b", "mlp.upper", "lm_head", "head.a")]
    assert names.hold("a.mlp.up.b")


def test_configs_of_their_own_count_where_config_json_has_none(without_weights: Path, tmp_path: Path) -> None:
    shutil.copy(without_weights / "config.json", tmp_path)
    older = tmp_path / "quantize_config.json"
    older.write_text(json.dumps({"bits": 4, "group_size": 128, "desc_act": False, "is_marlin_format": True}))
    assert re.search("'marlin'.*not served", refusal(tmp_path))
    older.write_text(json.dumps({"w_bit": 4, "q_group_size": 64, "zero_point": True, "version": "GEMM"}))
    found = formats.find(tmp_path, {})
    assert found is not None
    assert "awq" == found.name
    for text in ("{", "[]", '"gptq"', "[" * 100_000, "", "<html>"):
        older.write_text(text)
        assert re.search("quantize_config.json cannot be read.*download it again", refusal(tmp_path))
    older.unlink()
    older.symlink_to("/dev/zero")
    assert re.search("quantize_config.json cannot be read.*not a regular file", refusal(tmp_path))
    older.unlink()
    os.mkfifo(older)
    assert re.search("quantize_config.json cannot be read.*not a regular file", refusal(tmp_path))


def test_gguf_and_pt_are_refused_by_name(without_weights: Path, tmp_path: Path) -> None:
    shutil.copy(without_weights / "config.json", tmp_path)
    (tmp_path / "model-Q4_K_M.gguf").write_bytes(b"GGUF")
    assert re.search(r"model-Q4_K_M\.gguf, and GGUF is not served: \*\.safetensors or", refusal(tmp_path))
    (tmp_path / "a.pt").write_bytes(b"PK")
    assert re.search(r"a\.pt, and \*\.pt is not read: \*\.safetensors or", refusal(tmp_path))


def down_proj(change: Callable[[dict[str, Tensor], str], object]) -> Callable[[dict[str, Tensor]], object]:
    return lambda tensors: change(tensors, "model.layers.0.mlp.down_proj")


def without(suffix: str) -> Callable[[dict[str, Tensor]], object]:
    return down_proj(lambda tensors, name: tensors.pop(f"{name}.{suffix}"))


def with_tensor(suffix: str, tensor: Tensor) -> Callable[[dict[str, Tensor]], object]:
    return down_proj(lambda tensors, name: tensors.update({f"{name}.{suffix}": tensor}))


def in_place(suffix: str, number: float) -> Callable[[dict[str, Tensor]], object]:
    """The tensor with this number at its end."""
    return down_proj(lambda tensors, name: tensors[f"{name}.{suffix}"].view(-1)[-1:].fill_(number))


BY_TENSORS = {
    "fewer words": (
        "llama-gptq-2", with_tensor("qweight", torch.zeros(5, 64, dtype=torch.int32)),
        r"down_proj\.qweight in .* has shape \[5, 64\], but config\.json says \[6, 64\].*download both again",
    ),
    "floats for words": (
        "llama-gptq-2", with_tensor("qweight", torch.zeros(6, 64)),
        r"down_proj\.qweight in .* is float32 and must be int32: config\.json and weights do not belong together",
    ),
    "no scales": ("llama-gptq-2", without("scales"), r"down_proj\.scales is missing from .*is it a checkpoint of this"),
    "no zeros": ("mistral-awq", without("qzeros"), r"down_proj\.qzeros is missing from"),
    "neither dense nor packed": ("mistral-awq", without("qweight"), r"down_proj\.weight is missing from"),
    "a group too many": (
        "llama-gptq-3", with_tensor("g_idx", torch.full((96,), 3, dtype=torch.int32)),
        r"down_proj\.g_idx names group 3 of 3: the checkpoint is damaged, download it again",
    ),
    "a group below 0": (
        "llama-gptq-3", with_tensor("g_idx", torch.arange(96, dtype=torch.int32) // 48 - 7),
        r"down_proj\.g_idx names group -7 of 3: the checkpoint is damaged, download it again",
    ),
    "gptq without numbers": ("llama-gptq-2", in_place("scales", NAN), r"down_proj\.scales has nan among.*download"),
    "awq without end": ("mistral-awq", in_place("scales", INF), r"down_proj\.scales has inf among .*must be finite"),
    "packed without numbers": ("llama-packed", in_place("weight_scale", NAN), r"\.weight_scale has nan among"),
    "int8 without end": ("llama-int8-fixed", in_place("weight_scale", -INF), r"\.weight_scale has -inf among"),
    "float8 without numbers": ("llama-float8", in_place("weight_scale", NAN), r"\.weight_scale has nan among"),
    "a float8 that is none": ("llama-float8", in_place("weight", NAN), r"down_proj\.weight has nan among .*download"),
    "a float8 of blocks": ("mistral-float8-blocks", in_place("weight", NAN), r"down_proj\.weight has nan among"),
    "rows without numbers": ("llama-float8-rows", in_place("weight_scale", NAN), r"\.weight_scale has nan among"),
    "blocks without end": ("mistral-float8-blocks", in_place("weight_scale_inv", INF), r"weight_scale_inv has inf"),
    "magnitudes without end": ("mistral-fp4", in_place("weight.absmax", INF), r"\.weight\.absmax has inf among"),
    "levels without numbers": ("mistral-fp4", in_place("weight.quant_map", NAN), r"weight\.quant_map has nan among"),
    "inputs without numbers": ("llama-float8", in_place("input_scale", NAN), r"input_scale has nan among"),
    "inputs without end": ("llama-int8-fixed", in_place("input_scale", INF), r"input_scale has inf among"),
    "quark without numbers": ("llama-quark", in_place("weight_scale", NAN), r"weight_scale has nan among"),
    "quark that is dense by its config": (
        "llama-quark-mixed",
        lambda tensors: tensors.update({"model.layers.0.mlp.up_proj.weight_scale": torch.ones(2, 96)}),
        r"up_proj has a `weight_scale`, and config\.json leaves it dense: they do not belong together, download both",
    ),
    "quark in another shape": (
        "llama-quark", with_tensor("weight_scale", torch.ones(64, 3)), r"weight_scale in .* has shape \[64, 3\], but",
    ),
    "inputs by 0": ("llama-float8", in_place("input_scale", 0.0), r"input_scale is 0\.0, and .*above 0.*download"),
    "inputs below 0": ("llama-int8-fixed", in_place("input_scale", -0.5), r"input_scale is -0\.5, and .*above 0"),
    "biases that nobody adds": (
        "llama-gptq-2", with_tensor("bias", torch.ones(64)), r"does not use: model\.layers\.0\.mlp\.down_proj\.bias in",
    ),
    "scales of another strategy": (
        "llama-int8-fixed", with_tensor("weight_scale", torch.ones(1)), r"weight_scale in .* has shape \[1\], but",
    ),
    "many scales of inputs": (
        "llama-float8", with_tensor("input_scale", torch.ones(96)), r"input_scale has shape \[96\], and one number is",
    ),
    "a state that is no JSON": (
        "mistral-fp4", with_tensor("weight.quant_state.bitsandbytes__fp4", torch.zeros(9, dtype=torch.uint8)),
        r"down_proj\.weight\.quant_state\.bitsandbytes__fp4 is not JSON: the checkpoint is damaged, download it again",
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", BY_TENSORS)
def test_what_the_tensors_tell_is_refused(quantised_models: Quantised, tmp_path: Path, case: str) -> None:
    name, change, expected = BY_TENSORS[case]
    folder = quantised_models(name)[0] / "quantised"
    shutil.copy(folder / "config.json", tmp_path)
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, tmp_path / "model.safetensors")
    assert re.search(expected, refusal(tmp_path))


def test_a_kind_of_four_bits_that_the_config_does_not_name_is_refused(
    quantised_models: Quantised, tmp_path: Path
) -> None:
    folder = quantised_models("mistral-fp4")[0] / "quantised"
    shutil.copy(folder / "model.safetensors", tmp_path)
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"]["bnb_4bit_quant_type"] = "nf4"
    (tmp_path / "config.json").write_text(json.dumps(config))
    expected = r"is stored as fp4, and `bnb_4bit_quant_type` in config\.json says nf4: .*download both again"
    assert re.search(expected, refusal(tmp_path))


def four_bits(folder: Path, **changes: object) -> QuantisedWeight:
    """What is read of a layer in bitsandbytes' 4 bits, whose state has these changes."""
    codes, coarse = torch.zeros(64, 128, dtype=torch.uint8), torch.zeros(128, dtype=torch.uint8)
    tensors = packers.bitsandbytes(codes, coarse, "nf4", nested=(torch.ones(256), torch.ones(1), 0.5))
    state = "weight.quant_state.bitsandbytes__nf4"
    text = json.dumps(json.loads(bytes(tensors[state].tolist())) | changes).encode()
    tensors[state] = torch.tensor(list(text), dtype=torch.uint8)
    save_file({f"layer.{name}": tensor for name, tensor in tensors.items()}, folder / "model.safetensors")
    format = BitsAndBytesFormat({"load_in_4bit": True}, Budget())
    return format.read(Tensors(Checkpoint(folder), "layer"), Part((64, 128), [(0, 64)], (0, 128)))


STATES = [
    *({"blocksize": value} for value in (0, None, [64], INF, NAN, 64.9, "x", True, 1, -64, 10**30)),
    *({"nested_blocksize": value} for value in (0, None, 10**13, INF, "256", True)),
    *({"nested_offset": value} for value in (None, "x", NAN, INF, 10**400, [0.5])),
    *({"shape": value} for value in (5, None, [128, 64], "x", [64, 128, 1])),
]


@pytest.mark.parametrize("changes", STATES)
def test_a_state_of_bitsandbytes_with_a_bad_number_is_refused(tmp_path: Path, changes: dict[str, object]) -> None:
    with pytest.raises(FormatError) as raised:
        four_bits(tmp_path, **changes)
    expected = rf"`{next(iter(changes))}` in the quant_state of layer must be .*\. Given: .*; .*download"
    assert re.search(expected, str(raised.value))
    assert 400 > len(str(raised.value))


def test_a_state_of_bitsandbytes_is_small_and_not_deep(tmp_path: Path) -> None:
    assert 1.5 == four_bits(tmp_path).scale.max()
    with pytest.raises(FormatError, match=r"has shape .*, and must be 65536 bytes at most"):
        four_bits(tmp_path, more="x" * 70_000)
    with pytest.raises(FormatError, match="is not JSON: the checkpoint is damaged, download it again"):
        state = torch.full((60_000,), ord("["), dtype=torch.uint8)
        save_file({"layer.weight.quant_state.bitsandbytes__nf4": state}, tmp_path / "model.safetensors")
        tensors = Tensors(Checkpoint(tmp_path), "layer")
        BitsAndBytesFormat({"load_in_4bit": True}, Budget()).read(tensors, Part((64, 128), [(0, 64)], (0, 128)))


@pytest.mark.parametrize("how", [quantised.quark("uint4", 32), quantised.gptq(4, 32)], ids=["quark", "gptq"])
def test_a_head_in_fewer_bits_that_is_tied_is_told_with_remedies(tmp_path: Path, how: How) -> None:
    (tmp_path / "source").mkdir()
    save_tiny("llama-biased-tied", tmp_path / "source", num_hidden_layers=1, vocab_size=104)
    tensors = load_file(tmp_path / "source" / "model.safetensors")
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()
    save_file(tensors, tmp_path / "source" / "model.safetensors")
    quantised.quantise(tmp_path / "source", tmp_path, with_config(how, exclude=[]), also="lm_head")
    said = refusal(tmp_path / "quantised")
    assert re.search(
        r"head is stored in fewer bits \(lm_head\..*tied to the embedding table.*anew and leave its head.*or say", said
    )
    config = tmp_path / "quantised" / "config.json"  # the second remedy
    config.write_text(json.dumps(json.loads(config.read_text()) | {"tie_word_embeddings": False}))
    assert load_engine(tmp_path / "quantised", warms_up=False).model.spec.tied_head is False


@pytest.mark.parametrize("bits", [2, 3, 8])
def test_other_bits_than_the_config_says_are_refused(quantised_models: Quantised, tmp_path: Path, bits: int) -> None:
    folder = quantised_models("baichuan-gptq")[0] / "quantised"
    shutil.copy(folder / "model.safetensors", tmp_path)
    configured(folder, tmp_path, quantised.gptq(bits, 16).config)
    said = (
        r"qweight in .* has shape .*, but config\.json says|gptq with 3 bits packs 32 at a time: such a layer must be"
    )
    assert re.search(said, refusal(tmp_path))


def test_a_file_that_was_cut_is_refused(quantised_models: Quantised, tmp_path: Path) -> None:
    folder = quantised_models("mistral-awq")[0] / "quantised"
    shutil.copy(folder / "config.json", tmp_path)
    data = (folder / "model.safetensors").read_bytes()
    (tmp_path / "model.safetensors").write_bytes(data[: len(data) // 2])
    assert re.search(r"model\.safetensors is not a readable safetensors file.*download it again", refusal(tmp_path))
