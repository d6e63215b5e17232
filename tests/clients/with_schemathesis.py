"""Every route against the API's own document: requests that keep it and requests that do not, from schemathesis.

Against the null model, so that what is tested is the router. No answer is a 5xx, and all of them (their status, their
type, their headers, their bodies, and each event of a stream) are as the document says.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import schemathesis
from hypothesis import HealthCheck, given, settings
from schemathesis import GenerationMode, checks
from schemathesis.config import SchemathesisConfig
from schemathesis.specs.openapi import checks as openapi_checks

from tests.running import ROOT, Server

KEY = "schemathesis-key"
LEAST_CASES = 2000
CASES_OF_A_ROUTE = 120  # of each kind: fewer where there are not so many
PYTHON = str(ROOT / ".venv" / "bin" / "python")
FLAGS = "--model-id null --max-concurrent-requests 64 --max-total-tokens 128 --max-input-length 64".split()
TEMPLATE = "{% for message in messages %}{{ message.role }}: {{ message.content }}\n{% endfor %}assistant:"
LAST_EVENTS = {  # of each route that streams: what the data of its last event matches
    "/": '"generated_text":"|"error":',
    "/generate_stream": '"generated_text":"|"error":',
    "/invocations": r'"generated_text":"|data: \[DONE\]|"error":',
    "/v1/completions": r'data: \[DONE\]|"error":',
    "/v1/chat/completions": r'data: \[DONE\]|"error":',
    "/v1/responses": '"type":"response.(completed|incomplete|failed)"',
    "/v1/messages": '"type":"(message_stop|error)"',
}
CHECKS = [
    checks.not_a_server_error,
    openapi_checks.status_code_conformance,
    openapi_checks.content_type_conformance,
    openapi_checks.response_headers_conformance,
    openapi_checks.response_schema_conformance,
    openapi_checks.negative_data_rejection,
    openapi_checks.unsupported_method,
]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    template = Path(tmp_path_factory.mktemp("template")) / "template.jinja"
    template.write_text(TEMPLATE)
    flags = (*FLAGS, "--api-key", KEY, "--chat-template", str(template))
    with Server(*flags, command=(PYTHON, "launcher.py")) as it:
        yield it


@pytest.fixture(scope="module")
def document(server: Server) -> Any:
    whole_streams = SchemathesisConfig.from_dict({"max-stream-events": 1000})  # it hangs up behind 20 otherwise
    return schemathesis.openapi.from_url(f"{server.url}/openapi.json", config=whole_streams)


@schemathesis.hook
def map_headers(_: Any, headers: dict[str, Any] | None) -> dict[str, Any] | None:
    """A deadline of a few milliseconds passes, as the document says it may: with 504, which is a 5xx."""
    if headers and (given := str(headers.get("x-request-timeout-ms", ""))).isdecimal():
        headers["x-request-timeout-ms"] = given + "00000" if len(given) < 4 else given
    return headers


def test_routes_are_as_their_document_says(document: Any, subtests: pytest.Subtests) -> None:
    num_cases = 0

    def check(case: schemathesis.Case) -> None:
        nonlocal num_cases
        num_cases += 1
        validate(case)
        if mode is GenerationMode.POSITIVE and case.operation.path in LAST_EVENTS and isinstance(case.body, dict):
            num_cases += 1
            case.body = {**case.body, "stream": True}
            validate(case)

    limits = settings(
        max_examples=CASES_OF_A_ROUTE, deadline=None, database=None, suppress_health_check=list(HealthCheck)
    )
    for operation in (found.ok() for found in document.get_all_operations()):
        for mode in GenerationMode if operation.method == "post" else [GenerationMode.POSITIVE]:
            with subtests.test(f"{operation.label} {mode.value}"):
                limits(given(operation.as_strategy(generation_mode=mode))(check))()
    print(f"{num_cases} cases")
    assert num_cases >= LEAST_CASES


def validate(case: schemathesis.Case) -> None:
    """Send one request, and hold its answer, and each event of a stream, against the document."""
    key = {"authorization": f"Bearer {KEY}"}
    response = case.call_and_validate(headers=key, checks=CHECKS, timeout=60)
    if response.headers.get("content-type", [""])[0].startswith("text/event-stream"):
        check_frames(response.text, LAST_EVENTS[case.operation.path])


def check_frames(text: str, last: str) -> None:
    """What the document cannot say of a stream: how its events are written, and what ends it."""
    *events, rest = text.split("\n\n")
    assert rest == "" and events
    for event in events:
        named = re.fullmatch(r'event: (\S+)\ndata: {"type":"(\S+?)".*}', event)
        assert named[1] == named[2] if named else re.fullmatch(r"data: (\[DONE\]|{.*})|: ping", event), event
    assert re.search(last, events[-1]), text


def test_the_document_is_the_same_at_both_paths(server: Server) -> None:
    import httpx2

    paths = ("/openapi.json", "/api-doc/openapi.json")
    one, other = (httpx2.get(f"{server.url}{path}", timeout=60).json() for path in paths)
    assert one == other and one["openapi"].startswith("3.1")
