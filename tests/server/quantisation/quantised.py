"""Quantised checkpoints of tiny models: every linear layer rounded to the nearest, and packed by `packers.py`.

Beside the quantised checkpoint a dense one is written, of the weights that the codes stand for; where inputs are
rounded too, `Layer.emulated` is what the layer must compute, from the definition and number by number.
"""

from __future__ import annotations

import json
import math
import re
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from tests.server.quantisation import packers
from tests.server.quantisation.packers import FLOAT8

# What no tool quantises: embeddings, heads, routers, biases by distance. All other matrices are linear layers.
NOT_LINEAR = re.compile(r"embed|wte|shared|lm_head|relative_attention_bias|\.gate\.weight|output_layer")


@dataclass(frozen=True)
class Rounded:
    """How inputs are rounded: to int8 or float8, in groups or all of a token alike, or by a fixed scale and zero."""

    is_int: bool
    group: int = 0
    scale: float | None = None
    zero: int = 0


@dataclass(frozen=True)
class Layer:
    """A linear layer's tensors by suffix, and what they mean: codes [F, D], scale and zero [F, G], groups [D]."""

    tensors: Mapping[str, Tensor]
    codes: Tensor
    scale: Tensor
    groups: Tensor
    zero: Tensor | None = None
    inputs: Rounded | None = None

    @property
    def weight(self) -> Tensor:
        """[F, D] float32."""
        values = self.codes.float() if self.zero is None else self.codes.float() - self.zero[:, self.groups]
        return values * self.scale[:, self.groups]

    def emulated(self, x: Tensor) -> Tensor:
        """x [T, D] float32 → [T, F]: for each group, the exact sum of products of codes, times both scales."""
        assert self.inputs is not None
        of_input = torch.arange(x.shape[1]) // (self.inputs.group or x.shape[1])
        y = torch.zeros(len(x), len(self.codes))
        for pair in sorted(set(zip(of_input.tolist(), self.groups.tolist(), strict=True))):
            inside = (of_input == pair[0]) & (self.groups == pair[1])
            ours = self.codes.double()[:, inside]
            if self.zero is not None:
                ours = ours - self.zero.double()[:, pair[1], None]
            whole = x[:, of_input == pair[0]]
            codes, scale = self._rounded(x[:, inside], whole)
            y += (codes.double() @ ours.T).float() * scale * self.scale[:, pair[1]]
        return y

    def _rounded(self, x: Tensor, whole: Tensor) -> tuple[Tensor, Tensor]:
        """Codes of x, less that of 0, and their scale; it is the largest of `whole` that decides."""
        assert self.inputs is not None
        most = 127.0 if self.inputs.is_int else 448.0
        if self.inputs.scale is None:
            scale = whole.abs().amax(1, keepdim=True).clamp(min=1e-12) / most
        else:
            scale = torch.full((len(x), 1), self.inputs.scale)
        if not self.inputs.is_int:
            return (x / scale).clamp(-most, most).to(FLOAT8).float(), scale
        codes = (x / scale + self.inputs.zero if self.inputs.zero else x / scale).round()
        return codes.clamp(-128, 127) - self.inputs.zero, scale


@dataclass(frozen=True)
class How:
    """A way to quantise: what config.json says of it, and what is made of a layer's weight [F, D].

    note: what the metadata of the file says of each such weight.
    """

    config: Mapping[str, Any]
    pack: Callable[[Tensor], Layer]
    note: str | None = None


def groups_of(size: int, inputs: int, *, is_ordered: bool = True) -> Tensor:
    groups = torch.arange(inputs) // (size if size > 0 else inputs)
    return groups if is_ordered else groups[torch.randperm(inputs, generator=torch.Generator().manual_seed(5))]


def largest_of(weight: Tensor, groups: Tensor) -> Tensor:
    """[F, G]: the largest magnitude of each row's group."""
    found = torch.zeros(len(weight), int(groups.max()) + 1)
    return found.scatter_reduce_(1, groups.expand_as(weight), weight.abs(), "amax")


