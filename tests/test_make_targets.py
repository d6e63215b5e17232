"""The targets of the Makefile: what pages name is there, and what the suite leaves out is run by one of them."""

from __future__ import annotations

import re
import subprocess
import sys
import tomllib

import pytest

from tests import needs
from tests.needs import NEEDS, Need
from tests.running import ROOT

MAKEFILE = (ROOT / "Makefile").read_text()
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]


def rules() -> list[tuple[str, str]]:
    """The targets that have a name to type, each with what it depends on."""
    return re.findall(r"^([a-z][a-z-]*):(.*)$", MAKEFILE, re.MULTILINE)


def test_targets_that_pages_name_are_there() -> None:
    targets = {target for target, _ in rules()}
    named = {
        name for page in PAGES for name in re.findall(r"(?:^|`)make ([a-z][a-z-]*)", page.read_text(), re.MULTILINE)
    }
    assert {"install", "serve", "test", "check"} <= named <= targets


def test_what_the_suite_leaves_out_is_run_by_a_target_of_its_own() -> None:
    options = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["pytest"]["ini_options"]["addopts"]
    left_out = set(re.findall(r"\w+", options.split("not (")[1].split(")")[0])) - {"or"}
    assert {"gpu", "formats", "kernels"} <= left_out
    assert left_out <= set(re.findall(r'-m "?(\w+)', MAKEFILE))


def test_every_target_says_first_what_it_needs() -> None:
    others = [(target, on.split()) for target, on in rules() if target != "needs"]
    assert {target for target, _ in others} == NEEDS.keys()
    assert {"needs"} == {on[0] for _, on in others}
    told = subprocess.run(
        ["make", "--no-print-directory", "-n", "needs"], cwd=ROOT, capture_output=True, text=True, check=True
    ).stdout
    assert told.startswith("python3 tests/needs.py needs")


@pytest.mark.parametrize(("is_optional", "code", "then"), [(False, 1, "nothing is started"), (True, 0, "are left out")])
def test_what_is_missing_is_named_with_how_to_get_it(
    is_optional: bool, code: int, then: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    missing = Need("a thing", lambda: False, "apt-get install thing", is_optional)
    monkeypatch.setitem(needs.NEEDS, "test", ("some time", [missing, Need("another", lambda: True, "no way")]))
    assert code == needs.main(["test", "ARGS"])
    first, second = capsys.readouterr().out.splitlines()
    assert "make test needs a thing, another, some time" == first
    assert then in second and second.endswith("apt-get install thing")


def test_it_needs_nothing_but_pythons_own_library() -> None:
    argv = [sys.executable, "-I", "-S", str(ROOT / "tests" / "needs.py"), *NEEDS]
    done = subprocess.run(argv, capture_output=True, text=True, check=False)
    assert len(NEEDS) == done.stdout.count("make ") - done.stdout.count(": make ") and not done.stderr
