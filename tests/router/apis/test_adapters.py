"""Adapters on every route: which one a request means, what answers say of it, and who may change what there is."""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx2
import pytest

from router.scheduling.request import ValidRequest
from router.telemetry.adapter_metrics import MOST_NAMES, AdapterMetrics
from server.adapters.identity import content_key
from tests.adapter_folders import adapter_folder
from tests.router.doubles import tasks_in_process
from tests.router.site import PROMPT, Site, site

CHAT: dict[str, Any] = {"messages": [{"role": "user", "content": PROMPT}], "max_tokens": 2, "temperature": 0}
RESPONSE: dict[str, Any] = {"input": PROMPT, "max_output_tokens": 2}
COMPLETION: dict[str, Any] = {"prompt": PROMPT, "max_tokens": 2, "temperature": 0}
TEXT: dict[str, Any] = {"inputs": PROMPT, "parameters": {"max_new_tokens": 2}}


def by_model(body: dict[str, Any]) -> Callable[[str], dict[str, Any]]:
    return lambda name: {**body, "model": name}


def by_adapter_id(name: str) -> dict[str, Any]:
    return {**TEXT, "parameters": {**TEXT["parameters"], "adapter_id": name}}


# What names an adapter on each route that asks the model for tokens.
GENERATING: dict[str, Callable[[str], dict[str, Any]]] = {
    "/": by_adapter_id,
    "/generate": by_adapter_id,
    "/generate_stream": by_adapter_id,
    "/invocations": by_adapter_id,
    "/vertex": lambda name: {"instances": [by_adapter_id(name)]},
    "/v1/chat/completions": by_model(CHAT),
    "/v1/completions": by_model(COMPLETION),
    "/v1/responses": by_model(RESPONSE),
    "/v1/messages": by_model(CHAT),
}
COUNTING: dict[str, Callable[[str], dict[str, Any]]] = {
    "/tokenize": by_model({"prompt": PROMPT}),
    "/chat_tokenize": by_model(CHAT),
    "/v1/responses/input_tokens": by_model(RESPONSE),
    "/v1/messages/count_tokens": by_model(CHAT),
}


@asynccontextmanager
async def adapting(tmp_path: Path, template: str = "", **config: Any) -> AsyncIterator[tuple[Site, list[ValidRequest]]]:
    """A site with the adapter `alice` of the command line and `bob` in a folder, and what it asks its shards for."""
    home = tmp_path / "home"
    listed = (("alice", str(adapter_folder(tmp_path / "alice", "a"))),)
    adapter_folder(home / "bob", "b")
    given = {
        "adapters": listed,
        "adapter_dir": str(home),
        **({"chat_template": template} if template else {}),
        **config,
    }
    with tasks_in_process():
        async with site(config=given) as it:
            yield it, requests_of(it)


def requests_of(it: Site) -> list[ValidRequest]:
    """What it asks its shards for from now on."""
    asked: list[ValidRequest] = []
    submit = it.batcher.submit

    def noting(request: ValidRequest, **options: Any) -> Any:
        asked.append(request)
        return submit(request, **options)

    it.batcher.submit = noting  # type: ignore[method-assign]
    return asked


def error_of(answer: httpx2.Response) -> tuple[int, str]:
    """Its status and sentence, whatever the API."""
    body = answer.json()
    return answer.status_code, body["error"] if isinstance(body["error"], str) else body["error"]["message"]


async def test_every_route_means_what_it_names(tmp_path: Path, template: str) -> None:
    async with adapting(tmp_path, template) as (it, asked):
        for path, body in GENERATING.items():
            for name, folder in (("alice", tmp_path / "alice"), ("bob", tmp_path / "home" / "bob")):
                answer = await it.http.post(path, json=body(name))
                assert (200, 1) == (answer.status_code, len(asked)), answer.text
                adapter = asked.pop().adapter
                assert adapter is not None and (name, content_key(folder)) == (adapter.name, adapter.key)
            for base in ("a/model", "tgi"):
                assert 200 == (await it.http.post(path, json=body(base))).status_code
                assert None is asked.pop().adapter
        for path, body in COUNTING.items():
            assert [200] * 3 == [(await it.http.post(path, json=body(n))).status_code for n in ("alice", "bob", "tgi")]


