"""Traces for OpenTelemetry: one span per request, with events for the queue, the first token and the end.

Off unless `otlp_endpoint` is set, and nothing of OpenTelemetry is imported then. Export is batched and drops what a
dead collector cannot take, so it never holds up a request. Spans carry counts and reasons, never text.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

EXPORT_TIMEOUT_S = 2  # a dead collector holds up the end of the process by no more


class RequestSpan(Protocol):
    """The trace of one request."""

    def event(self, name: str) -> None:
        """Note that something happened now."""

    def end(self, reason: str, attributes: Mapping[str, int | str]) -> None:
        """Close the span."""


class Tracer(Protocol):
    """Opens the spans of requests."""

    def start(self, name: str, headers: Mapping[str, str]) -> RequestSpan:
        """Open a span, under the caller's if the headers carry a `traceparent`."""

    def close(self) -> None:
        """Export what is left."""


class NoSpan:
    """A span that nobody collects."""

    def event(self, name: str) -> None:
        """Nothing is noted."""

    def end(self, reason: str, attributes: Mapping[str, int | str]) -> None:
        """Nothing is exported."""


class NoTracer:
    """Tracing switched off."""

    def start(self, name: str, headers: Mapping[str, str]) -> RequestSpan:
        """A span that nobody collects."""
        return NoSpan()

    def close(self) -> None:
        """Nothing is left to export."""


def make_tracer(otlp_endpoint: str | None, service_name: str) -> Tracer:
    """The tracer for this endpoint, where `service_name` says whose traces they are.

    Raises ValueError with the remedy when OpenTelemetry is not installed.
    """
    if otlp_endpoint is None:
        return NoTracer()
    try:
        return _OtlpTracer(otlp_endpoint, service_name)
    except ImportError as error:
        raise ValueError(
            f"otlp_endpoint is set but {error.name} is not installed: pip install 'lockstep[otel]', or leave it unset"
        ) from None


class _OtlpSpan:
    def __init__(self, span: Any) -> None:
        self._span = span

    def event(self, name: str) -> None:
        self._span.add_event(name)

    def end(self, reason: str, attributes: Mapping[str, int | str]) -> None:
        self._span.add_event("finished", {"reason": reason})
        self._span.set_attributes(dict(attributes))
        self._span.end()


class _OtlpTracer:
    def __init__(self, endpoint: str, service_name: str) -> None:
        from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter
        from opentelemetry.sdk.resources import Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor
        from opentelemetry.trace import SpanKind
        from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

        self._provider = TracerProvider(resource=Resource.create({"service.name": service_name}))
        self._provider.add_span_processor(
            BatchSpanProcessor(OTLPSpanExporter(endpoint=endpoint, timeout=EXPORT_TIMEOUT_S))
        )
        self._tracer = self._provider.get_tracer("lockstep.router")
        self._propagator = TraceContextTextMapPropagator()
        self._kind = SpanKind.SERVER

    def start(self, name: str, headers: Mapping[str, str]) -> RequestSpan:
        context = self._propagator.extract(dict(headers))
        return _OtlpSpan(self._tracer.start_span(name, context=context, kind=self._kind))

    def close(self) -> None:
        self._provider.shutdown()
