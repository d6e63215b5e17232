"""Work aside: its bounds, and what the rest notices of it."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest
import uvloop

from router.errors import Unavailable
from router.sandbox import TaskError
from router.sandbox.pool import NICENESS, Sandbox, _Child
from tests.running import is_alive

HELLO = [{"role": "user", "content": "Hello"}]
LONG = "{% for i in range(3000) %}{% for j in range(9000) %}{% endfor %}{% endfor %}done"
ENDLESS = "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}"


def rendered(aside: Sandbox, template: str, owner: str = "", **variables: Any) -> Awaitable[str]:
    return aside.do(
        "render_chat",
        owner,
        template=template,
        messages=HELLO,
        tools=None,
        variables=variables,
        add_generation_prompt=True,
        continue_final_message=False,
    )


def aside(story: Callable[[Sandbox], Awaitable[None]], num: int = 1, **bounds: Any) -> None:
    async def told() -> None:
        pool = Sandbox(num, **bounds)
        try:
            await story(pool)
        finally:
            await pool.close()

    asyncio.run(told())


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


def test_a_task_is_done() -> None:
    async def story(pool: Sandbox) -> None:
        await pool.warm_up()
        for name in ("a", "b"):
            assert f"Hello {name}" == await rendered(pool, "{{ messages[0].content }} {{ name }}", name=name)

    aside(story)


@pytest.mark.parametrize(
    ("template", "sentence", "seconds"),
    [
        (ENDLESS, "longer than 2 s", 2.0),
        ("{{ 'x' * 99999999999 }}", "too much memory", 4.0),
        ("{{ 'x' * 40000000 }}", "too much memory|its result is too long|longer than 4 s", 4.0),
    ],
)
def test_what_takes_too_much_is_one_sentence_and_the_next_is_done(template: str, sentence: str, seconds: float) -> None:
    async def story(pool: Sandbox) -> None:
        with pytest.raises(TaskError, match=sentence):
            await rendered(pool, template)
        assert "Hello" == await rendered(pool, "{{ messages[0].content }}")

    aside(story, seconds=seconds)


def test_what_is_refused_is_one_sentence_and_the_same_process_does_the_next() -> None:
    refused = [
        ("{{ raise_exception('no system here') }}", "the chat template refuses the messages: no system here"),
        ("{% if %}", "the chat template is not valid"),
        ("{{ messages.__class__.__mro__ }}", "the chat template does what a template may not"),
        ("{{ nothing.at_all }}", "the chat template misses a value: 'nothing' is undefined"),
        ("{{ 1 // 0 }}", "the chat template fails with ZeroDivisionError"),
    ]

    async def story(pool: Sandbox) -> None:
        await pool.warm_up()
        children = set(pool._children)
        for template, sentence in refused:
            with pytest.raises(TaskError, match=sentence):
                await rendered(pool, template)
            assert "Hello" == await rendered(pool, "{{ messages[0].content }}")
        assert children == pool._children

    aside(story, seconds=4.0)


@pytest.mark.alone  # at this priority another test takes all the time there is
def test_it_runs_at_the_lowest_priority_and_ends_with_the_pool(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("router.sandbox.pool.NICENESS", NICENESS)  # which other tests do without

    async def story(pool: Sandbox) -> None:
        await pool.warm_up()
        fork_server, child = processes(pool)
        assert [19, 19] == [os.getpriority(os.PRIO_PROCESS, pid) for pid in (fork_server, child)]
        await pool.close()
        while is_alive(fork_server) or is_alive(child):
            await asyncio.sleep(0.01)

    aside(story)


def test_who_stops_waiting_leaves_room() -> None:
    async def story(pool: Sandbox) -> None:
        await pool.warm_up()
        fork_server, child = processes(pool)
        tasks = [asyncio.ensure_future(rendered(pool, ENDLESS)) for _ in range(3)]
        await asyncio.sleep(0.05)
        for task in tasks:
            task.cancel()
        await asyncio.wait(tasks)
        assert "Hello" == await rendered(pool, "{{ messages[0].content }}")
        while is_alive(child):
            await asyncio.sleep(0.01)
        assert (fork_server, child) != processes(pool) and fork_server == processes(pool)[0]

    aside(story, seconds=100.0)


def test_another_process_is_ready_once_one_has_been_ended() -> None:
    async def story(pool: Sandbox) -> None:
        await pool.warm_up()
        fork_server, _ = processes(pool)
        for _ in range(3):
            with pytest.raises(TaskError, match=r"longer than 1 s"):
                await rendered(pool, ENDLESS)
            assert "Hello" == await rendered(pool, "{{ messages[0].content }}")
        assert fork_server == processes(pool)[0]

    aside(story, seconds=1.0)  # of which a busy machine grants what a greeting takes


def test_a_child_that_somebody_kills_is_not_its_tasks_failure() -> None:
    """The task is done once more by a fresh child; a second loss is the server's failure."""

    async def story(pool: Sandbox) -> None:
        await pool.warm_up()
        slow = asyncio.ensure_future(rendered(pool, LONG))
        await asyncio.sleep(0.05)
        os.kill(processes(pool)[1], signal.SIGKILL)
        assert "done" == await slow
        endless = asyncio.ensure_future(rendered(pool, ENDLESS))
        for _ in range(2):
            await asyncio.sleep(0.05)
            _, child = await one_child(pool)
            os.kill(child, signal.SIGKILL)
            while is_alive(child) or any(known.pid == child for known in pool._children):
                await asyncio.sleep(0.01)
        with pytest.raises(Unavailable, match="was ended by SIGKILL: send it again"):
            await endless
        assert "Hello" == await rendered(pool, "{{ messages[0].content }}")

    aside(story, seconds=100.0)


