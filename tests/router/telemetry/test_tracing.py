"""Traces: what spans say, whose children they are, and that no collector holds anything up."""

from __future__ import annotations

import asyncio
import importlib.util
import logging
import sys
import time
from collections.abc import Iterator
from itertools import pairwise
from typing import Any

import pytest

from router.telemetry import tracing
from router.telemetry.tracing import NoTracer, Tracer, make_tracer
from tests.router.doubles import fake_shards, make_limits
from tests.router.site import PROMPT, site
from tests.router.telemetry.otel import FakeSdk, KeptSpan

TRACE, CALLER = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
HEADERS = {"traceparent": f"00-{TRACE}-{CALLER}-01", "x-request-id": "mine"}
SECRET = "SECRET"


@pytest.fixture
def sdk(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeSdk]:
    logger = logging.getLogger("opentelemetry")
    before, fake = logger.level, FakeSdk()
    fake.install(monkeypatch)
    yield fake
    logger.setLevel(before)


def tracer_of(sdk: FakeSdk) -> Tracer:
    return make_tracer("http://collector:4317", "my-service", "a/model")


def spans_of(
    sdk: FakeSdk, path: str, body: dict[str, Any], headers: dict[str, str] | None = None, **options: Any
) -> int:
    """Ask once. Returns the status."""

    async def story() -> int:
        async with site(tracer=tracer_of(sdk), **options) as it:
            return int((await it.http.post(path, json=body, headers=headers or HEADERS)).status_code)

    return asyncio.run(story())


def asked(**parameters: Any) -> dict[str, Any]:
    return {"inputs": SECRET, "parameters": {"max_new_tokens": 3, **parameters}}


def between(span: KeptSpan) -> tuple[int, int]:
    assert span.ended is not None
    return span.given["start_time"], span.ended


def test_a_request_s_span_has_its_caller_its_counts_and_its_stages(sdk: FakeSdk) -> None:
    before = time.time_ns()
    shards = fake_shards(make_limits(), step_delay_s=0.01)
    assert 200 == spans_of(sdk, "/generate", asked(temperature=0.5, seed=1), shards=shards)
    [whole] = sdk.named("generate")
    assert (int(TRACE, 16), int(CALLER, 16)) == (whole.parent.trace_id, whole.parent.span_id)
    assert {
        "gen_ai.operation.name": "text_completion",
        "gen_ai.provider.name": "lockstep",
        "gen_ai.request.stream": False,
        "gen_ai.request.max_tokens": 3,
        "gen_ai.request.choice.count": 1,
        "gen_ai.request.temperature": 0.5,
        "gen_ai.request.top_p": 1.0,
        "gen_ai.usage.input_tokens": 6,
        "gen_ai.usage.cache_read.input_tokens": 0,
        "gen_ai.usage.output_tokens": 3,
        "gen_ai.response.finish_reasons": ["length"],
        "gen_ai.response.model": "a/model",
        "lockstep.request_id": "mine",
    } == {name: value for name, value in whole.attributes.items() if name != "gen_ai.response.time_to_first_chunk"}
    assert None is whole.status
    stages = sdk.named("validation", "queue", "prefill", "decode")
    assert ["validation", "queue", "prefill", "decode"] == [span.name for span in stages]
    assert {(int(TRACE, 16), whole.get_span_context().span_id)} == {
        (span.parent.trace_id, span.parent.span_id) for span in stages
    }
    times = [between(span) for span in stages]
    assert whole.ended is not None
    assert before <= times[0][0] and times[-1][1] <= whole.ended <= time.time_ns()
    assert all(began <= ended for began, ended in times)
    assert all(one[1] == other[0] for one, other in pairwise(times))
    assert stages[2].attributes == {"gen_ai.usage.input_tokens": 6, "gen_ai.usage.cache_read.input_tokens": 0}
    assert stages[3].attributes == {"gen_ai.usage.output_tokens": 3}
    assert SECRET not in str([span.__dict__ for span in sdk.spans])


def test_without_a_caller_it_is_the_root_whatever_the_header_says(sdk: FakeSdk) -> None:
    for given in ("", "00-zz-1-01", "x" * 1000, f"00-{'0' * 32}-{CALLER}-01"):
        assert 200 == spans_of(sdk, "/generate_stream", asked(), {"traceparent": given})
    assert {0} == {span.parent.span_id for span in sdk.named("generate_stream")}


def test_each_answer_has_its_stages_up_to_a_bound(sdk: FakeSdk) -> None:
    body = {"prompt": [PROMPT, PROMPT], "n": 2, "max_tokens": 2, "model": "gpt"}
    assert 200 == spans_of(sdk, "/v1/completions", body)
    [whole] = sdk.named("generate")
    assert ("gpt", 4) == (whole.attributes["gen_ai.request.model"], whole.attributes["gen_ai.request.choice.count"])
    assert [0, 1, 2, 3] == [span.attributes["lockstep.answer"] for span in sdk.named("decode")]
    assert all(span.ended for span in sdk.spans)


def test_a_failure_ends_the_stage_that_it_was_in(sdk: FakeSdk) -> None:
    failing = fake_shards(make_limits(), failing_steps=dict.fromkeys(range(1, 60), "out of memory"))
    assert 424 == spans_of(sdk, "/generate", asked(), shards=failing)
    assert ["generate", "validation", "queue", "prefill"] == [span.name for span in sdk.spans]
    [whole] = sdk.named("generate")
    assert ("generation", ["generation"]) == (
        whole.attributes["error.type"],
        whole.attributes["gen_ai.response.finish_reasons"],
    )
    assert whole.status is not None and not whole.status.is_ok


def test_what_is_refused_is_a_span_without_stages(sdk: FakeSdk) -> None:
    assert 422 == spans_of(sdk, "/generate", asked(top_p=7))
    [whole] = sdk.spans
    assert "validation" == whole.attributes["error.type"]


def test_spans_wait_in_a_bounded_queue_and_attempts_have_a_time_limit(sdk: FakeSdk) -> None:
    tracer_of(sdk)
    assert {"service.name": "my-service"} == sdk.made["resource"]
    assert ("http://collector:4317", 2) == (sdk.made["exporter"]["endpoint"], sdk.made["exporter"]["timeout"])
    assert 2048 == sdk.made["processor"]["max_queue_size"]
    assert False is sdk.made["provider"]["shutdown_on_exit"]
    assert not logging.getLogger("opentelemetry.sdk.trace").isEnabledFor(logging.WARNING)  # one for each span dropped


def test_an_sdk_that_never_shuts_down_holds_up_nobody(sdk: FakeSdk, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tracing, "EXPORT_TIMEOUT_S", 0.01)
    sdk.may_shut_down.clear()
    tracer_of(sdk).close()  # or this would not return
    sdk.may_shut_down.set()


def test_nothing_is_imported_and_nothing_made_without_an_endpoint(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "opentelemetry.sdk.trace", None)
    assert isinstance(make_tracer(None, "lockstep"), NoTracer)


def test_without_its_extra_the_remedy_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    if importlib.util.find_spec("opentelemetry.sdk") is not None:
        monkeypatch.setitem(sys.modules, "opentelemetry.sdk", None)
    with pytest.raises(ValueError, match=r"pip install --editable '\.\[otel\]'"):
        make_tracer("http://collector:4317", "lockstep")
