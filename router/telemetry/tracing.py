"""Traces for OpenTelemetry: a span for each request, under its caller's, and in it one for each stage.

Off unless `otlp_endpoint` is set, and nothing of OpenTelemetry's SDK is imported then. Spans carry counts, times and
reasons, never text; attributes have the names of OpenTelemetry's conventions for generative AI where these have one,
and begin with `lockstep.` where they have none.

A collector that is dead, or takes connections and never answers, holds up nothing: spans wait in a queue of a bounded
length, a thread sends them and gives each attempt EXPORT_TIMEOUT_S, what finds no room is dropped, and the end of the
process waits for the last of them no longer than that.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from router.scheduling.request import Entry

EXPORT_TIMEOUT_S = 2
SEND_EVERY_MS = 1000
MOST_WAITING = 2048  # spans; of a request of one answer there are five
MOST_AT_ONCE = 512
MOST_ANSWERS = 8  # of one request that have spans for their stages
NS = 1_000_000_000
Value = int | float | str | bool | Sequence[str]


@dataclass(frozen=True, slots=True)
class Ended:
    """A request that is over. Times are in seconds of the router's clock.

    counts: as in its log line. names: what the line says besides.
    """

    at: float
    reason: str
    is_failure: bool
    is_chat: bool = False
    entries: Sequence[Entry] = ()
    counts: Mapping[str, int] = field(default_factory=dict)
    names: Mapping[str, Any] = field(default_factory=dict)


class RequestSpan(Protocol):
    """The trace of one request."""

    def end(self, ended: Ended) -> None:
        """Close the span."""


class Tracer(Protocol):
    """Opens spans of requests."""

    def start(self, name: str, headers: Mapping[str, str], at: float) -> RequestSpan:
        """Open a span, under the caller's if the headers carry a `traceparent`. at: now, by the router's clock."""

    def close(self) -> None:
        """Export what is left, in EXPORT_TIMEOUT_S at most."""


class NoSpan:
    """A span that is not exported."""

    def end(self, ended: Ended) -> None:
        """Nothing is exported."""


class NoTracer:
    """Tracing switched off."""

    def start(self, name: str, headers: Mapping[str, str], at: float) -> RequestSpan:
        """A span that is not exported."""
        return NoSpan()

    def close(self) -> None:
        """Nothing is left to export."""


def make_tracer(otlp_endpoint: str | None, service_name: str, model_id: str = "") -> Tracer:
    """The tracer for this endpoint, where `service_name` says whose traces they are.

    Raises ValueError with the remedy when OpenTelemetry is not installed.
    """
    if otlp_endpoint is None:
        return NoTracer()
    try:
        return _OtlpTracer(otlp_endpoint, service_name, model_id)
    except ImportError as error:
        raise ValueError(
            f"--otlp-endpoint is set but {error.name} is not installed: pip install --editable '.[otel]' in Lockstep's "
            "folder, or leave it unset"
        ) from None


@dataclass(frozen=True, slots=True)
class Stage:
    """A part of the time of one answer."""

    name: str
    began: float
    ended: float
    attributes: Mapping[str, Value]


def stages(entry: Entry, received_at: float, now: float) -> Iterator[Stage]:
    """Validation, queue, prefill and decode, as far as the answer came. The one that it was in ends now."""
    request, generated = entry.request, entry.generated.num_tokens
    yield Stage("validation", received_at, entry.queued_at, {})
    yield Stage("queue", entry.queued_at, entry.admitted_at or now, {})
    if entry.admitted_at:
        prompt: dict[str, Value] = {"gen_ai.usage.input_tokens": request.input_length}
        prompt["gen_ai.usage.cache_read.input_tokens"] = entry.num_cached
        yield Stage("prefill", entry.admitted_at, entry.first_token_at or now, prompt)
    if entry.admitted_at and entry.first_token_at:
        ended = entry.last_token_at if entry.is_over else now
        yield Stage("decode", entry.first_token_at, ended, {"gen_ai.usage.output_tokens": generated})


def attributes_of(ended: Ended) -> dict[str, Value]:
    """What a request's span says about it."""
    found: dict[str, Value] = {
        "gen_ai.operation.name": "chat" if ended.is_chat else "text_completion",
        "gen_ai.provider.name": "lockstep",
        "gen_ai.request.stream": bool(ended.names.get("stream")),
        "gen_ai.response.finish_reasons": [ended.reason],
    }
    given = {"model": "gen_ai.request.model", "adapter": "gen_ai.response.model", "request_id": "lockstep.request_id"}
    counted = {
        "prompt_tokens": "gen_ai.usage.input_tokens",
        "cached_tokens": "gen_ai.usage.cache_read.input_tokens",
        "generated_tokens": "gen_ai.usage.output_tokens",
    }
    found |= {name: ended.names[ours] for ours, name in given.items() if ours in ended.names}
    found |= {name: ended.counts[ours] for ours, name in counted.items() if ours in ended.counts}
    if ended.entries:
        asked = ended.entries[0].request
        found["gen_ai.request.max_tokens"] = asked.max_new_tokens
        found["gen_ai.request.choice.count"] = len(ended.entries)
        if asked.sampling.do_sample:
            found["gen_ai.request.temperature"] = asked.sampling.temperature
            found["gen_ai.request.top_p"] = asked.sampling.top_p
    if "first_token_ms" in ended.counts:
        found["gen_ai.response.time_to_first_chunk"] = ended.counts["first_token_ms"] / 1000
    if ended.is_failure:
        found["error.type"] = ended.reason
    return found


