"""What counting tokens costs the client: streams of ready-made frames, and calls for each of them."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
from collections.abc import Iterator
from types import FrameType

import pytest

from benchmark.__main__ import main
from benchmark.serving.http_client import Api, ChatApi, HttpExchange, OpenAiApi, Reply, TgiApi, _Stream
from tests.benchmark.serving import frames as made
from tests.running import ROOT

MOST_CALLS = 40  # for one token, of functions in Python and in C


@pytest.fixture
def frames() -> Iterator[str]:
    command = [sys.executable, "-m", "tests.benchmark.serving.frames"]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        try:
            yield f"http://127.0.0.1:{int(process.stdout.readline())}"
        finally:
            process.kill()


@pytest.mark.parametrize("api", ["tgi", "openai", "chat"])
def test_every_token_of_many_streams_is_counted(api: str, frames: str, capsys: pytest.CaptureFixture[str]) -> None:
    work = ("--input-length", "4", "--output-length", "300", "--concurrency", "256", "--num-requests", "256")
    code = main(["serving", "--url", frames, "--api", api, *work])
    [row] = json.loads(capsys.readouterr().out.splitlines()[-1])["rows"]
    assert (0, 0, 256 * 300, 0) == (code, row["errors"], row["output_tokens"], row["other_input_length"])


@pytest.mark.parametrize(
    ("api", "frame"),
    [
        (TgiApi(), made.tgi(300, 4)[0]),
        (OpenAiApi("m"), made.openai(300, 4, chat=False)[0]),
        (ChatApi("m"), made.openai(300, 4, chat=True)[0]),
    ],
    ids=["tgi", "openai", "chat"],
)
def test_a_token_costs_few_calls_and_no_more_than_the_one_before(api: Api, frame: bytes) -> None:
    """Each token in bytes of its own, which is the most that it can cost."""

    async def story() -> list[int]:
        reply = Reply(sent_at=0.0)
        exchange = HttpExchange(b"", _Stream(api, reply, keep_text=False).take)
        exchange.data_received(made.HEAD)
        counts = [calls_of(exchange, frame) for _ in range(1000)]
        assert 1000 == reply.num_tokens
        return counts

    counts = asyncio.run(story())
    assert counts[1:] == counts[1:2] * 999
    assert counts[1] <= MOST_CALLS


def calls_of(exchange: HttpExchange, data: bytes) -> int:
    """How many functions are called when these bytes come."""
    count = 0

    def note(frame: FrameType, event: str, argument: object) -> None:
        nonlocal count
        count += event in ("call", "c_call")

    sys.setprofile(note)
    try:
        exchange.data_received(data)
    finally:
        sys.setprofile(None)
    return count
