"""Overload and time over HTTP: deadlines, when to come again, and what each API key may have."""

from __future__ import annotations

import asyncio
import json
import logging
from contextlib import AbstractAsyncContextManager
from pathlib import Path
from typing import Any

import httpx2
import pytest

from router.grammars.compiler import Compiler
from router.scheduling.grammar import CompiledGrammar, Continuation, Grammar, Mask
from tests.router.doubles import FakeMatching, fake_shards, make_limits, stalling
from tests.router.site import PROMPT, Site, assert_is_error, events_in, site
from tests.router.test_accounts import ALICE, BOB, write

AS_ALICE = {"authorization": "Bearer alice-secret"}
AS_BOB = {"authorization": "Bearer bob-secret"}


def asked(max_new_tokens: int = 100, **parameters: Any) -> dict[str, Any]:
    return {"inputs": PROMPT, "parameters": {"max_new_tokens": max_new_tokens, **parameters}}


async def metric(it: Site, name: str, headers: dict[str, str] | None = None) -> float:
    text = (await it.http.get("/metrics", headers=headers)).text
    rows = dict(line.rsplit(" ", 1) for line in text.splitlines() if not line.startswith("#"))
    return float(rows.get(name, 0))


def slow_site(seconds: float = 0.02, config: dict[str, Any] | None = None, **limits: Any) -> Any:
    return site(fake_shards(make_limits(**limits), step_delay_s=seconds), config=config, **limits)


def stalling_site(
    gate: asyncio.Event, num_steps: int, config: dict[str, Any] | None = None, **limits: Any
) -> AbstractAsyncContextManager[Site]:
    """Its shards answer so many steps at once, and others when the gate is open."""
    return site(fake_shards(make_limits(**limits), sleep=stalling(gate, num_steps)), config=config, **limits)


# ------------------------------------------------------------------------------------------------------------ deadlines


@pytest.mark.parametrize("path", ["/generate", "/generate_stream"])
async def test_a_queued_request_ends_with_504_when_its_time_is_over(path: str) -> None:
    gate = asyncio.Event()
    async with stalling_site(gate, 0, max_batch_size=1) as it:
        running = asyncio.create_task(it.http.post("/generate", json=asked(25)))
        while not it.shards.live_ids:
            await asyncio.sleep(0.001)
        answer = await it.http.post(path, json=asked(), headers={"x-request-timeout-ms": "1500"})
        assert_is_error(answer, 504, "timeout")
        assert "within its 1.5 s" in answer.json()["error"]
        gate.set()
        assert 200 == (await running).status_code
        await it.all_free()
        assert 1 == await metric(it, 'tgi_request_timeout{stage="queued"}')
        assert 1 == await metric(it, 'tgi_request_failure{err="timeout"}')
        assert 0 == await metric(it, "tgi_queue_tokens")


async def test_a_running_stream_keeps_its_tokens_and_ends_with_an_event() -> None:
    gate = asyncio.Event()
    async with stalling_site(gate, 5) as it:
        answer = await it.http.post("/generate_stream", json=asked(), headers={"x-request-timeout-ms": "2000"})
        gate.set()
        *tokens, last = events_in(answer.text)
        assert (200, "timeout") == (answer.status_code, last["error_type"])
        assert [1, 2, 3, 4, 5] == [event["index"] for event in tokens]
        await it.all_free()
        assert 1 == await metric(it, 'tgi_request_timeout{stage="running"}')
        assert len(it.shards.requests) <= len(tokens) + 4  # nothing more was computed for it


async def test_a_plain_answer_that_is_late_is_504_for_all_its_samples() -> None:
    gate = asyncio.Event()
    async with stalling_site(gate, 5, config={"request_timeout": 2.0}) as it:
        answer = await it.http.post("/generate", json=asked(best_of=2, do_sample=True, details=True))
        assert_is_error(answer, 504, "timeout")
        gate.set()
        await it.all_free()
        assert 1 == await metric(it, 'tgi_request_timeout{stage="running"}')


