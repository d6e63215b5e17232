"""Prometheus metrics under TGI's names, so that its dashboards work, plus the ones that it lacks.

`prometheus_client` ends the name of every counter in `_total`; TGI's counters have plain names, so the suffix is taken
off again in `render`. Not here: TGI's `tgi_batch_filter_duration` and `tgi_batch_concat_duration`, which have no
counterpart (joining and leaving are part of a step). No label ever carries what a client sent, and every series whose
labels are known is there from the start, at 0: Prometheus does not see the first increase of one that appears with it.
"""

from __future__ import annotations

import re
from bisect import bisect_left
from collections.abc import Callable, Iterable, Mapping, Sequence, Sized
from dataclasses import dataclass
from itertools import accumulate, product
from typing import Any, TypeVar

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

from router.config import MOST_GUESSES
from router.scheduling.forecast import DemandCounts
from router.scheduling.limits import Limits
from router.scheduling.plan import StepPlan
from router.scheduling.request import Finished
from router.scheduling.scheduler import Scheduler
from router.telemetry.adapter_metrics import AdapterMetrics

M = TypeVar("M", Counter, Histogram)

# TGI's: 0.15 ms to about 146 s.
DURATION_BUCKETS = tuple(0.0001 * 1.5**k for k in range(1, 36))
BATCH_SIZE_BUCKETS = tuple(2**k for k in range(11))
NUM_LENGTH_BUCKETS = 100

