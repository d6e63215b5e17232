r"""Expressions for names of layers that stand in the config of a checkpoint, matched in a time that has a bound.

A config is untrusted, and Python's `re` may take years for an expression such as `(.+)+x`. The package `regex` reads
the same syntax and ends a match at a deadline, so it is what matches here; all expressions of a config share a budget
of seconds. What they mean is what `re` reads in them, as the libraries do that write them, so `re` has to accept an
expression first. Refused, for `regex` reads them otherwise, or in a time or memory without a bound: flags, braces that
are no repeat, and repeats in each other whose product is large, which `regex` writes out.
"""

from __future__ import annotations

import re
import time
import warnings

import regex

MOST_S = 60.0  # of computing, for all names and expressions of a config; a usual match takes some microseconds
MOST_WRITTEN = 1_000_000  # characters of a config's expressions with repeats written out: 200 MB once compiled
ESCAPED = re.compile(r"\\.", re.DOTALL)
FLAGS = re.compile(r"\(\?[^:=!<>P()#]")
NO_REPEAT = re.compile(r"\{(?!\d+(?:,\d*)?\}|,\d+\})|\[:")  # approximate matching, and classes as of POSIX
TOO_LONG = (
    "the expressions in `quantization_config` take too long to compare with the names of all layers: take another "
    "checkpoint of this model"
)
REPEAT = re.compile(r"(\))?\{(\d*),?(\d*)\}")


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
