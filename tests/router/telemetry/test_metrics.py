"""The metrics of a served application: TGI's names and types, and series that are there before anything happens."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

from prometheus_client import CollectorRegistry, Histogram, generate_latest
from prometheus_client.parser import text_string_to_metric_families

from router.scheduling.request import ValidRequest
from router.telemetry.metrics import DURATION_BUCKETS, NUM_LENGTH_BUCKETS, OfTokens
from tests.router.apis.test_overload import AS_ALICE
from tests.router.doubles import fake_shards, make_limits
from tests.router.site import site
from tests.router.test_accounts import ALICE, BOB, write

# What TGI shows, by its own names, less `tgi_`. Its counters have no `_total` at the end.
TGI = {
    "counter": """
        request_count request_success request_failure batch_inference_count batch_inference_success
        batch_inference_failure batch_concat
    """,
    "gauge": """
        queue_size batch_current_size batch_current_max_tokens batch_max_total_tokens
    """,
    "histogram": """
        request_duration request_validation_duration request_queue_duration request_inference_duration
        request_mean_time_per_token_duration request_input_length request_max_new_tokens request_generated_tokens
        request_skipped_tokens batch_next_size batch_inference_duration batch_forward_duration batch_decode_duration
        batch_filter_duration batch_concat_duration
    """,
}
# router/telemetry/metrics.py says why.
LEFT_OUT = {"tgi_batch_concat_duration", "tgi_batch_filter_duration"}
OURS = {
    "counter": """
        request_prefix_hit_tokens request_preempted request_timeout request_surplus_tokens batch_prefill_tokens
        request_guessed_tokens request_right_guesses request_proposed_tokens
        kv_preempted kv_waits kv_recomputed_tokens kv_asked_blocks kv_given_blocks request_expected_tokens
        request_expectation_error_tokens request_outgrown shards_recovery_count shards_recovery_seconds
        key_request_count key_tokens key_refused adapter_request_count adapter_tokens
    """,
    "gauge": """
        queue_tokens kv_blocks_total kv_blocks_free kv_used_ratio kv_owed_tokens batch_held_size batch_peak_batch_size
        batch_peak_reserved_tokens batch_peak_prefill_tokens key_current_requests
    """,
    "histogram": """
        request_time_to_first_token_duration request_inter_token_duration batch_propose_duration
    """,
}


def typed(names: dict[str, str]) -> dict[str, str]:
    """The type of each name."""
    return {f"tgi_{name}": kind for kind, several in names.items() for name in several.split()}


def page(config: dict[str, Any] | None = None, headers: dict[str, str] | None = None) -> str:
    """/metrics of an application that has done nothing yet."""

    async def story() -> str:
        async with site(config=config) as it:
            return str((await it.http.get("/metrics", headers=headers)).text)

    return asyncio.run(story())


def page_with_keys(folder: Path) -> str:
    return page({"api_keys_file": write(folder / "keys.json", ALICE, BOB)}, AS_ALICE)


def types_in(text: str) -> dict[str, str]:
    """Every metric's name, as it is written, and its type."""
    lines = (line.split(" ") for line in text.splitlines() if line.startswith("# TYPE "))
    return {name: type for _, _, name, type in lines}


def series_in(text: str) -> dict[str, float]:
    rows = (line.rsplit(" ", 1) for line in text.splitlines() if not line.startswith("#"))
    return {name: float(value) for name, value in rows}


def test_names_and_types_are_tgis_and_the_ones_that_it_lacks() -> None:
    expected = {name: kind for name, kind in typed(TGI).items() if name not in LEFT_OUT}
    assert expected | typed(OURS) == types_in(page())


def test_samples_have_the_names_of_their_metrics_and_counters_no_suffix(tmp_path: Path) -> None:
    text = page_with_keys(tmp_path)
    types = types_in(text)
    for series in series_in(text):
        name = series.partition("{")[0]
        family = name if name in types else name.rpartition("_")[0]
        suffix = name.removeprefix(family)
        assert suffix in (("_bucket", "_count", "_sum") if types[family] == "histogram" else ("",)), series


def test_a_reader_of_the_format_reads_every_sample(tmp_path: Path) -> None:
    text = page_with_keys(tmp_path)
    read = [sample for family in text_string_to_metric_families(text) for sample in family.samples]
    assert len(series_in(text)) == len(read)


