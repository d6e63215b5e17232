"""What the tiers behind the device hold and move, for Prometheus."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from router.tiers.mover import Mover

HIT_TOKENS = "tgi_prefix_tier_hit_tokens"
WRITTEN = "tgi_prefix_tier_written_bytes"
READ = "tgi_prefix_tier_read_bytes"
DAMAGED = "tgi_prefix_tier_damaged_blocks"
DROPPED = "tgi_prefix_tier_dropped_blocks"
GIVEN_UP = "tgi_prefix_tier_given_up"
COUNTERS = (HIT_TOKENS, WRITTEN, READ, DAMAGED, DROPPED, GIVEN_UP)


class TierMetrics(Collector):
    """Read from the mover whenever somebody looks. block_size: tokens of a block."""

    def __init__(self, mover: Mover, block_size: int) -> None:
        self._mover = mover
        self._block_size = block_size

    def collect(self) -> Iterable[Metric]:
        """Every series, at 0 where there is nothing."""
        counts, index = self._mover.counts, self._mover.index
        hits = {tier: blocks * self._block_size for tier, blocks in counts.hits.items()}
        yield _by_tier(HIT_TOKENS, "Tokens whose keys and values were copied back to the device", hits)
        yield _by_tier(WRITTEN, "Bytes written to a tier, by all shards", counts.written)
        yield _by_tier(READ, "Bytes read from a tier, by all shards", counts.read)
        yield CounterMetricFamily(DAMAGED, "Blocks on disk whose checksums were wrong", value=counts.damaged)
        yield CounterMetricFamily(DROPPED, "Blocks that no tier had room for in time", value=counts.dropped)
        yield CounterMetricFamily(GIVEN_UP, "Requests that stopped waiting for the disk", value=counts.given_up)
        held = GaugeMetricFamily("tgi_prefix_tier_blocks", "Blocks that a tier holds", labels=["tier"])
        most = GaugeMetricFamily("tgi_prefix_tier_blocks_total", "Blocks that a tier has room for", labels=["tier"])
        for tier, count in index.num_blocks.items():
            held.add_metric([tier], count)
            most.add_metric([tier], index.room[tier])
        yield from (held, most)


def _by_tier(name: str, what: str, values: Mapping[str, int]) -> Metric:
    family = CounterMetricFamily(name, what, labels=["tier"])
    for tier, value in values.items():
        family.add_metric([tier], value)
    return family
