"""Requests that replicas lose: whole again, or a stream that goes on behind what the client has, or one sentence."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Sequence
from typing import Any

import orjson
import pytest

from lockstep_ray import relay
from lockstep_ray.relay import Answer, Counts, Head, Patience, Relay, ReplicaLost
from lockstep_ray.requests import RelayedRequest

EVENTS = (("content-type", "text/event-stream; charset=utf-8"),)
TOLD = (*EVENTS, ("x-lockstep-told", "1"), ("x-compute-type", "1-cpu"), ("connection", "keep-alive"))
JSON = (("content-type", "application/json"), ("retry-after", "1"))


def ask(path: str = "/generate_stream") -> RelayedRequest:
    return RelayedRequest("POST", path, "", (), b"{}", 10, None)


def write(*ids: int, over: bool = False, first: bool = False) -> bytes:
    """Frames of these tokens, and what is told of them."""
    said: dict[str, Any] = {"created": 5, "seeds": [9]} if first else {}
    said |= {"tokens": [[0, id, -0.5, []] for id in ids], "over": [0] if over else []}
    return b"".join(b"data: %d\n\n" % id for id in ids) + b": lockstep " + orjson.dumps(said) + b"\n\n"


class Replicas:
    """Each request gets the next script: a head, pieces, and how it ends."""

    def __init__(self, *scripts: Sequence[Head | bytes | Exception]) -> None:
        self.scripts = [*scripts]
        self.asked: list[RelayedRequest] = []
        self.num_closed = 0

    async def ask(self, ask: RelayedRequest) -> AsyncGenerator[Head | bytes, None]:
        self.asked.append(ask)
        try:
            for piece in self.scripts.pop(0):
                if isinstance(piece, Exception):
                    raise piece
                yield piece
        finally:
            self.num_closed += 1


@pytest.fixture(autouse=True)
def without_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(relay, "FIRST_WAIT_S", 0.0)


def told(replicas: Replicas, wanted: RelayedRequest, counts: Counts, **patience: Any) -> tuple[Answer, bytes]:
    """The answer, and all of its body."""

    async def story() -> tuple[Answer, bytes]:
        answer = await Relay(replicas, Patience(**patience), counts).answer(wanted)
        pieces = [] if answer.rest is None else [piece async for piece in answer.rest]
        return answer, answer.first + b"".join(pieces)

    return asyncio.run(story())


def head(headers: tuple[tuple[str, str], ...] = TOLD, status: int = 200, replica: str = "a") -> Head:
    return Head(status, headers, replica)


def test_a_stream_goes_on_behind_the_last_write_that_was_told_of() -> None:
    first = [head(), write(1, 2, first=True), write(3) + b"data: 4\n\n", ReplicaLost("it died", "a")]
    second = [head(replica="b"), ReplicaLost("it died, too", "b")]
    third = [head(replica="c"), write(4, 5)[:9], write(4, 5)[9:], write(6, over=True)]
    replicas, counts = Replicas(first, second, third), Counts()
    answer, body = told(replicas, ask(), counts)
    assert body == b"".join(b"data: %d\n\n" % id for id in range(1, 7))
    assert answer.headers == (*EVENTS, ("x-compute-type", "1-cpu"))
    known = [orjson.loads(one.known or b"null") for one in replicas.asked]
    assert [None, [1, 2, 3], [1, 2, 3]] == [one and [id for id, *_ in one["samples"][0]["tokens"]] for one in known]
    assert {"created": 5, "seed": 9, "is_over": False} == {
        "created": known[1]["created"], **{k: v for k, v in known[1]["samples"][0].items() if k != "tokens"}
    }  # fmt: skip
    assert [set(), {"a"}, {"a", "b"}] == [set(one.avoid) for one in replicas.asked]
    assert (1, 0, 2, 0) == (counts.requests, counts.retried, counts.continued, counts.failed)
    assert 3 == replicas.num_closed


def test_an_end_in_the_middle_is_a_loss_and_not_an_end() -> None:
    replicas, counts = Replicas([head(), write(1, first=True)], [head(replica="b"), write(2, over=True)]), Counts()
    _, body = told(replicas, ask(), counts)
    assert (body, counts.continued) == (b"data: 1\n\ndata: 2\n\n", 1)


@pytest.mark.parametrize(
    ("path", "end"),
    [
        ("/generate_stream", b'data: {"error":"it died, also after 2 tries: send the request again later"'),
        ("/v1/chat/completions", b'data: {"error":{"message":"it died'),
        ("/v1/messages", b'event: error\ndata: {"type":"error"'),
    ],
)
def test_what_is_lost_too_often_ends_with_one_sentence(path: str, end: bytes) -> None:
    scripts = [[head(), write(1, first=True), ReplicaLost("it died", "a")], [ReplicaLost("it died", "b")]]
    counts = Counts()
    _, body = told(Replicas(*scripts), ask(path), counts, most_tries=2)
    assert body.startswith(b"data: 1\n\n" + end)
    assert body.endswith(b"[DONE]\n\n") == (path == "/v1/chat/completions")
    assert 1 == counts.failed


def test_a_replica_s_own_last_sentence_is_passed_on_where_nobody_goes_on() -> None:
    own = b'data: {"error":"The server is stopping","error_type":"unavailable"}\n\n'
    _, body = told(Replicas([head(), write(1, first=True), own]), ask(), Counts(), most_tries=1)
    assert body == b"data: 1\n\n" + own


def test_an_answer_that_is_no_stream_is_whole_or_asked_for_again() -> None:
    lost = [head(JSON), b'{"half', ReplicaLost("it died", "a")]
    replicas, counts = Replicas(lost, [head(JSON, replica="b"), b'{"whole":', b"1}"]), Counts()
    answer, body = told(replicas, ask("/generate"), counts)
    assert (answer.status, body, counts.retried, counts.failed) == (200, b'{"whole":1}', 1, 0)


def test_who_does_not_take_it_is_passed_over_and_the_last_refusal_is_the_client_s() -> None:
    full = [head(JSON, 429, replica=name) for name in "abc"]
    replicas = Replicas(*([one, b'{"error":"%s"}' % one.replica.encode()] for one in full))
    answer, body = told(replicas, ask("/generate"), Counts())
    assert (answer.status, body, 3) == (429, b'{"error":"c"}', len(replicas.asked))
    assert ("retry-after", "1") in answer.headers
    taken = Replicas([full[0], b"{}"], [head(JSON, replica="b"), b'{"a":1}'])
    assert b'{"a":1}' == told(taken, ask("/generate"), Counts())[1]


def test_a_refusal_by_the_server_is_final() -> None:
    replicas = Replicas([head(JSON, 422), b'{"error":"Input validation error"}'])
    answer, body = told(replicas, ask(), Counts())
    assert (answer.status, body) == (422, b'{"error":"Input validation error"}')


def test_an_answer_that_is_too_large_is_no_loss_and_is_made_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(relay, "MOST_ANSWER_BYTES", 10)
    replicas, counts = Replicas([head(JSON), b"12345", b"678901", b"2"]), Counts()
    answer, body = told(replicas, ask("/generate"), counts)
    assert (422, "validation") == (answer.status, orjson.loads(body)["error_type"])
    assert "larger than 10 bytes: ask for less of it" in orjson.loads(body)["error"]
    assert (1, 1, 0, 1) == (len(replicas.asked), replicas.num_closed, counts.retried, counts.failed)


def test_a_client_that_leaves_ends_the_request_upstream() -> None:
    replicas = Replicas([head(), write(1, first=True), *[write(2)] * 1000])

    async def story() -> None:
        answer = await Relay(replicas, Patience(), Counts()).answer(ask())
        assert answer.rest is not None
        assert b"data: 1\n\n" == await anext(answer.rest)
        await answer.rest.aclose()

    asyncio.run(story())
    assert (1, 1) == (replicas.num_closed, len(replicas.asked))


def test_nothing_is_tried_again_once_patience_has_an_end() -> None:
    times = iter((0.0, 61.0))
    replicas = Replicas([ReplicaLost("no replica is there")], [])

    async def story() -> Answer:
        return await Relay(replicas, Patience(give_up_s=60), Counts(), lambda: next(times)).answer(
            ask("/v1/completions")
        )

    answer = asyncio.run(story())
    assert (503, "no replica is there") == (answer.status, orjson.loads(answer.first)["error"]["message"][:19])
