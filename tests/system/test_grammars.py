"""Texts held to grammars by a whole server of two ranks: they keep to them, and neighbours do not notice."""

from __future__ import annotations

import asyncio
import json
import os
import random
import re
import signal
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any, Literal

import anthropic
import httpx2
import jsonschema
import openai
import pytest
from pydantic import BaseModel

from lockstep_ray.streams import Stream
from router.apis.app import CHAT_NICENESS
from router.requests.continuing import KEY_HEADER, LENGTH_HEADER
from tests.running import PATIENCE_S, Server, body, children_of, events_of, generate_all, tokens_of
from tests.system.schemas import draw, random_schema
from tests.system.test_end_to_end import eventually

SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 12},
        "age": {"type": "integer", "minimum": 1, "maximum": 99},
        "colours": {"type": "array", "items": {"enum": ["red", "green", "blue"]}, "minItems": 2, "maxItems": 3},
    },
    "required": ["name", "age", "colours"],
    "additionalProperties": False,
}
REGEX = r"(red|blue) [0-9]{2,4}(, (red|blue) [0-9]{2,4}){3}"
LARK = 'start: person ("; " person){2}\nperson: NAME " is " /[1-9][0-9]?/\nNAME: /[A-Z][a-z]{2,8}/'
GRAMMARS: list[dict[str, Any]] = [
    {"type": "json", "value": SCHEMA},
    {"type": "json_object", "value": json.dumps(SCHEMA)},
    {"type": "json_schema", "value": {"name": "person", "schema": SCHEMA}},
    {"type": "regex", "value": REGEX},
    {"type": "lark", "value": LARK},
]
FREE = [
    body("Once upon a time", max_new_tokens=40, details=True),
    body("The little fox", max_new_tokens=30, details=True, do_sample=True, seed=5, repetition_penalty=1.2),
    body("Tell me", max_new_tokens=35, details=True, do_sample=True, seed=6, top_p=0.9),
]


def keeps_to(text: str, grammar: dict[str, Any]) -> None:
    match grammar["type"]:
        case "regex":
            assert re.fullmatch(grammar["value"], text), text
        case "lark":
            assert re.fullmatch(r"[A-Z][a-z]{2,8} is [1-9][0-9]?(; [A-Z][a-z]{2,8} is [1-9][0-9]?){2}", text), text
        case _:
            jsonschema.validate(json.loads(text), SCHEMA)


def held(grammar: dict[str, Any], seed: int | None = None, **parameters: Any) -> dict[str, Any]:
    drawn = {} if seed is None else {"do_sample": True, "seed": seed}
    return body("Tell me", max_new_tokens=150, details=True, grammar=grammar, **drawn, **parameters)


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    with Server("--dtype", "float32", "--num-shard", "2", env={"CONTINUATION_KEY": KEY}) as running:
        yield running


KEY = "only-balancers-know"


def generated(server: Server, requests: list[dict[str, Any]]) -> list[dict[str, Any]]:
    answers = asyncio.run(generate_all(server, requests))
    assert [200] * len(answers) == [answer.status_code for answer in answers], [answer.text for answer in answers]
    return [answer.json() for answer in answers]


def test_every_kind_keeps_to_its_grammar_beside_free_requests_that_do_not_notice(server: Server) -> None:
    alone = [generated(server, [request])[0] for request in FREE]
    asked = [(grammar, seed) for grammar in GRAMMARS for seed in (None, 1, 2)]
    answers = generated(server, [*(held(grammar, seed) for grammar, seed in asked), *FREE])
    for (grammar, _), answer in zip(asked, answers, strict=False):
        keeps_to(answer["generated_text"], grammar)
        assert "eos_token" == answer["details"]["finish_reason"]
        tokens = answer["details"]["tokens"]
        assert answer["generated_text"] == "".join(token["text"] for token in tokens[:-1])
        assert len(tokens) == answer["details"]["generated_tokens"]
    assert [tokens_of(answer) for answer in alone] == [tokens_of(answer) for answer in answers[len(asked) :]]
    again = generated(server, [held(*asked[4])])[0]
    assert tokens_of(again) == tokens_of(answers[4])