def test_a_child_that_ends_by_itself_is_its_tasks_failure() -> None:
    async def story(pool: Sandbox) -> None:
        await pool.warm_up()
        task = asyncio.ensure_future(rendered(pool, ENDLESS))
        await asyncio.sleep(0.05)
        os.kill(processes(pool)[1], signal.SIGABRT)  # as a library does that gets no memory
        with pytest.raises(TaskError, match="too much memory"):
            await task

    aside(story, seconds=100.0)


def test_a_child_that_somebody_stops_is_replaced_at_once() -> None:
    async def story(pool: Sandbox) -> None:
        await pool.warm_up()
        _, child = processes(pool)
        os.kill(child, signal.SIGSTOP)
        assert "Hello" == await rendered(pool, "{{ messages[0].content }}")
        assert child != processes(pool)[1]

    aside(story, seconds=2.0)


def test_a_fork_server_that_somebody_stops_or_kills_is_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("router.sandbox.pool.FORK_S", 1.0)

    async def story(pool: Sandbox) -> None:
        await pool.warm_up()
        for number in (signal.SIGSTOP, signal.SIGKILL):
            fork_server, child = processes(pool)
            os.kill(fork_server, number)
            os.kill(child, signal.SIGKILL)
            assert "Hello" == await rendered(pool, "{{ messages[0].content }}")
            assert fork_server != processes(pool)[0] and not is_alive(fork_server)

    aside(story)


def test_nothing_is_left_of_many_births_and_ends() -> None:
    async def story(pool: Sandbox) -> None:
        await pool.warm_up()
        fork_server, _ = processes(pool)
        before = open_descriptors(os.getpid()), open_descriptors(fork_server)
        for round in range(30):
            task = asyncio.ensure_future(rendered(pool, ENDLESS))
            await asyncio.sleep(round / 1000)
            task.cancel()
            await asyncio.wait((task,))
        assert "Hello" == await rendered(pool, "{{ messages[0].content }}")
        while (open_descriptors(os.getpid()), open_descriptors(fork_server)) != before or 1 != len(
            children_of(fork_server)
        ):
            await asyncio.sleep(0.01)

    aside(story, seconds=100.0)


def test_keys_are_served_by_turns() -> None:
    served: list[str] = []

    async def one(pool: Sandbox, owner: str) -> None:
        await rendered(pool, "{{ messages[0].content }}", owner)
        served.append(owner)

    async def story(pool: Sandbox) -> None:
        await pool.warm_up()
        await asyncio.gather(*(one(pool, owner) for owner in ("many", "many", "many", "few")))
        assert ["many", "many", "few", "many"] == served

    aside(story)


@pytest.mark.parametrize(
    ("had", "waits", "error"), [(0.0, 80, Unavailable), (0.004, 80, Unavailable), (1.0, 4, TaskError)]
)
def test_who_gets_no_time_on_the_cores_is_given_more(
    monkeypatch: pytest.MonkeyPatch, had: float, waits: int, error: type[Exception]
) -> None:
    """And is not blamed for it: it is done once more, and then the server is too busy."""
    asked: list[float] = []

    async def wait(futures: Any, timeout: float) -> None:
        asked.append(timeout)
        await asyncio.sleep(timeout)

    async def story(pool: Sandbox) -> None:
        await pool.warm_up()
        begun: set[_Child] = set()

        def used(child: _Child) -> float:
            is_known = child in begun
            begun.add(child)
            return had if is_known else 0.0

        monkeypatch.setattr(_Child, "cpu_seconds", used)
        monkeypatch.setattr("router.sandbox.pool.asyncio.wait", wait)
        with pytest.raises(error):
            await rendered(pool, ENDLESS)
        assert [0.05 / 4] * waits == asked

    aside(story, seconds=0.05)


def test_a_fork_server_that_ends_before_it_is_ready_is_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    programs: list[str] = []
    start = subprocess.Popen

    def stillborn(command: tuple[str, ...], **options: Any) -> subprocess.Popen[bytes]:
        programs.append(command[0] if programs else "/bin/false")
        return start((programs[-1], *command[1:]), **options)

    async def story(pool: Sandbox) -> None:
        monkeypatch.setattr("router.sandbox.pool.subprocess.Popen", stillborn)
        assert "Hello a" == await rendered(pool, "{{ messages[0].content }} {{ name }}", name="a")
        assert 2 == len(programs)

    aside(story)


def test_a_child_whose_connection_is_closed_is_replaced() -> None:
    """As when it was killed with an order that it had not read: uvloop would raise where it is written to."""

    async def story() -> None:
        pool = Sandbox(1)
        try:
            assert "Hello" == await rendered(pool, "{{ messages[0].content }}")
            _, before = processes(pool)
            pool._idle[0]._writer.transport.abort()
            await asyncio.sleep(0.1)
            assert "Hello" == await rendered(pool, "{{ messages[0].content }}")
            assert before != processes(pool)[1]
        finally:
            await pool.close()

    uvloop.run(story())