@pytest.mark.parametrize("path", ["/generate", "/generate_stream"])
@pytest.mark.parametrize("is_compiled", [False, True])
async def test_a_grammar_that_takes_too_long_is_no_reason_to_be_late(
    path: str, is_compiled: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither while it is compiled, nor while the request is held until it is known what may come next."""

    async def compile(self: Compiler, grammar: Grammar, owner: str) -> CompiledGrammar:
        await asyncio.sleep(0 if is_compiled else 3600)
        return CompiledGrammar(grammar, Continuation((), Mask(allowed=(65,))))

    monkeypatch.setattr(Compiler, "_compile", compile)

    matching = FakeMatching(delays=())
    async with site(matching=matching) as it:
        body = asked(grammar={"type": "regex", "value": "A+"})
        headers = {"x-request-timeout-ms": "2000" if is_compiled else "300"}
        late = asyncio.create_task(it.http.post(path, json=body, headers=headers))
        free = await it.http.post("/generate", json=asked(3))
        assert 200 == free.status_code  # nobody waits for it
        if is_compiled:
            async with asyncio.timeout(10):
                while not await metric(it, "tgi_batch_held_size"):
                    await asyncio.sleep(0.01)
        answer = await late
        if is_compiled and path == "/generate_stream":
            first, last = events_in(answer.text)
            assert (200, "A", "timeout") == (answer.status_code, first["token"]["text"], last["error_type"])
        else:
            assert_is_error(answer, 504, "timeout")
        await it.all_free()
        stage = "running" if is_compiled else "validation"
        assert 1 == await metric(it, f'tgi_request_timeout{{stage="{stage}"}}')
        assert 0 == await metric(it, "tgi_batch_held_size") == matching.num_followed


@pytest.mark.parametrize(("server", "client", "seconds"), [(0.1, "60000", "0.1"), (60, "100", "0.1")])
async def test_the_smaller_of_both_counts(server: float, client: str, seconds: str) -> None:
    async with slow_site(config={"request_timeout": server}) as it:
        answer = await it.http.post("/generate", json=asked(), headers={"x-request-timeout-ms": client})
        assert_is_error(answer, 504, "timeout")
        assert f"within its {seconds} s" in answer.json()["error"]


@pytest.mark.parametrize("value", ["", "0", "-1", "1.5", "1e3", "abc", "99999999999", "9" * 5000, "٣"])
async def test_a_header_that_is_no_time_is_refused(value: str) -> None:
    async with site() as it:
        headers = [(b"x-request-timeout-ms", value.encode())]
        answer = await it.http.post("/generate_stream", json=asked(2), headers=headers)
        assert_is_error(answer, 422, "validation")
        assert "give a whole number of milliseconds from 1 to 86400000" in answer.json()["error"]
        assert len(answer.content) < 300


async def test_a_request_in_time_leaves_no_timer() -> None:
    async with site() as it:
        loop = asyncio.get_running_loop()
        before = len(timers(loop))
        for path in ("/generate", "/generate_stream"):
            answer = await it.http.post(path, json=asked(3), headers={"x-request-timeout-ms": "80000000"})
            assert 200 == answer.status_code
        assert len(timers(loop)) <= before + 1  # the connection's own


def timers(loop: Any) -> list[asyncio.TimerHandle]:
    return [handle for handle in loop._scheduled if not handle.cancelled()]


# ------------------------------------------------------------------------------------------------------- when to return


async def test_who_is_refused_learns_when_a_place_will_be_free() -> None:
    """Two of three requests have ended in 14 s, so the next may take another 7."""

    async with site(max_concurrent_requests=0) as it:
        rate = it.batcher._drain_rate
        rate._clock = lambda: 100.0
        for _ in range(3):
            rate.began()
        rate._clock = lambda: 114.0
        rate.ended(10)
        rate.ended(10)
        for path in ("/generate", "/generate_stream"):
            refused = await it.http.post(path, json=asked(1))
            assert_is_error(refused, 429, "overloaded")
            assert (429, "7") == (refused.status_code, refused.headers["retry-after"])


async def test_a_queue_full_of_tokens_is_429() -> None:
    async with slow_site(0.01, max_batch_size=1, max_queue_tokens=120) as it:
        running = [asyncio.create_task(it.http.post("/generate", json=asked(50)))]
        while not it.shards.live_ids:
            await asyncio.sleep(0.001)
        running += [asyncio.create_task(it.http.post("/generate", json=asked(50))) for _ in range(2)]
        while it.batcher._scheduler.ledger.waiting_tokens < 110:
            await asyncio.sleep(0.001)
        refused = await it.http.post("/generate", json=asked(50))
        assert_is_error(refused, 429, "overloaded")
        assert "more than 120 tokens would wait (max_queue_tokens)" in refused.json()["error"]
        assert [200, 200, 200] == [answer.status_code for answer in await asyncio.gather(*running)]
        assert 200 == (await it.http.post("/generate", json=asked(5))).status_code


# ----------------------------------------------------------------------------------------------------------------- keys


def keyed(path: Path, *keys: Any) -> dict[str, Any]:
    return {"api_keys_file": str(write(path / "keys.json", *keys))}


def test_every_key_of_the_file_opens_and_none_is_shown(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    async def story() -> None:
        async with site(config={**keyed(tmp_path, ALICE, BOB), "api_key": "lone"}) as it:
            for headers, status in (
                (AS_ALICE, 200),
                (AS_BOB, 200),
                ({"authorization": "Bearer lone"}, 200),
                ({"authorization": "Bearer mallory"}, 401),
                ({"authorization": "Basic alice-secret"}, 401),
                ({}, 401),
            ):
                answer = await it.http.post("/generate", json=asked(3), headers=headers)
                assert status == answer.status_code
            metrics = (await it.http.get("/metrics", headers=AS_ALICE)).text
            assert 'tgi_key_request_count{key="alice"} 1.0' in metrics
            assert 'tgi_key_tokens{key="bob",kind="generated"} 3.0' in metrics
            assert 'tgi_key_tokens{key="bob",kind="prompt"} 5.0' in metrics
            assert 'tgi_key_current_requests{key="default"} 0.0' in metrics
            assert "secret" not in metrics

    with caplog.at_level(logging.INFO):
        asyncio.run(story())
    ended = [record for record in caplog.records if record.getMessage().startswith("request ended")]
    assert ["alice", "bob", "default"] == [record.__dict__["key"] for record in ended]
    assert "secret" not in "".join(str(record.__dict__) for record in caplog.records)


@pytest.mark.parametrize(
    ("limit", "requests"),
    [
        ({"requests_per_minute": 2}, [(3, 200), (3, 200), (3, 429)]),
        ({"tokens_per_minute": 60}, [(40, 200), (40, 429), (3, 200)]),
    ],
)
async def test_a_key_s_limit_refuses_it_alone(
    tmp_path: Path, limit: dict[str, int], requests: list[tuple[int, int]]
) -> None:
    async with site(config=keyed(tmp_path, {**ALICE, **limit}, BOB)) as it:
        for max_new_tokens, status in requests:
            answer = await it.http.post("/generate_stream", json=asked(max_new_tokens), headers=AS_ALICE)
            assert status == answer.status_code
            if status == 429:
                assert_is_error(answer, 429, "overloaded")
                [name] = limit
                assert f"API key alice has reached its limit {name}, {limit[name]}" in answer.json()["error"]
                assert 1 <= int(answer.headers["retry-after"]) <= 60
        assert 200 == (await it.http.post("/generate", json=asked(3), headers=AS_BOB)).status_code
        refused = f'tgi_key_refused{{key="alice",limit="{next(iter(limit))}"}}'
        assert 1 == await metric(it, refused, AS_BOB)


async def test_a_request_is_counted_once_before_its_body_is_looked_at(tmp_path: Path) -> None:
    async with site(config=keyed(tmp_path, {**ALICE, "requests_per_minute": 5}, BOB)) as it:
        headers = {**AS_ALICE, "content-type": "application/json"}
        for path in ("/generate", "/generate_stream", "/", "/tokenize"):
            assert 200 == (await it.http.post(path, json=asked(3), headers=headers)).status_code
        assert 400 == (await it.http.post("/generate", content=b"{", headers=headers)).status_code
        for path in ("/generate", "/generate_stream", "/", "/tokenize"):
            refused = await it.http.post(path, content=b"{", headers=headers)
            assert_is_error(refused, 429, "overloaded")
            assert "limit requests_per_minute, 5" in refused.json()["error"]
            assert b"429" in await answer_without_body(it.port, path)
        assert 13 == await metric(it, 'tgi_key_request_count{key="alice"}', AS_BOB)
        assert 8 == await metric(it, 'tgi_key_refused{key="alice",limit="requests_per_minute"}', AS_BOB)
        assert 0 == await metric(it, 'tgi_key_current_requests{key="alice"}', AS_BOB)


async def answer_without_body(port: int, path: str) -> bytes:
    """The status line that comes while the whole body is held back."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    head = f"POST {path} HTTP/1.1\r\nhost: x\r\nauthorization: {AS_ALICE['authorization']}\r\n"
    writer.write(f"{head}content-type: application/json\r\ncontent-length: 1900000\r\n\r\n".encode())
    try:
        async with asyncio.timeout(5):
            return await reader.readline()
    finally:
        writer.close()


async def test_concurrency_is_counted_by_key_and_given_back_whatever_happens(tmp_path: Path) -> None:
    async with slow_site(config=keyed(tmp_path, {**ALICE, "max_concurrent_requests": 1}, BOB)) as it:
        body = json.dumps(asked(100)).encode()
        headers = {**AS_ALICE, "content-type": "application/json"}
        async with it.http.stream("POST", "/generate_stream", content=body, headers=headers) as stream:
            assert 200 == stream.status_code
            for path in ("/generate", "/tokenize"):
                refused = await it.http.post(path, json=asked(3), headers=AS_ALICE)
                assert_is_error(refused, 429, "overloaded")
                assert "limit max_concurrent_requests, 1" in refused.json()["error"]
            assert 200 == (await it.http.post("/generate", json=asked(3), headers=AS_BOB)).status_code
        await it.all_free()  # the client left
        assert 422 == (await it.http.post("/generate", json=asked(0), headers=AS_ALICE)).status_code
        assert 200 == (await it.http.post("/tokenize", json=asked(3), headers=AS_ALICE)).status_code
        assert 200 == (await it.http.post("/generate", json=asked(3), headers=AS_ALICE)).status_code
        assert 0 == await metric(it, 'tgi_key_current_requests{key="alice"}', AS_BOB)


async def test_a_greedy_key_leaves_permits_and_the_batch_to_another(tmp_path: Path) -> None:
    config = keyed(tmp_path, ALICE, {**BOB, "weight": 1})
    async with slow_site(0.004, config=config, max_batch_size=4, max_concurrent_requests=16) as it:
        client = httpx2.AsyncClient(base_url=it.http.base_url, timeout=60, limits=httpx2.Limits(max_connections=None))
        async with client:
            greedy = [asyncio.create_task(client.post("/generate", json=asked(), headers=AS_ALICE)) for _ in range(20)]
            while len(it.shards.live_ids) < 4:
                await asyncio.sleep(0.001)
            one = await client.post("/generate", json=asked(10, details=True), headers=AS_BOB)
            assert not any(task.done() and task.result().status_code == 200 for task in greedy)
            answers = await asyncio.gather(*greedy)
        assert 200 == one.status_code
        assert {200: 12, 429: 8} == {
            status: sum(answer.status_code == status for answer in answers) for status in (200, 429)
        }
        texts = {answer.json()["generated_text"] for answer in answers if answer.status_code == 200}
        assert 1 == len(texts)  # all asked for the same, one of them in two parts
        assert 1 == await metric(it, "tgi_request_preempted", AS_BOB)
        assert 8 == await metric(it, 'tgi_key_refused{key="alice",limit="share"}', AS_BOB)


async def test_earlier_answers_belong_to_a_key_even_if_it_is_the_only_one(tmp_path: Path) -> None:
    """Another key may take its place while the server runs: nothing is guessed from answers to the first one."""
    async with site(fake_shards(make_limits(speculate=4)), config=keyed(tmp_path, ALICE), speculate=4) as it:
        assert 200 == (await it.http.post("/generate", json=asked(20), headers=AS_ALICE)).status_code
        speculation = it.batcher._scheduler.speculation
        assert speculation is not None and speculation._answers is not None
        assert [("alice", "")] == list(speculation._answers._shelves)
