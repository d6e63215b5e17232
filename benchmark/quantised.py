"""Kinds and shapes of quantised weights that are served: what `kernels` compiles for and `products` times.

Shapes: F output features, D input features.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from server.quant.noise import Kind

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
