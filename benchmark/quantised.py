"""Quantised weights of real shapes with random contents: what `kernels` compiles for and `products` times.

Left out: what the numbers are. They are noise, since zeros would be faster than what is served.

Shapes: F output features, D input features.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

    from server.quant.stored import QuantisedWeight


@dataclass(frozen=True)
class Kind:
    """How a weight is stored, and whether its inputs are rounded too."""

    bits: int
    group: int = 0  # inputs; 0: the whole row
    has_zeros: bool = False  # one for each group; else one for all where codes have no sign
    has_levels: bool = False
    codes: str = "uint8"
    inputs: str | None = None  # the dtype that they are rounded to
    input_group: int = 0


KINDS: Mapping[str, Kind] = {
    "int4, groups of 128, zero points": Kind(4, 128, has_zeros=True),
    "int4, groups of 128": Kind(4, 128),
    "int4, groups of 32, zero points": Kind(4, 32, has_zeros=True),
    "nf4, groups of 64": Kind(4, 64, has_levels=True),
    "int2, groups of 64, zero points": Kind(2, 64, has_zeros=True),
    "int8, whole rows": Kind(8, codes="int8"),
    "int8, groups of 128, zero points": Kind(8, 128, has_zeros=True),
    "W8A8": Kind(8, codes="int8", inputs="int8"),
    "fp8": Kind(8, codes="float8_e4m3fn", inputs="float8_e4m3fn"),
    "fp8, blocks of 128": Kind(8, 128, codes="float8_e4m3fn", inputs="float8_e4m3fn", input_group=128),
}


@dataclass(frozen=True)
class LayerShape:
    """A linear layer [F, D]; is_gated: its F rows are [gate | up]."""

    features: int
    inputs: int
    is_gated: bool = False


LLAMA_LIKE = (
    LayerShape(6144, 4096), LayerShape(4096, 4096), LayerShape(28672, 4096, True), LayerShape(4096, 14336),
)  # fmt: skip
# The layers of models that are served: name, kind, shapes.
MODELS: tuple[tuple[str, str, tuple[LayerShape, ...]], ...] = (
    ("Mistral-7B AWQ", "int4, groups of 128, zero points", LLAMA_LIKE),
    (
        "Baichuan2-13B GPTQ",
        "int4, groups of 128",
        (LayerShape(15360, 5120), LayerShape(5120, 5120), LayerShape(27392, 5120, True), LayerShape(5120, 13696)),
    ),
    ("Llama-3-8B W8A8", "W8A8", LLAMA_LIKE),
    ("Llama-3-8B FP8", "fp8", LLAMA_LIKE),
)


def noise(kind: Kind, shape: LayerShape, device: torch.device) -> QuantisedWeight:
    """A weight of this kind and shape, of which products are around 1."""
    import torch

    from server.quant.stored import QuantisedWeight, RoundedInputs, contiguous_groups

    made = torch.Generator(device).manual_seed(0)
    size, most = (shape.features, shape.inputs), 1 << kind.bits
    codes = torch.randint(0, 256, size, generator=made, device=device, dtype=torch.uint8)
    if kind.codes == "float8_e4m3fn":
        codes = torch.where(codes & 0x7F == 0x7F, 0, codes).view(torch.float8_e4m3fn)  # these are no numbers
    else:
        codes = (codes & (most - 1)).view(getattr(torch, kind.codes))
    groups = contiguous_groups(kind.group, shape.inputs).to(device)
    counts = shape.features, -(-shape.inputs // (kind.group or shape.inputs))
    scale = torch.rand(counts, generator=made, device=device).half().float() / most / shape.inputs**0.5
    zero = None
    if kind.has_zeros:
        zero = torch.randint(0, most, counts, generator=made, device=device).float()
    elif kind.codes == "uint8" and not kind.has_levels:
        zero = torch.full(counts, most / 2, device=device)
    levels = torch.linspace(-1, 1, most, device=device) if kind.has_levels else None
    inputs = None if kind.inputs is None else RoundedInputs(getattr(torch, kind.inputs), group=kind.input_group)
    return QuantisedWeight(codes, kind.bits, scale, groups, zero, levels, inputs)
