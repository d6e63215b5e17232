"""Rotations that a compressed-tensors checkpoint was quantised with, `transform_config`: those of weights are served.

SpinQuant (Liu et al. 2024, arXiv 2405.16406) and QuIP (Chee et al. 2023, arXiv 2307.13304) multiply a layer's inputs
and the weights that make them with orthogonal matrices that cancel. Where both are weights (R1, R2), a server computes
what it always does. Left out: those of activations (R3, R4), which would have to be computed with every token.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from server.checkpoint.formats.protocol import FormatError
from server.quant.configs import AGAIN, shown

OF_WEIGHTS = ("weight_input", "weight_output")


def refuse_online_rotations(config: Mapping[str, Any]) -> None:
    """Raise FormatError where a rotation is of anything but weights."""
    groups = config.get("config_groups") or {}
    if not isinstance(groups, Mapping) or set(config) - {"config_groups"}:
        raise FormatError(
            "`transform_config` of a compressed-tensors checkpoint must be an object of `config_groups`. Given: "
            f"{shown(config)}; {AGAIN}"
        )
    for name, group in groups.items():
        for applied in group["apply"]:
            if applied["location"] not in OF_WEIGHTS:
                raise FormatError(
                    f"rotation {shown(name)} in `transform_config` is of {shown(applied['location'])}, and only those "
                    f"of weights are served, {' and '.join(OF_WEIGHTS)}, such as R1 and R2 of SpinQuant: write the "
                    "checkpoint without R3 and R4"
                )
