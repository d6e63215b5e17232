"""The targets of the Makefile: what pages name is there, and what the suite leaves out is run by one of them."""

from __future__ import annotations

import re
import tomllib

from tests.running import ROOT

MAKEFILE = (ROOT / "Makefile").read_text()
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]


def test_targets_that_pages_name_are_there() -> None:
    targets = set(re.findall(r"^([a-z][a-z-]*):", MAKEFILE, re.MULTILINE))
    named = {
        name for page in PAGES for name in re.findall(r"(?:^|`)make ([a-z][a-z-]*)", page.read_text(), re.MULTILINE)
    }
    assert {"serve", "test", "test-kernels"} <= named <= targets


def test_what_the_suite_leaves_out_is_run_by_a_target_of_its_own() -> None:
    options = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["pytest"]["ini_options"]["addopts"]
    left_out = set(re.findall(r"\w+", options.split("not (")[1].split(")")[0])) - {"or"}
    assert {"gpu", "formats", "kernels"} <= left_out
    assert left_out <= set(re.findall(r"pytest -m (\w+)", MAKEFILE))