def to_levels(weight: Tensor, groups: Tensor, bits: int, *, is_symmetric: bool) -> tuple[Tensor, Tensor, Tensor]:
    """Codes [F, D] from 0 on, scale (a float16) and zero [F, G]: what lies nearest."""
    num_groups, most = int(groups.max()) + 1, (1 << bits) - 1
    high = torch.zeros(len(weight), num_groups).scatter_reduce_(1, groups.expand_as(weight), weight, "amax")
    low = torch.zeros(len(weight), num_groups).scatter_reduce_(1, groups.expand_as(weight), weight, "amin")
    if is_symmetric:
        high = torch.maximum(high, -low)
        low = -high
    scale = ((high - low) / most).clamp(min=1e-4).half().float()
    zero = torch.full_like(scale, 1 << (bits - 1)) if is_symmetric else (-low / scale).round().clamp(0, most)
    codes = ((weight / scale[:, groups]).round() + zero[:, groups]).clamp(0, most)
    return codes.long(), scale, zero


def gptq(bits: int, group_size: int, *, version: int = 1, is_ordered: bool = True, is_symmetric: bool = False) -> How:
    config = {"quant_method": "gptq", "bits": bits, "group_size": group_size, "desc_act": not is_ordered,
              "sym": is_symmetric, "checkpoint_format": "gptq" if version == 1 else "gptq_v2"}  # fmt: skip

    def pack(weight: Tensor) -> Layer:
        groups = groups_of(group_size, weight.shape[1], is_ordered=is_ordered)
        codes, scale, zero = to_levels(weight, groups, bits, is_symmetric=is_symmetric)
        return Layer(packers.gptq(codes, scale, zero, groups, bits, version=version), codes, scale, groups, zero)

    return How(config, pack)


def awq(group_size: int) -> How:
    config = {"quant_method": "awq", "bits": 4, "group_size": group_size, "zero_point": True, "version": "gemm"}

    def pack(weight: Tensor) -> Layer:
        groups = groups_of(group_size, weight.shape[1])
        codes, scale, zero = to_levels(weight, groups, 4, is_symmetric=False)
        return Layer(packers.awq(codes, scale, zero), codes, scale, groups, zero)

    return How(config, pack)


def _compressed(format: str, weights: dict[str, Any], inputs: dict[str, Any] | None) -> dict[str, Any]:
    group = {"targets": ["Linear"], "weights": weights, "input_activations": inputs, "output_activations": None}
    return {"quant_method": "compressed-tensors", "format": format, "quantization_status": "compressed",
            "config_groups": {"group_0": group}, "ignore": ["lm_head", "re:.*gate$"]}  # fmt: skip


def compressed_packed(bits: int, group_size: int, *, is_symmetric: bool, is_ordered: bool = True) -> How:
    strategy = {"strategy": "group", "group_size": group_size} if group_size > 0 else {"strategy": "channel"}
    config = _compressed(
        "pack-quantized", {"num_bits": bits, "type": "int", "symmetric": is_symmetric, **strategy}, None
    )

    def pack(weight: Tensor) -> Layer:
        groups = groups_of(group_size, weight.shape[1], is_ordered=is_ordered)
        codes, scale, zero = to_levels(weight, groups, bits, is_symmetric=is_symmetric)
        half = 1 << (bits - 1)
        given = {"zero": None if is_symmetric else zero - half, "groups": None if is_ordered else groups}
        return Layer(packers.compressed_packed(codes - half, scale, bits, **given), codes, scale, groups, zero)

    return How(config, pack)


def compressed_int8(
    *, is_fixed: bool, is_symmetric: bool = True, strategy: str = "channel", has_zero: bool = False
) -> How:
    """W8A8. is_fixed: inputs have one scale, and where they are not symmetric a zero; others: of weights."""
    inputs = Rounded(True, scale=0.0625 if is_fixed else None, zero=0 if is_symmetric else -9)
    size = {"group_size": 32} if strategy == "group" else {}
    config = _compressed(
        "int-quantized",
        {"num_bits": 8, "type": "int", "symmetric": not has_zero, "strategy": strategy, **size},
        {"num_bits": 8, "type": "int", "symmetric": is_symmetric, "dynamic": not is_fixed,
         "strategy": "tensor" if is_fixed else "token"},
    )  # fmt: skip

    def pack(weight: Tensor) -> Layer:
        groups, of_all = groups_of(size.get("group_size", -1), weight.shape[1]), strategy == "tensor"
        looked_at = weight.reshape(1, -1) if of_all else weight
        of_groups = torch.zeros(weight.numel(), dtype=torch.int64) if of_all else groups
        codes, scale, zero = to_levels(looked_at, of_groups, 8, is_symmetric=not has_zero)
        codes, zero = (codes.view(weight.shape) - 128).to(torch.int8), zero - 128
        tensors = {"weight": codes, "weight_scale": scale[0].half() if of_all else scale.half()}
        if has_zero:
            tensors["weight_zero_point"] = (zero[0] if of_all else zero).to(torch.int8)
        if inputs.scale is not None:
            tensors["input_scale"] = torch.tensor([inputs.scale])
        if inputs.zero:
            tensors["input_zero_point"] = torch.tensor([inputs.zero], dtype=torch.int8)
        scale, zero = scale.expand(len(weight), -1), zero.expand(len(weight), -1)
        return Layer(tensors, codes, scale, groups, zero if has_zero else None, inputs)

    return How(config, pack)


