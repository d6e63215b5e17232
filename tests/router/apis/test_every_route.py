"""What all APIs share, on every route that opens a request: keys, limits, permits, deadlines, clients that leave."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest

from tests.router.doubles import fake_shards, make_limits
from tests.router.site import PROMPT, site

LIMITS: dict[str, Any] = {"max_total_tokens": 8192, "max_batch_total_tokens": 10 * 8192}
CHAT: dict[str, Any] = {"messages": [{"role": "user", "content": PROMPT}], "temperature": 0}
BODIES: dict[str, dict[str, Any]] = {
    "/": {"inputs": PROMPT},
    "/v1/completions": {"prompt": PROMPT, "temperature": 0},
    "/v1/chat/completions": CHAT,
    "/v1/messages": CHAT,
    "/v1/responses": {"input": PROMPT, "temperature": 0},
}
COUNTS = {
    "/tokenize": {"inputs": PROMPT},
    "/chat_tokenize": CHAT,
    "/v1/messages/count_tokens": CHAT,
    "/v1/responses/input_tokens": BODIES["/v1/responses"],
}
SHORT = {"parameters": {"max_new_tokens": 2}, "max_tokens": 2, "max_output_tokens": 2}
OF_TEMPLATES = ("/v1/chat/completions", "/v1/messages", "/v1/responses", *list(COUNTS)[1:])  # that wait for a process


async def test_clients_that_leave_free_their_places(template: str) -> None:
    shards = fake_shards(make_limits(**LIMITS), step_delay_s=0.001)
    async with asyncio.timeout(120), site(shards, config={"chat_template": template}, **LIMITS) as it:
        for path, body in BODIES.items():
            for is_stream in (False, True):
                num_steps = len(shards.requests)
                asking = asyncio.ensure_future(it.http.post(path, json={**body, "stream": is_stream}))
                while len(shards.requests) < num_steps + 5:
                    await asyncio.sleep(0.001)
                asking.cancel()
                await asyncio.wait((asking,))
                await it.all_free()
                assert it.app.state.services.permits._left == it.batcher.limits.max_concurrent_requests


@pytest.mark.aside
async def test_a_prompt_that_is_being_made_has_its_permit_and_its_deadline(template: str) -> None:
    Path(template).write_text("{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}")
    async with site(config={"chat_template": template}, max_concurrent_requests=1) as it:
        services = it.app.state.services
        for path in OF_TEMPLATES:
            services.aside._seconds = 1000  # so that nothing else ends it
            body = {**BODIES, **COUNTS}[path]
            leaving = asyncio.ensure_future(it.http.post(path, json=body))
            while services.permits._left:
                await asyncio.sleep(0.001)
            refused = await it.http.post(path, json=body)
            assert (429, "overloaded") == (refused.status_code, refused.json()["error_type"])
            leaving.cancel()
            while not services.permits._left:
                await asyncio.sleep(0.001)
            late = await it.http.post(path, json=body, headers={"x-request-timeout-ms": "100"})
            assert (504, "timeout") == (late.status_code, late.json()["error_type"])
            assert 1 == services.permits._left
        services.aside._seconds = 1.0
        endless = await it.http.post("/v1/chat/completions", json=CHAT)
        assert (400, "validation") == (endless.status_code, endless.json()["error_type"])


async def test_silence_and_deadlines_are_told_in_each_api_s_words(
    template: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("router.http.responses.KEEP_ALIVE_S", 0.05)
    shards = fake_shards(make_limits(**LIMITS), step_delay_s=0.2)
    async with site(shards, config={"chat_template": template}, **LIMITS) as it:
        late = {"x-request-timeout-ms": "3000"}
        asked = [it.http.post(path, json={**body, "stream": True}, headers=late) for path, body in BODIES.items()]
        texts = [answer.text for answer in await asyncio.gather(*asked)]
        for path, text in zip(BODIES, texts, strict=True):
            frames = [frame for frame in text.split("\n\n") if frame and not frame.endswith("[DONE]")]
            event = json.loads(frames[-1].partition("data: ")[2])
            assert ('event: ping\ndata: {"type":"ping"}' if path == "/v1/messages" else ": ping") in frames
            if path == "/v1/responses":
                error = json.loads(frames[-2].partition("data: ")[2])
                assert ("error", "server_error", "timeout") == (error["type"], error["code"], error["error_type"])
                assert ("response.failed", "failed") == (event["type"], event["response"]["status"])
                assert {"code": "server_error", "message": error["message"]} == event["response"]["error"]
            else:
                assert "timeout" == event["error_type"]
            assert ("completions" in path) == text.endswith("data: [DONE]\n\n")
            if path == "/v1/messages":
                assert ("error", "timeout_error") == (event["type"], event["error"]["type"])
        await it.all_free()


async def test_limits_of_keys_and_bodies_hold(template: str, tmp_path: Path) -> None:
    every, keys = {**BODIES, **COUNTS}, tmp_path / "keys.json"
    keys.touch(mode=0o600)
    limited: list[dict[str, Any]] = [{"name": f"k{n}", "key": f"k{n}", "requests_per_minute": 1} for n in range(9)]
    keys.write_text(json.dumps({"keys": [*limited, {"name": "free", "key": "free"}]}))
    settings = {"chat_template": template, "api_keys_file": str(keys), "payload_limit": 2000}
    async with site(config=settings) as it:
        for number, (path, body) in enumerate(every.items()):
            headers = {"authorization": f"Bearer k{number}"}
            body = {**body, **SHORT}
            assert 401 == (await it.http.post(path, json=body)).status_code
            assert 200 == (await it.http.post(path, json=body, headers=headers)).status_code
            refused = await it.http.post(path, json=body, headers=headers)
            assert (429, "overloaded") == (refused.status_code, refused.json()["error_type"])
            assert int(refused.headers["retry-after"]) > 0
            large = {**body, "user": "x" * 2000}
            refused = await it.http.post(path, json=large, headers={"authorization": "Bearer free"})
            assert (413, "validation") == (refused.status_code, refused.json()["error_type"])
