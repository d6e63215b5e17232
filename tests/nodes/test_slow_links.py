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
    """Stages with next to nothing to do, and links so long that what a busy machine adds is far from a second trip."""
    flags = ("--dtype", "float32", "--pipeline-parallel", "2")
    with certificates(tmp_path / "tls") as tls_dir, machines(2, delay_ms=200) as far:
        trip_ms = round_trip_ms(far[1])
        with Cluster(far, *flags, "--tls-dir", tls_dir) as cluster:
            token_ms, _ = medians(cluster, streams=1, tokens=20)
            cluster.stop()
            output = "".join(cluster.lines) + cluster.wait()[1]
    [told_ms] = re.findall(r"a message to node 1 and back takes ([\d.]+) ms, and every token waits for one", output)
    assert 400 <= min(trip_ms, float(told_ms), token_ms)
    assert token_ms < 2 * trip_ms