def test_a_stream_and_a_plain_answer_are_the_same(server: Server) -> None:
    plain = generated(server, [held(GRAMMARS[0], 3)])[0]
    lines = httpx2.post(
        f"{server.url}/generate_stream", json=held(GRAMMARS[0], 3), timeout=PATIENCE_S
    ).text.splitlines()
    events = events_of(lines)
    assert tokens_of(plain) == [event["token"]["id"] for event in events]
    assert [token["logprob"] for token in plain["details"]["tokens"]] == [e["token"]["logprob"] for e in events]
    assert plain["generated_text"] == events[-1]["generated_text"]
    assert list(range(1, len(events) + 1)) == [event["index"] for event in events]


def test_several_samples_keep_to_it_and_a_length_cuts_it_off(server: Server) -> None:
    best = generated(server, [held(GRAMMARS[3], best_of=2, do_sample=True)])[0]
    for text in (best["generated_text"], best["details"]["best_of_sequences"][0]["generated_text"]):
        keeps_to(text, GRAMMARS[3])
    [cut] = generated(server, [body("Tell me", max_new_tokens=4, details=True, grammar=GRAMMARS[0])])
    assert ("length", 4) == (cut["details"]["finish_reason"], len(tokens_of(cut)))
    assert cut["generated_text"] and '{"name": "'.startswith(cut["generated_text"])


@pytest.mark.parametrize(
    "format",
    [
        {"type": "json_schema", "json_schema": {"name": "person", "strict": True, "schema": SCHEMA}},
        {"type": "json_schema", "value": {"name": "person", "schema": SCHEMA}},
        {"type": "json", "value": SCHEMA},
        {"type": "regex", "value": REGEX},
    ],
    ids=["OpenAI's", "TGI's", "json", "regex"],
)
def test_response_format_in_all_nestings(server: Server, format: dict[str, Any]) -> None:
    chat = {"messages": [{"role": "user", "content": "Hello"}], "max_tokens": 150, "seed": 1, "response_format": format}
    answer = httpx2.post(f"{server.url}/v1/chat/completions", json={**chat, "n": 2}, timeout=PATIENCE_S).json()
    for choice in answer["choices"]:
        keeps_to(choice["message"]["content"], format if format["type"] == "regex" else GRAMMARS[0])
        assert "stop" == choice["finish_reason"]


def test_newer_apis_hold_their_answers_too(server: Server) -> None:
    format = {"type": "json_schema", "name": "person", "schema": SCHEMA}
    asked: dict[str, Any] = {"messages": [{"role": "user", "content": "Hello"}], "max_tokens": 150, "temperature": 0}
    asked["output_config"] = {"format": format}
    answer = httpx2.post(f"{server.url}/v1/messages", json=asked, timeout=PATIENCE_S).json()
    keeps_to(answer["content"][0]["text"], GRAMMARS[0])
    assert "end_turn" == answer["stop_reason"]
    asked = {"input": "Hello", "temperature": 0, "max_output_tokens": 150, "text": {"format": format}}
    answer = httpx2.post(f"{server.url}/v1/responses", json=asked, timeout=PATIENCE_S).json()
    keeps_to(answer["output"][0]["content"][0]["text"], GRAMMARS[0])
    assert ("completed", format) == (answer["status"], answer["text"]["format"])


UNTYPED = {
    "properties": {
        "at": {"properties": {"x": {"enum": [1, 2]}}, "required": ["x"], "additionalProperties": False},
        "all": {"items": {"const": 1}, "maxItems": 3},
    },
    "required": ["at", "all"],
    "additionalProperties": False,
}


def test_a_schema_without_types_means_objects_and_arrays_in_every_api(server: Server) -> None:
    """As TGI's own guide writes them: by JSON Schema any number keeps to such a schema."""
    chat = {"messages": [{"role": "user", "content": "Hello"}], "max_tokens": 100, "temperature": 0}
    named = {"name": "it", "schema": UNTYPED}
    typed = {"type": "json_schema", **named}
    for path, asked, where in (
        ("/generate", body("Hello", max_new_tokens=99, grammar={"type": "json", "value": UNTYPED}), ["generated_text"]),
        ("/v1/chat/completions", {**chat, "response_format": {"type": "json_schema", "json_schema": named}},
         ["choices", 0, "message", "content"]),
        ("/v1/completions", {"prompt": "Hello", "max_tokens": 100, "temperature": 0,
         "response_format": {"type": "json_object", "schema": UNTYPED}}, ["choices", 0, "text"]),
        ("/v1/messages", {**chat, "output_config": {"format": typed}}, ["content", 0, "text"]),
        ("/v1/responses", {"input": "Hello", "max_output_tokens": 100, "temperature": 0, "text": {"format": typed}},
         ["output", 0, "content", 0, "text"]),
    ):  # fmt: skip
        found: Any = httpx2.post(f"{server.url}{path}", json=asked, timeout=PATIENCE_S).json()
        for key in where:
            found = found[key]
        answer = json.loads(found)
        assert isinstance(answer["at"]["x"], int) and {1} >= set(answer["all"]), (path, answer)


