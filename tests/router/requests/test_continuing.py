"""Streams that another server goes on with: the client's bytes are those of one server, wherever it was cut."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from lockstep_ray.streams import Stream
from router.requests.continuing import KEY_HEADER, LENGTH_HEADER, MARK
from server.adapters.identity import content_key
from tests.adapter_folders import adapter_folder
from tests.router.doubles import (
    FakeMatching,
    constrained,
    fake_rule,
    fake_shards,
    make_limits,
    request_of,
    running,
    tasks_in_process,
    token_ids_of,
    tokens_alone,
)
from tests.router.site import PROMPT, Site, answering, site

KEY = "only-balancers-know"
TEXT = "Öne fish, two fish. ✓ end"  # characters of several tokens each
STREAMS: dict[str, tuple[str, dict[str, Any]]] = {
    "tgi": ("/generate_stream", {"inputs": PROMPT, "parameters": {"max_new_tokens": 24, "details": True}}),
    "tgi top": ("/generate_stream", {"inputs": PROMPT, "parameters": {"max_new_tokens": 12, "top_n_tokens": 2}}),
    "sampled": ("/generate_stream", {"inputs": PROMPT, "parameters": {"max_new_tokens": 20, "do_sample": True}}),
    "texts": (
        "/v1/completions",
        {"prompt": PROMPT, "stream": True, "max_tokens": 30, "n": 2, "seed": 5, "logprobs": 2},
    ),
    "usage": (
        "/v1/completions",
        {"prompt": PROMPT, "stream": True, "max_tokens": 30, "stream_options": {"include_usage": True}},
    ),
    "messages": (
        "/v1/messages",
        {"messages": [{"role": "user", "content": PROMPT}], "stream": True, "max_tokens": 30, "model": "m"},
    ),
    "responses": ("/v1/responses", {"input": PROMPT, "stream": True, "max_output_tokens": 30, "model": "m"}),
}
SAMPLED = ("sampled", "texts")  # from a model whose tokens depend on the seed


def headers(known: bytes = b"") -> dict[str, str]:
    told = {KEY_HEADER: KEY, "content-type": "application/json", "x-request-id": "the-same"}
    return told | ({LENGTH_HEADER: str(len(known))} if known else {})


async def begin(it: Site, path: str, body: dict[str, Any], stream: Stream, *, most_commits: int | None) -> bytes:
    """What the client gets of the stream until so many writes are confirmed, or to its end."""
    known, got = stream.known(), b""
    content = known + json.dumps(body).encode()
    begun = stream.num_commits
    async with it.http.stream("POST", path, content=content, headers=headers(known)) as answer:
        assert answer.status_code == 200, await answer.aread()
        async for piece in answer.aiter_raw():
            for cut in range(0, len(piece), 7):  # as a network may cut it
                got += stream.feed(piece[cut : cut + 7])
                if most_commits is not None and stream.num_commits - begun >= most_commits:
                    return got
    return got


def frames_of(text: bytes) -> list[Any]:
    """The frames, without when their answer was made."""
    blocks = [block.rpartition("data: ")[2] for block in text.decode().split("\n\n") if block[:1] not in ("", ":")]
    return [_timeless(json.loads(data)) if data.startswith("{") else data for data in blocks]


def _timeless(found: Any) -> Any:
    if isinstance(found, list):
        return [_timeless(one) for one in found]
    if not isinstance(found, dict):
        return found
    return {
        name: _timeless(one) for name, one in found.items() if name not in ("created", "created_at", "completed_at")
    }


def by_sample(frames: list[Any]) -> list[Any]:
    """Frames of one sample after those of another: how they take turns is nobody's promise."""

    def sample(frame: Any) -> int:
        choices = frame.get("choices") if isinstance(frame, dict) else None
        return choices[0]["index"] if choices else 9 if frame == "[DONE]" else -1

    return sorted(frames, key=sample)


@pytest.mark.parametrize("sampled", [True, False])
async def test_a_stream_that_changes_servers_is_the_stream_of_one(sampled: bool, tmp_path: Path) -> None:
    (template := tmp_path / "template.jinja").write_text(PROMPT)
    options: dict[str, Any] = {"config": {"continuation_key": KEY, "chat_template": str(template)}}

    def shards() -> Any:
        return fake_shards(make_limits(), **({} if sampled else answering(TEXT)))

    with tasks_in_process():
        async with site(shards(), **options) as one, site(shards(), **options) as other:
            for name, (path, body) in STREAMS.items():
                if (name in SAMPLED) == sampled:
                    for every in (1, 4):
                        await compare([one, other], path, body, every)
            await one.all_free()
            await other.all_free()


CALL = '{"name": "look", "arguments": {"at": "Ulm and Zürich"}}'
LOOK = {"name": "look", "parameters": {"type": "object", "properties": {"at": {"type": "string"}}}}
CALLS: dict[str, dict[str, Any]] = {
    "/v1/responses": {"input": PROMPT, "tools": [{"type": "function", **LOOK}], "max_output_tokens": 100},
    "/v1/chat/completions": {
        "messages": [{"role": "user", "content": PROMPT}],
        "tools": [{"type": "function", "function": LOOK}],
        "max_tokens": 100,
    },
}


