"""Readers of quantised checkpoints against packers that were written from the formats' definitions.

Every reader must give exactly what the packed numbers stand for: of the whole, and of parts that cut groups, blocks and
packed words. Left out: whole models (`test_checkpoints.py`) and what is refused (`test_refusals.py`).
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from server.checkpoint.formats.awq import AwqFormat
from server.checkpoint.formats.bitsandbytes import BitsAndBytesFormat
from server.checkpoint.formats.compressed import CompressedFormat
from server.checkpoint.formats.float8 import Float8Format
from server.checkpoint.formats.gptq import GptqFormat
from server.checkpoint.formats.protocol import Format, Part, Tensors
from server.checkpoint.formats.torchao import TorchaoFormat
from server.checkpoint.weights import Checkpoint
from server.quantisation.configs import Budget, FormatError
from server.quantisation.stored import RoundedInputs
from tests.server.quantisation import packers
from tests.server.quantisation.packers import FLOAT8

F, D = 64, 96
PARTS = [
    ([(0, F)], (0, D)), ([(0, 16), (40, 64)], (0, D)), ([(8, 13)], (0, D)), ([(63, 64), (0, 1)], (0, D)),
    ([(0, F)], (12, 37)), ([(0, F)], (48, 96)), ([(0, F)], (90, 96)), ([(3, 20)], (31, 66)),
]  # fmt: skip


def drawn(bits: int, num_groups: int) -> tuple[Tensor, Tensor, Tensor]:
    """Codes [F, D], scales and zeros [F, G]."""
    torch.manual_seed(bits * 100 + num_groups)
    codes = torch.randint(0, 1 << bits, (F, D))
    zero = torch.randint(0, 1 << bits, (F, num_groups)).float()
    return codes, (torch.rand(F, num_groups) + 0.5).half().float(), zero


def groups_of(size: int, *, is_ordered: bool = True) -> Tensor:
    """[D]: the group of each input."""
    groups = torch.arange(D) // (size if size > 0 else D)
    return groups if is_ordered else groups[torch.randperm(D, generator=torch.Generator().manual_seed(3))]


def check(
    format: Format,
    folder: Path,
    tensors: dict[str, Tensor],
    expected: Tensor,
    *,
    ignored: tuple[str, ...] = (),
    note: str | None = None,
) -> Tensors:
    """The whole and all parts, and that no tensor is left over but those of suffixes `ignored`."""
    packed = {f"layer.{name}": tensor.contiguous() for name, tensor in tensors.items()}
    save_file(packed, folder / "model.safetensors", None if note is None else {"layer.weight": note})
    checkpoint = Checkpoint(folder)
    opened = Tensors(checkpoint, "layer")
    assert format.has(opened)
    for rows, columns in PARTS:
        part = format.read(opened, Part((F, D), rows, columns))
        wanted = torch.cat([expected[start:stop] for start, stop in rows])[:, slice(*columns)]
        assert torch.equal(wanted, part.dequantised()), (rows, columns)
        assert (columns[0], D) == (part.first_input, part.num_inputs)
    file = folder / "model.safetensors"
    assert [f"layer.{name} in {file}" for name in sorted(ignored)] == checkpoint.leftovers(())
    assert [] == checkpoint.leftovers(format.ignored)
    return opened


def inputs_of(format: Format, tensors: Tensors) -> RoundedInputs:
    inputs = format.read(tensors, Part((F, D), [(0, F)], (0, D))).inputs
    assert inputs is not None
    return inputs


@pytest.mark.parametrize("bits", [2, 3, 4, 8])
@pytest.mark.parametrize("group_size", [32, -1])
@pytest.mark.parametrize("version", [1, 2])
@pytest.mark.parametrize("is_ordered", [True, False])
def test_gptq(tmp_path: Path, bits: int, group_size: int, version: int, is_ordered: bool) -> None:
    groups = groups_of(group_size, is_ordered=is_ordered)
    codes, scale, zero = drawn(bits, int(groups.max()) + 1)
    config = {"bits": bits, "group_size": group_size, "desc_act": not is_ordered}
    config["checkpoint_format"] = "gptq" if version == 1 else "gptq_v2"
    expected = (codes - zero[:, groups]) * scale[:, groups]
    tensors = packers.gptq(codes, scale, zero, groups, bits, version=version)
    check(GptqFormat(config, Budget()), tmp_path, tensors, expected, ignored=("g_idx",) if group_size == -1 else ())


def test_gptq_with_settings_of_its_own_for_some_layers(tmp_path: Path) -> None:
    groups = groups_of(-1)
    codes, scale, zero = drawn(8, 1)
    dynamic = {"-:.*gate": {}, "+:lay.*": {"bits": 8, "group_size": -1}, "layer": {"bits": 2}}
    format = GptqFormat({"bits": 4, "group_size": 32, "desc_act": False, "dynamic": dynamic}, Budget())
    tensors = packers.gptq(codes, scale, zero, groups, 8)
    check(format, tmp_path, tensors, (codes - zero) * scale, ignored=("g_idx",))


@pytest.mark.parametrize("group_size", [32, 48, -1])
def test_awq(tmp_path: Path, group_size: int) -> None:
    groups = groups_of(group_size)
    codes, scale, zero = drawn(4, int(groups.max()) + 1)
    expected = (codes - zero[:, groups]) * scale[:, groups]
    check(
        AwqFormat({"bits": 4, "group_size": group_size}, Budget()), tmp_path, packers.awq(codes, scale, zero), expected
    )


def compressed(format: str, weights: dict[str, Any], inputs: dict[str, Any] | None = None) -> CompressedFormat:
    """With one group for all linear layers."""
    group = {"targets": ["Linear"], "weights": {"type": "int"} | weights, "input_activations": inputs}
    return CompressedFormat({"format": format, "config_groups": {"group_0": group}, "ignore": ["lm_head"]}, Budget())


@pytest.mark.parametrize("bits", [2, 3, 4, 8])
@pytest.mark.parametrize("group_size", [32, -1])
@pytest.mark.parametrize("is_symmetric", [True, False])
@pytest.mark.parametrize("is_ordered", [True, False])
def test_compressed_packed(tmp_path: Path, bits: int, group_size: int, is_symmetric: bool, is_ordered: bool) -> None:
    groups = groups_of(group_size, is_ordered=is_ordered)
    codes, scale, zero = drawn(bits, int(groups.max()) + 1)
    codes, zero = codes - (1 << (bits - 1)), torch.zeros_like(zero) if is_symmetric else zero - (1 << (bits - 1))
    strategy = {"strategy": "group", "group_size": group_size} if group_size > 0 else {"strategy": "channel"}
    format = compressed("pack-quantized", {"num_bits": bits, "symmetric": is_symmetric, **strategy})
    tensors = packers.compressed_packed(
        codes, scale, bits, zero=None if is_symmetric else zero, groups=None if is_ordered else groups
    )
    left = ("weight_shape",) if is_ordered or group_size > 0 else ("weight_g_idx", "weight_shape")
    check(format, tmp_path, tensors, (codes - zero[:, groups]) * scale[:, groups], ignored=left)


def test_compressed_packed_with_one_scale_and_one_zero(tmp_path: Path) -> None:
    codes, _, _ = drawn(4, 1)
    tensors = packers.compressed_packed(codes - 8, torch.tensor([0.25]), 4)
    tensors["weight_zero_point"] = torch.tensor([3], dtype=torch.int8)  # one number is not packed
    format = compressed("pack-quantized", {"num_bits": 4, "symmetric": False, "strategy": "tensor"})
    check(format, tmp_path, tensors, (codes - 8 - 3) * 0.25, ignored=("weight_shape",))


@pytest.mark.parametrize("strategy", ["tensor", "channel", "group"])
@pytest.mark.parametrize("is_symmetric", [True, False])
@pytest.mark.parametrize("is_fixed", [True, False])
def test_compressed_int8(tmp_path: Path, strategy: str, is_symmetric: bool, is_fixed: bool) -> None:
    groups = groups_of(32 if strategy == "group" else -1)
    codes, scale, zero = drawn(8, int(groups.max()) + 1)
    if strategy == "tensor":
        scale, zero = scale[:1, 0], zero[:1, 0]
    codes, zero = (codes - 128).to(torch.int8), (zero - 128).to(torch.int8)
    tensors = packers.compressed_plain(
        codes,
        scale.bfloat16(),
        zero=None if is_symmetric else zero,
        input_scale=torch.tensor([0.125]) if is_fixed else None,
        input_zero=torch.tensor([-7], dtype=torch.int8) if is_fixed and not is_symmetric else None,
    )
    weights = {"num_bits": 8, "strategy": strategy, "symmetric": is_symmetric}
    inputs = {"num_bits": 8, "dynamic": not is_fixed, "strategy": "tensor" if is_fixed else "token"}
    format = compressed(
        "int-quantized",
        weights | ({"group_size": 32} if strategy == "group" else {}),
        inputs | {"type": "int", "symmetric": is_symmetric or not is_fixed},
    )
    of_all = strategy == "tensor"
    shift = 0 if is_symmetric else zero.float() if of_all else zero.float()[:, groups]
    factor = scale.bfloat16().float() if of_all else scale.bfloat16().float()[:, groups]
    found = inputs_of(format, check(format, tmp_path, tensors, (codes.float() - shift) * factor, ignored=()))
    assert torch.int8 == found.dtype
    assert (0.125 if is_fixed else None) == (None if found.scale is None else float(found.scale))
    assert (-7 if is_fixed and not is_symmetric else None) == (None if found.zero is None else float(found.zero))


@pytest.mark.parametrize("strategy", ["tensor", "channel", "block"])
@pytest.mark.parametrize("is_fixed", [True, False])
def test_compressed_float8(tmp_path: Path, strategy: str, is_fixed: bool) -> None:
    codes = torch.randn(F, D, generator=torch.Generator().manual_seed(1)).to(FLOAT8)
    scale, expected = scaled(codes, strategy, block=(48, 32))
    tensors = packers.compressed_plain(codes, scale, input_scale=torch.tensor([0.5]) if is_fixed else None)
    weights = {"num_bits": 8, "type": "float", "strategy": strategy, "symmetric": True}
    inputs: dict[str, Any] = {"num_bits": 8, "type": "float", "symmetric": True, "dynamic": not is_fixed}
    if strategy == "block":
        weights["block_structure"] = [48, 32]
    if not is_fixed:
        inputs |= {"strategy": "group", "group_size": 32} if strategy == "block" else {"strategy": "token"}
    format = compressed("float-quantized", weights, inputs)
    found = inputs_of(format, check(format, tmp_path, tensors, expected))
    assert (FLOAT8, 32 if strategy == "block" and not is_fixed else 0) == (found.dtype, found.group)
    assert is_fixed == (found.scale is not None)


def scaled(codes: Tensor, strategy: str, block: tuple[int, int]) -> tuple[Tensor, Tensor]:
    """Scales of float8 codes [F, D], and what the codes stand for."""
    generator = torch.Generator().manual_seed(2)
    if strategy == "block":
        shape: tuple[int, ...] = (-(-F // block[0]), -(-D // block[1]))
        scale = torch.rand(shape, generator=generator)
        return scale, codes.float() * scale.repeat_interleave(block[0], 0).repeat_interleave(block[1], 1)[:F, :D]
    scale = torch.rand((1,) if strategy == "tensor" else (F, 1), generator=generator)
    return scale, codes.float() * scale


def test_compressed_layers_have_the_scheme_that_names_them_best(tmp_path: Path) -> None:
    four = {"num_bits": 4, "type": "int", "strategy": "channel", "symmetric": True}
    groups = {
        "group_0": {"targets": ["Linear"], "weights": four | {"num_bits": 8}},
        "group_1": {"targets": ["re:.*ayer"], "weights": four | {"num_bits": 2}},
        "group_2": {"targets": ["layer"], "weights": four},
    }
    codes, scale, _ = drawn(4, 1)
    tensors = packers.compressed_packed(codes - 8, scale, 4)
    format = CompressedFormat({"format": "pack-quantized", "config_groups": groups}, Budget())
    check(format, tmp_path, tensors, (codes - 8) * scale, ignored=("weight_shape",))


@pytest.mark.parametrize("strategy", ["tensor", "channel", "block"])
@pytest.mark.parametrize("is_fixed", [True, False])
def test_float8(tmp_path: Path, strategy: str, is_fixed: bool) -> None:
    codes = torch.randn(F, D, generator=torch.Generator().manual_seed(1)).to(FLOAT8)
    scale, expected = scaled(codes, strategy, block=(48, 32))
    given = torch.tensor(0.5) if is_fixed else None
    config: dict[str, Any] = {"quant_method": "fp8", "activation_scheme": "static" if is_fixed else "dynamic"}
    tensors = packers.float8(codes, scale.squeeze() if strategy == "tensor" else scale, input_scale=given)
    if strategy == "block":
        config["weight_block_size"] = [48, 32]
        tensors = packers.float8_blocks(codes, scale) | ({} if given is None else {"input_scale": given})
    format = Float8Format(config, Budget())
    found = inputs_of(format, check(format, tmp_path, tensors, expected))
    assert (FLOAT8, 32 if strategy == "block" and not is_fixed else 0) == (found.dtype, found.group)
    assert is_fixed == (found.scale is not None)


def test_float8_with_a_bound_of_the_scales_of_inputs(tmp_path: Path) -> None:
    codes = torch.randn(F, D, generator=torch.Generator().manual_seed(1)).to(FLOAT8)
    scale, expected = scaled(codes, "channel", block=(1, 1))
    format = Float8Format({"quant_method": "fbgemm_fp8", "activation_scale_ub": 1200.0}, Budget())
    tensors = packers.float8(codes, scale) | {"input_scale_ub": torch.tensor([1200.0])}
    found = inputs_of(format, check(format, tmp_path, tensors, expected, ignored=("input_scale_ub",)))
    assert found.most is not None
    assert 1200 / 448 == pytest.approx(float(found.most))


def test_float8_under_the_names_of_newer_tools(tmp_path: Path) -> None:
    codes = torch.randn(F, D, generator=torch.Generator().manual_seed(1)).to(FLOAT8)
    scale, expected = scaled(codes, "tensor", block=(1, 1))
    tensors = {"weight": codes, "weight_scale_inv": scale.squeeze(), "activation_scale": torch.tensor(0.5)}
    format = Float8Format({"quant_method": "fp8", "activation_scheme": "static", "weight_block_size": None}, Budget())
    assert inputs_of(format, check(format, tmp_path, tensors, expected)).scale == 0.5


@pytest.mark.parametrize("kind", ["nf4", "fp4"])
@pytest.mark.parametrize("is_nested", [True, False])
@pytest.mark.parametrize("block", [32, 64, 4096])  # which end with rows, or go on in the next, the last one cut short
def test_bitsandbytes(tmp_path: Path, kind: str, is_nested: bool, block: int) -> None:
    codes, _, _ = drawn(4, 1)
    count = -(-F * D // block)
    levels = torch.tensor(packers.NF4 if kind == "nf4" else packers.FP4)
    largest = torch.rand(count) + 0.5
    tensors = packers.bitsandbytes(codes, largest, kind, block=block)
    if is_nested:
        of_codes, magnitudes = torch.linspace(-1, 1, 256), torch.rand(-(-count // 256))
        coarse = torch.randint(0, 256, (count,), dtype=torch.uint8)
        largest = of_codes[coarse.long()] * magnitudes[torch.arange(count) // 256] + 0.75
        tensors = packers.bitsandbytes(codes, coarse, kind, block=block, nested=(of_codes, magnitudes, 0.75))
    expected = levels[codes] * largest.repeat_interleave(block)[: F * D].reshape(F, D)
    check(BitsAndBytesFormat({"load_in_4bit": True}, Budget()), tmp_path, tensors, expected)


def test_bitsandbytes_with_blocks_that_share_few_inputs_with_rows(tmp_path: Path) -> None:
    tensors = packers.bitsandbytes(torch.zeros(64, 100, dtype=torch.int64), torch.ones(100), "nf4")
    save_file({f"layer.{name}": tensor for name, tensor in tensors.items()}, tmp_path / "model.safetensors")
    with pytest.raises(FormatError, match="layer has 100 inputs, an odd number or one that shares no factor of 8"):
        whole = Part((64, 100), [(0, 64)], (0, 100))
        BitsAndBytesFormat({"load_in_4bit": True}, Budget()).read(Tensors(Checkpoint(tmp_path), "layer"), whole)


def test_bitsandbytes_int8(tmp_path: Path) -> None:
    codes, scale, _ = drawn(8, 1)
    codes, largest = (codes - 128).to(torch.int8), scale[:, 0]
    tensors = packers.bitsandbytes_int8(codes, largest)
    check(BitsAndBytesFormat({"load_in_8bit": True}, Budget()), tmp_path, tensors, codes * (scale / 127))


def of_torchao(name: str, version: int = 2, **data: object) -> dict[str, Any]:
    """A config of torchao as transformers 5 writes it."""
    return {"quant_method": "torchao", "quant_type": {"default": {"_type": name, "_version": version, "_data": data}}}


def named(kind: str, value: str) -> dict[str, str]:
    return {"_type": kind, "_data": value}


PER_GROUP = {"_type": "PerGroup", "_version": 1, "_data": {"group_size": 32}}
ROWS = {"_type": "PerRow", "_version": 1, "_data": {"dim": -1}}


@pytest.mark.parametrize("granularity", [PER_GROUP, ROWS, {"_type": "PerTensor", "_data": {}}, None])
@pytest.mark.parametrize("name", ["Int8WeightOnlyConfig", "Float8WeightOnlyConfig"])
def test_torchao_of_bytes(tmp_path: Path, name: str, granularity: dict[str, Any] | None) -> None:
    groups = groups_of(32 if granularity is PER_GROUP else -1)
    codes, scale, _ = drawn(8, int(groups.max()) + 1)
    is_of_all = granularity is not None and granularity["_type"] == "PerTensor"
    scale = scale[:1] if is_of_all else scale
    codes = codes - 128 if name.startswith("Int8") else ((codes - 128) / 16).to(FLOAT8)
    kind = "Int8Tensor" if name.startswith("Int8") else "Float8Tensor"
    zero = torch.zeros_like(scale) if kind == "Int8Tensor" else None
    format = TorchaoFormat(of_torchao(name, granularity=granularity), Budget())
    expected = codes.float() * scale[:, groups]
    opened = check(
        format, tmp_path, packers.torchao(kind, codes, scale, zero), expected, note=packers.torchao_note(kind)
    )
    assert format.read(opened, Part((F, D), [(0, F)], (0, D))).zero is None


@pytest.mark.parametrize("bits", [1, 3, 4, 6, 8])
@pytest.mark.parametrize("mapping", ["SYMMETRIC", "SYMMETRIC_NO_CLIPPING_ERR", "ASYMMETRIC"])
def test_torchao_of_fewer_bits_in_bytes(tmp_path: Path, bits: int, mapping: str) -> None:
    codes, scale, zero = drawn(bits, 3)
    half = 1 << (bits - 1)
    zero = zero - half if mapping == "ASYMMETRIC" else torch.zeros_like(zero)
    data = {"weight_dtype": named("torch.dtype", f"int{bits}"), "mapping_type": named("MappingType", mapping)}
    format = TorchaoFormat(of_torchao("IntxWeightOnlyConfig", granularity=PER_GROUP, **data), Budget())
    kind, groups = "IntxUnpackedToInt8Tensor", groups_of(32)
    tensors = packers.torchao(kind, codes - half, scale, zero)
    expected = (codes - half - zero[:, groups]) * scale[:, groups]
    opened = check(format, tmp_path, tensors, expected, note=packers.torchao_note(kind))
    assert (4 if bits <= 4 else 8) == format.read(opened, Part((F, D), [(0, F)], (0, D))).bits


@pytest.mark.parametrize("kind", ["Int4Tensor", "Int4PlainInt32Tensor"])
def test_torchao_of_packed_codes(tmp_path: Path, kind: str) -> None:
    (codes, scale, zero), groups = drawn(4, 3), groups_of(32)
    packing = named("Int4PackingFormat", "PLAIN" if kind == "Int4Tensor" else "PLAIN_INT32")
    format = TorchaoFormat(of_torchao("Int4WeightOnlyConfig", group_size=32, int4_packing_format=packing), Budget())
    if kind == "Int4Tensor":
        scale = torch.exp2(torch.randint(-4, 4, scale.shape))  # by which what weights are raised by can be divided
        raised_by = (zero - 7.5) * scale
        tensors = packers.torchao(kind, codes - 8, scale, raised_by=raised_by)
        expected = (codes - 8) * scale[:, groups] + raised_by[:, groups]
    else:
        tensors = packers.torchao(kind, codes, scale, zero)
        expected = (codes - zero[:, groups]) * scale[:, groups]
    check(format, tmp_path, tensors, expected, note=packers.torchao_note(kind))


def test_torchao_of_a_tensor_that_has_another_name_than_its_note(tmp_path: Path) -> None:
    codes, scale, zero = drawn(4, 3)
    config = of_torchao("Int4WeightOnlyConfig", group_size=32, int4_packing_format="PLAIN_INT32")
    tensors = packers.torchao("Int4PlainInt32Tensor", codes, scale, zero)
    groups = groups_of(32)
    check(TorchaoFormat(config, Budget()), tmp_path, tensors, (codes - zero[:, groups]) * scale[:, groups])


def test_torchao_whose_tensors_are_not_what_its_config_says(tmp_path: Path) -> None:
    codes, scale, zero = drawn(4, 1)
    config = of_torchao("IntxWeightOnlyConfig", weight_dtype=named("torch.dtype", "int4"))
    kind, format = "IntxUnpackedToInt8Tensor", TorchaoFormat(config, Budget())
    good, note = packers.torchao(kind, codes - 8, scale, torch.zeros_like(zero)), json.loads(packers.torchao_note(kind))
    rounded = {"_type": kind, "_data": {"activation_quantization": "int8_asym_per_token"}}
    for tensors, text, told in (
        (good, "[" * 100_000, "is None, and config.json says IntxUnpackedToInt8Tensor: save the model anew"),
        (good, packers.torchao_note("Int8Tensor"), "is 'Int8Tensor', and config.json says"),
        (good, json.dumps({"_type": kind}), "no settings of layer"),
        (good, json.dumps(rounded), "`activation_quantization` 'int8_asym_per_token' of layer.*weights only"),
        (good | {"_weight_act_pre_scale": scale.clone()}, None, "_weight_act_pre_scale scales inputs"),
        (good | {"_weight_zero_point": zero.to(torch.int8)}, json.dumps(note), "is not 0.*symmetric"),
        (good | {"_weight_qdata": codes.to(torch.int8)}, json.dumps(note), "codes beyond 4 bits"),
    ):
        with pytest.raises(FormatError, match=told):
            check(format, tmp_path, tensors, torch.empty(F, D), note=text)
