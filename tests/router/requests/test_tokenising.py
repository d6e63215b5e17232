"""Texts before the tokenising threads: keys in turn, deadlines, clients that leave, nothing kept for who has gone."""

from __future__ import annotations

import asyncio
import gc
import json
import threading
import weakref
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx2
import pytest

from router.apis.tgi.bodies import GenerateRequest, prompt_request_of
from router.requests.validation import Validator
from router.sandbox.workers import Workers
from tests.router.apis.test_overload import AS_ALICE, AS_BOB, keyed, metric
from tests.router.doubles import byte_tokenizer, make_limits
from tests.router.site import Site, assert_is_error, site
from tests.router.test_accounts import ALICE, BOB

PATHS = ("/generate", "/generate_stream", "/tokenize")
NUM_PERMITS = 20


class HeldTokenizer:
    """Takes as long as it is told to: a text for each call of `release`."""

    most_characters_per_token = None

    def __init__(self) -> None:
        self.begun: list[str] = []
        self.num_ended = 0
        self._turns = threading.Semaphore(0)

    def release(self, number: int = 1) -> None:
        self._turns.release(number)

    eos_ids: frozenset[int] = frozenset()

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        self.begun.append(str(text))
        self._turns.acquire()
        self.num_ended += 1
        return list(text.encode())

    def count(self, text: str, add_special_tokens: bool = True) -> int:
        return len(self.encode(text))

    def encode_with_offsets(self, text: str, add_special_tokens: bool = True) -> list[tuple[int, tuple[int, int]]]:
        return byte_tokenizer().encode_with_offsets(text)


async def until(condition: Callable[[], object]) -> None:
    async with asyncio.timeout(30):
        while not condition():
            await asyncio.sleep(0.001)


@asynccontextmanager
async def held_site(**config: Any) -> AsyncIterator[tuple[Site, HeldTokenizer]]:
    """With one tokenising thread, which waits."""
    held = HeldTokenizer()
    async with site(config={"validation_workers": 1, **config}, max_concurrent_requests=NUM_PERMITS) as it:
        it.app.state.services.validator._tokenizer = held
        try:
            yield it, held
        finally:
            held.release(1000)


def post(it: Site, path: str, inputs: str, headers: dict[str, str] | None = None) -> asyncio.Task[Any]:
    body = {"inputs": inputs, "parameters": {"max_new_tokens": 1}}
    return asyncio.create_task(it.http.post(path, json=body, headers=headers, timeout=30))


def num_held(it: Site) -> int:
    """Requests in the server."""
    return NUM_PERMITS - int(it.app.state.services.permits._left)


async def test_one_text_of_a_key_waits_for_one_of_another_s_many(tmp_path: Path) -> None:
    async with held_site(**keyed(tmp_path, ALICE, BOB)) as (it, held):
        many = []
        for number in range(8):
            many.append(post(it, PATHS[number % 3], f"a{number}", AS_ALICE))
            await until(lambda: num_held(it) == len(many))
        one = post(it, "/generate", "bob", AS_BOB)
        await until(lambda: num_held(it) == 9)
        held.release(3)
        assert 200 == (await one).status_code
        await until(lambda: len(held.begun) >= 4)
        assert ["a0", "a1", "bob", "a2"] == held.begun[:4]
        held.release(100)
        assert {200} == {answer.status_code for answer in await asyncio.gather(*many)}
        assert [f"a{number}" for number in range(2, 8)] == held.begun[3:]


