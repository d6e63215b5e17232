"""What is nested deeper than anybody needs is refused with one sentence, wherever it lies in a body."""

from __future__ import annotations

import json
import time
from contextlib import suppress
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from router.errors import ValidationError
from router.requests.schemas import (
    MOST_NESTING,
    MOST_VALUES,
    is_nested_deeper,
    num_values,
    refuse_excess,
    refuse_excess_within,
)
from tests.router.served import Served, served

json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4),
)


def depth_of(value: Any) -> int:
    inner = value.values() if isinstance(value, dict) else value if isinstance(value, list) else None
    return 0 if inner is None else 1 + max(map(depth_of, inner), default=0)


@given(json_values)
def test_the_nesting_of_json_is_counted_without_its_texts(value: Any) -> None:
    depth, text = depth_of(value), json.dumps(value).encode()
    assert not is_nested_deeper(text, depth)
    assert depth == 0 or is_nested_deeper(text, depth - 1)


def values_of(value: Any) -> int:
    inner = value.values() if isinstance(value, dict) else value if isinstance(value, list) else None
    return 1 if inner is None else 1 + sum(map(values_of, inner))


@given(json_values, st.integers(0, 20))
def test_values_are_counted_without_what_is_within_texts(value: Any, enough: int) -> None:
    """At most twice as many as there are, and all but the outermost."""
    there, found = values_of(value), num_values(json.dumps(value).encode(), enough)
    assert found <= 2 * there
    assert found > enough or found >= there - 1


@pytest.mark.parametrize("text", [b'"' + b'\\"' * 10**6, b'"' + b"\\\\" * 10**6, b'"' * 10**6, b'"a'])
def test_a_text_without_an_end_is_read_once(text: bytes) -> None:
    """Read again from each quote in it, a million of them would take days."""
    assert is_nested_deeper(b"[" * 200 + text, 199) and not is_nested_deeper(b"[" * 200 + text, 200)


@pytest.mark.parametrize(
    "text",
    [b"[" * 2_000_000, b"[" * 129 + b'""' * 1_000_000, b'{"' * 1_000_000, b'["' + b'\\"' * 1_000_000],
    ids=["brackets", "texts", "names", "escapes"],
)
def test_what_is_no_json_is_counted_at_once(text: bytes) -> None:
    """Each step through it in Python would hold up everybody."""
    began = time.thread_time()
    with suppress(ValidationError):
        refuse_excess(text, MOST_VALUES)
    assert time.thread_time() - began < 0.5


def test_no_text_hides_the_values_of_another() -> None:
    many = json.dumps({"a": [[]] * (MOST_VALUES + 1)}).encode()
    for texts in ([b'"', many], [b"\\", many], [many, b'"'], [json.dumps([0] * (MOST_VALUES // 2 + 2)).encode()] * 2):
        with pytest.raises(ValidationError, match="more than 10000 values"):
            refuse_excess_within(texts, MOST_VALUES)
    refuse_excess_within([b'"', b"{}"], MOST_VALUES)


def deep(levels: int) -> Any:
    schema: Any = {"type": "string"}
    for _ in range(levels // 2):
        schema = {"type": "object", "properties": {"a": schema}}
    return schema


SAID = [{"role": "user", "content": "hi"}]
CALLED = {"name": "f", "arguments": json.dumps(deep(500))}
BODIES = [
    ("/generate", {"inputs": "a", "parameters": {"grammar": {"type": "json", "value": deep(500)}}}),
    ("/generate", {"inputs": "a", "parameters": {"grammar": {"type": "json", "value": json.dumps(deep(500))}}}),
    ("/v1/chat/completions", {"messages": SAID, "response_format": {"type": "json_object", "schema": deep(500)}}),
    (
        "/v1/chat/completions",
        {
            "messages": SAID,
            "response_format": {"type": "json_schema", "json_schema": {"name": "a", "schema": deep(500)}},
        },
    ),
    (
        "/v1/chat/completions",
        {"messages": SAID, "tools": [{"type": "function", "function": {"name": "f", "parameters": deep(500)}}]},
    ),
    (
        "/v1/chat/completions",
        {
            "messages": [
                *SAID,
                {"role": "assistant", "tool_calls": [{"id": "1", "type": "function", "function": CALLED}]},
            ]
        },
    ),
    ("/v1/chat/completions", {"messages": SAID, "chat_template_kwargs": {"a": deep(500)}}),
    ("/v1/completions", {"prompt": "a", "unknown": deep(500)}),
    ("/v1/responses", {"input": "a", "text": {"format": {"type": "json_schema", "name": "a", "schema": deep(500)}}}),
    ("/v1/responses", {"input": [{"type": "function_call", "call_id": "1", **CALLED}]}),
    (
        "/v1/messages",
        {"max_tokens": 1, "messages": SAID, "tools": [{"name": "f", "input_schema": deep(500)}]},
    ),
    ("/v1/messages", {"max_tokens": 1, "messages": [{"role": "user", "content": [{"type": "text", "x": deep(500)}]}]}),
    ("/invocations", {"inputs": "a", "x": deep(500)}),
    ("/tokenize", {"inputs": "a", "x": deep(500)}),
]


@pytest.fixture(scope="module")
def it(tmp_path_factory: pytest.TempPathFactory) -> Any:
    with served(tmp_path_factory.mktemp("nesting"), lambda _: "yes") as running:
        yield running


@pytest.mark.parametrize(("path", "body"), BODIES, ids=[f"{path} {list(body)[-1]}" for path, body in BODIES])
def test_a_body_that_is_nested_too_deep_is_refused_with_a_sentence(it: Served, path: str, body: dict[str, Any]) -> None:
    answer = it.http.post(path, json={"model": "m", **body})
    assert answer.status_code in (400, 422), answer.text
    assert "nested more than 128 levels deep: flatten it" in answer.text


def test_schemas_up_to_the_bound_are_no_servers_failure(it: Served) -> None:
    for levels in (20, MOST_NESTING - 10, MOST_NESTING):
        asked = {"type": "json_schema", "json_schema": {"name": "a", "schema": deep(levels - 4)}}
        answer = it.http.post("/v1/chat/completions", json={"model": "m", "messages": SAID, "response_format": asked})
        assert answer.status_code in (200, 400, 422), answer.text
