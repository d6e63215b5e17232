"""How the code reads, as far as it can be counted: docstrings, annotations, the length of modules and functions."""

from __future__ import annotations

import ast
from collections.abc import Iterator, Sequence

from tests.test_architecture import ROOT, sources

MOST_LINES_OF_A_MODULE = 700  # its length follows from its subject: a longer one has two
MOST_LINES_OF_A_FUNCTION = 40  # of 99 in 100
LEAST_WITH_DOCSTRINGS = 0.9
# Kernels in a language of their own, inside Python: they are as long as their hardware wants, and Triton takes no
# annotations but its own.
KERNELS = ("server.backends.cuda.kernels.", "server.backends.cuda.fused")

Function = ast.FunctionDef | ast.AsyncFunctionDef


def definitions(body: Sequence[ast.stmt]) -> Iterator[ast.ClassDef | Function]:
    """Classes, functions and methods, those inside of functions left out."""
    for node in body:
        if isinstance(node, ast.ClassDef | Function):
            yield node
        if isinstance(node, ast.ClassDef):
            yield from definitions(node.body)


def functions() -> Iterator[tuple[str, Function]]:
    """Every function but kernels, those inside of functions too."""
    for module, tree in sources():
        if not module.startswith(KERNELS):
            yield from ((f"{module}.{n.name}", n) for n in ast.walk(tree) if isinstance(n, Function))


def bare_parameters(node: Function) -> list[str]:
    arguments = node.args
    every = [*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs, arguments.vararg, arguments.kwarg]
    return [a.arg for a in every if a is not None and a.annotation is None and a.arg not in ("self", "cls")]


def test_nearly_everything_public_has_a_docstring() -> None:
    public = {
        f"{module}.{node.name}": ast.get_docstring(node)
        for module, tree in sources()
        for node in definitions(tree.body)
        if not node.name.startswith("_")
    }
    silent = [name for name, docstring in public.items() if not docstring]
    assert len(public) > 900
    assert len(silent) <= (1 - LEAST_WITH_DOCSTRINGS) * len(public), silent


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


def test_modules_fit_on_some_screens() -> None:
    lines = {path: len(path.read_text().splitlines()) for path in (ROOT / "launcher.py", *ROOT.glob("*/**/*.py"))}
    packages = ("router", "server", "benchmark", "launcher.py")
    ours = {p.relative_to(ROOT): n for p, n in lines.items() if p.relative_to(ROOT).parts[0] in packages}
    long = {str(path): n for path, n in ours.items() if n > MOST_LINES_OF_A_MODULE and "pb" not in path.parts}
    assert {} == long
    assert ours[(ROOT / "launcher.py").relative_to(ROOT)] <= 250
