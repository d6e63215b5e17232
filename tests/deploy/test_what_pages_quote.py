"""What the pages on containers quote of our own messages stands in the source, and each has a picture."""

from __future__ import annotations

import re

import pytest

from tests.running import ROOT

# Our own sentences of "When it goes wrong", and who says them. The other rows quote Docker, Kubernetes, pip and curl.
SAYS = {
    "docker.md": {
        "make room or check permissions": "server/checkpoint/hub.py",
        "the compiled CPU kernels are not used": "server/backends/cpu/__init__.py",
        "no C++ compiler was found": "server/backends/cpu/build.py",
        "--device is cuda, but torch finds no usable GPU": "server/backends/__init__.py",
        "--device is cuda but no GPU is visible": "launch/machine.py",
        "cannot start: ": "launcher.py",
    },
    "kubernetes.md": {"cannot write ": "server/checkpoint/hub.py"},
}


@pytest.mark.parametrize("page", SAYS)
def test_sentences_are_those_of_the_source(page: str) -> None:
    rows = (ROOT / "docs" / page).read_text().partition("\n## When it goes wrong\n")[2].partition("\n## ")[0]
    for sentence, source in SAYS[page].items():
        assert sentence in rows, f"{page} has no {sentence!r} any more"
        assert sentence in (ROOT / source).read_text(), f"{source} says no {sentence!r}"


@pytest.mark.parametrize("page", ["several-nodes.md", "ray.md", "kubernetes.md", "docker.md"])
def test_a_topology_is_drawn(page: str) -> None:
    blocks = re.findall(r"^```\n(.*?)^```$", (ROOT / "docs" / page).read_text(), re.DOTALL | re.MULTILINE)
    assert any("──" in block and "│" in block for block in blocks)
