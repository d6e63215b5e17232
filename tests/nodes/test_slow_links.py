"""Nodes with a long cable between them. Run by `make test-nodes`, as root."""

from __future__ import annotations

import re
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
    """Stages with next to nothing to do, and links of 20 ms: 40 ms a token by `plan`, and 80 if it had to go twice."""
    flags = ("--dtype", "float32", "--pipeline-parallel", "2")
    with certificates(tmp_path / "tls") as tls_dir, machines(2, delay_ms=20) as far:
        assert 40 <= round_trip_ms(far[1]) <= 44
        with Cluster(far, *flags, "--tls-dir", tls_dir) as cluster:
            token_ms, _ = medians(cluster, streams=1)
            cluster.stop()
            _, output = cluster.wait()
    assert re.search(r"a message to node 1 and back takes 4\d\.\d ms, and every token waits for one", output)
    assert 40 <= token_ms < 60