async def test_without_keys_addresses_take_turns() -> None:
    elsewhere = httpx2.AsyncHTTPTransport(local_address="127.0.0.2")
    async with held_site() as (it, held), httpx2.AsyncClient(transport=elsewhere) as other:
        many = []
        for number in range(6):
            many.append(post(it, PATHS[number % 3], f"a{number}"))
            await until(lambda: num_held(it) == len(many))
        body = {"inputs": "other"}
        one = asyncio.create_task(other.post(f"http://127.0.0.1:{it.port}/tokenize", json=body, timeout=30))
        await until(lambda: num_held(it) == 7)
        held.release(3)
        assert 200 == (await one).status_code
        await until(lambda: len(held.begun) >= 4)
        assert ["a0", "a1", "other", "a2"] == held.begun[:4]
        held.release(100)
        assert {200} == {answer.status_code for answer in await asyncio.gather(*many)}
        await other.aclose()
        await asyncio.sleep(0.1)  # so that the server has closed its end before its loop is


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("by_header", [True, False])
async def test_a_text_whose_time_is_over_is_504_and_keeps_no_place_in_the_queue(path: str, by_header: bool) -> None:
    async with held_site(**({} if by_header else {"request_timeout": 0.05})) as (it, held):
        headers = {"x-request-timeout-ms": "50"} if by_header else None
        late = await asyncio.gather(*(post(it, path, f"{number}", headers) for number in range(5)))
        for answer in late:
            assert_is_error(answer, 504, "timeout")
            assert "within its 0.05 s" in answer.json()["error"]
        assert 5 == await metric(it, 'tgi_request_timeout{stage="validation"}')
        assert 0 == num_held(it)
        assert 0 == it.app.state.services.workers._pool._work_queue.qsize()
        held.release(100)
        assert len(held.begun) <= 1


async def test_tokenize_refuses_a_time_that_is_none() -> None:
    async with held_site() as (it, held):
        held.release()
        assert_is_error(await post(it, "/tokenize", "a", {"x-request-timeout-ms": "0"}), 422, "validation")
        assert 200 == (await post(it, "/tokenize", "a", {"x-request-timeout-ms": "86400000"})).status_code


@pytest.mark.parametrize("path", PATHS)
async def test_a_client_that_leaves_takes_its_text_along(path: str) -> None:
    async with held_site() as (it, held):
        writers = [await asking(it.port, path, f"{number}") for number in range(5)]
        await until(lambda: num_held(it) == 5 and held.begun)
        for writer in writers:
            writer.close()
        await until(lambda: num_held(it) == 0)
        held.release()
        await until(lambda: held.num_ended)
        held.release()
        assert 200 == (await post(it, path, "next")).status_code
        assert 2 == len(held.begun) and "next" == held.begun[1]
        if path != "/tokenize":
            assert 5 == await metric(it, 'tgi_request_failure{err="dropped"}')


async def asking(port: int, path: str, inputs: str) -> asyncio.StreamWriter:
    """A client that has asked, and reads nothing yet."""
    _, writer = await asyncio.open_connection("127.0.0.1", port)
    body = json.dumps({"inputs": inputs, "parameters": {"max_new_tokens": 1}}).encode()
    head = f"POST {path} HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\ncontent-length: {len(body)}\r\n\r\n"
    writer.write(head.encode() + body)
    return writer


def num_tokens(text: str, tokens: list[Any]) -> int:
    return len(tokens)


class Text(str):
    """One that can be seen to be gone."""


async def test_texts_of_who_has_gone_are_gone_but_for_those_in_threads() -> None:
    """Whoever is cancelled a millisecond after asking would else fill memory with texts that wait for a thread."""

    held = HeldTokenizer()
    workers = Workers(2)
    validator = Validator(held, make_limits(), workers)  # type: ignore[arg-type]
    alive: weakref.WeakSet[Text] = weakref.WeakSet()

    async def come_and_go(number: int) -> None:
        text = Text(f"text {number}")
        alive.add(text)
        request = GenerateRequest.model_construct(inputs=text, parameters=None)
        work = asyncio.ensure_future(
            validator.validate(prompt_request_of(request))
            if number % 2
            else validator.tokenise(prompt_request_of(request), num_tokens)
        )
        del text, request
        await until(lambda: number > 1 or len(held.begun) == number + 1)
        await asyncio.sleep(0)
        work.cancel()
        await asyncio.wait((work,))

    try:
        for number in range(50):
            await come_and_go(number)
        gc.collect()
        assert 2 == len(alive) == len(held.begun)
        following = asyncio.create_task(
            validator.tokenise(prompt_request_of(GenerateRequest(inputs="next")), num_tokens)
        )
        await until(lambda: workers._semaphore.num_waiting)  # what was cancelled still has its place
        assert 2 == len(held.begun)
        held.release(3)
        assert 4 == await following
    finally:
        held.release(100)
        workers.close()
