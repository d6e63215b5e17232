"""How the code reads, as far as it can be counted: annotations, lengths of functions, names that mean two things."""

from __future__ import annotations

import ast
import symtable
import sys
from collections.abc import Iterator

import pytest

from tests.test_architecture import sources

MOST_LINES_OF_A_FUNCTION = 40  # of 99 in 100
# Kernels in a language of their own, inside Python: they are as long as their hardware wants, and Triton takes no
# annotations but its own.
KERNELS = ("server.backends.cuda.kernels.", "server.backends.cuda.fused")

Function = ast.FunctionDef | ast.AsyncFunctionDef


def functions() -> Iterator[tuple[str, Function]]:
    """Every function but kernels, those inside of functions too."""
    for module, tree in sources():
        if not module.startswith(KERNELS):
            yield from ((f"{module}.{n.name}", n) for n in ast.walk(tree) if isinstance(n, Function))


def bare_parameters(node: Function) -> list[str]:
    arguments = node.args
    every = [*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs, arguments.vararg, arguments.kwarg]
    return [a.arg for a in every if a is not None and a.annotation is None and a.arg not in ("self", "cls")]


def test_every_parameter_and_result_is_annotated() -> None:
    assert [] == [
        (name, bare_parameters(node))
        for name, node in functions()
        if bare_parameters(node) or (node.returns is None and node.name != "__init__")
    ]


def test_functions_are_short() -> None:
    lengths = sorted((node.end_lineno or 0) - node.lineno + 1 for _, node in functions())
    assert lengths[int(0.99 * len(lengths))] <= MOST_LINES_OF_A_FUNCTION
    assert lengths[-1] <= 60


def comprehensions(
    scope: symtable.SymbolTable, known: frozenset[str] = frozenset()
) -> Iterator[tuple[set[str], set[str]]]:
    """What each comprehension of a scope binds, and what it takes from outside of all around it."""
    for inner in scope.get_children():
        if inner.get_name() in ("listcomp", "setcomp", "dictcomp"):
            symbols = [symbol for symbol in inner.get_symbols() if not symbol.is_parameter()]
            bound = {symbol.get_name() for symbol in symbols if symbol.is_local()}
            taken = {symbol.get_name() for symbol in symbols if symbol.is_global() or symbol.is_free()}
            yield bound, taken - known
            yield from comprehensions(inner, known | bound)


def confused(scope: symtable.SymbolTable) -> Iterator[tuple[int, str]]:
    """Names that one comprehension of a function binds, and another takes from outside of it: with line numbers.

    Python 3.12.0 to 3.12.3, and where the function is inside another all since, find such a name unbound, as they
    compute comprehensions in the function itself: https://github.com/python/cpython/issues/118513.
    """
    found = list(comprehensions(scope))
    bound, taken = (set[str]().union(*(pair[place] for pair in found)) for place in (0, 1))
    own = {symbol.get_name() for symbol in scope.get_symbols() if symbol.is_local()}
    if scope.get_type() == "function":
        yield from ((scope.get_lineno(), name) for name in (bound & taken) - own)
    for inner in scope.get_children():
        yield from confused(inner)


@pytest.mark.skipif(sys.version_info >= (3, 12), reason="comprehensions are no scopes any more since Python 3.12")
def test_no_name_means_two_things_in_comprehensions() -> None:
    trap = "def f(a):\n    b = [id for id in a]\n    return {id(one): one for one in a}\n"
    assert [(1, "id")] == list(confused(symtable.symtable(trap, "trap", "exec")))
    assert [] == [
        (module, *where)
        for module, tree in sources()
        for where in confused(symtable.symtable(ast.unparse(tree), module, "exec"))
    ]
