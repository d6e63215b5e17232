"""Work aside: its bounds, and what the rest notices of it."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
from collections.abc import AsyncIterator, Awaitable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
import uvloop

from router.errors import Unavailable
from router.sandbox import TaskError
from router.sandbox.pool import NICENESS, Sandbox, _Child
from tests.running import is_alive

LIGHT = ("tests.router.sandbox.light_tasks", "")
CHATS = ("router.sandbox.tasks", "")
ENDLESS = 1e9
LIVENESS_S = 60.0


def hello(pool: Sandbox, owner: str = "") -> Awaitable[str]:
    return pool.do("repeat", owner, text="Hello")


def spin(pool: Sandbox) -> Awaitable[str]:
    return pool.do("spin", seconds=ENDLESS)


@asynccontextmanager
async def sandbox(tasks: tuple[str, str] = LIGHT, **bounds: Any) -> AsyncIterator[Sandbox]:
    """With one child, which is ready."""
    pool = Sandbox(1, tasks=tasks, **bounds)
    try:
        await pool.warm_up()
        yield pool
    finally:
        await pool.close()


def processes(pool: Sandbox) -> tuple[int, int]:
    """The process ids of the fork server and of the only child."""
    assert pool._fork_server is not None
    [child] = pool._children
    assert child.pid is not None
    return pool._fork_server.process.pid, child.pid


async def one_child(pool: Sandbox) -> tuple[int, int]:
    while not pool._children:
        await asyncio.sleep(0.01)
    return processes(pool)


def open_descriptors(pid: int) -> int:
    return len(os.listdir(f"/proc/{pid}/fd"))


def children_of(pid: int) -> list[str]:
    return Path(f"/proc/{pid}/task/{pid}/children").read_text().split()


@pytest.mark.parametrize(
    ("task", "sentence", "seconds"),
    [
        ({"task": "spin", "seconds": ENDLESS}, "longer than 1 s", 1.0),
        ({"task": "repeat", "text": "x", "times": 10**11}, "too much memory", 4.0),
        ({"task": "repeat", "text": "x", "times": 4 * 10**7}, "its result is too long|longer than 4 s", 4.0),
    ],
)
async def test_what_takes_too_much_is_one_sentence_and_the_next_is_done(
    task: dict[str, Any], sentence: str, seconds: float
) -> None:
    async with sandbox(seconds=seconds) as pool:
        fork_server, _ = processes(pool)
        for _ in range(2):
            with pytest.raises(TaskError, match=sentence):
                await pool.do(**task)
            assert "Hello" == await hello(pool)
        assert fork_server == processes(pool)[0]


async def test_what_a_template_may_not_is_one_sentence_and_the_same_process_does_the_next() -> None:
    def rendered(template: str) -> Awaitable[str]:
        messages = [{"role": "user", "content": "Hello"}]
        given: dict[str, Any] = {"template": template, "messages": messages, "variables": {"name": "a"}, "tools": None}
        return pool.do("render_chat", add_generation_prompt=True, continue_final_message=False, **given)

    async with sandbox(CHATS, seconds=4.0) as pool:
        children = set(pool._children)
        for template, sentence in (
            ("{{ raise_exception('no system here') }}", "the chat template refuses the messages: no system here"),
            ("{% if %}", "the chat template is not valid"),
            ("{{ messages.__class__.__mro__ }}", "the chat template does what a template may not"),
            ("{{ nothing.at_all }}", "the chat template misses a value: 'nothing' is undefined"),
            ("{{ 1 // 0 }}", "the chat template fails with ZeroDivisionError"),
        ):
            with pytest.raises(TaskError, match=sentence):
                await rendered(template)
            assert "Hello a" == await rendered("{{ messages[0].content }} {{ name }}")
        assert children == pool._children


@pytest.mark.alone  # at this priority another test takes all the time there is
@pytest.mark.parametrize(("given", "expected"), [({}, 19), ({"niceness": 7}, 7)])
async def test_children_run_at_a_low_priority_and_end_with_the_pool(
    monkeypatch: pytest.MonkeyPatch, given: dict[str, int], expected: int
) -> None:
    monkeypatch.setattr("router.sandbox.pool.NICENESS", NICENESS)  # which other tests do without
    async with sandbox(**given) as pool:
        fork_server, child = processes(pool)
        assert [0, expected] == [os.getpriority(os.PRIO_PROCESS, pid) for pid in (fork_server, child)]
        await pool.close()
        while is_alive(fork_server) or is_alive(child):
            await asyncio.sleep(0.01)


async def test_who_stops_waiting_leaves_room() -> None:
    async with sandbox(seconds=100.0) as pool:
        fork_server, child = processes(pool)
        tasks = [asyncio.ensure_future(spin(pool)) for _ in range(3)]
        await asyncio.sleep(0.05)
        for task in tasks:
            task.cancel()
        await asyncio.wait(tasks)
        assert "Hello" == await hello(pool)
        while is_alive(child):
            await asyncio.sleep(0.01)
        assert (fork_server, child) != processes(pool) and fork_server == processes(pool)[0]


async def test_a_child_that_somebody_kills_is_not_its_tasks_failure(tmp_path: Path) -> None:
    """The task is done once more by a fresh child; a second loss is the server's failure."""
    async with sandbox(seconds=100.0) as pool:
        slow = asyncio.ensure_future(pool.do("wait", path=str(tmp_path / "go on")))
        await asyncio.sleep(0.05)
        os.kill(processes(pool)[1], signal.SIGKILL)
        (tmp_path / "go on").touch()
        assert "done" == await slow
        endless = asyncio.ensure_future(spin(pool))
        for _ in range(2):
            await asyncio.sleep(0.05)
            _, child = await one_child(pool)
            os.kill(child, signal.SIGKILL)
            while is_alive(child) or any(known.pid == child for known in pool._children):
                await asyncio.sleep(0.01)
        with pytest.raises(Unavailable, match="was ended by SIGKILL: send it again"):
            await endless
        assert "Hello" == await hello(pool)


