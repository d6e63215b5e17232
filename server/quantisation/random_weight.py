"""Quantised weights with random contents, of any kind that is served: what is timed where no checkpoint is at hand.

Left out: what the numbers are. They are noise, since zeros would be faster than what is served. Torch is imported when
a weight is made.

Shapes: F output features, D input features.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from server.quantisation.sizes import Storage

if TYPE_CHECKING:
    import torch

    from server.quantisation.stored import QuantisedWeight


@dataclass(frozen=True)
class Kind:
    """How a weight is stored, and whether its inputs are rounded too."""

    bits: int
    group: int = 0  # inputs; 0: the whole row
    has_zeros: bool = False  # one for each group; else one for all where codes have no sign
    has_levels: bool = False
    has_float4: bool = False  # whether the levels are float4's, and scales powers of 2
    codes: str = "uint8"
    inputs: str | None = None  # the dtype that they are rounded to
    input_group: int = 0

    @classmethod
    def of(cls, storage: Storage) -> Kind:
        """That of a model's linear layers."""
        float8, has_zeros = "float8_e4m3fn", storage.zero_bytes > 0
        is_signed = storage.bits == 8 and not has_zeros and not storage.has_levels
        return cls(
            storage.bits,
            storage.group,
            has_zeros,
            storage.has_levels,
            storage.has_float4,
            codes=float8 if storage.is_float else "int8" if is_signed else "uint8",
            inputs=(float8 if storage.is_float else "int8") if storage.rounds_inputs else None,
            input_group=storage.group if storage.is_float and storage.rounds_inputs else 0,
        )


def noise(kind: Kind, features: int, inputs: int, device: torch.device) -> QuantisedWeight:
    """A weight [F, D] of this kind, of which products are around 1."""
    import torch

    from server.quantisation.rounding import float4_levels
    from server.quantisation.stored import QuantisedWeight, RoundedInputs, contiguous_groups

    made = torch.Generator(device).manual_seed(0)
    size, most = (features, inputs), 1 << kind.bits
    codes = torch.randint(0, 256, size, generator=made, device=device, dtype=torch.uint8)
    if kind.codes == "float8_e4m3fn":
        codes = torch.where(codes & 0x7F == 0x7F, 0, codes).view(torch.float8_e4m3fn)  # these are no numbers
    else:
        codes = (codes & (most - 1)).view(getattr(torch, kind.codes))
    groups = contiguous_groups(kind.group, inputs).to(device)
    counts = features, -(-inputs // (kind.group or inputs))
    scale = torch.rand(counts, generator=made, device=device).half().float() / most / inputs**0.5
    zero = None
    if kind.has_zeros:
        zero = torch.randint(0, most, counts, generator=made, device=device).float()
    elif kind.codes == "uint8" and not kind.has_levels:
        zero = torch.full(counts, most / 2, device=device)
    levels = torch.linspace(-1, 1, most, device=device) if kind.has_levels else None
    if kind.has_float4:
        levels, scale = float4_levels().to(device), torch.exp2(scale.clamp(min=2**-14).log2().floor())
    rounded = None if kind.inputs is None else RoundedInputs(getattr(torch, kind.inputs), group=kind.input_group)
    return QuantisedWeight(codes, kind.bits, scale, groups, zero, levels, rounded)