def test_buckets_are_tgis() -> None:
    buckets: dict[str, list[float]] = {}
    for family in text_string_to_metric_families(page()):
        bounds = {float(sample.labels["le"]) for sample in family.samples if sample.name.endswith("_bucket")}
        buckets[family.name] = sorted(bounds)[:-1]
    durations = {name: bounds for name, bounds in buckets.items() if name.endswith("_duration")}
    assert 11 == len(durations) and all(list(DURATION_BUCKETS) == bounds for bounds in durations.values())
    assert [1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024] == buckets["tgi_batch_next_size"]
    for name, longest in {"input_length": 64, "max_new_tokens": 128, "generated_tokens": 128}.items():
        bounds = buckets[f"tgi_request_{name}"]
        assert (NUM_LENGTH_BUCKETS, longest) == (len(bounds), bounds[-1])


def test_series_whose_labels_are_known_are_there_before_anything_happens(tmp_path: Path) -> None:
    """`rate` and `increase` begin at a series' second sample: a failure that is the first one would never be seen."""
    series = series_in(page_with_keys(tmp_path))
    for name, label, values in (
        ("tgi_request_failure", "err", ("validation", "overloaded", "incomplete", "dropped", "generation", "timeout")),
        ("tgi_request_failure", "err", ("slow_client", "unavailable")),
        ("tgi_request_timeout", "stage", ("validation", "queued", "running")),
        ("tgi_batch_concat", "reason", ("backpressure", "wait_exceeded")),
        ("tgi_batch_inference_failure", "method", ("prefill", "decode")),
        ("tgi_batch_forward_duration_count", "method", ("prefill", "decode")),
    ):
        assert {0.0} == {series[f'{name}{{{label}="{value}"}}'] for value in values}
    for limit in ("max_concurrent_requests", "requests_per_minute", "tokens_per_minute", "share"):
        assert 0 == series[f'tgi_key_refused{{key="bob",limit="{limit}"}}']
    for kind in ("prompt", "generated"):
        assert 0 == series[f'tgi_key_tokens{{key="bob",kind="{kind}"}}']


async def test_tokens_of_prompts_are_either_found_or_computed() -> None:
    async with site(prefix_caching=True) as it:
        for _ in range(3):
            await it.post("/generate", inputs="p" * 40, max_new_tokens=2)
        series = series_in((await it.http.get("/metrics")).text)
        asked = series["tgi_request_input_length_sum"]
        assert 3 * 40 <= asked
        assert 2 * 32 == series["tgi_request_prefix_hit_tokens"]  # two full blocks, twice
        assert asked - 2 * 32 == series["tgi_batch_prefill_tokens"]


async def test_steps_that_only_say_who_leaves_are_none_of_decoding() -> None:
    async with site() as it:
        for new_tokens in (1, 3):
            await it.post("/generate", max_new_tokens=new_tokens)
        await it.all_free()
        series = series_in((await it.http.get("/metrics")).text)
        assert 2 == series['tgi_batch_inference_count{method="prefill"}']
        assert 2 == series['tgi_batch_inference_count{method="decode"}']
        assert 2 == series['tgi_batch_forward_duration_count{method="decode"}']


async def test_gauges_are_true_between_steps_and_while_none_is_planned() -> None:
    limits = make_limits(max_batch_size=1)
    async with site(fake_shards(limits, step_delay_s=3600), max_batch_size=1) as it:
        first, second = (it.batcher.submit(ValidRequest([1] * 20, 12)) for _ in range(2))
        while not it.shards.live_ids:
            await asyncio.sleep(0.001)
        series = series_in((await it.http.get("/metrics")).text)
        assert (1, 32) == (series["tgi_queue_size"], series["tgi_queue_tokens"])
        assert (1, 32) == (series["tgi_batch_current_size"], series["tgi_batch_current_max_tokens"])
        third = it.batcher.submit(ValidRequest([1] * 20, 12))  # the shards are computing: nothing is planned
        series = series_in((await it.http.get("/metrics")).text)
        assert (2, 64) == (series["tgi_queue_size"], series["tgi_queue_tokens"])
        assert series["tgi_kv_blocks_total"] - 2 == series["tgi_kv_blocks_free"]
        assert 2 / series["tgi_kv_blocks_total"] == series["tgi_kv_used_ratio"]
        for entry in (first, second, third):
            entry.cancelled = True


def test_gaps_are_counted_as_a_histogram_counts_them() -> None:
    ours, theirs = CollectorRegistry(), CollectorRegistry()
    gaps = OfTokens("gap", "Gaps")
    ours.register(gaps)
    histogram = Histogram("gap", "Gaps", buckets=DURATION_BUCKETS, registry=theirs)
    for seconds in (0.0, DURATION_BUCKETS[0], 0.01, 0.011, DURATION_BUCKETS[-1], 1e6):
        gaps.observe(seconds)
        histogram.observe(seconds)
    expected = [line for line in generate_latest(theirs).decode().splitlines() if "_created" not in line]
    assert expected == generate_latest(ours).decode().splitlines()
