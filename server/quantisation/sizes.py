"""In how many bits a model's linear layers are stored, from its config or a name: what people are told and plans count.

No torch here, so that plans start at once, and no names of tensors: `server/checkpoint/formats/` reads these. What is
counted is what kernels keep in memory, of which those of `backends/cpu/quantised.py` are the measure: codes of 4 or
8 bits, and for each group of a row a scale, of 16 bits where the format's are, and its zero if zeros differ. Where a
checkpoint stores groups of layers in several ways, all count as the first. A config is untrusted (`configs.py`).

Shapes: F output features, D input features.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from server.quantisation import exclusions
from server.quantisation.configs import Budget, FormatError, block_size, group_size, read_config, shown, strategy_of
from server.quantisation.exclusions import Exclusions
from server.quantisation.quark import Layers
from server.quantisation.torchao import layout_of
from server.quantisation.translation import translated

# Inputs of a block, which share a scale in memory, where products are of integers. Groups are filled up to whole ones.
BLOCKS = (128, 64, 32)
MORE_SLOTS = 1.05  # for which a longer block is taken than the one with the fewest slots
MXFP4_GROUP = 32  # inputs that share a power of 2
FILLED = BLOCKS[-1] // 2  # slots that stay empty in a group on average, where its inputs are scattered over ranks


@dataclass(frozen=True)
class Storage:
    """How linear layers are stored. name: as `--quantize` knows it."""

    name: str
    bits: int = 8
    group: int = 0  # neighbouring inputs of a row that share a scale; 0: all of them do
    scale_bytes: int = 4  # of a group of a row
    zero_bytes: int = 0  # likewise, of the code that stands for 0; 0: all groups have the same
    rounds_inputs: bool = False  # whether inputs have 8 bits as well
    has_levels: bool = False  # whether codes stand for numbers of a table, and are no integers
    has_float4: bool = False  # whether these are float4's with so large groups that a CPU multiplies them as integers
    has_int8_head: bool = False  # whether the head, and a table tied to it, are stored in int8
    includes_head: bool = False  # whether a head that is not tied is stored as the layers are
    exclusions: Exclusions = field(default_factory=Exclusions)  # layers that are dense
    kind: str = ""  # another name of it, which says more
    is_float: bool = False  # whether codes are float8
    is_packed: bool = False  # whether compressed-tensors has several codes in a word
    has_float_inputs: bool = False  # whether rounded inputs are float8
    has_exact_inputs: bool = False  # whether a CPU takes inputs as they are where the format does
    is_scattered: bool = False  # whether the inputs of a group may lie anywhere in a row (`desc_act`)

    @property
    def names(self) -> tuple[str, ...]:
        """What `--quantize` may call it."""
        return (self.name, self.kind) if self.kind else (self.name,)

    @property
    def description(self) -> str:
        """As in messages: `gptq, 4 bits, groups of 128`."""
        parts = [self.name, f"{self.bits} bits"]
        parts += [f"groups of {self.group}"] if self.group else []
        parts += ["8-bit inputs"] if self.rounds_inputs else []
        parts += ["head in int8"] if self.has_int8_head else []
        return ", ".join(parts)

    def weight_bytes(self, outputs: int, inputs: int, ranks: int = 1) -> int:
        """Memory of a weight [F, D], or of what one of several ranks has of it, among which its inputs are divided."""
        bits = 4 if self.bits <= 4 else 8
        share = -(-inputs // ranks)
        if self._is_in_integers:
            block, slots = self._slots(inputs, ranks)
            of_row, scales = slots * bits, slots // block
        else:
            of_row, scales = share * bits, self.num_groups(inputs if self.is_scattered else share)
        return -(-outputs * of_row // 8) + outputs * scales * (self.scale_bytes + self.zero_bytes)

    @property
    def _is_in_integers(self) -> bool:
        """Whether a CPU multiplies it in integers."""
        has_others = self.has_levels and not self.has_float4
        return not (has_others or self.is_float or self.has_float_inputs or self.has_exact_inputs)

    def with_exact_inputs(self) -> Storage:
        """As a CPU keeps it in float32, or where `--cpu-inputs` is exact: scales and zeros are float32 as well."""
        if self.rounds_inputs or not self._is_in_integers:
            return self
        return replace(self, has_exact_inputs=True, scale_bytes=4, zero_bytes=4 if self.zero_bytes else 0)

    def _slots(self, inputs: int, ranks: int) -> tuple[int, int]:
        """(slots that share a scale, slots of a row) of a rank's share, as a CPU keeps it."""
        share = -(-inputs // ranks)
        if self.rounds_inputs and not self.group and self.bits > 4:
            return share, share
        if self.is_scattered and self.group and ranks > 1:
            return BLOCKS[-1], -(-(share + self.num_groups(inputs) * FILLED) // BLOCKS[-1]) * BLOCKS[-1]
        size = self.group or share
        return slots_of([min(size, share - start) for start in range(0, share, size)])

    def product_kind(self, dtype: str, *, on_cpu: bool) -> str:
        """Of which numbers of 8 bits or less products are, int4, int8 or float8; empty: they are of the model's dtype.

        Weights alone say nothing of that: a GPU widens them for inputs of 16 bits, and a CPU rounds inputs of bfloat16
        to int8 where codes are integers; it has no float8. Some multiply int4 with int8 faster than two int8.
        """
        if self._is_in_integers:
            kind = "int4" if on_cpu and self.bits <= 4 else "int8"
            return kind if self.rounds_inputs or (on_cpu and dtype == "bfloat16") else ""
        return "float8" if self.is_float and self.rounds_inputs and not on_cpu else ""

    def of_head(self, *, is_tied: bool) -> Storage | None:
        """How the head is stored; None: dense. is_tied: to the embedding table."""
        if self.has_int8_head:
            return IN_FLIGHT["int8"]
        return self if self.includes_head and not is_tied else None

    def num_groups(self, inputs: int) -> int:
        """Groups of a row of so many inputs."""
        return -(-inputs // self.group) if self.group else 1

    def leaves_out(self, name: str) -> bool:
        """Whether the layer of this name is dense."""
        return self.exclusions.hold(name)


def slots_of(counts: Sequence[int]) -> tuple[int, int]:
    """(slots of a block, slots of all) for groups of so many inputs, each filled up to whole blocks."""
    slots = {block: sum(-(-count // block) * block for count in counts) for block in BLOCKS}
    block = next(block for block in BLOCKS if slots[block] <= MORE_SLOTS * slots[BLOCKS[-1]])
    return block, slots[block]


IN_FLIGHT: Mapping[str, Storage] = {
    storage.name: storage
    for storage in (
        Storage("int8", rounds_inputs=True, has_int8_head=True),
        Storage("fp8", rounds_inputs=True, is_float=True),
        Storage("int4", bits=4, group=128, scale_bytes=2, zero_bytes=1, has_int8_head=True),
        Storage("eetq"),
        Storage("bitsandbytes"),
        Storage("bitsandbytes-nf4", bits=4, group=64, has_levels=True),
        Storage("bitsandbytes-fp4", bits=4, group=64, has_levels=True),
    )
}


def in_flight(name: str, head: str = "int8") -> Storage:
    """What `--quantize` makes of dense weights; head: as `--quantize-head`."""
    storage = IN_FLIGHT[name]
    return storage if head == "int8" else replace(storage, has_int8_head=False)


def described(text: str) -> Storage | None:
    """The in-flight storage that begins a `description`, or is its name; None where it is none of these."""
    name, *details = text.split(", ")
    return (
        in_flight(name, "int8" if not details or "head in int8" in details else "none") if name in IN_FLIGHT else None
    )


def of_config(hf_config: Mapping[str, Any]) -> Storage | None:
    """How a checkpoint stores its linear layers, by its own config; None: dense. Raises FormatError."""
    config = config_of(hf_config)
    return read_config(_read, config) if config else None


def _read(config: Mapping[str, Any]) -> Storage:
    config = translated(config)
    method = str(method_of(config))
    if method not in READERS:
        raise FormatError(f"`quant_method` {shown(method)} is not served: {', '.join(READERS)} are")
    dense = exclusions.of_config(config, method, Budget())
    return replace(READERS[method](config), exclusions=dense, includes_head=not dense.holds_head)


def config_of(hf_config: Mapping[str, Any]) -> Mapping[str, Any]:
    """What a model's config says of quantised weights, be it in its text half; empty where it says nothing."""
    text = hf_config.get("text_config")
    halves = (hf_config, text if isinstance(text, Mapping) else {})
    keys = ("quantization_config", "compression_config")
    found: Mapping[str, Any] = next((half[key] for half in halves for key in keys if half.get(key)), {})
    return found


# Keys that only one tool writes -> its `quant_method`, for configs that name none. The first that is there counts.
TOLD_BY: Mapping[str, str] = {
    "load_in_4bit": "bitsandbytes",
    "load_in_8bit": "bitsandbytes",
    "_load_in_4bit": "bitsandbytes",
    "_load_in_8bit": "bitsandbytes",
    "config_groups": "compressed-tensors",
    "sparsity_config": "compressed-tensors",
    "weight_quant_params": "hqq",
    "global_quant_config": "quark",
    "quant_type": "torchao",
    "activations": "quanto",
    "desc_act": "gptq",
    "zero_point": "awq",
}


def method_of(config: Mapping[str, Any]) -> str | None:
    """The `quant_method`, or what the keys tell where none is named."""
    if config.get("quant_method"):
        return str(config["quant_method"])
    if config.get("is_marlin_format"):
        return "marlin"
    return next((method for key, method in TOLD_BY.items() if key in config), None)


def _gptq(config: Mapping[str, Any]) -> Storage:
    return Storage(
        "gptq",
        int(config.get("bits", 4)),
        max(0, group_size(config.get("group_size", -1), "a gptq checkpoint")),
        scale_bytes=2,
        zero_bytes=int(not config.get("sym", False)),
        is_scattered=bool(config.get("desc_act")) and not config.get("static_groups"),
    )


def _awq(config: Mapping[str, Any]) -> Storage:
    size = group_size(config.get("group_size") or config.get("q_group_size") or 128, "an awq checkpoint")
    bits, has_zeros = int(config.get("bits") or config.get("w_bit") or 4), bool(config.get("zero_point", True))
    return Storage("awq", bits, max(0, size), 2, int(has_zeros))


def _compressed(config: Mapping[str, Any]) -> Storage:
    first = next(iter((config.get("config_groups") or {}).values()), None) or {}
    weights = first.get("weights") or {}
    strategy, group = strategy_of(weights), 0
    if strategy in ("group", "tensor_group"):
        group = group_size(weights.get("group_size"), "weights", may_be_all=False)
    elif strategy == "block":
        group = block_size(weights.get("block_structure"), "block_structure")[1]
    is_float, inputs = weights.get("type") == "float", first.get("input_activations")
    has_float_inputs = inputs is not None and inputs.get("type") == "float"
    format = first.get("format") or config.get("format")
    is_packed, bits = format == "pack-quantized", int(weights.get("num_bits", 8))
    if is_float and (bits == 4 or format == "mxfp8-quantized"):  # inputs are taken as they are
        storage = Storage("compressed-tensors", bits, group, has_levels=bits == 4, is_float=bits == 8)
        return _in_integers(storage) if format == "mxfp4-pack-quantized" else storage
    return Storage(
        "compressed-tensors",
        bits,
        group,
        scale_bytes=2 if is_packed else 4,
        zero_bytes=int(is_packed and not weights.get("symmetric", True)),
        rounds_inputs=inputs is not None,
        kind="" if inputs is None else "fp8" if has_float_inputs else "int8",
        has_float_inputs=has_float_inputs,
        is_scattered=weights.get("actorder") in ("group", "dynamic", True),
        is_float=is_float,
        is_packed=is_packed,
    )


def _mxfp4(config: Mapping[str, Any]) -> Storage:
    return _in_integers(Storage("mxfp4", 4, MXFP4_GROUP, has_levels=True))


def _in_integers(storage: Storage) -> Storage:
    """That of float4 with powers of 2, of which an exponent is kept."""
    return replace(storage, has_float4=True, scale_bytes=1)


def _float8(config: Mapping[str, Any]) -> Storage:
    group = 0
    if (block := config.get("weight_block_size")) is not None:
        group = block_size(block, "weight_block_size")[1]
    return Storage("fp8", 8, group, rounds_inputs=True, is_float=True)


def _bitsandbytes(config: Mapping[str, Any]) -> Storage:
    if config.get("load_in_8bit") or config.get("_load_in_8bit"):
        return Storage("bitsandbytes", 8)
    kind = f"bitsandbytes-{config.get('bnb_4bit_quant_type', 'fp4')}"
    return Storage("bitsandbytes", 4, group=64, has_levels=True, kind=kind)


def _quark(config: Mapping[str, Any]) -> Storage:
    if (first := Layers(config, Budget()).first) is None:  # only the cache of keys and values is in fewer bits
        return Storage("quark")
    inputs = "" if first.inputs is None else "fp8" if first.is_float else "int8"
    storage = Storage(
        "quark",
        first.bits,
        first.group,
        scale_bytes=2 if first.group and not first.is_float else 4,
        zero_bytes=int(first.has_zero),
        rounds_inputs=first.inputs is not None,
        has_levels=first.bits == 4 and first.is_float,
        kind=inputs,
        is_float=first.bits == 8 and first.is_float,
        has_float_inputs=inputs == "fp8",
    )
    return _in_integers(storage) if storage.has_levels else storage


def _torchao(config: Mapping[str, Any]) -> Storage:
    layout = layout_of(config)
    if layout.tensor == "Int4Tensor":  # whose zeros are no codes
        return Storage("torchao", 4, layout.group, zero_bytes=4, has_exact_inputs=True)
    is_packed = layout.bits <= 4
    return Storage(
        "torchao",
        4 if is_packed else 8,
        layout.group,
        scale_bytes=2 if is_packed else 4,
        zero_bytes=int(layout.has_zeros),
        is_float=layout.tensor == "Float8Tensor",
    )


# By `quant_method`.
READERS: Mapping[str, Callable[[Mapping[str, Any]], Storage]] = {
    "gptq": _gptq,
    "awq": _awq,
    "compressed-tensors": _compressed,
    "fp8": _float8,
    "fbgemm_fp8": _float8,
    "bitsandbytes": _bitsandbytes,
    "mxfp4": _mxfp4,
    "quark": _quark,
    "torchao": _torchao,
}