METHODS = ("prefill", "decode")
JOIN_REASONS = ("backpressure", "wait_exceeded")
STAGES = ("validation", "queued", "running")
FAILURES = (
    "validation", "overloaded", "timeout", "dropped", "slow_client", "generation", "incomplete", "unavailable",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class StepTrace:
    """One planned step in numbers: what tests check against the limits."""

    step: int
    batch_size: int
    num_waiting: int
    waiting_tokens: int
    num_admitted: int
    num_retired: int
    num_decoding: int
    prefill_tokens: int
    reserved_tokens: int
    free_blocks: int

    @classmethod
    def of(cls, plan: StepPlan[Any], scheduler: Scheduler[Any]) -> StepTrace:
        """Of a plan that the scheduler has just made."""
        return cls(
            step=plan.number,
            batch_size=len(scheduler.running),
            num_waiting=len(scheduler.waiting),
            waiting_tokens=scheduler.ledger.waiting_tokens,
            num_admitted=len(plan.admitted),
            num_retired=len(plan.retired),
            num_decoding=plan.num_decoding,
            prefill_tokens=plan.prefill_tokens,
            reserved_tokens=scheduler.reserved_tokens,
            free_blocks=scheduler.num_free_blocks,
        )


class Metrics:
    """All metrics of one router, in a registry of their own."""

    def __init__(self, limits: Limits) -> None:
        self._registry = CollectorRegistry()
        self._counter_names: list[str] = []
        self.on_step: Callable[[StepTrace], None] | None = None  # called with each planned step, if set
        self._define_request_metrics(limits)
        self._define_batch_metrics(limits)
        self._define_peaks()
        self.adapters = AdapterMetrics()
        self.add(self.adapters, *AdapterMetrics.COUNTERS)

    def render(self) -> bytes:
        """The text format."""
        names = "|".join(self._counter_names)
        counter_suffix = rf"(?m)^((?:# (?:HELP|TYPE) )?(?:{names}))_total(?=[ {{])".encode()
        return re.sub(counter_suffix, rb"\1", generate_latest(_WithoutCreated(self._registry)))

    def add(self, collector: Collector, *counters: str) -> None:
        """Show the metrics of another collector. counters: the names of its counters."""
        self._registry.register(collector)
        self._counter_names += counters

    def watch(self, scheduler: Scheduler[Any], held: Sized) -> None:
        """Show its queue, batch and KV blocks as they are at each scrape, also while no steps are planned.

        held: requests of the batch that wait for their grammars.
        """
        self.queue_size.set_function(lambda: len(scheduler.waiting))
        self.queue_tokens.set_function(lambda: scheduler.ledger.waiting_tokens)
        self.batch_size.set_function(lambda: len(scheduler.running))
        self.held_size.set_function(lambda: len(held))
        self.batch_tokens.set_function(lambda: scheduler.reserved_tokens)
        self.free_blocks.set_function(lambda: scheduler.num_free_blocks)
        self.used_blocks.set_function(lambda: 1 - scheduler.num_free_blocks / scheduler.limits.num_blocks)
        self.add(DemandMetrics(scheduler), *DemandMetrics.COUNTERS)

    def planned(self, trace: StepTrace) -> None:
        """A step was planned and is about to be sent."""
        if trace.prefill_tokens:
            self.prefill_tokens.inc(trace.prefill_tokens)
        self._raise_peak("batch_size", trace.batch_size)
        self._raise_peak("reserved_tokens", trace.reserved_tokens)
        self._raise_peak("prefill_tokens", trace.prefill_tokens)
        if trace.num_admitted:
            self.next_size.observe(trace.num_admitted)
        if self.on_step is not None:
            self.on_step(trace)

    def joined(self, reason: str) -> None:
        """Requests join a batch that runs already."""
        self.batch_concat.labels(reason).inc()

    def delivered(self, method: str, duration_s: float, forward_s: float, delivery_s: float) -> None:
        """A step's tokens are with their requests. Duration is from sending the step to its reply."""
        self.step_count.labels(method).inc()
        self.step_success.labels(method).inc()
        self.step_duration.labels(method).observe(duration_s)
        self.forward_duration.labels(method).observe(forward_s)
        self.delivery_duration.labels(method).observe(delivery_s)

    def guessed(self, num_guesses: int, num_right: int) -> None:
        """A step has checked so many guesses."""
        self.guessed_tokens.inc(num_guesses)
        self.right_guesses.inc(num_right)

    def proposed(self, num_tokens: int, seconds: float) -> None:
        """A speculative model has proposed so many tokens in a step, for all its sequences."""
        self.proposed_tokens.inc(num_tokens)
        self.propose_duration.observe(seconds)

    def recovered(self, seconds: float, limits: Limits) -> None:
        """Lost shards have been replaced, by some with these limits; nothing ran for so long."""
        self.recoveries.inc()
        self.recovery_seconds.inc(seconds)
        self._show_capacity(limits)

    def _show_capacity(self, limits: Limits) -> None:
        self.most_tokens.set(limits.max_batch_total_tokens)
        self.most_blocks.set(limits.num_blocks)

    def succeeded(self, received_at: float, finished: Finished, generated_tokens: int) -> None:
        """A request is complete. `received_at` is on the clock of its timings; the tokens are those of all answers."""
        timings = finished.timings
        inference = timings.finished - timings.admitted
        self.request_success.inc()
        self.request_duration.observe(timings.finished - received_at)
        self.validation_duration.observe(timings.queued - received_at)
        self.queue_duration.observe(timings.admitted - timings.queued)
        self.inference_duration.observe(inference)
        if finished.generated_tokens:
            self.time_per_token.observe(inference / finished.generated_tokens)
        self.generated_tokens.observe(generated_tokens)

    def failed(self, reason: str) -> None:
        """A request ended otherwise; the reason is one of a fixed few."""
        self.request_failure.labels(reason).inc()

    def _define_request_metrics(self, limits: Limits) -> None:
        self.request_count = self._counter("tgi_request_count", "Requests received")
        self.request_success = self._counter("tgi_request_success", "Requests completed")
        self.request_failure = self._counter("tgi_request_failure", "Requests not completed", err=FAILURES)
        self.request_duration = self._durations("tgi_request_duration", "From arrival to the last token")
        self.validation_duration = self._durations("tgi_request_validation_duration", "From arrival to the queue")
        self.queue_duration = self._durations("tgi_request_queue_duration", "Waiting for admission")
        self.inference_duration = self._durations("tgi_request_inference_duration", "From admission to the last token")
        self.time_per_token = self._durations(
            "tgi_request_mean_time_per_token_duration", "Inference duration per generated token"
        )
        self.time_to_first_token = self._durations(
            "tgi_request_time_to_first_token_duration", "From the queue to the first token"
        )
        self.inter_token = OfTokens("tgi_request_inter_token_duration", "Between two tokens of one request, seconds")
        numbers = range(MOST_GUESSES + 1)
        self.skipped_tokens = OfTokens("tgi_request_skipped_tokens", "Right guesses of one request in a step", numbers)
        self._registry.register(self.inter_token)
        self._registry.register(self.skipped_tokens)
        self.guessed_tokens = self._counter("tgi_request_guessed_tokens", "Tokens guessed ahead and checked in a step")
        self.right_guesses = self._counter("tgi_request_right_guesses", "Guesses that were the next tokens")
        self.proposed_tokens = self._counter("tgi_request_proposed_tokens", "Tokens that a speculative model proposed")
        self.input_length = self._lengths("tgi_request_input_length", "Prompt tokens", limits.max_input_length)
        self.max_new_tokens = self._lengths("tgi_request_max_new_tokens", "Tokens asked for", limits.max_total_tokens)
        self.generated_tokens = self._lengths(
            "tgi_request_generated_tokens", "Tokens generated", limits.max_total_tokens
        )
        self.prefix_hit_tokens = self._counter(
            "tgi_request_prefix_hit_tokens", "Tokens of new and resumed sequences found in the KV cache"
        )
        self.preempted = self._counter(
            "tgi_request_preempted", "Preemptions of running requests, for another API key's or for want of KV blocks"
        )
        self.timeouts = self._counter("tgi_request_timeout", "Requests whose deadline passed", stage=STAGES)
        self.surplus_tokens = self._counter(
            "tgi_request_surplus_tokens", "Tokens computed and dropped: after an end, or of a preempted sequence"
        )

    def _define_batch_metrics(self, limits: Limits) -> None:
        self.queue_size = self._gauge("tgi_queue_size", "Requests waiting for admission")
        self.queue_tokens = self._gauge("tgi_queue_tokens", "Prompt and new tokens of waiting requests, at most")
        self.batch_size = self._gauge("tgi_batch_current_size", "Requests running")
        self.held_size = self._gauge("tgi_batch_held_size", "Running requests that wait for their grammar")
        self.batch_tokens = self._gauge("tgi_batch_current_max_tokens", "Tokens reserved by running requests")
        self.most_tokens = self._gauge("tgi_batch_max_total_tokens", "Tokens that may be reserved")
        self.most_blocks = self._gauge("tgi_kv_blocks_total", "KV blocks")
        self._show_capacity(limits)
        self.free_blocks = self._gauge("tgi_kv_blocks_free", "KV blocks not reserved")
        self.used_blocks = self._gauge("tgi_kv_used_ratio", "Share of the KV blocks that is reserved, from 0 to 1")
        self.next_size = Histogram(
            "tgi_batch_next_size",
            "Requests admitted in one step",
            buckets=BATCH_SIZE_BUCKETS,
            registry=self._registry,
        )
        self.prefill_tokens = self._counter(
            "tgi_batch_prefill_tokens", "Tokens of new and resumed sequences that had to be computed"
        )
        self.batch_concat = self._counter(
            "tgi_batch_concat", "Times that requests joined a running batch", reason=JOIN_REASONS
        )
        self.step_count = self._counter("tgi_batch_inference_count", "Steps computed", method=METHODS)
        self.step_success = self._counter("tgi_batch_inference_success", "Steps computed without error", method=METHODS)
        self.recoveries = self._counter("tgi_shards_recovery_count", "Times that lost shards were replaced")
        self.recovery_seconds = self._counter("tgi_shards_recovery_seconds", "Total seconds without shards")
        self.step_failures = self._counter("tgi_batch_inference_failure", "Steps that failed", method=METHODS)
        self.step_duration = self._durations(
            "tgi_batch_inference_duration", "From sending a step to its reply", method=METHODS
        )
        self.forward_duration = self._durations(
            "tgi_batch_forward_duration", "Forward pass and sampling on rank 0", method=METHODS
        )
        self.propose_duration = self._durations(
            "tgi_batch_propose_duration", "A speculative model's proposals in one step"
        )
        self.delivery_duration = self._durations(
            "tgi_batch_decode_duration", "Detokenisation and delivery", method=METHODS
        )

    def _define_peaks(self) -> None:
        self._peaks = {
            name: self._gauge(f"tgi_batch_peak_{name}", f"Largest {what} since the start")
            for name, what in {
                "batch_size": "number of requests running together",
                "reserved_tokens": "number of reserved tokens",
                "prefill_tokens": "number of prompt tokens in one step",
            }.items()
        }
        self._peak_values = dict.fromkeys(self._peaks, 0)

    def _raise_peak(self, name: str, value: int) -> None:
        if value > self._peak_values[name]:
            self._peak_values[name] = value
            self._peaks[name].set(value)

    def _counter(self, name: str, what: str, **labels: Sequence[str]) -> Counter:
        self._counter_names.append(name)
        return _with_values(Counter(name, what, list(labels), registry=self._registry), labels)

    def _gauge(self, name: str, what: str) -> Gauge:
        return Gauge(name, what, registry=self._registry)

    def _durations(self, name: str, what: str, **labels: Sequence[str]) -> Histogram:
        histogram = Histogram(name, f"{what}, seconds", list(labels), buckets=DURATION_BUCKETS, registry=self._registry)
        return _with_values(histogram, labels)

    def _lengths(self, name: str, what: str, longest: int) -> Histogram:
        buckets = [longest * k / NUM_LENGTH_BUCKETS for k in range(1, NUM_LENGTH_BUCKETS + 1)]
        return Histogram(name, what, buckets=buckets, registry=self._registry)


def _with_values(metric: M, labels: Mapping[str, Sequence[str]]) -> M:
    """The metric with a series for every combination of the labels' values."""
    if labels:
        for values in product(*labels.values()):
            metric.labels(*values)
    return metric


class OfTokens(Collector):
    """A histogram for what is observed for every token.

    That of `prometheus_client` takes two locks and walks through the buckets each time, at five times the cost.
    """

    def __init__(self, name: str, what: str, bounds: Sequence[float] = DURATION_BUCKETS) -> None:
        self._name = name
        self._what = what
        self._bounds = bounds
        self._counts = [0] * (len(bounds) + 1)
        self._sum = 0.0

    def observe(self, value: float) -> None:
        """Count one."""
        self._counts[bisect_left(self._bounds, value)] += 1
        self._sum += value

    def collect(self) -> Iterable[Metric]:
        """The histogram in the registry's form."""
        bounds = [*map(str, map(float, self._bounds)), "+Inf"]
        buckets = list(zip(bounds, map(float, accumulate(self._counts)), strict=True))
        yield HistogramMetricFamily(self._name, self._what, buckets=buckets, sum_value=self._sum)


class DemandMetrics(Collector):
    """What giving KV blocks on demand has led to; all at 0 where they are reserved."""

    COUNTERS: Mapping[str, tuple[str, str]] = {
        "tgi_kv_preempted": ("num_sent_away", "Running requests that paused because KV blocks ran out"),
        "tgi_kv_waits": ("num_waits", "Steps that a running request let pass for want of a KV block"),
        "tgi_kv_recomputed_tokens": ("tokens_again", "Tokens computed once more, of requests that paused"),
        "tgi_kv_asked_blocks": ("blocks_asked", "KV blocks without which running requests could not go on"),
        "tgi_kv_given_blocks": ("blocks_given", "KV blocks given to running requests: those, and some ahead"),
        "tgi_request_expected_tokens": ("expected_tokens", "Tokens that completed answers were expected to have"),
        "tgi_request_expectation_error_tokens": ("error_tokens", "By how much that was wrong, whichever way"),
        "tgi_request_outgrown": ("num_outgrown", "Completed answers that became longer than expected"),
    }

    def __init__(self, scheduler: Scheduler[Any]) -> None:
        self._scheduler = scheduler

    def collect(self) -> Iterable[Metric]:
        """Every series."""
        forecast = self._scheduler.forecast
        counts = DemandCounts() if forecast is None else forecast.counts
        for name, (field, what) in self.COUNTERS.items():
            yield CounterMetricFamily(name, what, value=getattr(counts, field))
        owed = 0.0 if forecast is None else max(0.0, forecast.owed)
        yield GaugeMetricFamily("tgi_kv_owed_tokens", "Tokens computed again beyond the share that may be", value=owed)


class _WithoutCreated(Collector):
    """The registry less the time stamps that `prometheus_client` adds to every series."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self._registry = registry

    def collect(self) -> Iterable[Metric]:
        for metric in self._registry.collect():
            metric.samples = [sample for sample in metric.samples if not sample.name.endswith("_created")]
            yield metric
