"""What an untrusted config says of quantised weights, checked: each value is good, or refused in a sentence.

No torch here, and no names of tensors. Left out: what values mean (`sizes.py`, `server/checkpoint/formats/`), and which
layers are meant (`left_out.py`).
"""

from __future__ import annotations

import re
import reprlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

from server.quant.expressions import Budget, Expression, ExpressionError

Read = TypeVar("Read")

LEAST_GROUP, MOST_GROUP = 8, 1 << 24  # inputs that share a scale; fewer would take more memory than what they scale
MOST_SHOWN = 100  # characters of a value that a sentence quotes
MOST_EXPRESSIONS, MOST_EXPRESSION = 4096, 1000  # of names of layers in a config, and characters of each
AGAIN = "download config.json again"
# What reading a config of wrong types, or of numbers that nothing can hold, may raise.
UNREADABLE = (TypeError, AttributeError, LookupError, ArithmeticError, RecursionError, re.error, ValueError)


class FormatError(ValueError):
    """A checkpoint's `quantization_config` is not served, or its tensors are not what that says."""


def shown(value: object) -> str:
    """A value of a config as a sentence quotes it, cut where it is long or deep."""
    short = reprlib.Repr()
    short.maxstring = short.maxother = short.maxlong = MOST_SHOWN
    text = short.repr(value)
    return text if len(text) <= MOST_SHOWN else f"{text[:MOST_SHOWN]}…"


def read_config(read: Callable[[Mapping[str, Any]], Read], config: Any) -> Read:
    """`read(config)`, where whatever it stumbles on is one sentence. Raises FormatError."""
    try:
        return read(config)
    except FormatError:
        raise
    except UNREADABLE as error:
        told = " ".join(str(error).split())[:MOST_SHOWN]
        raise FormatError(f"`quantization_config` cannot be read: {told or type(error).__name__}; {AGAIN}") from None


def strings(config: Mapping[str, Any], key: str) -> tuple[str, ...]:
    """The names in a list of a config, none where it has no such list. Raises FormatError."""
    found = config.get(key) or []
    if not isinstance(found, list) or not all(isinstance(one, str) for one in found):
        raise FormatError(f"`{key}` in `quantization_config` must be a list of names. Given: {shown(found)}; {AGAIN}")
    return tuple(found)


def compiled(expressions: Sequence[str], budget: Budget) -> list[Expression]:
    """Expressions of the config that this budget is for. Raises FormatError for one that is none or too long.

    Likewise if the config has too many of them.
    """
    budget.num_expressions += len(expressions)
    if budget.num_expressions > MOST_EXPRESSIONS:
        raise FormatError(
            f"`quantization_config` has {budget.num_expressions} expressions for names of layers, and "
            f"{MOST_EXPRESSIONS} at most are served: take another checkpoint of this model"
        )
    return [_compiled(expression, budget) for expression in expressions]


def _compiled(expression: str, budget: Budget) -> Expression:
    if len(expression) > MOST_EXPRESSION:
        raise FormatError(
            f"an expression for names of layers in `quantization_config` has {len(expression)} characters, and "
            f"{MOST_EXPRESSION} at most are served. Given: {shown(expression)}; take another checkpoint of this model"
        )
    try:
        return Expression(expression, budget)
    except ExpressionError as error:
        raise FormatError(
            f"an expression for names of layers in `quantization_config` must be a regular one. Given: "
            f"{shown(expression)} ({error}); {AGAIN}"
        ) from None


def whole_number(value: object, least: int, most: int) -> bool:
    """Whether this is an integer from `least` to `most`, and not true or false."""
    return isinstance(value, int) and not isinstance(value, bool) and least <= value <= most


def group_size(size: Any, of: str, *, may_be_all: bool = True) -> int:
    """The inputs that share a scale, as a config of `of` says; -1: all do. Raises FormatError."""
    if not whole_number(size, LEAST_GROUP, MOST_GROUP) and not (may_be_all and whole_number(size, -1, -1)):
        raise FormatError(
            f"`group_size` of {of} must be {'-1 or ' if may_be_all else ''}a number of inputs from {LEAST_GROUP} to "
            f"{MOST_GROUP}. Given: {shown(size)}; take another checkpoint of this model"
        )
    return int(size)


def strategy_of(weights: Mapping[str, Any]) -> Any:
    """What of a weight shares a scale in compressed-tensors, of which older versions named only the group's size."""
    size = weights.get("group_size")
    return weights.get("strategy") or ("tensor" if size is None else "channel" if size == -1 else "group")


def block_size(block: Any, key: str) -> tuple[int, int]:
    """(rows, inputs) that share a scale, of a list or of text as 128x128. Raises FormatError."""
    numbers = block
    if isinstance(block, str) and re.fullmatch("[0-9]{1,9}x[0-9]{1,9}", block):  # as older versions wrote it
        numbers = [int(number) for number in block.split("x")]
    if not (
        isinstance(numbers, list)
        and len(numbers) == 2
        and whole_number(numbers[0], 1, MOST_GROUP)
        and whole_number(numbers[1], LEAST_GROUP, MOST_GROUP)
    ):
        raise FormatError(
            f"`{key}` must be two numbers, of rows from 1 and of inputs from {LEAST_GROUP} on, to {MOST_GROUP}. Given: "
            f"{shown(block)}; take another checkpoint of this model"
        )
    return numbers[0], numbers[1]
