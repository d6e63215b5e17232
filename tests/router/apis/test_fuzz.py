"""Nearly right bodies by the thousand: each is answered or refused in our words, and nothing is left of it.

`HYPOTHESIS_PROFILE=large` tries three times as many, `FUZZED_BODIES=100000` so many.
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
from collections import Counter
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from random import Random

import pytest
from hypothesis import settings

from router.grammars.follower import Follower
from tests.router.apis.error_bodies import assert_is_clean, assert_is_clean_answer
from tests.router.apis.fuzzed_bodies import fuzzed_body
from tests.router.doubles import EOS, byte_tokenizer, fake_next_token, fake_shards, make_limits
from tests.router.site import events_in, site

NUM_CLIENTS = 8
PAYLOAD_LIMIT = 8000
NUM_PERMITS = NUM_CLIENTS  # `best_of` takes two, so that some are refused
PATHS = ("/", "/generate", "/generate_stream", "/tokenize", "/invocations", "/vertex")
CONTENT_TYPES = ("application/json",) * 30 + ("application/json; charset=utf-16", "text/plain", "", "a/b+json", "\xff")
LIMITS = {"max_input_length": 16, "max_total_tokens": 32, "max_concurrent_requests": NUM_PERMITS}


@dataclass(frozen=True)
class Reply:
    """A whole answer, as it came."""

    status: int
    headers: dict[str, str]
    content: bytes


class Client:
    """One connection after the other, each for as many requests as the server allows."""

    def __init__(self, port: int) -> None:
        self._port = port
        self._streams: tuple[asyncio.StreamReader, asyncio.StreamWriter] | None = None

    async def post(self, path: str, content_type: str, body: bytes) -> Reply:
        """The answer, or ConnectionError or asyncio.IncompleteReadError where none came to its end."""
        if self._streams is None:
            self._streams = await asyncio.open_connection("127.0.0.1", self._port)
        reader, writer = self._streams
        head = f"POST {path} HTTP/1.1\r\nhost: localhost\r\ncontent-type: {content_type}\r\n"
        writer.write(f"{head}content-length: {len(body)}\r\n\r\n".encode("latin-1") + body)
        status, *lines = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1").split("\r\n")
        headers = {name.lower(): value for name, value in (line.split(": ", 1) for line in lines if line)}
        if "content-length" in headers:
            content = await reader.readexactly(int(headers["content-length"]))
        else:
            content = b"".join([chunk async for chunk in _chunks(reader)])
        if headers.get("connection") == "close":
            self.close()
        return Reply(int(status.split()[1]), headers, content)

    def close(self) -> None:
        if self._streams is not None:
            self._streams[1].close()
            self._streams = None


async def _chunks(reader: asyncio.StreamReader):  # type: ignore[no-untyped-def]
    while size := int((await reader.readuntil(b"\r\n")), 16):
        yield await reader.readexactly(size)
        await reader.readexactly(2)
    await reader.readexactly(2)


def check(reply: Reply) -> None:
    """Answered, or refused in our words."""
    assert reply.status < 500 or reply.status in (503, 504), reply
    if reply.status != 200:
        assert_is_clean_answer(reply.headers["content-type"], reply.content)
    elif reply.headers["content-type"].startswith("text/event-stream"):
        *_, last = events_in(reply.content.decode().removesuffix("data: [DONE]\n\n"))
        if "choices" in last:  # a completion's, which ends with its reason
            assert last["choices"][0]["finish_reason"]
        else:
            assert isinstance(last["generated_text"], str) if "token" in last else not assert_is_clean(last)
    else:
        json.loads(reply.content)


def next_token(token_ids: list[int], seed: int, vocab_size: int) -> int:
    """Any byte, or the end."""
    token_id = fake_next_token(token_ids, seed, vocab_size)
    return EOS if token_id % 16 == 0 else token_id


async def fuzz(seeds: Iterator[int], port: int, counts: Counter[int]) -> None:
    """Post the body of each seed, one after the other."""
    client = Client(port)
    for seed in seeds:
        random = Random(seed)
        path, content_type, body = random.choice(PATHS), random.choice(CONTENT_TYPES), fuzzed_body(random)
        if path == "/vertex":
            body = b'{"instances": [%b]}' % b",".join([body] * random.choice([1, 1, 1, 2, 5]))
        try:
            reply = await client.post(path, content_type, body)
            check(reply)
        except ConnectionError:  # the server need not read the rest of a body that it refuses for its size
            assert len(body) > PAYLOAD_LIMIT, f"seed {seed}: cut off"
            client.close()
            counts[413] += 1
            continue
        except Exception as error:
            raise AssertionError(f"seed {seed}: POST {path} as {content_type!r}: {body!r}") from error
        counts[reply.status] += 1
    client.close()


@asynccontextmanager
async def following(folder: Path) -> AsyncIterator[Follower]:
    """What follows texts of byte_tokenizer, which it saves there for whoever compiles."""
    path = folder / "tokenizer.json"
    byte_tokenizer().tokenizer.save(str(path))
    follower = Follower(json.dumps({"tokenizer_path": str(path), "vocab_size": 257, "eos_ids": [EOS]}))
    try:
        yield follower
        assert not follower._texts, "texts that nobody wants are followed"
    finally:
        await follower.close()


def test_nearly_right_bodies_are_answered_or_refused_and_leave_nothing(
    caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    num_bodies = int(os.environ.get("FUZZED_BODIES", min(10 * settings().max_examples, 10_000)))
    counts: Counter[int] = Counter()

    async def story() -> None:
        shards = fake_shards(make_limits(**LIMITS), vocab_size=257, next_token=next_token, keep_requests=False)
        config = {"payload_limit": PAYLOAD_LIMIT, "tokenizer_path": str(tmp_path)}
        async with following(tmp_path) as follower, site(shards, config=config, matching=follower, **LIMITS) as it:
            seeds = iter(range(num_bodies))
            await asyncio.gather(*(fuzz(seeds, it.port, counts) for _ in range(NUM_CLIENTS)))
            await it.all_free()
            assert it.app.state.services.permits._left == NUM_PERMITS and not it.batcher._live
            assert it.app.state.services.validator._compiler._kept, "no grammar was good"
            assert (await it.post("/generate", max_new_tokens=2)).status_code == 200

    with caplog.at_level(logging.WARNING):
        asyncio.run(story())
    print(dict(sorted(counts.items())))
    assert not [record for record in caplog.records if record.exc_info or record.levelno >= logging.ERROR]
    assert sum(counts.values()) == num_bodies
    assert all(counts[status] > num_bodies / 500 for status in (200, 400, 413, 415, 422)), counts