def float8(publisher: str, strategy: str, *, is_fixed: bool = False, block: tuple[int, int] = (32, 32)) -> How:
    """publisher: compressed-tensors, fp8 or fbgemm_fp8; strategy: of the weights' scales, tensor, channel or block."""
    in_blocks = strategy == "block"
    inputs = Rounded(False, scale=0.03125 if is_fixed else None, group=block[1] if in_blocks and not is_fixed else 0)
    config: dict[str, Any] = {"quant_method": publisher, "activation_scheme": "static" if is_fixed else "dynamic"}
    if publisher == "fbgemm_fp8":
        config = {"quant_method": publisher, "activation_scale_ub": 1200.0}
    elif publisher == "compressed-tensors":
        weights = {"num_bits": 8, "type": "float", "symmetric": True, "strategy": strategy}
        weights |= {"block_structure": [*block]} if in_blocks else {}
        given = {"num_bits": 8, "type": "float", "symmetric": True, "dynamic": not is_fixed}
        given |= {"strategy": "tensor" if is_fixed else "group" if in_blocks else "token"}
        given |= {"group_size": block[1]} if in_blocks and not is_fixed else {}
        config = _compressed("float-quantized", weights, given)
    elif in_blocks:
        config["weight_block_size"] = [*block]

    def pack(weight: Tensor) -> Layer:
        rows, groups = groups_of(block[0], len(weight)), groups_of(block[1], weight.shape[1])
        if not in_blocks:
            groups = torch.zeros_like(groups)
            rows = torch.arange(len(weight)) if strategy == "channel" else torch.zeros_like(rows)
        largest = torch.zeros(int(rows.max()) + 1, weight.shape[1])
        largest.scatter_reduce_(0, rows[:, None].expand_as(weight), weight.abs(), "amax")
        stored = largest_of(largest, groups) / 448
        scale = stored[rows]
        codes = (weight / scale[:, groups]).clamp(-448, 448).to(FLOAT8)
        is_of_fp8 = publisher != "compressed-tensors"
        number = (stored.squeeze() if is_of_fp8 else stored[0]) if strategy == "tensor" else stored
        name = "weight_scale_inv" if in_blocks and is_of_fp8 else "weight_scale"
        given = {} if inputs.scale is None else {"input_scale": torch.tensor(inputs.scale)}
        return Layer({"weight": codes, name: number, **given}, codes, scale, groups, inputs=inputs)

    return How(config, pack)


MX_FLOAT = {"type": "float", "symmetric": True, "strategy": "group", "group_size": 32, "scale_dtype": "torch.uint8"}


def _powers_of_2(weight: Tensor, groups: Tensor, most: float) -> Tensor:
    """[F, G]: the least with which no weight is above `most`."""
    return torch.exp2((largest_of(weight, groups) / most).clamp(min=2.0**-120).log2().ceil())


def _nearest(values: Tensor, levels: Tensor) -> Tensor:
    return (values[..., None] - levels).abs().argmin(-1)


def nvfp4(publisher: str) -> How:
    """publisher: compressed-tensors or modelopt."""
    config = _compressed(
        "nvfp4-pack-quantized",
        {"num_bits": 4, "type": "float", "symmetric": True, "strategy": "tensor_group", "group_size": 16},
        {"num_bits": 4, "type": "float", "dynamic": "local", "strategy": "tensor_group", "group_size": 16},
    )
    if publisher == "modelopt":
        config = {"quant_method": "modelopt", "quant_algo": "NVFP4", "ignore": ["lm_head", "*layers.0.nothing*"]}
    levels, pack_as = torch.tensor(packers.FLOAT4), packers.nvfp4
    if publisher == "modelopt":
        pack_as = packers.nvfp4_of_modelopt

    def pack(weight: Tensor) -> Layer:
        groups, of_all = groups_of(16, weight.shape[1]), 448 * 6 / float(weight.abs().max())
        stored = (largest_of(weight, groups) / 6 * of_all).clamp(min=0.01).to(FLOAT8)
        scale = stored.float() / of_all
        codes = _nearest(weight / scale[:, groups], levels)
        return Layer(pack_as(codes, stored.float(), of_all), levels[codes], scale, groups)

    return How(config, pack)