async def test_a_name_that_is_nobody_s_is_404_on_every_route(tmp_path: Path, template: str) -> None:
    async with adapting(tmp_path, template) as (it, asked):
        for path, body in (GENERATING | COUNTING).items():
            expected = "the model carol is not served here: there is a/model, alice"
            answer = await it.http.post(path, json=body("carol"))
            assert (404, expected) == error_of(answer)
            assert "not_found" == answer.json()["error_type"]
            if path.startswith("/v1/messages"):
                assert "not_found_error" == answer.json()["error"]["type"]
            elif path.startswith("/v1/"):
                error = answer.json()["error"]
                assert ("invalid_request_error", "model", "model_not_found") == (
                    error["type"], error["param"], error["code"]
                )  # fmt: skip
        assert [] == asked
        assert it.app.state.services.permits._left == it.batcher.limits.max_concurrent_requests


@pytest.mark.parametrize(
    "name", ["../alice", "..", "/etc/passwd", "bob/../bob", "%2e%2e", "\0", "bob\0", ".bob", "x" * 250]
)
async def test_hostile_names_are_404_or_refused(tmp_path: Path, template: str, name: str) -> None:
    async with adapting(tmp_path, template) as (it, asked):
        for path, body in GENERATING.items():
            status, sentence = error_of(await it.http.post(path, json=body(name)))
            assert 404 == status and sentence.isprintable() and len(sentence) < 200
        for given in ("x" * 5000, "a/" * 2500):
            assert 404 == error_of(await it.http.post("/generate", json=by_adapter_id(given)))[0]
            assert 400 == error_of(await it.http.post("/v1/completions", json=by_model(COMPLETION)(given)))[0]
        assert [] == asked


async def test_without_adapters_any_model_is_the_model_and_adapter_id_is_refused() -> None:
    async with site() as it:
        answer = await it.http.post("/v1/completions", json={**COMPLETION, "model": "gpt-4"})
        assert (200, "gpt-4") == (answer.status_code, answer.json()["model"])
        status, sentence = error_of(await it.http.post("/generate", json=by_adapter_id("alice")))
        assert 422 == status and "this server has no adapters: leave `adapter_id` out" in sentence
        assert None is (await it.http.get("/info")).json()["adapters"]


async def test_answers_name_the_adapter(tmp_path: Path, template: str) -> None:
    async with adapting(tmp_path, template) as (it, _):
        for path in ("/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/messages"):
            for name in ("alice", "tgi"):
                assert name == (await it.http.post(path, json=GENERATING[path](name))).json()["model"]
        streamed = (await it.http.post("/v1/completions", json={**COMPLETION, "model": "bob", "stream": True})).text
        assert "bob" == json.loads(streamed.split("\n\n")[0].removeprefix("data: "))["model"]


async def test_answers_say_which_content_they_had(tmp_path: Path, template: str) -> None:
    async with adapting(tmp_path, template) as (it, _):
        alice = f"alice={content_key(tmp_path / 'alice').hex()}"
        for path, body in GENERATING.items():
            has_streams = path not in ("/vertex", "/generate", "/generate_stream")
            for wanted in ({}, {"stream": True}) if has_streams else ({},):
                answer = await it.http.post(path, json=body("alice") | wanted)
                assert (200, alice) == (answer.status_code, answer.headers["x-lockstep-adapter"])
            assert "x-lockstep-adapter" not in (await it.http.post(path, json=body("tgi"))).headers
        both = {"instances": [by_adapter_id("bob"), by_adapter_id("alice"), TEXT]}
        told = (await it.http.post("/vertex", json=both)).headers["x-lockstep-adapter"]
        assert [f"bob={content_key(tmp_path / 'home' / 'bob').hex()}", alice] == told.split(", ")


