"""How a quantised weight lies in a GPU's memory, so that a program reads what it multiplies in one piece.

Inputs are taken in steps, and a step in parts. Of one step each feature has a piece of memory, and the pieces of
neighbouring features are neighbours. Where codes have 8 bits, a step is one part and a piece its codes. Fewer bits are
packed into 16 words of 32 bits: a part is 32 inputs, of which word j holds the codes of inputs 2 j and 2 j + 1, 16 bits
apart, and the parts of a step follow each other from the lowest bits on. So two codes at a time are unpacked by one
shift and one mask, and are neighbours as the matrix units want them. A part lies in one group of inputs; where a split
over ranks cuts the first group, the inputs begin at the place `lead`, as they would in the whole.

Groups in another order, as GPTQ's activation order has them, are sorted; then inputs are gathered before the product
(`order`). So are groups whose size is no multiple of a part. Codes of 3 bits take the place of 4.

Weights whose inputs are rounded too have a byte for each code, and keep their rows in one piece, in which torch's
operators read them; the kernel reads both.

Left out: what no kernel multiplies, of which `why_not_packed` says why. Importing this imports no Triton.

Shapes: F output features, D input features, S steps, G groups of inputs, E experts.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from torch import Tensor

from server.backends.device import alone
from server.quantisation.stored import QuantisedWeight

PARTS_OF_BYTES = (128, 64, 32)  # inputs of a part where codes have 8 bits: the matrix units take 32 of them at a time
WORDS = 16  # of a piece of packed codes: 64 bytes
PACKED_PART = 2 * WORDS  # inputs
FLOAT8 = torch.float8_e4m3fn
MOST_ZERO = 128  # up to here codes less zero points are exact in bfloat16, and the way that the kernel takes to them


@dataclass(frozen=True)
class PackedWeight:
    """A weight [F, D], or those of all experts with one more dimension in front."""

    codes: Tensor  # [S, F, piece] int32 words, or uint8, int8 or float8_e4m3fn
    scale: Tensor  # [G, F] in the narrowest dtype that holds it
    bits: int  # of a code's place: 2, 4 or 8
    part: int  # inputs
    num_inputs: int  # of what is multiplied
    lead: int = 0  # places before the first input
    group_parts: int = 0  # parts of a group of inputs that share a scale; 0: all do
    input_parts: int = 0  # parts that share a scale of the inputs; 0: all do
    zero: Tensor | None = None  # [G, F] uint8 or int16, or float32 where zero points are no integers
    fixed_zero: int = 0  # the zero point of all, where there is no tensor
    levels: Tensor | None = None  # [2^bits of a place] in the dtype of the inputs: what codes stand for
    order: Tensor | None = None  # [places] int32: the input at each, -1 for none; None: as they are
    offset: Tensor | None = None  # [F] int32: what the zero point of inputs adds to a whole sum

    def __post_init__(self) -> None:
        for name in ("codes", "scale", "zero"):  # views, given other memory, would keep what they are parts of
            if (tensor := getattr(self, name)) is not None:
                object.__setattr__(self, name, alone(tensor))

    @property
    def parts(self) -> int:
        """Of a step."""
        return 1 if self.bits == 8 else 16 // self.bits

    @property
    def sum_parts(self) -> int:
        """Parts of a step whose products are summed before they are scaled."""
        if self.group_parts % self.parts == 0:
            return self.parts
        return self.group_parts if self.parts % self.group_parts == 0 else 1

    @property
    def step(self) -> int:
        """Inputs of a step."""
        return self.parts * self.part

    @property
    def places(self) -> int:
        """Inputs that all steps have room for."""
        return self.codes.shape[-3] * self.step

    @property
    def nbytes(self) -> int:
        """Memory that it takes."""
        tensors = (self.codes, self.scale, self.zero, self.levels, self.order, self.offset)
        return sum(tensor.nbytes for tensor in tensors if tensor is not None)

    @property
    def memory(self) -> list[Tensor]:
        """The tensors that grow with both sides of the weight."""
        return [tensor for tensor in (self.codes, self.scale, self.zero) if tensor is not None]


@dataclass(frozen=True)
class Places:
    """Where the inputs of a row go."""

    part: int
    lead: int = 0
    group_parts: int = 0
    input_parts: int = 0
    order: Tensor | None = None  # [places], -1 for none
    group_of_part: Tensor | None = None  # with an order


def why_not_packed(weight: QuantisedWeight) -> str | None:
    """Why no kernel multiplies such a weight; None: one does."""
    inputs = weight.inputs
    if weight.codes.dtype == FLOAT8 and inputs is None:
        return "float8 weights without float8 inputs have no kernel"
    if weight.levels is not None and weight.zero is not None:
        return "a table of levels beside zero points has no kernel"
    if inputs is None:
        return None
    if (inputs.dtype == FLOAT8) != (weight.codes.dtype == FLOAT8) or weight.levels is not None:
        return "inputs and weights that are rounded to different kinds of numbers have no kernel"
    if inputs.dtype not in (torch.int8, FLOAT8):
        return f"inputs in {inputs.dtype} have no kernel"
    places = _places(weight)
    if places is None or places.order is not None:
        return "rounded inputs in groups that are cut or out of order have no kernel"
    if inputs.zero is not None and (places.group_parts or places.input_parts):
        return "rounded inputs with a zero point have no kernel for weights in groups"
    if inputs.dtype == torch.int8 and not _fits_int8(weight):
        return "weights whose codes less their zero points need 9 bits have no kernel for rounded inputs"
    return None


def pack(weight: QuantisedWeight, dtype: torch.dtype) -> PackedWeight:
    """A weight of which `why_not_packed` says nothing. Reads values on the host: for loading alone.

    dtype: of the inputs, in which levels are kept.
    """
    inputs = weight.inputs
    if inputs is not None and inputs.dtype == torch.int8:
        weight = replace(weight, held=_shifted(weight).to(torch.int8), zero=None)
    bits, places = _slot(weight), _places(weight)
    assert places is not None
    codes = _placed(weight.codes, places, bits)
    num_parts = codes.shape[1] // places.part
    if bits == 8:
        steps = codes.unflatten(1, (-1, places.part)).transpose(0, 1)
        stored = steps.contiguous() if inputs is None else steps
    else:
        stored = _words(codes, bits)
    packed = PackedWeight(
        stored,
        _narrowest(_by_group(weight.scale, places, num_parts)),
        bits,
        places.part,
        weight.shape[1],
        places.lead,
        places.group_parts,
        places.input_parts,
        levels=None if weight.levels is None else F.pad(weight.levels, (0, (1 << bits) - len(weight.levels))).to(dtype),
        order=None if places.order is None else places.order.to(codes.device),
    )
    if inputs is not None and inputs.zero is not None:
        sums = weight.codes.sum(dim=1, dtype=torch.int32)
        packed = replace(packed, offset=sums * inputs.zero.to(torch.int32))
    if weight.zero is None:
        return packed
    return _with_zero(packed, _by_group(weight.zero, places, num_parts), num_parts)


def stacked_weights(experts: Sequence[PackedWeight]) -> PackedWeight | None:
    """The weights of all experts as one; None where they are not stored alike."""
    first = experts[0]
    if first.offset is not None or not all(_is_alike(first, other) for other in experts[1:]):
        return None
    return replace(
        first,
        codes=torch.stack([expert.codes for expert in experts]),
        scale=_narrowest(torch.stack([expert.scale.float() for expert in experts])),
        zero=_stacked([expert.zero for expert in experts]),
        order=_stacked([expert.order for expert in experts]),
    )


def _is_alike(one: PackedWeight, other: PackedWeight) -> bool:
    plain = ("bits", "part", "num_inputs", "lead", "group_parts", "input_parts", "fixed_zero")
    tensors = ((getattr(one, name), getattr(other, name)) for name in ("codes", "scale", "zero", "levels", "order"))
    return (
        all(getattr(one, name) == getattr(other, name) for name in plain)
        and all(_shape(of_one) == _shape(of_other) for of_one, of_other in tensors)
        and (one.levels is None or other.levels is None or torch.equal(one.levels, other.levels))
    )


def _slot(weight: QuantisedWeight) -> int:
    """Bits of a code's place. Codes that meet rounded inputs have a byte each."""
    return 8 if weight.bits > 4 or weight.inputs is not None else 4 if weight.bits > 2 else 2


