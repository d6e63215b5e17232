"""How a model's linear layers are stored: as its checkpoint has them, or quantised while they are loaded."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from server.checkpoint import formats
from server.checkpoint.formats.protocol import Format
from server.checkpoint.quantize_config import with_file
from server.quant import sizes
from server.quant.rounding import float8_rows, fp4_blocks, int4_groups, int8_rows, int8_weights, nf4_blocks
from server.quant.stored import QuantisedWeight

Quantise = Callable[[Tensor], QuantisedWeight]

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
    format = formats.find(folder, hf_config)
    if format is not None:
        return _of_checkpoint(wanted, format, sizes.of_config(with_file(folder, hf_config)))
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
