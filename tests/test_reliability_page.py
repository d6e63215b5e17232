"""docs/reliability.md names tests and commands: all of them exist, and no row is missing."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from functools import cache

from tests.test_architecture import ROOT

PAGE = (ROOT / "docs" / "reliability.md").read_text()
IDS = [*(f"R-{number:02}" for number in range(1, 50)), *(f"S-{number:02}" for number in range(1, 30))]


@cache
def functions(path: str) -> frozenset[str]:
    """Names of the functions at the top of a file."""
    kinds = ast.FunctionDef | ast.AsyncFunctionDef
    return frozenset(node.name for node in ast.parse((ROOT / path).read_text()).body if isinstance(node, kinds))


def rows() -> Iterator[list[str]]:
    """Cells of every row that has an id."""
    for line in PAGE.splitlines():
        if re.match(r"\| [RS]-\d\d \|", line):
            yield [cell.strip() for cell in line.strip("|").split("|")]


def test_every_row_is_there_once_and_in_order() -> None:
    assert IDS == [row[0] for row in rows()]


def test_every_row_says_what_holds_it_or_why_nothing_does() -> None:
    for id, fault, promise, held_by in rows():
        assert fault and held_by, id
        assert promise or "Out of scope" in held_by, id
        assert re.search(r"`[\w/.]+::\w+`|`python -m |[Nn]ot tested|Out of scope", held_by), id


def test_every_test_that_is_named_exists() -> None:
    named = re.findall(r"`([\w/.-]+\.py)::(\w+)`", PAGE)
    assert len(named) > 80 and len(named) == PAGE.count("::") - PAGE.count("`file::name`")
    assert [] == [f"{path}::{name}" for path, name in named if name not in functions(path)]


def test_every_command_and_file_that_is_named_exists() -> None:
    modules = re.findall(r"`\.venv/bin/python -m ([\w.]+)`", PAGE)
    files = [f"{module.replace('.', '/')}.py" for module in modules]
    files += re.findall(r"`([\w/]+\.py)`", PAGE) + [f"docs/{link}" for link in re.findall(r"\]\(([\w/.-]+)\)", PAGE)]
    assert modules and [] == [path for path in files if not (ROOT / path).is_file()]