class _OtlpSpan:
    def __init__(self, tracer: _OtlpTracer, span: Any, received_at: float) -> None:
        self._tracer = tracer
        self._span = span
        self._received_at = received_at
        self._offset_ns = time.time_ns() - round(received_at * NS)  # of the time of day from the router's clock

    def end(self, ended: Ended) -> None:
        span, tracer = self._span, self._tracer
        if span.is_recording():
            for number, entry in enumerate(ended.entries[:MOST_ANSWERS]):
                for stage in stages(entry, self._received_at, ended.at):
                    of_answer = {"lockstep.answer": number} if len(ended.entries) > 1 else {}
                    began, over = self._time(stage.began), self._time(stage.ended)
                    tracer.child(span, stage.name, began, {**stage.attributes, **of_answer}).end(over)
            span.set_attributes({**tracer.served, **attributes_of(ended)})
            if ended.is_failure:
                span.set_status(tracer.failure)
        span.end(self._time(ended.at))

    def _time(self, at: float) -> int:
        return round(at * NS) + self._offset_ns


class _OtlpTracer:
    def __init__(self, endpoint: str, service_name: str, model_id: str) -> None:
        from opentelemetry import trace
        from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter
        from opentelemetry.sdk.resources import Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor
        from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

        logging.getLogger("opentelemetry").setLevel(logging.ERROR)  # it warns of every span that it drops
        exporter = OTLPSpanExporter(endpoint=endpoint, timeout=EXPORT_TIMEOUT_S)
        self._provider = TracerProvider(
            resource=Resource.create({"service.name": service_name}), shutdown_on_exit=False
        )
        self._provider.add_span_processor(
            BatchSpanProcessor(
                exporter,
                max_queue_size=MOST_WAITING,
                schedule_delay_millis=SEND_EVERY_MS,
                max_export_batch_size=MOST_AT_ONCE,
            )
        )
        self._trace = trace
        self._tracer = self._provider.get_tracer("lockstep.router")
        self._propagator = TraceContextTextMapPropagator()
        self.failure = trace.Status(trace.StatusCode.ERROR)
        self.served: Mapping[str, Value] = {"gen_ai.response.model": model_id}

    def start(self, name: str, headers: Mapping[str, str], at: float) -> RequestSpan:
        context = self._propagator.extract(dict(headers))
        return _OtlpSpan(self, self._tracer.start_span(name, context, kind=self._trace.SpanKind.SERVER), at)

    def child(self, span: Any, name: str, began: int, attributes: Mapping[str, Value]) -> Any:
        """A span within another."""
        return self._tracer.start_span(
            name, self._trace.set_span_in_context(span), attributes=dict(attributes), start_time=began
        )

    def close(self) -> None:
        closing = threading.Thread(target=self._provider.shutdown, name="otlp", daemon=True)
        closing.start()
        closing.join(EXPORT_TIMEOUT_S)  # by itself it would wait for every batch
