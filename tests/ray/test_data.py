"""Ray Data: each line of a job once, whatever is killed."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("ray", reason="Ray is an extra: `make test-ray` has an environment with it")

from tests.ray.data import run
from tests.ray.fleet import cluster

pytestmark = [pytest.mark.ray, pytest.mark.filterwarnings("ignore")]


def test_each_line_is_answered_once_whatever_is_killed(tmp_path: Path) -> None:
    with cluster() as nodes:
        print("\n" + run(3_000, nodes.address, tmp_path))
