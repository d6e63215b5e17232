"""The threads beside the event loop: never more than there are, keys in turn, long answers written in them."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from router.sandbox.workers import Workers
from tests.router.doubles import fake_shards, make_limits, tasks_in_process
from tests.router.site import answering, site

CHAT: dict[str, Any] = {"messages": [{"role": "user", "content": "hello"}], "max_tokens": 20}
# What writes a whole answer, and a body that it answers.
SHAPES = {
    "/v1/messages": ("router.apis.anthropic.answers.message", CHAT),
    "/v1/responses": ("router.apis.openai.responses.answers.response", {"input": "hello"}),
    "/v1/chat/completions": ("router.apis.openai.routes.add_to_chat", {**CHAT, "logprobs": True}),
    "/v1/completions": (
        "router.apis.openai.routes.add_to_completion",
        {"prompt": "hello", "logprobs": 1, "max_tokens": 3},
    ),
}


class Gate:
    """Work that waits for leave to end, and knows how much of it there is at once."""

    def __init__(self) -> None:
        self.begun: list[str] = []
        self.num_running = self.most_running = 0
        self._leave = threading.Semaphore(0)
        self._lock = threading.Lock()

    def release(self, number: int) -> None:
        self._leave.release(number)

    def has_begun(self, number: int) -> bool:
        return len(self.begun) == number

    def work(self, name: str) -> None:
        with self._lock:
            self.begun.append(name)
            self.num_running += 1
            self.most_running = max(self.most_running, self.num_running)
        assert self._leave.acquire(timeout=30)
        with self._lock:
            self.num_running -= 1


async def until(condition: Callable[[], object]) -> None:
    async with asyncio.timeout(30):
        while not condition():
            await asyncio.sleep(0.001)


async def test_keys_take_turns_and_no_more_run_than_there_are_threads() -> None:
    gate = Gate()
    with closing(Workers(2)) as workers:
        names = ["a0", "a1", "a2", "a3", "b0"]
        tasks = [asyncio.create_task(workers.do(lambda name=name: gate.work(name), name[0])) for name in names]
        await until(lambda: gate.num_running == 2)
        for number in range(3, 6):
            gate.release(1)
            await until(partial(gate.has_begun, number))
        gate.release(2)
        await asyncio.gather(*tasks)
        assert 2 == gate.most_running
        assert gate.begun.index("b0") < gate.begun.index("a3")


async def test_who_leaves_the_gate_leaves_nothing_and_who_leaves_a_thread_keeps_its_place() -> None:
    gate = Gate()
    with closing(Workers(1)) as workers:
        first, second = (asyncio.create_task(workers.do(lambda: gate.work("x"))) for _ in range(2))
        await until(lambda: gate.num_running)
        await asyncio.sleep(0)
        for task in (first, second):
            task.cancel()
            await asyncio.wait({task})
        third = asyncio.create_task(workers.do(lambda: gate.work("y")))
        await asyncio.sleep(0.01)
        assert ["x"] == gate.begun
        gate.release(2)
        await third
        assert ["x", "y"] == gate.begun


# Templates are rendered in this process: on a busy machine another one takes longer to start than a client waits.
@pytest.mark.parametrize("path", SHAPES)
def test_long_answers_are_written_in_no_more_threads_than_the_setting_says(
    path: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    gate, (shape, body) = Gate(), SHAPES[path]
    module, _, name = shape.rpartition(".")
    written = getattr(__import__(module, fromlist=[name]), name)

    def held(*given: Any) -> Any:
        gate.work(path)
        return written(*given)

    monkeypatch.setattr(shape, held)
    template = tmp_path / "template.jinja"
    template.write_text("{{ messages[-1]['content'] }}")

    async def story() -> None:
        config = {"chat_template": str(template), "validation_workers": 2}
        async with site(fake_shards(make_limits(), **answering("one two")), config=config) as it:
            it.http.timeout = 60
            gone, *others = (asyncio.create_task(it.http.post(path, json=body)) for _ in range(5))
            await until(lambda: gate.num_running == 2)
            gone.cancel()
            await it.all_free()
            gate.release(10)
            assert {200} == {answer.status_code for answer in await asyncio.gather(*others)}
            assert 2 == gate.most_running

    with tasks_in_process():
        asyncio.run(story())
