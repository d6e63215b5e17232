"""Experts in MXFP4, as gpt-oss is published: each role's matrices in one stack (`server/checkpoint/experts.py`).

Of the matrix [F, D] of one expert:

    blocks   [F, D / 32, 16] uint8   codes of float4: two neighbouring inputs in a byte, the former in the lower bits
    scales   [F, D / 32] uint8       exponents of powers of 2

All that has no such tensors is dense, whatever the config says.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from server.checkpoint.formats.compressed import of_exponents
from server.checkpoint.formats.protocol import Format, Part, Tensors, covering, finite, refuse_undivided
from server.quantisation import exclusions
from server.quantisation.configs import Budget
from server.quantisation.packing import packed_inputs
from server.quantisation.rounding import float4_levels
from server.quantisation.sizes import MXFP4_GROUP
from server.quantisation.stored import QuantisedWeight


class Mxfp4Format(Format):
    """config: `quantization_config`."""

    name = "mxfp4"

    def __init__(self, config: Mapping[str, Any], budget: Budget):
        self.exclusions = exclusions.of_config(config, self.name, budget)

    def has(self, tensors: Tensors) -> bool:
        return tensors.has("blocks")

    def read(self, tensors: Tensors, part: Part) -> QuantisedWeight:
        outputs, inputs = part.size
        refuse_undivided(tensors, inputs, MXFP4_GROUP, "take another checkpoint of this model")
        (first, last), inside = covering(part.columns, MXFP4_GROUP, inputs)
        groups, shape = [(first // MXFP4_GROUP, last // MXFP4_GROUP)], (outputs, inputs // MXFP4_GROUP)
        blocks = tensors.read_box("blocks", (*shape, MXFP4_GROUP // 2), (torch.uint8,), part.rows, groups)
        scales = tensors.read_box("scales", shape, (torch.uint8, torch.float8_e8m0fnu), part.rows, groups)
        _, of_input = part.groups_of(MXFP4_GROUP)
        codes = packed_inputs(blocks.flatten(1).view(torch.int32).t(), 4, inside)
        scale = finite(tensors, "scales", of_exponents(scales))
        return part.weight(codes, 4, scale, of_input, levels=float4_levels())