def mxfp4() -> How:
    config, levels = _compressed("mxfp4-pack-quantized", MX_FLOAT | {"num_bits": 4}, None), torch.tensor(packers.FLOAT4)

    def pack(weight: Tensor) -> Layer:
        groups = groups_of(32, weight.shape[1])
        scale = _powers_of_2(weight, groups, 6)
        codes = _nearest(weight / scale[:, groups], levels)
        tensors = {"weight_packed": packers.float4_bytes(codes), "weight_scale": packers.exponents(scale)}
        return Layer(tensors, levels[codes], scale, groups)

    return How(config, pack)


def mxfp8() -> How:
    config = _compressed("mxfp8-quantized", MX_FLOAT | {"num_bits": 8}, None)

    def pack(weight: Tensor) -> Layer:
        groups = groups_of(32, weight.shape[1])
        scale = _powers_of_2(weight, groups, 448)
        codes = (weight / scale[:, groups]).to(FLOAT8)
        return Layer({"weight": codes, "weight_scale": packers.exponents(scale)}, codes, scale, groups)

    return How(config, pack)


QUARK = {"is_dynamic": False, "block_size": None, "symmetric": True, "round_method": "half_even", "scale_type": "float",
         "zero_point_type": "int32", "scale_format": None, "mx_element_dtype": None, "is_scale_quant": False,
         "observer_cls": "PerGroupMinMaxObserver", "ch_axis": None, "group_size": None}  # fmt: skip


def _quark(weight: dict[str, Any], order: str = "reorder", inputs: dict[str, Any] | None = None) -> dict[str, Any]:
    entry = {"weight": QUARK | weight, "input_tensors": inputs and QUARK | inputs, "output_tensors": None, "bias": None}
    return {
        "quant_method": "quark", "global_quant_config": entry, "layer_quant_config": {}, "layer_type_quant_config": {},
        "kv_cache_quant_config": {}, "exclude": ["lm_head", "*.gate"], "algo_config": None, "quant_mode": "eager_mode",
        "export": {"weight_format": "real_quantized", "pack_method": order, "kv_cache_group": []}, "version": "0.13",
    }  # fmt: skip


def quark(dtype: str, group_size: int, order: str = "reorder", *, is_symmetric: bool = False) -> How:
    """Integers in groups, or of rows."""
    shared = {"qscheme": "per_group", "ch_axis": 1, "group_size": group_size}
    weight = {"dtype": dtype, "symmetric": is_symmetric, **shared}
    if group_size < 0:
        weight |= {"qscheme": "per_channel", "ch_axis": 0, "group_size": None}
    bits = 4 if dtype.endswith("4") else 8
    lower = 0 if dtype.startswith("u") else 1 << (bits - 1)

    def pack(weight: Tensor) -> Layer:
        groups = groups_of(group_size, weight.shape[1])
        codes, scale, zero = to_levels(weight, groups, bits, is_symmetric=is_symmetric)
        codes, zero = codes - lower, zero - lower
        tensors = packers.quark(codes, scale, zero, dtype, order, in_groups=group_size > 0)
        return Layer(tensors, codes, scale, groups, zero)

    return How(_quark(weight, order), pack)


def quark_float8(scheme: str, *, is_rounded: bool) -> How:
    """scheme: of the weights' scales, per_tensor or per_channel; is_rounded: by one scale, or by those of tokens."""
    of_all = scheme == "per_tensor"
    inputs = {"dtype": "fp8_e4m3", "qscheme": scheme, "ch_axis": None if of_all else 1, "is_dynamic": not of_all}
    weight = {"dtype": "fp8_e4m3", "qscheme": scheme, "ch_axis": None if of_all else 0}
    packed = float8("fp8", "tensor" if of_all else "channel", is_fixed=of_all).pack

    def pack(weight: Tensor) -> Layer:
        layer = packed(weight)
        tensors = dict(layer.tensors) | {"weight_scale": layer.tensors["weight_scale"].squeeze()}
        if not is_rounded:
            tensors.pop("input_scale", None)
        return replace(layer, tensors=tensors, inputs=layer.inputs if is_rounded else None)

    return How(_quark(weight, inputs=inputs if is_rounded else None), pack)