async def test_usage_metrics_and_the_log_name_the_adapter(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "router.telemetry.request_log"):
        async with adapting(tmp_path) as (it, _):
            for name in ("bob", "bob", "tgi"):
                answer = (await it.http.post("/v1/completions", json=by_model(COMPLETION)(name))).json()
                assert (None if name == "tgi" else name) == answer["usage"].get("adapter")
            await it.http.post("/generate", json=by_adapter_id("carol"))
            metrics = (await it.http.get("/metrics")).text
    for name, count, prompt, generated in (("alice", 0.0, 0.0, 0.0), ("bob", 2.0, 10.0, 4.0)):
        assert f'tgi_adapter_request_count{{adapter="{name}"}} {count}' in metrics
        assert f'tgi_adapter_tokens{{adapter="{name}",kind="prompt"}} {prompt}' in metrics
        assert f'tgi_adapter_tokens{{adapter="{name}",kind="generated"}} {generated}' in metrics
    assert "carol" not in metrics and 'adapter="other"' not in metrics
    key = content_key(tmp_path / "home" / "bob").hex()
    lines = [record.__dict__ for record in caplog.records]
    assert [("bob", key), ("bob", key), (None, None), (None, None)] == [
        (line.get("adapter"), line.get("adapter_key")) for line in lines
    ]
    assert ("not_found", "carol") == (lines[-1]["reason"], lines[-1]["model"])


def test_of_many_names_the_first_have_series() -> None:
    metrics = AdapterMetrics()
    metrics.expect(f"adapter-{number}" for number in range(MOST_NAMES + 10))
    requests, _ = metrics.collect()
    names = [sample.labels["adapter"] for sample in requests.samples]
    assert MOST_NAMES + 1 == len(names) and ["adapter-63", "other"] == names[-2:]


async def test_the_model_has_the_names_that_the_operator_gives_it(tmp_path: Path) -> None:
    async with adapting(tmp_path, model_id="/models/a", served_model_name=("gpt", "chat")) as (it, asked):
        for named in ({"model": name} for name in ("gpt", "chat", "/models/a", "tgi")):
            assert 200 == (await it.http.post("/v1/completions", json=COMPLETION | named)).status_code
            assert None is asked.pop().adapter
        assert "gpt" == (await it.http.post("/v1/completions", json=COMPLETION)).json()["model"]
        listed = (await it.http.get("/v1/models")).json()["data"]
        assert [("gpt", "gpt"), ("alice", "gpt")] == [(one["id"], one["root"]) for one in listed]
        assert "gpt" == (await it.http.get("/v1/models/gpt")).json()["id"]


async def test_other_servers_names_of_adapters_are_refused(tmp_path: Path, template: str) -> None:
    async with adapting(tmp_path, template) as (it, asked):
        for field in ({"lora_path": "alice"}, {"lora": [{"id": 0, "scale": 1.0}]}, {"adapter_id": "alice"}):
            status, sentence = error_of(await it.http.post("/v1/completions", json=COMPLETION | field))
            assert 400 == status and "is not served: an adapter is named as `model`" in sentence
        assert [] == asked


async def test_adapter_id_beside_the_parameters_is_refused_and_not_passed_over(tmp_path: Path) -> None:
    async with adapting(tmp_path) as (it, asked):
        misplaced = TEXT | {"adapter_id": "alice"}
        asked_of = dict.fromkeys(("/", "/generate", "/generate_stream", "/invocations"), misplaced)
        for path, body in {**asked_of, "/vertex": {"instances": [misplaced]}}.items():
            status, sentence = error_of(await it.http.post(path, json=body))
            assert 422 == status and sentence.endswith("adapter_id`: belongs in `parameters`: put it there")
        assert 200 == (await it.http.post("/generate", json=TEXT | {"adapter_id": None})).status_code
        assert 1 == len(asked)


async def test_a_key_for_adapters_alone_may_count_tokens(tmp_path: Path) -> None:
    """The tokenizer is that of all. What it names must be its own all the same."""
    keys = keys_file(tmp_path, {"name": "a", "adapters": ["alice"]})
    async with adapting(tmp_path, api_keys_file=keys) as (it, _):
        bodies = ({"inputs": PROMPT}, {"prompt": PROMPT}, {"content": PROMPT}, by_adapter_id("alice"))
        for body in bodies:
            assert 200 == (await it.http.post("/tokenize", json=body, headers=bearer("a"))).status_code
        for body in (by_adapter_id("bob"), {"prompt": PROMPT, "model": "a/model"}):
            assert 404 == (await it.http.post("/tokenize", json=body, headers=bearer("a"))).status_code
        assert 404 == (await it.http.post("/generate", json=TEXT, headers=bearer("a"))).status_code


