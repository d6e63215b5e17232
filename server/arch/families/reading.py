"""What several families read from config.json in the same way: activations, rotary settings, layer types."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

from server.arch.spec import (
    Activation,
    DynamicScaling,
    LinearScaling,
    Llama3Scaling,
    LongScaling,
    Rope,
    Scaling,
    YarnScaling,
)

Config = Mapping[str, Any]

ACTIVATIONS = {
    "gelu": Activation.GELU,
    "gelu_new": Activation.GELU_TANH,
    "gelu_fast": Activation.GELU_TANH,
    "gelu_pytorch_tanh": Activation.GELU_TANH,
    "relu": Activation.RELU,
    "silu": Activation.SILU,
    "swish": Activation.SILU,
}


def activation(name: str) -> Activation:
    """The activation that config.json calls `name`."""
    if name not in ACTIVATIONS:
        raise ValueError(f"config.json asks for the activation {name!r}; served are: {', '.join(sorted(ACTIVATIONS))}")
    return ACTIVATIONS[name]


def head_dim(config: Config) -> int:
    """Features of one head: given, or the model's width divided by its heads."""
    return config.get("head_dim") or share_of(config["hidden_size"], config["num_attention_heads"])


def share_of(width: int, heads: int) -> int:
    """Features of one of so many heads that share a width."""
    if heads > width:
        raise ValueError(f"config.json says {heads} heads for a width of {width}: download it again")
    return width // heads


def layer_windows(config: Config, is_windowed: Callable[[int], bool]) -> list[int]:
    """The window of each layer, 0 for none: by `layer_types` where config.json has them, else by `is_windowed`."""
    window = config.get("sliding_window") or 0
    types = config.get("layer_types") or []
    count = config["num_hidden_layers"]
    windowed = [kind == "sliding_attention" for kind in types] or [is_windowed(i) for i in range(count)]
    if len(windowed) != count:
        raise ValueError(f"config.json has {len(windowed)} `layer_types` for {count} layers: download it again")
    return [window if wanted else 0 for wanted in windowed]


def rope(config: Config, dim: int, *, kind: str | None = None, theta: float = 10000.0) -> Rope:
    """The rotation that config.json describes, in its old form (`rope_theta`, `rope_scaling`) or in its new one.

    kind: the layer type, for models that rotate their layer types differently; theta: the default of the family.
    """
    given = config.get("rope_parameters") or {}
    given = given.get(kind, given) if kind else given
    given = given or config.get("rope_scaling") or {}
    base = given.get("rope_theta") or config.get("rope_theta") or theta
    name = given.get("rope_type") or given.get("type") or "default"
    if name not in SCALINGS:
        raise ValueError(f"config.json asks for the rope type {name!r}; served are: {', '.join(sorted(SCALINGS))}")
    return Rope(theta=float(base), dim=dim, scaling=SCALINGS[name](given, config))


def _trained(given: Config, config: Config) -> int:
    key = "original_max_position_embeddings"
    return given.get(key) or config.get(key) or config["max_position_embeddings"]


def _linear(given: Config, config: Config) -> Scaling:
    return LinearScaling(given["factor"])


def _dynamic(given: Config, config: Config) -> Scaling:
    return DynamicScaling(given["factor"], config["max_position_embeddings"])


def _llama3(given: Config, config: Config) -> Scaling:
    return Llama3Scaling(given["factor"], given["low_freq_factor"], given["high_freq_factor"], _trained(given, config))


def _yarn(given: Config, config: Config) -> Scaling:
    def magnitude(mscale: float) -> float:
        return 0.1 * mscale * math.log(given["factor"]) + 1.0 if given["factor"] > 1 else 1.0

    scale = given.get("attention_factor")
    if scale is None and given.get("mscale") and given.get("mscale_all_dim"):
        scale = magnitude(given["mscale"]) / magnitude(given["mscale_all_dim"])
    return YarnScaling(
        factor=given["factor"],
        trained_positions=_trained(given, config),
        beta_fast=given.get("beta_fast") or 32.0,
        beta_slow=given.get("beta_slow") or 1.0,
        truncate=given.get("truncate", True),
        magnitude=scale or magnitude(1.0),
    )


def _long(given: Config, config: Config) -> Scaling:
    trained = _trained(given, config)
    factor = given.get("factor") or config["max_position_embeddings"] / trained
    magnitude = math.sqrt(1 + math.log(factor) / math.log(trained)) if factor > 1 else 1.0
    return LongScaling(
        tuple(given["short_factor"]), tuple(given["long_factor"]), trained, given.get("attention_factor") or magnitude
    )


SCALINGS: dict[str, Callable[[Config, Config], Scaling | None]] = {
    "default": lambda given, config: None,
    "linear": _linear,
    "dynamic": _dynamic,
    "llama3": _llama3,
    "yarn": _yarn,
    "longrope": _long,
    "su": _long,
}
