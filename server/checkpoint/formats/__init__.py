"""How a model's linear layers are stored: in its checkpoint's format, by its config, or quantised while loading."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from server.checkpoint.files import with_quantisation
from server.checkpoint.formats.awq import AwqFormat
from server.checkpoint.formats.bitsandbytes import BitsAndBytesFormat
from server.checkpoint.formats.compressed import CompressedFormat
from server.checkpoint.formats.float8 import Float8Format
from server.checkpoint.formats.gptq import GptqFormat
from server.checkpoint.formats.mxfp4 import Mxfp4Format
from server.checkpoint.formats.protocol import Format, FormatError
from server.checkpoint.formats.quark import QuarkFormat
from server.checkpoint.formats.torchao import TorchaoFormat
from server.quantisation import configs, sizes
from server.quantisation.config_keys import refuse_unserved
from server.quantisation.configs import Budget
from server.quantisation.rounding import float8_rows, fp4_blocks, int4_groups, int8_rows, int8_weights, nf4_blocks
from server.quantisation.stored import Quantise
from server.quantisation.translation import translated

# By `quant_method`.
FORMATS: Mapping[str, Callable[[Mapping[str, Any], Budget], Format]] = {
    "gptq": GptqFormat,
    "awq": AwqFormat,
    "compressed-tensors": CompressedFormat,
    "fp8": Float8Format,
    "fbgemm_fp8": Float8Format,
    "bitsandbytes": BitsAndBytesFormat,
    "mxfp4": Mxfp4Format,
    "quark": QuarkFormat,
    "torchao": TorchaoFormat,
}


USE_GPTQ = "a gptq, awq or compressed-tensors checkpoint of this model"
USE_FP8 = "an fp8 or compressed-tensors checkpoint of this model"
PUBLISHED = "the model as it was published, in 16 bits, with --quantize"
OTHERS_OF_INTEGERS = (
    *("exl2", "exl3", "marlin", "gguf", "quip", "aqlm", "vptq", "higgs", "spqr", "squeezellm", "bitnet", "qqq"),
    "paroquant",
)
# What else is known by name -> what to use in its place.
REFUSED: Mapping[str, str] = {
    **dict.fromkeys(OTHERS_OF_INTEGERS, USE_GPTQ),
    **dict.fromkeys(("fp_quant", "nvfp4"), USE_FP8),
    "quanto": f"{PUBLISHED} int8 or int4",
    "hqq": f"{PUBLISHED} int4",
    "eetq": f"{PUBLISHED} eetq",
    "deepspeedfp": f"{PUBLISHED} fp8",
}

# As in `sizes.IN_FLIGHT`. bitsandbytes' 8 bits are of weights alone, as a checkpoint of it has them.
IN_FLIGHT: Mapping[str, Quantise] = {
    "int8": int8_rows,
    "fp8": float8_rows,
    "int4": int4_groups,
    "eetq": int8_weights,
    "bitsandbytes": int8_weights,
    "bitsandbytes-nf4": nf4_blocks,
    "bitsandbytes-fp4": fp4_blocks,
}
HEADS: Mapping[str, Quantise | None] = {"int8": int8_rows, "none": None}


@dataclass(frozen=True)
class Quantisation:
    """name: as people know it; None: dense. Of format and quantise, one is given where there is a name.

    quantise_head: how the head is stored, and a table tied to it; None: as the checkpoint has it.
    description: name, bits and groups, for people.
    """

    name: str | None = None
    format: Format | None = None
    quantise: Quantise | None = None
    quantise_head: Quantise | None = None
    description: str = "dense"
    storage: sizes.Storage | None = None


def choose(wanted: str | None, folder: Path, hf_config: Mapping[str, Any], head: str = "int8") -> Quantisation:
    """What `--quantize` and the checkpoint's config ask for. Raises ValueError where they contradict each other.

    head: as `--quantize-head`, for what is quantised in flight.
    """
    format = find(folder, hf_config)
    if format is not None:
        return _of_checkpoint(wanted, format, sizes.of_config(with_quantisation(folder, hf_config)))
    if wanted is None:
        return Quantisation()
    if wanted not in IN_FLIGHT:
        raise ValueError(
            f"--quantize is {wanted}, but config.json has no `quantization_config`: give a checkpoint that is "
            f"quantised so, or one of {', '.join(IN_FLIGHT)}, which quantise while loading"
        )
    storage = sizes.in_flight(wanted, head)
    quantise_head = HEADS[head] if storage.has_int8_head else None
    return Quantisation(
        wanted,
        quantise=IN_FLIGHT[wanted],
        quantise_head=quantise_head,
        description=storage.description,
        storage=storage,
    )


def _of_checkpoint(wanted: str | None, format: Format, storage: sizes.Storage | None) -> Quantisation:
    assert storage is not None, "whatever has a format has a config"
    if wanted is not None and wanted not in storage.names:
        raise ValueError(
            f"--quantize is {wanted}, but the checkpoint is quantised already, as {storage.description}: leave it out"
        )
    return Quantisation(format.name, format, description=storage.description, storage=storage)


def find(folder: Path, hf_config: Mapping[str, Any]) -> Format | None:
    """The format that a model's config names; None where its weights are dense. Raises FormatError."""
    config = sizes.config_of(with_quantisation(folder, hf_config))
    if not config:
        return None
    if not isinstance(config, Mapping):
        raise FormatError(
            f"`quantization_config` in config.json must be an object. Given: {configs.shown(config)}; {configs.AGAIN}"
        )
    return configs.read_config(_make, config)


def _make(config: Mapping[str, Any], budget: Budget | None = None) -> Format:
    config = translated(config)
    method = sizes.method_of(config)
    make = FORMATS.get(str(method))
    if make is None:
        instead = REFUSED.get(str(method).lower(), "another checkpoint of this model")
        raise FormatError(
            f"`quant_method` {configs.shown(method)} of the checkpoint is not served: {', '.join(FORMATS)} are; take "
            f"{instead}"
        )
    format = make(config, budget or Budget())
    refuse_unserved(config, str(method))
    return format
