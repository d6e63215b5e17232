"""Whatever fails on a request's way, its permits, its entries and its blocks come back."""

from __future__ import annotations

import asyncio
from typing import Any
from unittest.mock import Mock

import pytest

from router.apis import serving
from router.apis.tgi import routes
from router.batching.batcher import Batcher
from router.errors import Unavailable
from router.requests.validation import Validator
from router.text.generated import Detokeniser
from router.text.tokenizer import ModelTokenizer
from tests.router.doubles import fake_shards, make_limits
from tests.router.site import Site, assert_is_error, site

PATHS = ("/", "/generate", "/generate_stream")


class PanicException(BaseException):
    """What a panic in a library's Rust code arrives as; the real class cannot be imported."""


async def assert_nothing_is_held(it: Site, num_permits: int) -> None:
    """All permits are there, no request is known any more, and a good request is answered."""
    await it.all_free()
    assert it.app.state.services.permits._left == num_permits
    assert not it.batcher._live
    assert (await it.post("/generate", max_new_tokens=1)).status_code == 200


@pytest.mark.parametrize("path", [*PATHS, "/tokenize"])
async def test_tokenizer_that_panics_holds_nothing(path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ten times, with three permits."""

    panic = Mock(side_effect=PanicException("secret"))
    broken = ModelTokenizer(Mock(encode_batch_fast=panic, encode_batch=panic), frozenset(), frozenset())

    async with site(max_concurrent_requests=3) as it:
        validator: Validator = it.app.state.services.validator
        tokenizer = validator._tokenizer
        monkeypatch.setattr(validator, "_tokenizer", broken)
        for _ in range(10):
            answer = await it.post(path)
            assert_is_error(answer, 422, "validation")
            assert "cannot be tokenised" in answer.json()["error"] and "secret" not in answer.text
        monkeypatch.setattr(validator, "_tokenizer", tokenizer)
        await assert_nothing_is_held(it, 3)


@pytest.mark.parametrize("path", PATHS[1:])
@pytest.mark.parametrize("error", [PanicException("x"), ZeroDivisionError("x"), asyncio.CancelledError()], ids=repr)
@pytest.mark.parametrize("where", [(Validator, "validate"), (Batcher, "submit")], ids=["validate", "submit"])
async def test_error_that_nobody_thought_of_holds_nothing(
    path: str, error: BaseException, where: tuple[type, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The second sample cannot be queued when the first has been."""
    kind, name = where
    original = getattr(kind, name)
    calls = iter(range(1000))

    def failing(*arguments: Any) -> Any:
        if name == "submit" and next(calls) % 2 == 0:
            return original(*arguments)
        raise error

    async with site(max_concurrent_requests=3) as it:
        with monkeypatch.context() as patch:
            patch.setattr(kind, name, failing)
            more: dict[str, Any] = {} if path == "/generate_stream" else {"best_of": 2, "do_sample": True}
            for _ in range(4):
                try:
                    answer = await it.post(path, max_new_tokens=2, **more)
                except Exception:  # a cancelled request is not answered
                    continue
                assert answer.status_code in (200, 500)
        await assert_nothing_is_held(it, 3)


def test_second_sample_that_is_refused_frees_the_first(monkeypatch: pytest.MonkeyPatch) -> None:
    submit = Batcher.submit

    async def story() -> None:
        async with site(fake_shards(make_limits(), step_delay_s=0.01)) as it:
            calls = iter([submit, None, submit])

            def once(*arguments: Any, **named: Any) -> Any:
                if (call := next(calls)) is None:
                    raise Unavailable("The server is stopping or restarting")
                return call(*arguments, **named)

            monkeypatch.setattr(Batcher, "submit", once)
            assert_is_error(await it.post("/generate", best_of=2, do_sample=True), 503, "unavailable")
            await assert_nothing_is_held(it, 128)

    asyncio.run(story())


@pytest.mark.parametrize(
    "where",
    [(serving, "EventStream"), (routes.EventFrames, "__init__"), (routes.EventFrames, "write")],
)
def test_stream_that_cannot_be_written_holds_nothing(
    where: tuple[Any, str], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def broken(*_: Any) -> Any:
        raise ZeroDivisionError

    async def story() -> None:
        async with site(max_concurrent_requests=2) as it:
            monkeypatch.setattr(*where, broken)
            for _ in range(3):
                try:
                    answer = await it.post("/generate_stream", max_new_tokens=2)
                except Exception:  # its status was sent: all that is left is to cut the connection
                    assert where[1] == "write"
                else:
                    assert answer.status_code == 500
            await assert_nothing_is_held(it, 2)

    asyncio.run(story())
    assert any("ZeroDivisionError" in str(record.exc_info) for record in caplog.records)


def test_text_that_cannot_be_decoded_ends_its_own_request_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    async def story() -> None:
        async with site(max_concurrent_requests=2) as it:
            good = it.batcher._tokenizer
            panicking = Mock(decode=Mock(side_effect=PanicException), decoder=good.tokenizer.decoder)
            broken = ModelTokenizer(panicking, frozenset(), frozenset())
            push = Detokeniser.push

            def poisoned(self: Detokeniser, token_id: int) -> str:
                self._tokenizer = broken
                return push(self, token_id)

            with monkeypatch.context() as patch:
                patch.setattr(Detokeniser, "push", poisoned)
                for path in PATHS:
                    assert_is_error(await it.post(path), 500, "incomplete_generation")
            await assert_nothing_is_held(it, 2)

    asyncio.run(story())