def quark_mxfp4() -> How:
    mxfp4_pack = mxfp4().pack
    spec = {"dtype": "fp4", "qscheme": "per_group", "ch_axis": -1, "group_size": 32, "scale_format": "e8m0"}

    def pack(weight: Tensor) -> Layer:
        layer = mxfp4_pack(weight)
        tensors = {"weight": layer.tensors["weight_packed"], "weight_scale": layer.tensors["weight_scale"]}
        return replace(layer, tensors=tensors)

    return How(_quark(spec, inputs=spec | {"is_dynamic": True}), pack)


def auto_round(packing: str) -> How:
    """As GPTQ packs, with or without 1 less in the codes of 0, or as AWQ packs."""
    packed_as = {
        "auto_round:auto_gptq": gptq(4, 32, is_symmetric=True),
        "auto_round:gptqmodel": gptq(4, 32, version=2),
        "auto_round:exllamav2": gptq(4, 32, version=2),
        "auto_round:gptq:exllamav2": gptq(4, 32),
        "auto_round:auto_awq": awq(32),
    }[packing]
    config = {"quant_method": "auto-round", "bits": 4, "group_size": 32, "sym": False, "data_type": "int",
              "packing_format": packing, "iters": 200, "autoround_version": "0.16.1"}  # fmt: skip
    return How(config, packed_as.pack)


