"""Checkpoints in float8 (E4M3): `quant_method` fp8 as Qwen, DeepSeek and vLLM write it, and Meta's fbgemm_fp8.

Of a layer [F, D]:

    weight           [F, D] float8_e4m3fn
    weight_scale     [] or [1]: of all; [F, 1]: of each row; some tools call it weight_scale_inv
    weight_scale_inv [F / 128, D / 128]: of each block (`weight_block_size`), and inputs are rounded in groups of 128
    input_scale      [] or [1], where `activation_scheme` is static; else each token has its own; or activation_scale
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from server.checkpoint.formats.protocol import (
    FLOATS,
    SCALES,
    SCALES_OF_KV,
    Format,
    FormatError,
    Part,
    Tensors,
    finite,
    numbers_of_float8,
    rows_of_all,
)
from server.quantisation import exclusions
from server.quantisation.configs import AGAIN, Budget, block_size, shown
from server.quantisation.stored import QuantisedWeight, RoundedInputs

FLOAT8 = torch.float8_e4m3fn
SCHEMES = ("dynamic", "static")
KINDS = (None, "e4m3", "float8_e4m3fn")
WEIGHT_SCALES = ("weight_scale", "weight_scale_inv")
INPUT_SCALES = ("input_scale", "activation_scale")


class Float8Format(Format):
    """config: `quantization_config`. Raises FormatError for what is not served."""

    name = "fp8"
    ignored: tuple[str, ...] = (r"\.input_scale_ub$", *SCALES_OF_KV)

    def __init__(self, config: Mapping[str, Any], budget: Budget):
        block = config.get("weight_block_size")
        self._block = None if block is None else block_size(block, "weight_block_size")
        self._scheme = config.get("activation_scheme", "dynamic")
        if self._scheme not in SCHEMES:
            raise FormatError(
                f"`activation_scheme` must be dynamic or static. Given: {shown(self._scheme)}; take another checkpoint"
            )
        if config.get("fmt", "e4m3") not in KINDS:
            raise FormatError(
                f"`fmt` {shown(config['fmt'])} of an fp8 checkpoint is not served: e4m3 is, take another checkpoint"
            )
        if self._scheme == "dynamic":  # calibrated, and then decided otherwise
            self.ignored += (r"\.(input|activation)_scale$",)
        self.exclusions = exclusions.of_config(config, self.name, budget)
        self._most = _bound(config.get("activation_scale_ub"))

    def has(self, tensors: Tensors) -> bool:
        return tensors.has("weight_scale") or tensors.has("weight_scale_inv")

    def read(self, tensors: Tensors, part: Part) -> QuantisedWeight:
        codes = tensors.read_box("weight", part.size, (FLOAT8,), part.rows, [part.columns]).contiguous()
        numbers_of_float8(tensors, "weight", codes)
        scale, groups = self._scale(tensors, part) if self._block is None else self._blocks(tensors, part, self._block)
        return part.weight(codes, 8, scale, groups, inputs=self._inputs(tensors))

    @staticmethod
    def _scale(tensors: Tensors, part: Part) -> tuple[Tensor, Tensor]:
        return scale_of_rows(tensors, part), torch.zeros(part.columns[1] - part.columns[0], dtype=torch.int64)

    @staticmethod
    def _blocks(tensors: Tensors, part: Part, block: tuple[int, int]) -> tuple[Tensor, Tensor]:
        rows, inputs = block
        shape = (-(-part.size[0] // rows), -(-part.size[1] // inputs))
        whole = finite(tensors, "weight_scale_inv", tensors.read("weight_scale_inv", shape, SCALES))
        of_row = torch.cat([torch.arange(start, stop) // rows for start, stop in part.rows])
        kept, of_input = part.groups_of(inputs)
        return whole[of_row][:, kept], of_input

    def _inputs(self, tensors: Tensors) -> RoundedInputs:
        if self._scheme == "static":
            return RoundedInputs(FLOAT8, scale=read_above_0(tensors, _first(tensors, INPUT_SCALES)))
        return RoundedInputs(FLOAT8, group=0 if self._block is None else self._block[1], most=self._most)


def _bound(most: Any) -> Tensor | None:
    """[] float32: the largest scale of inputs, of the largest magnitude that a config says; None: there is none."""
    if most is None:
        return None
    if not isinstance(most, int | float) or isinstance(most, bool) or not 0 < most <= torch.finfo(torch.float32).max:
        raise FormatError(
            f"`activation_scale_ub` of an fp8 checkpoint must be a finite number above 0. Given: {shown(most)}; {AGAIN}"
        )
    return torch.tensor(float(most) / 448.0)


def scale_of_rows(tensors: Tensors, part: Part) -> Tensor:
    """[rows, 1] float32: a scale of each row or of all."""
    suffix = _first(tensors, WEIGHT_SCALES)
    shape = tensors.shape(suffix)
    if shape in ((), (1,), (1, 1)):
        return rows_of_all(read_scalar(tensors, suffix), part)
    shape = (part.size[0], 1) if len(shape) == 2 else (part.size[0],)
    return finite(tensors, suffix, tensors.read_ranges(suffix, shape, SCALES, 0, part.rows)).reshape(-1, 1)


def _first(tensors: Tensors, suffixes: Sequence[str]) -> str:
    """The first that there is."""
    return next((suffix for suffix in suffixes if tensors.has(suffix)), suffixes[0])


def read_scalar(tensors: Tensors, suffix: str) -> Tensor:
    """[] float32. Raises FormatError for a tensor of more numbers, and for one that is not finite."""
    shape = tensors.shape(suffix)
    if shape not in ((), (1,), (1, 1)):
        raise FormatError(f"{tensors.name}.{suffix} has shape {list(shape)}, and one number is served: convert it")
    return finite(tensors, suffix, tensors.read(suffix, shape, (*FLOATS, torch.int8))).reshape(())


def read_above_0(tensors: Tensors, suffix: str) -> Tensor:
    """[] float32: a scale of a whole tensor. Raises FormatError unless it is above 0 and finite."""
    scale = read_scalar(tensors, suffix)
    if not scale.is_meta and not scale > 0:
        raise FormatError(
            f"{tensors.name}.{suffix} is {float(scale)}, and such a scale must be above 0: the checkpoint is damaged, "
            "download it again"
        )
    return scale
