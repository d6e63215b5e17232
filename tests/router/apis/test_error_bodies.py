"""No client reads what is inside the server: of a shard's failure it gets the sentence, the log gets the rest."""

from __future__ import annotations

import asyncio

import pytest

from router.errors import AdapterRefused, GenerationError, for_clients
from tests.router.apis.error_bodies import INTERNALS, assert_is_clean, assert_is_clean_answer
from tests.router.doubles import fake_shards, make_limits
from tests.router.site import events_in, site

SECRETS = [
    "unavailable: recvmsg:Connection reset by peer",
    "unavailable: recvmsg: Connection reset by peer",
    "internal: Internal error from Core",
    "unavailable: failed to connect to all addresses; last error: UNKNOWN: unix:/tmp/lockstep-x/shard-0.sock",
    "RuntimeError: bad pointer 0x7f00deadbeef",
    "FileNotFoundError: [Errno 2] No such file or directory: '/home/user/model/config.json'",
    'Traceback (most recent call last):\n  File "/srv/server/service.py", line 3, in step\nKeyError: 1',
    "ValueError: shape mismatch\nsecond line with /etc/passwd",
    "cancelled: Socket closed",
]


@pytest.mark.parametrize("cause", [SECRETS[0], SECRETS[7]])
async def test_inside_of_the_server_stays_in_its_log(cause: str, caplog: pytest.LogCaptureFixture) -> None:
    async with site(fake_shards(make_limits(), failing_steps=dict.fromkeys(range(1, 50), cause))) as it:
        for path in ("/generate", "/generate_stream", "/"):
            answer = await it.post(path)
            assert answer.status_code == 424
            assert_is_clean_answer(answer.headers["content-type"], answer.content)
    async with site(
        fake_shards(make_limits(), failing_steps=dict.fromkeys(range(3, 50), cause), step_delay_s=0.01)
    ) as it:
        *_, last = events_in((await it.post("/generate_stream", max_new_tokens=9)).text)
        assert_is_clean(last)
    async with site(fake_shards(make_limits(), step_delay_s=0.05)) as it:
        running = asyncio.create_task(it.post("/generate"))
        while not it.shards.requests:
            await asyncio.sleep(0.001)
        it.shards.die(cause)
        for answer in (await running, await it.http.get("/health"), await it.post("/generate")):
            assert answer.status_code in (424, 503)
            assert_is_clean_answer(answer.headers["content-type"], answer.content)
    assert any(cause.split("\n")[0] in record.getMessage() for record in caplog.records)


@pytest.mark.parametrize("cause", SECRETS)
def test_no_inside_is_in_what_clients_read_of_a_failure(cause: str) -> None:
    assert_is_clean(GenerationError(cause).body())


@pytest.mark.parametrize(
    "cause",
    [
        "the device is out of memory; lower --max-batch-prefill-tokens or --max-batch-total-tokens",
        "another shard went away",
        "ValueError: 3/4 of the tokens",
        "shard 0: it does not answer",
    ],
)
def test_sentences_reach_the_client_as_they_are(cause: str) -> None:
    assert str(GenerationError(cause)) == f"Request failed during generation: {cause}"


def test_cause_without_end_is_cut() -> None:
    assert len(for_clients("x" * 10_000)) < 400


def test_the_check_itself_finds_what_it_looks_for() -> None:
    assert all(INTERNALS.search(secret) for secret in SECRETS)


def test_what_is_wrong_with_an_adapter_is_told_without_its_folder() -> None:
    found = AdapterRefused(
        "mine", "tensor a in /srv/adapters/mine/adapter_model.safetensors has NaN", "/srv/adapters/mine"
    )
    assert str(found).endswith("the adapter mine cannot be served: tensor a in adapter_model.safetensors has NaN")
    assert "srv" not in str(
        AdapterRefused("mine", "tensor a in /srv/other/adapter_model.safetensors has NaN", "/srv/mine")
    )
