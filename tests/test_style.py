"""How the code reads, as far as it can be counted: annotations, and the length of functions."""

from __future__ import annotations

import ast
from collections.abc import Iterator

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