async def test_several_instances_may_name_several_adapters(tmp_path: Path, template: str) -> None:
    async with adapting(tmp_path, template) as (it, asked):
        instances = [by_adapter_id("alice"), TEXT, by_model(CHAT)("bob")]
        assert 200 == (await it.http.post("/vertex", json={"instances": instances})).status_code
        assert ["alice", None, "bob"] == [one.adapter and one.adapter.name for one in asked]
        assert 404 == (await it.http.post("/vertex", json={"instances": [*instances, by_adapter_id("x")]})).status_code
        assert 3 == len(asked)


async def test_models_are_listed_with_their_parent(tmp_path: Path) -> None:
    async with adapting(tmp_path) as (it, _):
        listed = (await it.http.get("/v1/models")).json()["data"]
        assert [("a/model", None), ("alice", "a/model")] == [(one["id"], one.get("parent")) for one in listed]
        assert {"a/model"} == {one["root"] for one in listed}
        for name in ("a/model", "alice", "bob"):
            assert name == (await it.http.get(f"/v1/models/{name}")).json()["id"]
        assert ["a/model", "alice", "bob"] == [one["id"] for one in (await it.http.get("/v1/models")).json()["data"]]
        assert 404 == (await it.http.get("/v1/models/carol")).status_code
        theirs = {"anthropic-version": "2023-06-01"}
        page = (await it.http.get("/v1/models", headers=theirs)).json()
        assert ("a/model", "bob", 3) == (page["first_id"], page["last_id"], len(page["data"]))
        assert "bob" == (await it.http.get("/v1/models/bob", headers=theirs)).json()["display_name"]
        assert 2 == (await it.http.get("/info")).json()["adapters"]


# ------------------------------------------------------------------------------------------------ loading and unloading


LOAD, UNLOAD = "/v1/load_lora_adapter", "/v1/unload_lora_adapter"


def keys_file(tmp_path: Path, *keys: dict[str, Any]) -> str:
    path = tmp_path / "keys.json"
    path.touch(mode=0o600)
    path.write_text(json.dumps({"keys": [{"key": one["name"], **one} for one in keys]}))
    return str(path)


def bearer(key: str) -> dict[str, str]:
    return {"authorization": f"Bearer {key}"}


async def test_nobody_changes_adapters_unless_the_operator_allows_it(tmp_path: Path) -> None:
    keys = keys_file(tmp_path, {"name": "user"}, {"name": "boss", "admin": True})
    body = {"lora_name": "mine", "lora_path": "bob"}
    async with adapting(tmp_path, api_keys_file=keys, api_key="lone") as (it, _):
        for path in (LOAD, UNLOAD):
            assert 401 == (await it.http.post(path, json=body)).status_code
            for key in ("user", "lone"):
                status, sentence = error_of(await it.http.post(path, json=body, headers=bearer(key)))
                assert 403 == status and "a key that has `admin` in --api-keys-file" in sentence
        assert 200 == (await it.http.post(LOAD, json=body, headers=bearer("boss"))).status_code
        assert 200 == (await it.http.post(UNLOAD, json=body, headers=bearer("boss"))).status_code
    async with adapting(tmp_path) as (it, _):
        assert [403, 403] == [(await it.http.post(path, json=body)).status_code for path in (LOAD, UNLOAD)]
    async with site() as it:
        assert [403, 403] == [(await it.http.post(path, json=body)).status_code for path in (LOAD, UNLOAD)]