class Colour(BaseModel):
    colour: Literal["red", "green"]
    is_liked: bool


def test_clients_get_objects_of_their_own_classes(server: Server) -> None:
    messages: Any = [{"role": "user", "content": "Which colour?"}]
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="-", max_retries=0) as client:
        parsed = client.responses.parse(model="any", input="Which colour?", text_format=Colour)
        assert isinstance(parsed.output_parsed, Colour)
        chat = client.chat.completions.parse(model="any", messages=messages, response_format=Colour)
        assert isinstance(chat.choices[0].message.parsed, Colour)
    with anthropic.Anthropic(base_url=server.url, api_key="-", max_retries=0) as client_of_messages:
        asked: dict[str, Any] = {"model": "any", "max_tokens": 100, "messages": messages}
        found = client_of_messages.messages.parse(**asked, output_format=Colour)
        assert isinstance(found.parsed_output, Colour)


def test_newer_apis_call_the_tool_that_is_required(server: Server) -> None:
    tool = {"name": "person", "description": "Who", "input_schema": SCHEMA}
    asked: dict[str, Any] = {"messages": [{"role": "user", "content": "Hello"}], "max_tokens": 200, "temperature": 0}
    for choice in ({"type": "tool", "name": "person"}, {"type": "any", "disable_parallel_tool_use": True}):
        body = {**asked, "tools": [tool], "tool_choice": choice}
        answer = httpx2.post(f"{server.url}/v1/messages", json=body, timeout=PATIENCE_S).json()
        [call] = answer["content"]
        assert ("tool_use", "person", "tool_use") == (call["type"], call["name"], answer["stop_reason"])
        jsonschema.validate(call["input"], SCHEMA)
    function = {"type": "function", "name": "person", "parameters": SCHEMA}
    body = {"input": "Hello", "temperature": 0, "tools": [function], "max_output_tokens": 200}
    body["tool_choice"] = {"type": "function", "name": "person"}
    [item] = httpx2.post(f"{server.url}/v1/responses", json=body, timeout=PATIENCE_S).json()["output"]
    assert ("function_call", "person", "completed") == (item["type"], item["name"], item["status"])
    jsonschema.validate(json.loads(item["arguments"]), SCHEMA)


def test_a_json_object_is_one(server: Server) -> None:
    chat = {"messages": [{"role": "user", "content": "Hello"}], "max_tokens": 12, "temperature": 0}
    chat["response_format"] = {"type": "json_object"}
    answer = httpx2.post(f"{server.url}/v1/chat/completions", json=chat, timeout=PATIENCE_S).json()
    assert answer["choices"][0]["message"]["content"].startswith("{")


@pytest.mark.parametrize(
    ("grammar", "sentence"),
    [
        ({"type": "regex", "value": "(a"}, "grammar is not valid: unclosed group"),
        ({"type": "json", "value": {"type": "frob"}}, "grammar is not valid: Invalid type: frob"),
        ({"type": "lark", "value": "begin: /a/"}, "grammar is not valid: "),
        ({"type": "regex", "value": ".*" * 500}, "grammar is not valid: it is too complex"),
        ({"type": "xml", "value": "a"}, "`parameters.grammar.type`"),
    ],
    ids=lambda value: str(value)[:30],
)
def test_a_bad_grammar_fails_alone(server: Server, grammar: dict[str, Any], sentence: str) -> None:
    for path in ("generate", "generate_stream"):
        answer = httpx2.post(f"{server.url}/{path}", json=held(grammar), timeout=PATIENCE_S)
        assert 422 == answer.status_code
        assert sentence in answer.json()["error"]


def test_random_schemas_finish_and_validate(server: Server) -> None:
    schemas = [random_schema(random.Random(5000 + number)) for number in range(6)]
    outcome = asyncio.run(draw(server.url, schemas, (1, 2)))
    assert not outcome.failures
    assert outcome.share >= 0.9


