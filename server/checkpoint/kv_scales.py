"""The scales of keys and values that some checkpoints have, made for a KV cache in float8.

llm-compressor and its kin write one number for all keys of a layer and one for all values, under several names. Left
out: scales for each head, which no server reads either; and what is done with a scale (`server/quant/kv.py`).
"""

from __future__ import annotations

import math

from server.checkpoint.formats.protocol import FLOATS, FormatError, Source

KV_SCALES = (".k_scale", ".v_scale", ".output_scale", ".kv_scale")


def kv_scales(source: Source, keys: str, values: str) -> tuple[float, float] | None:
    """By what a layer's keys and values are divided; None where the checkpoint does not say so for both.

    keys, values: names of the projections, which are the same where one computes both. Raises FormatError.
    """
    found = [_scale(source, keys, "k", is_alone=keys != values), _scale(source, values, "v", is_alone=keys != values)]
    return None if found[0] is None or found[1] is None else (found[0], found[1])


def _scale(source: Source, projection: str, part: str, *, is_alone: bool) -> float | None:
    names = [f"{projection.rpartition('.')[0]}.{part}_scale", f"{projection}.{part}_scale"]
    names += [f"{projection}.output_scale"] if is_alone else []
    names.append(f"{projection.rpartition('.')[0]}.kv_scale")  # of older ones, for both
    name = next((name for name in names if name in source), None)
    if name is None:
        return None
    shape = source.shape_of(name)
    if math.prod(shape) != 1:
        raise FormatError(
            f"tensor {name} has shape {list(shape)}, but only one scale for all heads of a layer is served: use "
            "--kv-cache-dtype int8, which makes its own"
        )
    scale = float(source.read(name, shape, dtypes=FLOATS).item())
    if not (scale > 0 and math.isfinite(scale)):
        raise FormatError(
            f"tensor {name} is {scale}, but a scale is above 0 and finite: use --kv-cache-dtype int8, which makes its "
            "own"
        )
    return scale
