"""What the commands' options have in common: types for argparse, and how an option is written.

A type raises `argparse.ArgumentTypeError` with one sentence that names the value and the bound. Which options there are
is each command's business.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable, Iterable
from typing import Any


def positive(text: str) -> int:
    """An argparse type: a whole number of at least 1."""
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text} is not a whole number of at least 1")
    return int(text)


def not_negative(text: str) -> int:
    """An argparse type: a whole number of at least 0."""
    return 0 if text == "0" else positive(text)


def at_least_two(text: str) -> int:
    """An argparse type: a decode length that has a decode step, because the prefill gives the first token."""
    if (value := positive(text)) < 2:
        raise argparse.ArgumentTypeError(f"{text} leaves no decode step: the prefill gives the first token")
    return value


def number(
    *, above: float = -math.inf, at_least: float = -math.inf, at_most: float = math.inf
) -> Callable[[str], float]:
    """An argparse type: a finite number within the bounds that are given."""
    bounds = {"above": above, "at least": at_least, "at most": at_most}
    wanted = " and ".join(f"{word} {bound:g}" for word, bound in bounds.items() if math.isfinite(bound))

    def parse(text: str) -> float:
        value = float(text)
        if not (math.isfinite(value) and above < value and at_least <= value <= at_most):
            raise argparse.ArgumentTypeError(f"{text} is not {wanted}")
        return value

    return parse


def option(name: str) -> str:
    """The option that sets the argument `name`: `num_shard` is `--num-shard`."""
    return f"--{name.replace('_', '-')}"


def options_given(args: argparse.Namespace, names: Iterable[str]) -> list[str]:
    """Those of the arguments `names` that the user gave, as options. An argument without a default is None or empty."""
    return [option(name) for name in names if getattr(args, name)]


def distinct(values: Iterable[Any]) -> list[Any]:
    """The values in their order, each once: two rows of the same load would have the same prompts."""
    return list(dict.fromkeys(values))
