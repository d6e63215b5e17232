"""What is seen of a server while it is measured: by the names of several servers, and nothing where there is none."""

from __future__ import annotations

import asyncio
from typing import cast

import pytest

from benchmark.serving.http_client import HttpClient
from benchmark.serving.sweep import ServerWatch, counts_of

OURS = """# HELP tgi_queue_size Requests waiting for admission
# TYPE tgi_queue_size gauge
tgi_queue_size 3.0
tgi_batch_current_size 12.0
tgi_batch_current_max_tokens 99.0
"""
VLLM = """vllm:num_requests_running{engine="0",model_name="a } b"} 5.0
vllm:num_requests_running{engine="1",model_name="a } b"} 2.0 1700000000
vllm:num_requests_waiting{engine="0",model_name="a } b"} 1
vllm:num_requests_waiting_total{engine="0"} 77
"""


@pytest.mark.parametrize(
    ("text", "found"),
    [
        (OURS, {"running": 12.0, "waiting": 3.0}),
        (VLLM, {"running": 7.0, "waiting": 1.0}),
        ('sglang:num_running_reqs{a="b"} 1\nsglang:num_queue_reqs{a="b"} 0', {"running": 1.0, "waiting": 0.0}),
        ("tgi_queue_size NaN\ntgi_batch_current_size 1", None),
        ("tgi_queue_size 1e999\ntgi_batch_current_size 1", None),
        ("tgi_queue_size 3", None),
        ("tgi_queue_size many\ntgi_batch_current_size\n", None),
        ("<html>not found</html>", None),
        ("", None),
    ],
)
def test_counts_are_found_by_their_names(text: str, found: dict[str, float] | None) -> None:
    assert counts_of(text) == found


class Answers:
    """A client whose answers are given; an error is raised, and after the last one every answer is the last."""

    def __init__(self, *answers: str | Exception) -> None:
        self.answers = list(answers)
        self.asked = 0

    async def text(self, path: str) -> str:
        assert path == "/metrics"
        answer = self.answers[min(self.asked, len(self.answers) - 1)]
        self.asked += 1
        if isinstance(answer, Exception):
            raise answer
        return answer


async def watched(answers: Answers, times: int) -> ServerWatch:
    async with ServerWatch(cast(HttpClient, answers), interval_s=0.0) as watch:
        while answers.asked < times:
            await asyncio.sleep(0)
    return watch


def test_a_server_is_asked_again_and_again_also_after_an_error() -> None:
    answers = Answers(OURS, TimeoutError(), OSError("reset"), VLLM)
    watch = asyncio.run(watched(answers, 5))
    assert [point["running"] for point in watch.timeline][:2] == [12.0, 7.0]
    assert all(0 <= a["at_s"] <= b["at_s"] for a, b in zip(watch.timeline, watch.timeline[1:], strict=False))


@pytest.mark.parametrize("answer", ["nothing", UnicodeDecodeError("utf-8", b"\xff", 0, 1, "bad")])
def test_a_server_without_counts_is_asked_once(answer: str | Exception) -> None:
    answers = Answers(answer)

    async def scenario() -> ServerWatch:
        async with ServerWatch(cast(HttpClient, answers), interval_s=0.0) as watch:
            for _ in range(20):
                await asyncio.sleep(0)
        return watch

    assert asyncio.run(scenario()).timeline == []
    assert answers.asked == 1
