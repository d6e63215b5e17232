"""A stand-in for OpenTelemetry's SDK, which is an extra: it keeps the spans that the real one would export.

Contexts and `traceparent` are those of OpenTelemetry's API, which is installed.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Sequence
from types import ModuleType
from typing import Any

import pytest
from opentelemetry import trace
from opentelemetry.context import Context


class KeptSpan(trace.NonRecordingSpan):
    """One span, and what was said of it."""

    def __init__(self, sdk: FakeSdk, name: str, context: Context | None, given: dict[str, Any]) -> None:
        self.parent = trace.get_current_span(context).get_span_context()
        trace_id = self.parent.trace_id or 1000 + len(sdk.spans)
        super().__init__(trace.SpanContext(trace_id, len(sdk.spans) + 1, False, trace.TraceFlags(1)))
        self.name = name
        self.given = given
        self.attributes: dict[str, Any] = dict(given.get("attributes") or {})
        self.status: trace.Status | None = None
        self.ended: int | None = None

    def is_recording(self) -> bool:
        return self.ended is None

    def set_attributes(self, attributes: Any) -> None:
        self.attributes |= attributes

    def set_status(self, status: Any, description: str | None = None) -> None:
        self.status = status

    def end(self, end_time: int | None = None) -> None:
        assert self.ended is None, "ended twice"
        self.ended = end_time


class FakeSdk:
    """All of the SDK that the router uses."""

    def __init__(self) -> None:
        self.spans: list[KeptSpan] = []
        self.made: dict[str, Any] = {}
        self.may_shut_down = threading.Event()
        self.may_shut_down.set()

    def install(self, monkeypatch: pytest.MonkeyPatch) -> None:
        names = {
            "opentelemetry.sdk": {},
            "opentelemetry.sdk.resources": {"Resource": self},
            "opentelemetry.sdk.trace": {"TracerProvider": self.note("provider")},
            "opentelemetry.sdk.trace.export": {"BatchSpanProcessor": self.note("processor")},
            "opentelemetry.exporter.otlp.proto.grpc.trace_exporter": {"OTLPSpanExporter": self.note("exporter")},
        }
        for name, contents in names.items():
            module = ModuleType(name)
            module.__dict__.update(contents)
            monkeypatch.setitem(sys.modules, name, module)

    def note(self, kind: str) -> Any:
        def make(*arguments: Any, **settings: Any) -> FakeSdk:
            self.made[kind] = settings
            return self

        return make

    def create(self, attributes: dict[str, Any]) -> dict[str, Any]:
        self.made["resource"] = attributes
        return attributes

    def add_span_processor(self, processor: Any) -> None:
        assert processor is self

    def get_tracer(self, name: str) -> FakeSdk:
        return self

    def start_span(self, name: str, context: Context | None = None, **given: Any) -> KeptSpan:
        self.spans.append(KeptSpan(self, name, context, given))
        return self.spans[-1]

    def shutdown(self) -> None:
        self.may_shut_down.wait()

    def named(self, *names: str) -> Sequence[KeptSpan]:
        return [span for span in self.spans if span.name in names]
