"""Readers of quantised checkpoints against packers that were written from the formats' definitions.

Every reader must give exactly what the packed numbers stand for: of the whole, and of parts that cut groups, blocks and
packed words. Left out: whole models (`test_checkpoints.py`) and what is refused (`test_refusals.py`).
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from server.checkpoint import formats
from server.checkpoint.formats.protocol import Format, FormatError, Part, Tensors
from server.checkpoint.weights import Checkpoint
from server.quantisation import sizes
from tests.server.quantisation import packers, quantised
from tests.server.quantisation.cases import in_pairs, with_config
from tests.server.quantisation.quantised import How, Layer, Rounded

F, D = 64, 96
WHOLE = Part((F, D), [(0, F)], (0, D))
PARTS = [
    ([(0, F)], (0, D)), ([(0, 16), (40, 64)], (0, D)), ([(8, 13)], (0, D)), ([(63, 64), (0, 1)], (0, D)),
    ([(0, F)], (12, 37)), ([(0, F)], (48, 96)), ([(0, F)], (90, 96)), ([(3, 20)], (31, 66)),
]  # fmt: skip


def layer_of(how: How) -> Layer:
    """What is made of a weight whose rows differ in size and place, some of one sign alone."""
    generator = torch.Generator().manual_seed(7)
    rows = torch.rand(F, 1, generator=generator) + 0.1
    return how.pack(torch.randn(F, D, generator=generator) * rows + 3 * torch.randn(F, 1, generator=generator) * rows)


def opened(folder: Path, config: object, tensors: Mapping[str, Tensor], note: str | None = None) -> tuple[Format, Any]:
    """A checkpoint of one layer, and its format."""
    packed = {f"layer.{name}": tensor.contiguous() for name, tensor in tensors.items()}
    save_file(packed, folder / "model.safetensors", None if note is None else {"layer.weight": note})
    format = formats.find(folder, {"quantization_config": config})
    assert format is not None
    return format, Checkpoint(folder)


def check(folder: Path, how: How, layer: Layer, *, is_exact: bool = True) -> None:
    """The whole and all parts are what they stand for, inputs are rounded as they are told, no tensor is left over."""
    format, checkpoint = opened(folder, dict(how.config), layer.tensors, how.note)
    tensors = Tensors(checkpoint, "layer")
    assert format.has(tensors)
    for rows, columns in PARTS:
        part = format.read(tensors, Part((F, D), rows, columns))
        wanted = torch.cat([layer.weight[start:stop] for start, stop in rows])[:, slice(*columns)]
        near = {"rtol": 0.0, "atol": 0.0} if is_exact else {"rtol": 1e-5, "atol": 1e-6}
        torch.testing.assert_close(
            part.dequantised(), wanted, **near, msg=lambda told, at=(rows, columns): f"{at}{told}"
        )
        assert (columns[0], D) == (part.first_input, part.num_inputs)
    assert [] == checkpoint.leftovers(format.ignored)
    found = format.read(tensors, WHOLE)
    storage = sizes.of_config({"quantization_config": dict(how.config)})
    assert storage is not None and (found.bits, found.inputs is not None) == (storage.bits, storage.rounds_inputs)
    if found.inputs is not None and (told := layer.inputs) is not None:
        scale, zero = (None if number is None else float(number) for number in (found.inputs.scale, found.inputs.zero))
        is_int = found.inputs.dtype == torch.int8
        assert told == Rounded(is_int, found.inputs.group, scale, int(zero or 0))


@pytest.mark.parametrize(
    ("bits", "size", "version", "is_ordered"), in_pairs((2, 3, 4, 8), (32, -1), (1, 2), (True, False))
)
def test_gptq(tmp_path: Path, bits: int, size: int, version: int, is_ordered: bool) -> None:
    how = quantised.gptq(bits, size, version=version, is_ordered=is_ordered)
    check(tmp_path, how, layer_of(how))


@pytest.mark.parametrize("size", [32, 48, -1])
def test_awq(tmp_path: Path, size: int) -> None:
    check(tmp_path, quantised.awq(size), layer_of(quantised.awq(size)))


@pytest.mark.parametrize(
    ("bits", "size", "is_symmetric", "is_ordered"), in_pairs((2, 3, 4, 8), (32, -1), (True, False), (True, False))
)
def test_compressed_packed(tmp_path: Path, bits: int, size: int, is_symmetric: bool, is_ordered: bool) -> None:
    how = quantised.compressed_packed(bits, size, is_symmetric=is_symmetric, is_ordered=is_ordered)
    check(tmp_path, how, layer_of(how))


@pytest.mark.parametrize(
    ("strategy", "has_zero", "is_fixed", "is_symmetric"),
    in_pairs(("tensor", "channel", "group"), (True, False), (True, False), (True, False)),
)
def test_compressed_int8(tmp_path: Path, strategy: str, has_zero: bool, is_fixed: bool, is_symmetric: bool) -> None:
    zero_of_inputs = {"is_fixed": is_fixed, "is_symmetric": is_symmetric or not is_fixed}
    how = quantised.compressed_int8(**zero_of_inputs, strategy=strategy, has_zero=has_zero)
    check(tmp_path, how, layer_of(how))


@pytest.mark.parametrize(
    ("publisher", "strategy", "is_fixed"),
    [
        *in_pairs(("compressed-tensors", "fp8"), ("tensor", "channel", "block"), (True, False)),
        ("fbgemm_fp8", "channel", False),
    ],
)
def test_float8(tmp_path: Path, publisher: str, strategy: str, is_fixed: bool) -> None:
    how = quantised.float8(publisher, strategy, is_fixed=is_fixed, block=(48, 32))
    check(tmp_path, how, layer_of(how))


FLOATS_IN_GROUPS = {
    "nvfp4": quantised.nvfp4("compressed-tensors"),
    "nvfp4 of ModelOpt": quantised.nvfp4("modelopt"),
    "mxfp4": quantised.mxfp4(),
    "mxfp8": quantised.mxfp8(),
    "mxfp4 of Quark": quantised.quark_mxfp4(),
}


@pytest.mark.parametrize("name", FLOATS_IN_GROUPS)
def test_floats_in_groups(tmp_path: Path, name: str) -> None:
    how = FLOATS_IN_GROUPS[name]
    check(tmp_path, how, layer_of(how), is_exact="ModelOpt" not in name)


# Blocks end with rows, or go on in the next, the last one cut short.
@pytest.mark.parametrize(
    ("kind", "is_nested", "block", "storage"),
    in_pairs(("nf4", "fp4"), (True, False), (32, 64, 4096), ("uint8", "bfloat16")),
)
def test_bitsandbytes(tmp_path: Path, kind: str, is_nested: bool, block: int, storage: str) -> None:
    how = quantised.bitsandbytes(kind, is_nested=is_nested, block=block, storage=storage)
    check(tmp_path, how, layer_of(how))


def test_bitsandbytes_int8(tmp_path: Path) -> None:
    check(tmp_path, quantised.bitsandbytes_int8(), layer_of(quantised.bitsandbytes_int8()))


@pytest.mark.parametrize(
    ("dtype", "size", "order", "is_symmetric"),
    in_pairs(("int4", "uint4", "int8", "uint8"), (32, -1), ("reorder", "order"), (True, False)),
)
def test_quark(tmp_path: Path, dtype: str, size: int, order: str, is_symmetric: bool) -> None:
    how = quantised.quark(dtype, size, order, is_symmetric=is_symmetric)
    check(tmp_path, how, layer_of(how))


@pytest.mark.parametrize(("scheme", "is_rounded"), in_pairs(("per_tensor", "per_channel"), (True, False)))
def test_quark_of_floats(tmp_path: Path, scheme: str, is_rounded: bool) -> None:
    how = quantised.quark_float8(scheme, is_rounded=is_rounded)
    check(tmp_path, how, layer_of(how))


@pytest.mark.parametrize(("kind", "group"), in_pairs(("Int8Tensor", "Float8Tensor"), (32, 0, -1)))
def test_torchao_of_bytes(tmp_path: Path, kind: str, group: int) -> None:
    how = quantised.torchao(kind, group=group)
    check(tmp_path, how, layer_of(how))


@pytest.mark.parametrize(
    ("bits", "mapping", "group"),
    in_pairs((1, 3, 4, 6, 8), ("SYMMETRIC", "SYMMETRIC_NO_CLIPPING_ERR", "ASYMMETRIC"), (32, 0)),
)
def test_torchao_of_fewer_bits_in_bytes(tmp_path: Path, bits: int, mapping: str, group: int) -> None:
    how = quantised.torchao("IntxUnpackedToInt8Tensor", group=group, bits=bits, mapping=mapping)
    check(tmp_path, how, layer_of(how))


@pytest.mark.parametrize("kind", ["Int4Tensor", "Int4PlainInt32Tensor"])
def test_torchao_of_packed_codes(tmp_path: Path, kind: str) -> None:
    how = quantised.torchao(kind)
    check(tmp_path, how, layer_of(how), is_exact=kind != "Int4Tensor")  # whose zeros are divided by scales
    unnamed = How(how.config, how.pack)  # a tensor may have another name than its note
    check(tmp_path, unnamed, layer_of(how), is_exact=kind != "Int4Tensor")


# How layers are stored that a config names, or that newer or older tools name otherwise.


def test_gptq_with_settings_of_its_own_for_some_layers(tmp_path: Path) -> None:
    dynamic = {"-:.*gate": {}, "+:lay.*": {"bits": 8, "group_size": -1}, "layer": {"bits": 2}}
    how = quantised.gptq(8, -1)
    others = with_config(how, bits=4, group_size=32, dynamic=dynamic)
    format, checkpoint = opened(tmp_path, dict(others.config), layer_of(how).tensors)
    assert torch.equal(layer_of(how).weight, format.read(Tensors(checkpoint, "layer"), WHOLE).dequantised())


def test_compressed_layers_have_the_scheme_that_names_them_best(tmp_path: Path) -> None:
    how = quantised.compressed_packed(4, -1, is_symmetric=True)
    group = how.config["config_groups"]["group_0"]
    groups = {
        target: group | {"targets": [target], "weights": group["weights"] | {"num_bits": bits}}
        for target, bits in (("Linear", 8), ("re:.*ayer", 2), ("layer", 4))
    }
    format, checkpoint = opened(tmp_path, how.config | {"config_groups": groups}, layer_of(how).tensors)
    assert torch.equal(layer_of(how).weight, format.read(Tensors(checkpoint, "layer"), WHOLE).dequantised())


def test_compressed_packed_with_one_scale_and_one_zero(tmp_path: Path) -> None:
    codes = torch.randint(0, 16, (F, D), generator=torch.Generator().manual_seed(1))
    tensors = packers.compressed_packed(codes - 8, torch.tensor([0.25]), 4)
    tensors["weight_zero_point"] = torch.tensor([3], dtype=torch.int8)  # one number is not packed
    how = quantised.compressed_packed(4, -1, is_symmetric=False)
    group = how.config["config_groups"]["group_0"]
    groups = {"group_0": group | {"weights": group["weights"] | {"strategy": "tensor"}}}
    format, checkpoint = opened(tmp_path, how.config | {"config_groups": groups}, tensors)
    assert torch.equal((codes - 11) * 0.25, format.read(Tensors(checkpoint, "layer"), WHOLE).dequantised())


def test_float8_has_a_bound_of_the_scales_of_inputs_and_other_names_of_newer_tools(tmp_path: Path) -> None:
    how = quantised.float8("fbgemm_fp8", "channel")
    format, checkpoint = opened(tmp_path, how.config, layer_of(how).tensors)
    bounded = format.read(Tensors(checkpoint, "layer"), WHOLE).inputs
    assert bounded is not None and bounded.most is not None and float(bounded.most) == pytest.approx(1200 / 448)
    how = quantised.float8("fp8", "tensor", is_fixed=True)
    names = {"weight_scale": "weight_scale_inv", "input_scale": "activation_scale"}
    layer = layer_of(how)
    tensors = {names.get(name, name): tensor for name, tensor in layer.tensors.items()}
    format, checkpoint = opened(tmp_path, how.config | {"weight_block_size": None}, tensors)
    found = format.read(Tensors(checkpoint, "layer"), WHOLE)
    assert torch.equal(layer.weight, found.dequantised())
    assert found.inputs is not None and found.inputs.scale == 0.03125


def test_bitsandbytes_with_blocks_that_share_few_inputs_with_rows(tmp_path: Path) -> None:
    tensors = packers.bitsandbytes(torch.zeros(64, 100, dtype=torch.int64), torch.ones(100), "nf4")
    format, checkpoint = opened(tmp_path, {"quant_method": "bitsandbytes", "load_in_4bit": True}, tensors)
    with pytest.raises(FormatError, match="layer has 100 inputs, an odd number or one that shares no factor of 8"):
        format.read(Tensors(checkpoint, "layer"), Part((64, 100), [(0, 64)], (0, 100)))


def test_torchao_whose_tensors_are_not_what_its_config_says(tmp_path: Path) -> None:
    how = quantised.torchao("IntxUnpackedToInt8Tensor", group=0, mapping="SYMMETRIC")
    good, kind = layer_of(how).tensors, "IntxUnpackedToInt8Tensor"
    note, scale = str(how.note), good["_weight_scale"]
    rounded = {"_type": kind, "_data": {"activation_quantization": "int8_asym_per_token"}}
    for changes, text, told in (
        ({}, "[" * 100_000, "is None, and config.json says IntxUnpackedToInt8Tensor: save the model anew"),
        ({}, packers.torchao_note("Int8Tensor"), "is 'Int8Tensor', and config.json says"),
        ({}, json.dumps({"_type": kind}), "no settings of layer"),
        ({}, json.dumps(rounded), "`activation_quantization` 'int8_asym_per_token' of layer.*weights only"),
        ({"_weight_act_pre_scale": scale.clone()}, None, "_weight_act_pre_scale scales inputs"),
        ({"_weight_zero_point": torch.ones_like(scale).to(torch.int8)}, note, "is not 0.*symmetric"),
        ({"_weight_qdata": good["_weight_qdata"] + 8}, note, "codes beyond 4 bits"),
    ):
        format, checkpoint = opened(tmp_path, dict(how.config), {**good, **changes}, text)
        with pytest.raises(FormatError, match=told):
            format.read(Tensors(checkpoint, "layer"), WHOLE)