async def test_a_child_that_ends_by_itself_is_its_tasks_failure() -> None:
    async with sandbox(seconds=100.0) as pool:
        task = asyncio.ensure_future(spin(pool))
        await asyncio.sleep(0.05)
        os.kill(processes(pool)[1], signal.SIGABRT)  # as a library does that gets no memory
        with pytest.raises(TaskError, match="too much memory"):
            await task


async def test_a_child_that_somebody_stops_is_replaced_at_once() -> None:
    async with sandbox(seconds=2.0) as pool:
        _, child = processes(pool)
        os.kill(child, signal.SIGSTOP)
        assert "Hello" == await hello(pool)
        assert child != processes(pool)[1]


async def test_a_fork_server_that_somebody_stops_or_kills_is_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("router.sandbox.pool.FORK_S", 1.0)
    async with sandbox(seconds=0.3) as pool:
        for number in (signal.SIGSTOP, signal.SIGKILL):
            fork_server, child = processes(pool)
            os.kill(fork_server, number)
            os.kill(child, signal.SIGKILL)
            assert "Hello" == await hello(pool)
            assert fork_server != processes(pool)[0] and not is_alive(fork_server)


async def test_a_fork_server_that_only_lacks_time_on_the_cores_becomes_ready(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever waited for it too long is refused, but the next need not wait for it from its beginning."""
    monkeypatch.setattr("router.sandbox.pool.START_S", 0.1)
    pool, answer, refused = Sandbox(2, tasks=(LIGHT[0], "1.5")), "", 0
    try:
        async with asyncio.timeout(LIVENESS_S):
            while not answer:
                try:
                    answer = await hello(pool)
                except Unavailable:
                    refused += 1
    finally:
        await pool.close()
    assert "Hello" == answer and refused


async def test_a_fork_server_that_works_for_ever_is_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("router.sandbox.pool.START_S", 0.1)
    monkeypatch.setattr("router.sandbox.pool.BUSY_S", 0.0)
    pool = Sandbox(1, tasks=(LIGHT[0], str(ENDLESS)))
    try:
        with pytest.raises(Unavailable, match=r"no process for it came within 0\.1 s: send it again"):
            await hello(pool)
        assert pool._fork_server is not None and not pool._fork_server.is_alive
    finally:
        await pool.close()


async def test_nobody_waits_for_ever_for_a_place_or_an_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    async with sandbox(seconds=100.0) as pool:
        monkeypatch.setattr("router.sandbox.pool.WAIT_S", 0.2)
        async with asyncio.timeout(LIVENESS_S):
            refused = await asyncio.gather(spin(pool), spin(pool), spin(pool), return_exceptions=True)
        for error in refused:
            assert isinstance(error, Unavailable) and "no process had done it within 0.2 s: send it again" in str(error)
        monkeypatch.undo()
        assert "Hello" == await hello(pool)


async def test_nothing_is_left_of_many_births_and_ends() -> None:
    async with sandbox(seconds=100.0) as pool:
        fork_server, _ = processes(pool)
        before = open_descriptors(os.getpid()), open_descriptors(fork_server)
        for round in range(30):
            task = asyncio.ensure_future(spin(pool))
            await asyncio.sleep(round / 1000)
            task.cancel()
            await asyncio.wait((task,))
        assert "Hello" == await hello(pool)
        while before != (open_descriptors(os.getpid()), open_descriptors(fork_server)):
            await asyncio.sleep(0.01)
        while 1 != len(children_of(fork_server)):
            await asyncio.sleep(0.01)


async def test_keys_are_served_by_turns() -> None:
    served: list[str] = []

    async def one(owner: str) -> None:
        await hello(pool, owner)
        served.append(owner)

    async with sandbox() as pool:
        await asyncio.gather(*map(one, ("many", "many", "many", "few")))
    assert ["many", "many", "few", "many"] == served


@pytest.mark.parametrize(
    ("had", "waits", "error"),
    [(0.0, 80, Unavailable), (0.004, 80, Unavailable), (0.04, 40, Unavailable), (0.06, 4, TaskError)],
)
async def test_who_gets_no_time_on_the_cores_is_given_more(
    monkeypatch: pytest.MonkeyPatch, had: float, waits: int, error: type[Exception]
) -> None:
    """And is not blamed for it: what had next to nothing is done once more, and then the server is too busy."""
    asked: list[float] = []
    begun: set[_Child] = set()

    async def wait(futures: Any, timeout: float) -> None:
        asked.append(timeout)
        await asyncio.sleep(timeout)

    def used(child: _Child) -> float:
        is_known = child in begun
        begun.add(child)
        return had if is_known else 0.0

    async with sandbox(seconds=0.05) as pool:
        with monkeypatch.context() as patch:
            patch.setattr(_Child, "cpu_seconds", used)
            patch.setattr("router.sandbox.pool.asyncio.wait", wait)
            with pytest.raises(error):
                await spin(pool)
    assert [0.05 / 4] * waits == asked


async def test_a_fork_server_that_ends_before_it_is_ready_is_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    programs: list[str] = []
    start = subprocess.Popen

    def stillborn(command: tuple[str, ...], **options: Any) -> subprocess.Popen[bytes]:
        programs.append(command[0] if programs else "/bin/false")
        return start((programs[-1], *command[1:]), **options)

    monkeypatch.setattr("router.sandbox.pool.subprocess.Popen", stillborn)
    async with sandbox() as pool:
        assert "Hello" == await hello(pool)
    assert 2 == len(programs)


def test_a_child_whose_connection_is_closed_is_replaced() -> None:
    """As when it was killed with an order that it had not read: uvloop would raise where it is written to."""

    async def story() -> None:
        async with sandbox() as pool:
            _, before = processes(pool)
            pool._idle[0]._writer.transport.abort()
            await asyncio.sleep(0.1)
            assert "Hello" == await hello(pool)
            assert before != processes(pool)[1]

    uvloop.run(story())