def _places(weight: QuantisedWeight) -> Places | None:
    """How the inputs are laid out; None: no product of rounded inputs can be."""
    groups, bits = weight.groups.cpu(), _slot(weight)
    rounded = 0 if weight.inputs is None else weight.inputs.group
    if rounded >= (weight.num_inputs or weight.shape[1]):
        rounded = 0
    is_grouped = bool((groups != groups[0]).any())
    of_weight = _regular(groups) if is_grouped else None
    of_inputs = (rounded, weight.first_input % rounded) if rounded else None
    known = of_weight or of_inputs
    size, lead = known or (0, 0)
    sizes = (PACKED_PART,) if bits < 8 else PARTS_OF_BYTES
    part = next((part for part in sizes if size % part == 0), None)
    is_cut = is_grouped and of_weight is None
    if is_cut or part is None or (None not in (of_weight, of_inputs) and of_weight != of_inputs):
        return None if rounded else _gathered(groups, bits)
    return Places(part, lead, size // part if is_grouped else 0, size // part if rounded else 0)


def _regular(groups: Tensor) -> tuple[int, int] | None:
    """The size of groups of neighbours, all alike, and how much of the first one is cut off; None: other groups."""
    found, counts = torch.unique_consecutive(groups, return_counts=True)
    if len(found) < 2 or not torch.equal(found, torch.arange(len(found))):
        return None
    size = int(counts.max())
    inner = counts[1:-1]
    return (size, size - int(counts[0])) if bool((inner == size).all()) else None


def _gathered(groups: Tensor, bits: int) -> Places:
    """Inputs sorted by group, each group filled up to whole parts of 32."""
    part = PACKED_PART
    assert part in PARTS_OF_BYTES
    step = part if bits == 8 else part * 16 // bits
    order = torch.argsort(groups, stable=True)
    counts = torch.bincount(groups)
    padded = (counts + part - 1) // part * part
    total = -(-int(padded.sum()) // step) * step
    starts, firsts = (torch.cumsum(sizes, 0) - sizes for sizes in (padded, counts))
    place = torch.arange(len(groups)) + (starts - firsts)[groups[order]]
    places = torch.full((total,), -1, dtype=torch.int32).index_copy_(0, place, order.int())
    of_part = torch.repeat_interleave(torch.arange(len(counts)), padded // part)
    of_part = torch.cat([of_part, of_part.new_zeros(total // part - len(of_part))])
    return Places(part, 0, 1, 0, places, of_part)


def _placed(codes: Tensor, places: Places, bits: int) -> Tensor:
    """Codes [F, D] → [F, places], 0 where no input is."""
    outputs, inputs = codes.shape
    plain = codes.view(torch.uint8)
    if places.order is not None:
        order = places.order.to(codes.device)
        placed = plain.index_select(1, order.clamp(min=0))
        return torch.where(order >= 0, placed, torch.zeros_like(placed)).view(codes.dtype)
    step = places.part * (1 if bits == 8 else 16 // bits)
    total = -(-(places.lead + inputs) // step) * step
    if total == inputs:
        return codes.contiguous()
    placed = plain.new_zeros(outputs, total)
    placed[:, places.lead : places.lead + inputs] = plain
    return placed.view(codes.dtype)


def _words(codes: Tensor, bits: int) -> Tensor:
    """Codes [F, places] → [S, F, words] int32."""
    pairs = codes.unflatten(1, (-1, 16 // bits, WORDS, 2)).transpose(0, 1)  # [S, F, parts, words, 2]
    words = torch.zeros(*pairs.shape[:2], WORDS, dtype=torch.int32, device=codes.device)
    for part in range(16 // bits):
        for half in range(2):
            words |= pairs[:, :, part, :, half].int() << (part * bits + 16 * half)
    return words


def _by_group(numbers: Tensor, places: Places, num_parts: int) -> Tensor:
    """[F, G] → [G, F], as many groups as all parts of all steps are in; of gathered inputs each part is a group."""
    if places.group_of_part is not None:
        numbers = numbers.index_select(1, places.group_of_part.to(numbers.device))
    groups = -(-num_parts // places.group_parts) if places.group_parts else 1
    return F.pad(numbers.t(), (0, 0, 0, groups - numbers.shape[1])).contiguous()


def _narrowest(numbers: Tensor) -> Tensor:
    """The same numbers in 16 bits where these hold them."""
    for dtype in (torch.float16, torch.bfloat16):
        if torch.equal(numbers.to(dtype).float(), numbers):
            return numbers.to(dtype)
    return numbers


def _with_zero(packed: PackedWeight, zero: Tensor, num_parts: int) -> PackedWeight:
    # The kernel takes zero points from the sums of groups, and so needs one.
    grouped = packed if packed.group_parts else replace(packed, group_parts=num_parts)
    least, most = (float(bound) for bound in zero.aminmax())
    if not torch.equal(zero, zero.round()) or max(-least, most) > MOST_ZERO:
        return replace(grouped, zero=zero)
    if least == most:
        return replace(packed, fixed_zero=int(most))
    return replace(grouped, zero=zero.to(torch.uint8 if least >= 0 and most <= 255 else torch.int16))


def _shifted(weight: QuantisedWeight) -> Tensor:
    """Codes less their zero points, [F, D]."""
    if weight.zero is None:
        return weight.codes
    return weight.codes.float() - weight.zero.index_select(1, weight.groups)


def _fits_int8(weight: QuantisedWeight) -> bool:
    if weight.codes.dtype == torch.int8 and weight.zero is None:
        return True
    least, most = (float(bound) for bound in _shifted(weight).aminmax())
    return (weight.zero is None or torch.equal(weight.zero, weight.zero.round())) and least >= -128 and most <= 127


def _shape(tensor: Tensor | None) -> torch.Size | None:
    return None if tensor is None else tensor.shape


def _stacked(tensors: Sequence[Tensor | None]) -> Tensor | None:
    present = [tensor for tensor in tensors if tensor is not None]
    return torch.stack(present) if present else None
