"""What docs/deploying.md quotes of our own messages stands in the source, and what runs where is drawn."""

from __future__ import annotations

import re

import pytest

from tests.pages import section
from tests.running import ROOT

# Our own sentences in tables of problems, and who says them. The other rows quote Docker, Kubernetes, pip and NCCL.
SAYS = {
    "Containers": {
        "make room or check permissions": "server/checkpoint/hub.py",
        "the compiled CPU kernels are not used": "server/backends/cpu/__init__.py",
        "no C++ compiler was found": "server/backends/cpu/build.py",
        "--device is cuda, but torch finds no usable GPU": "server/backends/__init__.py",
        "--device is cuda but no GPU is visible": "launch/machine.py",
        "cannot start: ": "launcher.py",
    },
    "Kubernetes": {"cannot write ": "server/checkpoint/hub.py"},
}


@pytest.mark.parametrize("heading", SAYS)
def test_sentences_are_those_of_the_source(heading: str) -> None:
    rows = section("deploying.md", heading).partition("\n### Problems ")[2].partition("\n### ")[0]
    for sentence, source in SAYS[heading].items():
        assert sentence in rows, f"{heading} has no {sentence!r} any more"
        assert sentence in (ROOT / source).read_text(), f"{source} says no {sentence!r}"


@pytest.mark.parametrize("heading", ["Kubernetes", "Several nodes", "Ray Serve"])
def test_a_topology_is_drawn(heading: str) -> None:
    blocks = re.findall(r"^```\n(.*?)^```$", section("deploying.md", heading), re.DOTALL | re.MULTILINE)
    assert any("──" in block and "│" in block for block in blocks)
