"""What an ingress reads of requests, models and loads."""

from __future__ import annotations

from typing import Any

import pytest

from lockstep_ray.errors import error_body
from lockstep_ray.requests import PREFIX_CHARACTERS, adapter_of, is_served, model_of, read_body, size_of
from lockstep_ray.scaling import KV, QUEUE, wanted
from lockstep_ray.settings import read_settings

LONG = "Once upon a time there was a fox. " * 20


@pytest.mark.parametrize(
    ("body", "other"),
    [
        ({"inputs": LONG + "a"}, {"inputs": LONG + "b"}),
        ({"prompt": LONG + "a"}, {"prompt": [LONG, "b"]}),
        ({"prompt": [*range(200), 1]}, {"prompt": [*range(200), 2]}),
        (
            {"messages": [{"role": "user", "content": LONG + "a"}]},
            {"messages": [{"role": "user", "content": [{"type": "text", "text": LONG}]}, {"content": "b"}]},
        ),
        ({"system": LONG, "messages": [{"content": "a"}]}, {"system": LONG, "messages": [{"content": "b"}]}),
    ],
)
def test_what_begins_alike_has_one_number(body: dict[str, Any], other: dict[str, Any]) -> None:
    _, number = size_of(body)
    assert number is not None
    assert number == size_of(other)[1]
    assert number != size_of({"inputs": "x" + LONG})[1]


def test_what_begins_alike_with_another_adapter_begins_otherwise() -> None:
    names = ("alice", "bob")
    bodies = [{"inputs": LONG, "parameters": {"adapter_id": "alice"}}, {"prompt": LONG, "model": "bob"}]
    bodies += [{"prompt": LONG, "model": "alice"}, {"prompt": LONG, "model": "the/model"}, {"prompt": LONG}]
    assert ["alice", "bob", "alice", "", ""] == [adapter_of(body, names) for body in bodies]
    first, second, third, *plain = (size_of(body, adapter_of(body, names))[1] for body in bodies)
    assert first == third and 3 == len({first, second, *plain})


def test_adapters_are_names_of_their_model() -> None:
    models = [{"name": "m", "aliases": ["tgi"], "adapters": ["alice"], "flags": ["--adapter-dir", "/a"]}, {"name": "n"}]
    found = read_settings({"models": models})
    assert {"m": "m", "tgi": "m", "alice": "m", "n": "n"} == found.by_name() and {"alice": "m"} == found.parents()
    served = ["--served-model-name=m", "--served-model-name=tgi"]
    assert [["--adapter-dir", "/a", *served], []] == [model.every_flag for model in found.models]
    with pytest.raises(ValueError, match="alice is the name of several models"):
        read_settings({"models": [*models, {"name": "alice"}]})


def test_short_beginnings_have_none_and_lengths_are_about_right() -> None:
    assert (102, None) == size_of({"inputs": "Tell me"[:8] + "!"})
    tokens, _ = size_of({"inputs": LONG, "parameters": {"max_new_tokens": 7}})
    assert len(LONG) // 4 + 7 == tokens
    assert len(LONG) // 4 + 9 == size_of({"prompt": LONG, "max_tokens": 9})[0]
    assert len(LONG) > PREFIX_CHARACTERS


@pytest.mark.parametrize("body", [b"", b"[1]", b"{", b'{"model":1,"prompt":{"a":[null]}}'])
def test_what_is_no_request_is_nobody_s_problem_here(body: bytes) -> None:
    found = read_body(body)
    assert (None, (100, None)) == (model_of(found), size_of(found))


@pytest.mark.parametrize(
    ("method", "path", "expected"),
    [
        ("POST", "/generate", True), ("GET", "/v1/models/a/b", True), ("GET", "/docs/swagger-ui.css", True),
        ("OPTIONS", "/v1/messages", True), ("POST", "/v1/files", False), ("GET", "/v1/batches", False),
        ("GET", "/metrics", False), ("DELETE", "/generate", False),
    ],
)  # fmt: skip
def test_routes_of_one_replica_s_own_are_not_served(method: str, path: str, expected: bool) -> None:
    assert expected == is_served(method, path)


def test_errors_have_the_shape_of_their_api() -> None:
    assert {"error": "no", "error_type": "not_found"} == error_body("/generate", 404, "no")
    missing = error_body("/v1/completions", 404, "no", "model_not_found")["error"]
    assert ("invalid_request_error", "model_not_found") == (missing["type"], missing["code"])
    not_here = error_body("/v1/files", 404, "no")["error"]
    assert ("invalid_request_error", None) == (not_here["type"], not_here["code"])
    assert "server_error" == error_body("/v1/completions", 503, "no")["error"]["type"]
    assert "not_found_error" == error_body("/v1/messages", 404, "no")["error"]["type"]


@pytest.mark.parametrize(
    ("loads", "num_replicas", "queued", "expected"),
    [
        ({}, 2, 0, 2), ({}, 0, 9, 3),
        ({QUEUE: {"a": 0}, KV: {"a": 0.1}}, 1, 0, 1),
        ({QUEUE: {"a": 8}, KV: {"a": 0.9}}, 1, 0, 2),
        ({QUEUE: {"a": 0, "b": 0}, KV: {"a": 0.8, "b": 0.8}}, 2, 0, 2),
        ({QUEUE: {"a": 0, "b": 0, "c": 0}, KV: {"a": 0.0, "b": 0.3, "c": 0.1}}, 3, 0, 1),
        ({QUEUE: {"a": 0, "b": 0}, KV: {"a": 1, "b": 1}}, 2, 4, 4),
        ({QUEUE: {"a": 0}, KV: {"a": 0}}, 1, 0, 0),
    ],
)  # fmt: skip
def test_replicas_follow_the_fullest_of_queue_and_cache(
    loads: dict[str, dict[str, float]], num_replicas: int, queued: float, expected: int
) -> None:
    assert expected == wanted(loads, num_replicas, queued, 4, 0.8)


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"policy": "fastest"}, "fastest is no dispatch policy: give one of"),
        ({"aliases": ["a"]}, "a is the name of several models"),
        ({"scaling": {"min_replicas": 3}}, "min_replicas is 3: give at most max_replicas, 1"),
        ({"replicas": 3}, "Extra inputs are not permitted"),
    ],
)
def test_wrong_settings_are_refused_before_anything_starts(changes: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ValueError, match=sentence):
        read_settings({"models": [{"name": "a", **changes}]})