async def test_what_is_loaded_is_served_and_what_is_unloaded_is_not(tmp_path: Path) -> None:
    async with adapting(tmp_path, allow_adapter_changes=True) as (it, asked):
        named = by_model(COMPLETION)("mine")
        assert 404 == (await it.http.post("/v1/completions", json=named)).status_code
        answer = await it.http.post(LOAD, json={"lora_name": "mine", "lora_path": "bob"})
        assert (200, "Success: LoRA adapter 'mine' added successfully.") == (answer.status_code, answer.text)
        assert 200 == (await it.http.post("/v1/completions", json=named)).status_code
        first = asked.pop().adapter
        again = await it.http.post(LOAD, json={"lora_name": "mine", "lora_path": "bob"})
        assert 400 == error_of(again)[0] and "the adapter mine is loaded already" in error_of(again)[1]
        adapter_folder(tmp_path / "home" / "new", "other")
        whole = str(tmp_path / "home" / "new")
        load = {"lora_name": "mine", "lora_path": whole, "load_inplace": True}
        assert 200 == (await it.http.post(LOAD, json=load)).status_code
        assert 200 == (await it.http.post("/v1/completions", json=named)).status_code
        second = asked.pop().adapter
        assert first is not None and second is not None and first.key != second.key
        assert it.shards.prepared.keys() >= {first.key, second.key}
        assert 200 == (await it.http.post(UNLOAD, json={"lora_name": "mine"})).status_code
        assert 404 == (await it.http.post("/v1/completions", json=named)).status_code
        assert 404 == (await it.http.post(UNLOAD, json={"lora_name": "mine"})).status_code


async def test_a_running_request_goes_on_when_its_adapter_is_unloaded(tmp_path: Path) -> None:
    async with adapting(tmp_path, allow_adapter_changes=True) as (it, asked):
        it.shards.step_delay_s = 0.005
        body = {**COMPLETION, "model": "alice", "max_tokens": 60, "ignore_eos": True}
        asking = asyncio.ensure_future(it.http.post("/v1/completions", json=body))
        while not asked:
            await asyncio.sleep(0.001)
        assert 200 == (await it.http.post(UNLOAD, json={"lora_name": "alice"})).status_code
        assert 404 == (await it.http.post("/v1/completions", json=body)).status_code
        answer = await asking
        assert (200, 60) == (answer.status_code, answer.json()["usage"]["completion_tokens"])


async def test_nothing_outside_the_folder_is_loaded(tmp_path: Path) -> None:
    async with adapting(tmp_path, allow_adapter_changes=True) as (it, _):
        (tmp_path / "home" / "link").symlink_to(tmp_path / "alice")
        for path in (str(tmp_path / "alice"), "../alice", "link", "/etc", "", "\0", "org/name", "x" * 9000):
            status, sentence = error_of(await it.http.post(LOAD, json={"lora_name": "mine", "lora_path": path}))
            assert 400 == status and "give the path of an adapter's folder in that of --adapter-dir" in sentence
            assert sentence.isprintable() and len(sentence) < 300
        assert 1 == (await it.http.get("/info")).json()["adapters"]


async def test_a_key_may_use_some_adapters_alone(tmp_path: Path) -> None:
    keys = ({"name": "a", "adapters": ["alice"]}, {"name": "b", "adapters": ["bob", ""]}, {"name": "all"})
    async with adapting(tmp_path, api_keys_file=keys_file(tmp_path, *keys)) as (it, _):
        statuses = {
            key: [
                (await it.http.post("/v1/completions", json={**COMPLETION, **named}, headers=bearer(key))).status_code
                for named in ({"model": "alice"}, {"model": "bob"}, {"model": "a/model"}, {})
            ]
            for key in ("a", "b", "all")
        }
        assert {"a": [200, 404, 404, 404], "b": [404, 200, 200, 200], "all": [200] * 4} == statuses
        listed = {key: (await it.http.get("/v1/models", headers=bearer(key))).json()["data"] for key in statuses}
        names = {key: [one["id"] for one in data] for key, data in listed.items()}
        assert {"a": ["alice"], "b": ["a/model", "bob"], "all": ["a/model", "alice", "bob"]} == names
        for key, name, status in (("a", "bob", 404), ("a", "a/model", 404), ("b", "bob", 200), ("b", "a/model", 200)):
            assert status == (await it.http.get(f"/v1/models/{name}", headers=bearer(key))).status_code