@pytest.mark.parametrize("path", CALLS)
async def test_a_call_keeps_its_id_on_another_server(path: str, tmp_path: Path) -> None:
    (template := tmp_path / "template.jinja").write_text(PROMPT)
    options: dict[str, Any] = {"config": {"continuation_key": KEY, "chat_template": str(template)}}
    shards = [fake_shards(make_limits(), **answering(CALL)) for _ in range(2)]
    with tasks_in_process():
        async with site(shards[0], **options) as one, site(shards[1], **options) as other:
            cut, got, num_servers = Stream(), b"", 0
            body = {**CALLS[path], "stream": True, "model": "m"}
            while not cut.is_over:
                if num_servers:
                    cut.lost()
                got += await begin((one, other)[num_servers % 2], path, body, cut, most_commits=1)
                num_servers += 1
    ids = re.findall(rb'"call_[0-9a-f]+"', got)
    assert 1 == len(set(ids)) and num_servers > 2
    assert path == "/v1/chat/completions" or len(ids) > 2


async def compare(sites: list[Site], path: str, body: dict[str, Any], every: int) -> None:
    """A stream that changes sites after so many writes, and the same one undisturbed."""
    cut, whole, num_servers = Stream(), Stream(), 1
    got = await begin(sites[0], path, body, cut, most_commits=every)
    while not cut.is_over:
        cut.lost()
        got += await begin(sites[num_servers % 2], path, body, cut, most_commits=every)
        num_servers += 1
    if "inputs" in body:
        seed = json.loads(cut.known())["samples"][0]["seed"]
        body = body | {"parameters": body["parameters"] | {"seed": seed}}
    expected = await begin(sites[0], path, body, whole, most_commits=None)
    assert by_sample(frames_of(expected)) == by_sample(frames_of(got))
    assert (whole.num_tokens, num_servers >= 2) == (cut.num_tokens, True)


def ends_of_writes(token_ids: list[int]) -> list[int]:
    """How many tokens of a constrained text there are after each write: forced ones come with the next."""
    counts = [0]
    while (count := counts[-1] + len(fake_rule(token_ids[: counts[-1]]).forced) + 1) < len(token_ids):
        counts.append(count)
    return counts[1:]


async def test_a_text_that_is_held_to_a_grammar_goes_on_within_it() -> None:
    request = constrained(request_of(4, 20, seed=1))
    expected = tokens_alone(request)
    async with running(matching=FakeMatching(delays=(0, 3))) as at_work:
        for count in ends_of_writes(expected):
            known = [(id, -0.5, []) for id in expected[:count]]
            assert await token_ids_of(at_work.batcher.submit(request, known=known)) == expected


async def test_a_stream_goes_on_with_its_adapter_and_with_no_other(tmp_path: Path) -> None:
    folders = [adapter_folder(tmp_path / name / "alice", content) for name, content in ("ax", "bx", "cy")]
    path, body = "/v1/completions", {"prompt": PROMPT, "stream": True, "max_tokens": 30, "model": "alice"}
    body["temperature"] = 0
    told = [{"continuation_key": KEY, "adapters": (("alice", str(folder)),)} for folder in folders]
    async with site(config=told[0]) as one, site(config=told[1]) as same, site(config=told[2]) as another:
        await compare([one, same], path, body, 4)
        stream = Stream()
        await begin(one, path, body, stream, most_commits=2)
        known = stream.known()
        assert content_key(folders[0]).hex() == json.loads(known)["adapter"]
        for wanted, has_key in ((body, True), (body | {"model": "tgi"}, True), (body, False)):
            said = known if has_key else json.dumps({**json.loads(known), "adapter": ""}).encode()
            there = another if has_key else same
            answer = await there.http.post(path, content=said + json.dumps(wanted).encode(), headers=headers(said))
            assert (503, "unavailable") == (answer.status_code, answer.json()["error_type"])
            assert "has other content here than where this stream began" in answer.text
            await there.all_free()


async def test_only_who_knows_the_key_is_told_and_listened_to() -> None:
    path, body = STREAMS["tgi"]
    content = json.dumps(body)
    told = {"content-type": "application/json"}
    known = b'{"created":1,"samples":[{"seed":1,"tokens":[[1,-0.5,[]]]}]}'
    async with site(config={"continuation_key": KEY}) as it, site() as other:
        assert MARK not in (await it.http.post(path, content=content, headers=told)).content
        wrong = told | {KEY_HEADER: "guess"}
        assert (await it.http.post(path, content=content, headers=wrong)).status_code == 422
        without = told | {LENGTH_HEADER: str(len(known))}
        assert (await it.http.post(path, content=known + content.encode(), headers=without)).status_code == 422
        answer = await other.http.post(path, content=content, headers=headers())
        assert (answer.status_code, "--continuation-key" in answer.text) == (422, True)


@pytest.mark.parametrize(
    "known",
    [
        b"nonsense",
        b'{"created":1,"samples":[]}',
        b'{"created":1,"samples":[{"seed":-1}]}',
        b'{"created":1,"samples":[{"seed":1,"tokens":[[99999,-0.5,[]]]}]}',
        b'{"created":1,"samples":[{"seed":1,"tokens":[' + b",".join([b"[1,-0.5,[]]"] * 25) + b"]}]}",
    ],
)
async def test_what_no_stream_has_is_refused_in_one_sentence(known: bytes) -> None:
    path, body = STREAMS["tgi"]
    async with site(config={"continuation_key": KEY}) as it:
        content = known + json.dumps(body).encode()
        answer = await it.http.post(path, content=content, headers=headers(known))
        assert (answer.status_code, answer.json()["error_type"]) == (422, "validation")
        await it.all_free()
