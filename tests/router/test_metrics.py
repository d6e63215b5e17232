"""The histogram of gaps between tokens is written as one of `prometheus_client`'s would be."""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Histogram, generate_latest

from router.metrics import DURATION_BUCKETS, TokenGaps


def test_gaps_are_counted_as_a_histogram_counts_them() -> None:
    ours, theirs = CollectorRegistry(), CollectorRegistry()
    gaps = TokenGaps("gap", "Gaps")
    ours.register(gaps)
    histogram = Histogram("gap", "Gaps", buckets=DURATION_BUCKETS, registry=theirs)
    for seconds in (0.0, DURATION_BUCKETS[0], 0.01, 0.011, DURATION_BUCKETS[-1], 1e6):
        gaps.observe(seconds)
        histogram.observe(seconds)
    expected = [line for line in generate_latest(theirs).decode().splitlines() if "_created" not in line]
    assert expected == generate_latest(ours).decode().splitlines()