def matcher_processes(server: Server) -> list[int]:
    """Process ids of what follows texts."""
    found = []
    for pid in children_of(server.router()):
        command = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
        found += [pid] if b"router.grammars" in command else []
    return found


def test_what_works_beside_the_router_gives_way() -> None:
    """What clients' grammars cost has the lowest priority beside shards, and templates of chats one in between."""

    def priorities(pids: Iterable[int]) -> set[int]:
        return {os.getpriority(os.PRIO_PROCESS, pid) for pid in pids}

    def children_of_fork_servers() -> list[int]:
        return [child for pid in children_of(server.router()) for child in children_of(pid)]

    with Server("--model-id", "null", "--num-shard", "2", env={"LOCKSTEP_TEST_KEEPS_PRIORITY": ""}) as server:
        asked = partial(httpx2.post, f"{server.url}/generate", json=held(GRAMMARS[3]), timeout=PATIENCE_S)
        assert eventually(lambda: asked().status_code == 200)  # on busy cores it may be refused at first
        assert matcher_processes(server)
        # A process asks for it as soon as it runs, which on busy cores may be late.
        assert eventually(lambda: {19} == priorities(matcher_processes(server)))
        assert eventually(lambda: {CHAT_NICENESS, 19} == priorities(children_of_fork_servers()))
        assert priorities([os.getpid()]) == priorities([server.router(), *server.shards()])


@pytest.mark.parametrize("victim", ["shard", pytest.param("matchers", marks=pytest.mark.rest)])
def test_it_survives_the_death_of_what_computes_it(server: Server, victim: str) -> None:
    requests = [*(held(grammar, seed) for grammar in GRAMMARS for seed in (7, 8)), *FREE]
    undisturbed = generated(server, requests)
    [follower] = matcher_processes(server)
    with ThreadPoolExecutor(1) as clients:
        answers = clients.submit(generated, server, requests)
        assert eventually(lambda: server.metrics()["tgi_batch_current_size"] >= 1)
        os.kill(server.shards()[1] if victim == "shard" else follower, signal.SIGKILL)
        disturbed = answers.result()
    assert [tokens_of(answer) for answer in undisturbed] == [tokens_of(answer) for answer in disturbed]


def test_a_server_without_grammars_refuses_them() -> None:
    with Server("--model-id", "null", "--disable-grammar-support") as server:
        answer = httpx2.post(f"{server.url}/generate", json=held(GRAMMARS[3]), timeout=PATIENCE_S)
        assert 422 == answer.status_code
        assert "start the server without --disable-grammar-support" in answer.json()["error"]


@pytest.mark.rest
def test_the_null_model_keeps_to_grammars_too() -> None:
    with Server("--model-id", "null") as server:
        for grammar in GRAMMARS[3:]:
            answer = httpx2.post(f"{server.url}/generate", json=held(grammar), timeout=PATIENCE_S).json()
            keeps_to(answer["generated_text"], grammar)


@pytest.mark.parametrize("grammar", GRAMMARS[:1] + GRAMMARS[3:], ids=lambda grammar: grammar["type"])
def test_a_stream_that_is_handed_on_stays_within_its_grammar(server: Server, grammar: dict[str, Any]) -> None:
    asked = body("Tell me", max_new_tokens=100, do_sample=True, seed=4, grammar=grammar)
    expected, whole = told(server, asked, Stream(), most_commits=None), b""
    stream = Stream()
    while not stream.is_over:
        stream.lost()
        whole += told(server, asked, stream, most_commits=5)
    assert stream.num_commits > 5
    assert expected == whole
    keeps_to(json.loads(whole.split(b"data: ")[-1])["generated_text"], grammar)


def told(server: Server, asked: dict[str, Any], stream: Stream, *, most_commits: int | None) -> bytes:
    """What a client gets of a stream that is lost after so many writes; `stream` knows what it had before."""
    known, begun, got = stream.known(), stream.num_commits, b""
    headers = {KEY_HEADER: KEY, LENGTH_HEADER: str(len(known)), "content-type": "application/json"}
    content = known + json.dumps(asked).encode()
    if not known:
        del headers[LENGTH_HEADER]
    with httpx2.stream(
        "POST", f"{server.url}/generate_stream", content=content, headers=headers, timeout=PATIENCE_S
    ) as answer:
        assert answer.status_code == 200
        for piece in answer.iter_raw():
            got += stream.feed(piece)
            if most_commits is not None and stream.num_commits - begun >= most_commits:
                break
    return got
