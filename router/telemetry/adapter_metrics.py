"""Requests and tokens of each adapter, under its name: a bounded number of names, for each is a series that stays.

Names are those that the operator gave, or let others give. Requests without an adapter are none of these.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence

from prometheus_client.metrics_core import CounterMetricFamily, Metric
from prometheus_client.registry import Collector

from router.scheduling.request import Entry

MOST_NAMES = 64  # the first; all later ones together are OTHER
OTHER = "other"
KINDS = ("prompt", "cached", "generated")  # cached: of the prompts'


class AdapterMetrics(Collector):
    """The counts, and their form in the registry."""

    COUNTERS = ("tgi_adapter_request_count", "tgi_adapter_tokens")

    def __init__(self) -> None:
        self._num_requests: Counter[str] = Counter()
        self._num_tokens: Counter[tuple[str, str]] = Counter()

    def expect(self, names: Iterable[str]) -> None:
        """Have the series of these adapters from the start."""
        for name in names:
            self._num_requests[self._label(name)] += 0

    def count(self, entries: Sequence[Entry]) -> None:
        """A request is over. entries: of its answers, whose prompts count once for each."""
        names = {entry.request.adapter.name for entry in entries if entry.request.adapter is not None}
        for name in names:
            self._num_requests[self._label(name)] += 1
        for entry in entries:
            if entry.request.adapter is not None:
                numbers = (entry.request.input_length, entry.num_cached, entry.generated.num_tokens)
                label = self._label(entry.request.adapter.name)
                self._num_tokens.update({(label, kind): n for kind, n in zip(KINDS, numbers, strict=True)})

    def _label(self, name: str) -> str:
        is_shown = name in self._num_requests or len(self._num_requests) < MOST_NAMES
        return name if is_shown else OTHER

    def collect(self) -> Iterable[Metric]:
        """Every series."""
        requests = CounterMetricFamily("tgi_adapter_request_count", "Requests of each adapter", labels=["adapter"])
        tokens = CounterMetricFamily("tgi_adapter_tokens", "Tokens of its requests", labels=["adapter", "kind"])
        for name, count in self._num_requests.items():
            requests.add_metric([name], count)
            for kind in KINDS:
                tokens.add_metric([name, kind], self._num_tokens[name, kind])
        yield from (requests, tokens)
