"""What an untrusted config says of quantised weights, checked: each value is good, or refused in a sentence.

No torch here, and no names of tensors. Left out: what values mean (`sizes.py`, `server/checkpoint/formats/`), and which
layers are meant (`exclusions.py`).

Expressions for names of layers are matched in a time that has a bound: Python's `re` may take years for one such as
`(.+)+x`. The package `regex` reads the same syntax and ends a match at a deadline, so it is what matches here; all
expressions of a config share a budget of seconds. The libraries that write them use `re`, so `re` has to accept an
expression first. What `regex` reads otherwise than `re`, or in a time or memory without a bound, is refused: flags,
braces that are no repeat, and repeats in each other whose product is large, which `regex` writes out.
"""

from __future__ import annotations

import re
import reprlib
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

import regex

Read = TypeVar("Read")
MOST_SHOWN = 100  # characters of a value that a sentence quotes
AGAIN = "download config.json again"
# What reading a config of wrong types, or of numbers that nothing can hold, may raise.
UNREADABLE = (TypeError, AttributeError, LookupError, ArithmeticError, RecursionError, re.error, ValueError)
LEAST_GROUP, MOST_GROUP = 8, 1 << 24  # inputs that share a scale; fewer would take more memory than what they scale


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


MOST_EXPRESSIONS, MOST_EXPRESSION = 4096, 1000  # of names of layers in a config, and characters of each
MOST_S = 60.0  # of computing, for all names and expressions of a config; a usual match takes some microseconds
MOST_WRITTEN = 1_000_000  # characters of a config's expressions with repeats written out: 200 MB once compiled
ESCAPED = re.compile(r"\\.", re.DOTALL)
FLAGS = re.compile(r"\(\?[^:=!<>P()#]")
NO_REPEAT = re.compile(r"\{(?!\d+(?:,\d*)?\}|,\d+\})|\[:")  # approximate matching, and classes as of POSIX
REPEAT = re.compile(r"(\))?\{(\d*),?(\d*)\}")
TOO_LONG = (
    "the expressions in `quantization_config` take too long to compare with the names of all layers: take another "
    "checkpoint of this model"
)


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


class ExpressionError(ValueError):
    """An expression is none, or has what is not understood; says what, without the expression."""


class Budget:
    """What the expressions of a config may still take."""

    def __init__(self, most_s: float = MOST_S) -> None:
        self.left_s = most_s
        self.left_written = MOST_WRITTEN
        self.num_expressions = 0

    def spend(self, since: float) -> None:
        """Count what has been computed since `time.thread_time()` was `since`. Raises ExpressionError."""
        self.left_s -= time.thread_time() - since
        if self.left_s <= 0:
            raise ExpressionError(TOO_LONG)


class Expression:
    """Raises ExpressionError for what is none, is too large or is not understood."""

    def __init__(self, text: str, budget: Budget) -> None:
        self._budget = budget
        began = time.thread_time()
        plain = ESCAPED.sub("x", text)
        if FLAGS.search(plain):
            raise ExpressionError("flags are not understood")
        if NO_REPEAT.search(plain):
            raise ExpressionError("a `{` that begins no repeat, or a `[:`, is not understood: write a `\\` before it")
        budget.left_written -= _written(plain)
        if budget.left_written < 0:
            raise ExpressionError(f"more than {MOST_WRITTEN} characters, with what is repeated written out")
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("error")  # what a later `re` will read in another way
                re.compile(text)
            self._pattern = regex.compile(text, regex.V0, cache_pattern=False)
        except (re.error, regex.error, Warning, OverflowError, RecursionError) as error:
            raise ExpressionError(_told(error)) from None
        budget.spend(began)

    def match(self, name: str) -> bool:
        """Whether the name begins with what this stands for, as `re.match`. Raises ExpressionError as `Budget` does."""
        began = time.thread_time()
        try:
            found = self._pattern.match(name, timeout=self._budget.left_s)
        except TimeoutError:
            raise ExpressionError(TOO_LONG) from None
        self._budget.spend(began)
        return found is not None


def _written(plain: str) -> int:
    """Characters of an expression with its repeats written out, at most: those of groups may be in each other."""
    ones, groups = 0, 2 ** plain.count(")+")
    for group, least, most in REPEAT.findall(plain):
        times = max(int(least or 1), int(most or 1))
        ones, groups = (ones, groups * times) if group else (ones + times, groups)
    return (len(plain) + ones) * groups


def _told(error: Exception) -> str:
    if isinstance(error, OverflowError | RecursionError):
        return "a repeat is too large, or groups are too deep in each other"
    return re.split("['\"]", getattr(error, "msg", str(error)))[0].strip()  # what is quoted is of the expression
