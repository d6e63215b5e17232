"""The HTTP side over fake shards: what is answered, and what is refused."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import cast

import pytest
from hypothesis import given
from hypothesis import strategies as st

from router.apis.tgi.bodies import GenerateRequest
from router.apis.tgi.routes import EventFrames
from router.http.responses import frame
from router.requests.generation import OpenRequest
from router.scheduling.request import Token
from router.text.tokenizer import named_eos_ids
from tests.router.doubles import EOS, fake_shards, make_limits, tasks_in_process
from tests.router.site import answering, assert_is_error, events_in, site

# ------------------------------------------------------------------------------------------------- answers


async def test_generate_answers_an_object_and_root_a_list() -> None:
    async with site(fake_shards(make_limits(), **answering("Hi 🙂"))) as it:
        plain = await it.post("/generate")
        assert plain.json() == {"generated_text": "Hi 🙂"}
        assert (await it.post("/")).json() == [{"generated_text": "Hi 🙂"}]
        assert (await it.post("/", stream=False)).json() == [{"generated_text": "Hi 🙂"}]
        full = await it.post("/generate", return_full_text=True)
        assert full.json() == {"generated_text": "helloHi 🙂"}
        for name in ("x-compute-type", "x-request-id"):
            assert plain.headers[name]
        assert plain.headers["x-compute-characters"] == plain.headers["x-prompt-tokens"] == "5"
        assert plain.headers["x-generated-tokens"] == "8"
        times = ("compute", "total", "validation", "queue", "inference")
        assert all(plain.headers[f"x-{name}-time"].isdigit() for name in times)
        assert plain.headers["x-time-per-token"].isdigit()


async def test_details_have_tokens_prompt_and_candidates() -> None:
    async with site(fake_shards(make_limits(), **answering("Hi"))) as it:
        answer = await it.post("/generate", details=True, decoder_input_details=True, top_n_tokens=2)
        details = answer.json()["details"]
        assert details["finish_reason"] == "eos_token"
        assert (details["generated_tokens"], details["seed"]) == (3, None)
        assert [token["text"] for token in details["prefill"]] == list("hello")
        assert [token["logprob"] for token in details["prefill"]] == [None, -1, -1, -1, -1]
        assert details["tokens"][0] == {"id": 72, "text": "H", "logprob": -0.5, "special": False}
        assert details["tokens"][-1] == {"id": EOS, "text": "</s>", "logprob": -0.5, "special": True}
        assert [len(candidates) for candidates in details["top_tokens"]] == [2, 2, 2]
        assert "best_of_sequences" not in details
        plain = (await it.post("/generate", details=True)).json()["details"]
        assert plain["prefill"] == [] and "top_tokens" not in plain


async def test_seed_is_shown_only_where_it_mattered() -> None:
    async with site() as it:
        answer = await it.post("/generate", details=True, do_sample=True, seed=7, max_new_tokens=2)
        assert answer.json()["details"]["seed"] == 7
        answer = await it.post("/generate", details=True, seed=7, max_new_tokens=2)
        assert answer.json()["details"]["seed"] is None


async def test_best_of_returns_the_likeliest_and_the_others() -> None:
    async with site() as it:
        answer = await it.post("/generate", details=True, best_of=2, do_sample=True, max_new_tokens=3)
        details = answer.json()["details"]
        [other] = details["best_of_sequences"]
        assert other["seed"] != details["seed"]
        assert other["generated_tokens"] == 3
        assert set(other) >= {"generated_text", "finish_reason", "prefill", "tokens"}
        assert "3" == answer.headers["x-generated-tokens"]


async def test_stream_numbers_its_events_and_ends_with_the_text() -> None:
    async with site(fake_shards(make_limits(), **answering("a\nb"))) as it:
        for path, stream in (("/generate_stream", None), ("/", True)):
            answer = await it.post(path, stream=stream, details=True)
            assert answer.status_code == 200
            assert answer.headers["content-type"].startswith("text/event-stream")
            assert answer.headers["x-accel-buffering"] == "no"
            assert answer.headers["cache-control"] == "no-cache"
            events = events_in(answer.text)
            assert [event["index"] for event in events] == [1, 2, 3, 4]
            assert [event["token"]["text"] for event in events] == ["a", "\n", "b", "</s>"]
            assert all(event["generated_text"] is event["details"] is None for event in events[:-1])
            assert events[-1]["generated_text"] == "a\nb"
            expected = {"finish_reason": "eos_token", "generated_tokens": 4, "seed": None, "input_length": 5}
            assert events[-1]["details"] == expected
            assert "top_tokens" not in events[0]


async def test_end_token_inside_a_character_leaves_the_same_text_everywhere() -> None:
    async with site(fake_shards(make_limits(), **answering("Hi 🙂".encode()[:-1]))) as it:
        events = events_in((await it.post("/generate_stream")).text)
        shown = "".join(event["token"]["text"] for event in events if not event["token"]["special"])
        plain = (await it.post("/generate")).json()["generated_text"]
        assert shown == events[-1]["generated_text"] == plain == "Hi "


async def test_stream_without_details_has_none() -> None:
    async with site() as it:
        events = events_in((await it.post("/generate_stream", max_new_tokens=3)).text)
        assert events[-1]["details"] is None
        assert isinstance(events[-1]["generated_text"], str)


async def test_info_reports_what_the_publisher_says_about_generating(tmp_path: Path) -> None:
    wanted = {"do_sample": True, "temperature": 0.6, "top_p": 0.9}
    published = {"eos_token_id": [128001, 128009], "top_k": None, "transformers_version": "4.40.0", **wanted}
    (tmp_path / "generation_config.json").write_text(json.dumps(published))
    async with site(config={"model_path": str(tmp_path)}) as it:
        info = (await it.http.get("/info")).json()
        assert (wanted, [EOS]) == (info["generation_defaults"], info["eos_token_ids"])
    assert {128001, 128009} == named_eos_ids(tmp_path)


async def test_info_health_metrics_and_docs() -> None:
    async with site() as it:
        await it.post("/generate", max_new_tokens=3)
        info = (await it.http.get("/info")).json()
        assert info["model_id"] == "a/model"
        assert info["max_input_length"] == info["max_input_tokens"] == 64
        assert ("none", 0, [], None) == tuple(
            info[name] for name in ("decode_graphs", "decode_graph_bytes", "measured_products", "clocks")
        )
        for path in ("/health", "/ping", "/"):
            answer = await it.http.get(path)
            assert (answer.status_code, answer.content) == (200, b"")
        metrics = (await it.http.get("/metrics")).text
        assert "\ntgi_request_count 1.0\n" in metrics
        assert "# TYPE tgi_request_success counter" in metrics
        assert "\ntgi_batch_max_total_tokens 1024.0\n" in metrics
        assert "\ntgi_kv_blocks_total 64.0\n" in metrics
        assert "\ntgi_kv_blocks_free 64.0\n" in metrics
        assert 'tgi_batch_inference_count{method="prefill"} 1.0' in metrics
        assert "tgi_request_time_to_first_token_duration_count 1.0" in metrics
        assert "_created" not in metrics
        page = (await it.http.get("/docs")).text
        assert "http://" not in page and "https://" not in page
        assert (await it.http.get("/docs/swagger-ui.css")).status_code == 200
        assert (await it.http.get("/docs/swagger-ui-bundle.js")).status_code == 200
        paths = (await it.http.get("/api-doc/openapi.json")).json()["paths"]
        schema = paths["/generate"]["post"]["requestBody"]["content"]["application/json"]["schema"]
        assert "temperature" in schema["properties"]["parameters"]["anyOf"][0]["properties"]


@given(st.text(), st.floats(max_value=0, allow_nan=False) | st.none(), st.booleans())
def test_frames_of_all_tokens_have_one_form(text: str, logprob: float | None, special: bool) -> None:
    token = Token(7, text, logprob, special)
    event = {"index": 1, "token": {"id": 7, "text": text, "logprob": logprob, "special": special}}
    expected = frame({**event, "generated_text": None, "details": None})
    assert expected == EventFrames(GenerateRequest(inputs="x"), cast(OpenRequest, None)).write(0, [token])


# -------------------------------------------------------------------------------------------------- errors


@pytest.mark.parametrize(
    "path",
    "/ /generate /generate_stream /tokenize /chat_tokenize /detokenize /invocations /vertex".split(),
)
async def test_bad_bodies_have_their_status_on_every_route(path: str) -> None:
    async with site(config={"payload_limit": 100}) as it:
        json_type = {"content-type": "application/json"}
        answer = await it.http.post(path, content=b"{", headers=json_type)
        assert_is_error(answer, 400, "validation")
        answer = await it.http.post(path, content=b"{}", headers=json_type)
        assert_is_error(answer, 422, "validation")
        answer = await it.http.post(path, content=b'{"inputs": "\\ud800"}', headers=json_type)
        assert_is_error(answer, 422, "validation")
        answer = await it.http.post(path, content=b"{}", headers={"content-type": "text/plain"})
        assert_is_error(answer, 415, "validation")
        answer = await it.http.post(path, json={"inputs": "x" * 200})
        assert_is_error(answer, 413, "validation")
        assert "100 bytes" in answer.json()["error"]


async def test_refused_stream_has_a_real_status() -> None:
    async with site(max_concurrent_requests=0) as it:
        assert_is_error(await it.post("/generate_stream", best_of=2), 422, "validation")
        assert_is_error(await it.post("/generate_stream"), 429, "overloaded")
        assert_is_error(await it.post("/generate", inputs=""), 429, "overloaded")  # a permit comes before validation
        assert "retry-after" in (await it.post("/", stream=True)).headers


async def test_unknown_paths_and_methods_are_json_too() -> None:
    async with site() as it:
        assert_is_error(await it.http.get("/nowhere"), 404, "not_found")
        assert_is_error(await it.http.get("/generate"), 405, "method_not_allowed")
        assert_is_error(await it.http.delete("/"), 405, "method_not_allowed")


async def test_one_request_too_many_is_refused_and_the_others_are_untouched() -> None:
    shards = fake_shards(make_limits(), step_delay_s=0.005)
    async with site(shards, max_concurrent_requests=4) as it:
        running = [asyncio.create_task(it.post("/generate", max_new_tokens=10)) for _ in range(4)]
        await asyncio.sleep(0.02)
        refused = await it.post("/generate")
        assert_is_error(refused, 429, "overloaded")
        assert refused.headers["retry-after"] == "1"
        assert [answer.status_code for answer in await asyncio.gather(*running)] == [200] * 4
        assert (await it.post("/generate", max_new_tokens=1)).status_code == 200


async def test_best_of_takes_a_permit_for_each_sample_and_gives_all_back() -> None:
    async with site(max_concurrent_requests=1) as it:
        assert_is_error(await it.post("/generate", best_of=2, do_sample=True), 429, "overloaded")
        assert (await it.post("/generate", max_new_tokens=1)).status_code == 200


async def test_failed_step_is_424_before_the_first_token_and_an_event_after_it() -> None:
    always = dict.fromkeys(range(1, 50), "out of memory")
    async with site(fake_shards(make_limits(), failing_steps=always)) as it:
        answer = await it.post("/generate_stream")
        assert_is_error(answer, 424, "generation")
        assert "out of memory" in answer.json()["error"]
    async with site(fake_shards(make_limits(), failing_steps=always)) as it:
        assert_is_error(await it.post("/generate"), 424, "generation")
        it.shards.failing_steps = {}
        assert (await it.post("/generate", max_new_tokens=2)).status_code == 200
    later = dict.fromkeys(range(3, 50), "out of memory")
    shards = fake_shards(make_limits(), failing_steps=later, step_delay_s=0.01)
    async with site(shards) as it:
        answer = await it.post("/generate_stream", max_new_tokens=9)
        assert answer.status_code == 200
        *tokens, last = events_in(answer.text)
        assert [event["index"] for event in tokens] == [1, 2]
        assert set(last) == {"error", "error_type"}
        assert last["error_type"] == "generation"


async def test_draining_and_dead_servers_are_unavailable_and_unhealthy() -> None:
    async with site() as it:
        await it.batcher.drain(1)
        answer = await it.post("/generate")
        assert_is_error(answer, 503, "unavailable")
        assert "retry-after" in answer.headers
        assert_is_error(await it.http.get("/health"), 503, "healthcheck")
    async with site() as it:
        it.shards.die("killed")
        assert_is_error(await it.http.get("/health"), 503, "healthcheck")


async def test_no_error_repeats_the_prompt() -> None:
    async with site() as it:
        for parameters in ({"top_p": "SECRET"}, {"stop": ["SECRET"] * 9}, {"max_new_tokens": 10**6}):
            answer = await it.post("/generate", inputs="SECRET", **parameters)
            assert answer.status_code == 422
            assert "SECRET" not in answer.text


@pytest.mark.parametrize(
    ("template", "said"),
    [("{{ messages[0].content }}", None), ("{% for m in messages %}{{ m.content }", "the chat template is not valid")],
)
async def test_a_template_that_refuses_each_chat_is_told_at_the_start(
    template: str, said: str | None, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (path := tmp_path / "template.jinja").write_text(template)
    with tasks_in_process():
        async with site(fake_shards(make_limits()), config={"chat_template": str(path)}) as it:
            chat = {"model": "m", "messages": [{"role": "user", "content": "Hello"}], "max_tokens": 2}
            answer = await it.http.post("/v1/chat/completions", json=chat)
            assert (200 if said is None else 400) == answer.status_code
            warnings = [record.getMessage() for record in caplog.records if "plain chat" in record.getMessage()]
    if said is None:
        assert not warnings
    else:
        [warning] = warnings
        assert f"a plain chat is refused, as {said}" in warning and "--chat-template" in warning