def bitsandbytes(kind: str, *, is_nested: bool, storage: str = "uint8", block: int = 64) -> How:
    """block: numbers that follow one another and share a magnitude, in one row or in several."""
    config = {"quant_method": "bitsandbytes", "load_in_4bit": True, "bnb_4bit_quant_type": kind,
              "bnb_4bit_use_double_quant": is_nested, "bnb_4bit_quant_storage": storage}  # fmt: skip
    levels = torch.tensor(packers.NF4 if kind == "nf4" else packers.FP4)

    def pack(weight: Tensor) -> Layer:
        filled = torch.nn.functional.pad(weight.flatten(), (0, -weight.numel() % block))
        largest = filled.view(-1, block).abs().amax(1)
        nested, stored = None, largest
        if is_nested:
            of_codes, offset = torch.linspace(-1, 1, 256), float(largest.mean())
            centred = torch.nn.functional.pad(largest - offset, (0, -len(largest) % 256)).reshape(-1, 256)
            magnitudes = centred.abs().amax(1).clamp(min=1e-6)
            coarse = _nearest(centred / magnitudes[:, None], of_codes)
            stored = coarse.flatten()[: len(largest)].to(torch.uint8)
            largest = (of_codes[coarse] * magnitudes[:, None]).flatten()[: len(largest)] + offset
            nested = (of_codes, magnitudes, offset)
        size = math.gcd(block, weight.shape[1])
        scale = largest.repeat_interleave(block // size)[: weight.numel() // size].view(len(weight), -1)
        groups = groups_of(size, weight.shape[1])
        codes = _nearest(weight / scale[:, groups], levels)
        tensors = packers.bitsandbytes(codes, stored, kind, block=block, nested=nested)
        tensors["weight"] = tensors["weight"].view(-1).view(getattr(torch, storage)).view(-1, 1)
        return Layer(tensors, levels[codes], scale, groups)

    return How(config, pack)


CLASSES = {
    "Int4Tensor": "Int4WeightOnlyConfig",
    "Int4PlainInt32Tensor": "Int4WeightOnlyConfig",
    "Int8Tensor": "Int8WeightOnlyConfig",
    "Float8Tensor": "Float8WeightOnlyConfig",
    "IntxUnpackedToInt8Tensor": "IntxWeightOnlyConfig",
}
SYMMETRIC = "SYMMETRIC"


def torchao(kind: str, *, group: int = 32, bits: int = 4, mapping: str = "ASYMMETRIC") -> How:
    """kind: the class of its tensors; group: 0: each row has a scale; -1: there is one of all."""
    granularity = {"_type": "PerGroup", "_data": {"group_size": group}}
    if group <= 0:
        granularity = {"_type": "PerTensor" if group else "PerRow", "_data": {}}
    data: dict[str, Any] = {"granularity": granularity}
    if kind.startswith("Int4"):
        packing = {"_type": "Int4PackingFormat", "_data": "PLAIN" if kind == "Int4Tensor" else "PLAIN_INT32"}
        data = {"group_size": group, "int4_packing_format": packing}
    elif kind == "IntxUnpackedToInt8Tensor":
        data["weight_dtype"] = {"_type": "torch.dtype", "_data": f"int{bits}"}
        data["mapping_type"] = {"_type": "MappingType", "_data": mapping}
        if group <= 0:
            data["granularity"] = {"_type": "PerAxis", "_data": {"axis": 0}}
    quant_type = {"default": {"_type": CLASSES[kind], "_version": 2, "_data": data}}

    def pack(weight: Tensor) -> Layer:
        groups = groups_of(group, weight.shape[1])
        if kind in ("Float8Tensor", "Int8Tensor"):
            most = 448 if kind == "Float8Tensor" else 127
            scale = largest_of(weight, groups) / most
            scale = scale.amax(keepdim=True).expand(len(weight), 1) if group < 0 else scale
            exact = weight / scale[:, groups]
            codes = exact.to(FLOAT8) if kind == "Float8Tensor" else exact.round().to(torch.int8)
            tensors = packers.torchao(kind, codes, scale[:1] if group < 0 else scale)
            return Layer(tensors, codes, scale, groups)
        codes, scale, zero = to_levels(weight, groups, bits, is_symmetric=mapping.startswith(SYMMETRIC))
        if kind == "Int4PlainInt32Tensor":
            return Layer(packers.torchao(kind, codes, scale, zero), codes, scale, groups, zero)
        half = 1 << (bits - 1)
        raised_by = (half - zero) * scale
        return Layer(packers.torchao(kind, codes - half, scale, zero - half, raised_by), codes, scale, groups, zero)

    return How({"quant_method": "torchao", "quant_type": quant_type}, pack, note=packers.torchao_note(kind))


def bitsandbytes_int8() -> How:
    def pack(weight: Tensor) -> Layer:
        largest = weight.abs().amax(1)
        codes = (weight * (127 / largest[:, None])).round().to(torch.int8)
        groups = groups_of(-1, weight.shape[1])
        return Layer(packers.bitsandbytes_int8(codes, largest), codes, largest[:, None] / 127, groups)

    return How({"quant_method": "bitsandbytes", "load_in_8bit": True}, pack)


def quantise(
    source: Path, folder: Path, how: How, *, also: str = "-", others: Mapping[str, How | None] = MappingProxyType({})
) -> dict[str, Layer]:
    """Write `folder`/quantised and `folder`/dense from the float32 model in `source`; returns the layers by name.

    also: pattern of what is quantised though tools seldom do; others: pattern → how else, or not at all.
    """
    tensors = load_file(source / "model.safetensors")
    linear = [
        name
        for name, tensor in tensors.items()
        if name.endswith(".weight") and tensor.dim() == 2
        and (not NOT_LINEAR.search(name) or re.search(also, name))
    ]  # fmt: skip
    chosen = {name: next((h for pattern, h in others.items() if re.search(pattern, name)), how) for name in linear}
    layers = {name.removesuffix(".weight"): h.pack(tensors.pop(name)) for name, h in chosen.items() if h is not None}
    config = json.loads((source / "config.json").read_text())
    for kind in ("quantised", "dense"):
        (folder / kind).mkdir(parents=True)
        for path in source.glob("*.json"):
            shutil.copy(path, folder / kind)
    packed = {f"{name}.{suffix}": t for name, layer in layers.items() for suffix, t in layer.tensors.items()}
    notes = {name: h.note for name, h in chosen.items() if h is not None and h.note is not None}
    _save(tensors | packed, folder / "quantised", notes)
    _save(tensors | {f"{name}.weight": layer.weight for name, layer in layers.items()}, folder / "dense")
    config["quantization_config"] = dict(how.config)
    (folder / "quantised" / "config.json").write_text(json.dumps(config))
    return layers


def _save(tensors: Mapping[str, Tensor], folder: Path, notes: dict[str, str] | None = None) -> None:
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, folder / "model.safetensors", notes)
