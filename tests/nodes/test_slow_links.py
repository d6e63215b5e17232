"""Nodes with a long cable between them. Run by `make test-nodes`, as root."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.nodes.cluster import Cluster, certificates
from tests.nodes.machines import machines, why_not
from tests.nodes.slow_links import medians, round_trip_ms

pytestmark = [
    pytest.mark.nodes,
    pytest.mark.skipif(why_not() is not None, reason=why_not() or ""),
    pytest.mark.xdist_group("namespaces"),
]


def test_a_token_takes_one_round_trip(tmp_path: Path) -> None:
    """Stages with next to nothing to do, and links of 20 ms: a token takes 40 ms by `plan`, and no 15 % more."""
    flags = ("--dtype", "float32", "--pipeline-parallel", "2")
    with certificates(tmp_path / "tls") as tls_dir, machines(2, delay_ms=20) as far:
        assert 40 <= round_trip_ms(far[1]) <= 44
        with Cluster(far, *flags, "--tls-dir", tls_dir) as cluster:
            token_ms, _ = medians(cluster, streams=1)
    assert 40 <= token_ms <= 1.15 * 40
