"""Traces by OpenTelemetry's own SDK, from a whole server to a collector: one that works, a mute one, and none."""

from __future__ import annotations

import signal
import socket
import sysconfig
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

import grpc
import httpx2
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2 as service
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2_grpc as rpc
from opentelemetry.proto.trace.v1.trace_pb2 import Span

from tests.ports import free_port
from tests.running import ROOT, Server, body

TRACE, CALLER = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
HEADERS = {"traceparent": f"00-{TRACE}-{CALLER}-01"}
# Five spans each, of which so many wait at most that a second's worth of them do not find room.
MANY = 1000
GIVES_UP_S = 10  # at the end, for a collector that does not answer; left to itself the SDK waits for minutes


# The project's own interpreter, which finds the SDK in this environment.
PYTHON = str(ROOT / ".venv" / "bin" / "python")
SDK = {"PYTHONPATH": sysconfig.get_path("purelib")}


class Collector(rpc.TraceServiceServicer):  # type: ignore[misc]
    """Keeps every span."""

    def __init__(self) -> None:
        self.spans: list[Span] = []

    def Export(self, request: service.ExportTraceServiceRequest, _: object) -> service.ExportTraceServiceResponse:
        """One batch."""
        self.spans += [
            span for resource in request.resource_spans for scope in resource.scope_spans for span in scope.spans
        ]
        return service.ExportTraceServiceResponse()


@contextmanager
def collecting() -> Iterator[tuple[str, Collector]]:
    """A collector that works, and its address."""
    collector = Collector()
    server = grpc.server(ThreadPoolExecutor(2))
    rpc.add_TraceServiceServicer_to_server(collector, server)
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    try:
        yield f"http://127.0.0.1:{port}", collector
    finally:
        server.stop(None)


def started(*flags: str) -> Server:
    return Server("--model-id", "null", *flags, env=SDK, command=(PYTHON, "launcher.py"))


def traced(endpoint: str) -> Server:
    return started("--otlp-endpoint", endpoint, "--otlp-service-name", "checked")


def ended(server: Server) -> tuple[float, str]:
    """Stop a server. Returns the seconds that it took, and what it printed."""
    began = time.monotonic()
    server.stop(signal.SIGTERM)
    code, output = server.wait(timeout=300)
    assert 0 == code, output
    return time.monotonic() - began, output


def ended_in_time(server: Server) -> str:
    """The same for one that traces: it takes little longer than one that does not, however slow the machine is."""
    seconds, output = ended(server)
    with started() as plain:
        plain_seconds, _ = ended(plain)
    assert seconds < 3 * plain_seconds + GIVES_UP_S, output
    return output


def test_a_collector_that_works() -> None:
    with collecting() as (endpoint, collector), traced(endpoint) as server:
        for path in ("/generate", "/generate_stream"):
            asked = body("Once upon a time", max_new_tokens=5)
            assert httpx2.post(f"{server.url}{path}", json=asked, headers=HEADERS, timeout=60).status_code == 200
        ended_in_time(server)  # which sends what waits
    assert {bytes.fromhex(TRACE)} == {span.trace_id for span in collector.spans}
    for name in ("generate", "generate_stream"):
        [whole] = [span for span in collector.spans if span.name == name]
        assert bytes.fromhex(CALLER) == whole.parent_span_id
        parts = [span for span in collector.spans if span.parent_span_id == whole.span_id]
        assert ["decode", "prefill", "queue", "validation"] == sorted(span.name for span in parts)
        assert all(
            whole.start_time_unix_nano - 10**9 < span.start_time_unix_nano <= span.end_time_unix_nano for span in parts
        )
        counts = {pair.key: pair.value.int_value for pair in whole.attributes if pair.value.HasField("int_value")}
        assert 5 == counts["gen_ai.usage.output_tokens"] and counts["gen_ai.usage.input_tokens"] > 0


def ask_many(server: Server) -> float:
    """Seconds for many requests, one after another."""
    began = time.monotonic()
    with httpx2.Client(base_url=server.url, timeout=60) as client:
        for _ in range(MANY):
            assert client.post("/generate", json=body("Once", max_new_tokens=1)).status_code == 200
    return time.monotonic() - began


def test_a_collector_that_never_answers() -> None:
    with socket.create_server(("127.0.0.1", 0), backlog=64) as mute:
        with traced(f"http://127.0.0.1:{mute.getsockname()[1]}") as server:
            seconds = ask_many(server)
            output = ended_in_time(server)
    assert "Queue full" not in output, output
    print(f"{MANY} requests beside a mute collector: {seconds:.1f} s")


def test_no_collector_at_all() -> None:
    with traced(f"http://127.0.0.1:{free_port()}") as server:
        seconds = ask_many(server)
        output = ended_in_time(server)
    assert output.count("Failed to export") < 60, output
    print(f"{MANY} requests beside none: {seconds:.1f} s")
