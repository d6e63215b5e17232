"""Work aside: its bounds, and what the rest notices of it."""

from __future__ import annotations

import asyncio
import os
import signal
from asyncio.subprocess import PIPE
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest

from router.aside import TaskError
from router.aside.pool import NICENESS, Aside, _Worker

HELLO = [{"role": "user", "content": "Hello"}]
ENDLESS = "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}"


def rendered(aside: Aside, template: str, owner: str = "", **variables: Any) -> Awaitable[str]:
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


def aside(story: Callable[[Aside], Awaitable[None]], num: int = 1, **bounds: Any) -> None:
    async def told() -> None:
        pool = Aside(num, **bounds)
        try:
            await story(pool)
        finally:
            await pool.close()

    asyncio.run(told())


def is_alive(pid: int) -> bool:
    path = Path(f"/proc/{pid}/stat")
    return path.exists() and path.read_text().rsplit(")", 1)[1].split()[0] != "Z"


def test_a_task_is_done() -> None:
    async def story(pool: Aside) -> None:
        await pool.warm_up()
        for name in ("a", "b"):
            assert f"Hello {name}" == await rendered(pool, "{{ messages[0].content }} {{ name }}", name=name)

    aside(story)


@pytest.mark.parametrize(
    ("template", "sentence", "seconds"),
    [
        (ENDLESS, "longer than 2 s", 2.0),
        ("{{ 'x' * 99999999999 }}", "too much memory", 4.0),
        ("{{ 'x' * 40000000 }}", "too much memory, or its result is too long|longer than 4 s", 4.0),
    ],
)
def test_what_takes_too_much_is_one_sentence_and_the_next_is_done(template: str, sentence: str, seconds: float) -> None:
    async def story(pool: Aside) -> None:
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

    async def story(pool: Aside) -> None:
        await pool.warm_up()
        workers = set(pool._workers)
        for template, sentence in refused:
            with pytest.raises(TaskError, match=sentence):
                await rendered(pool, template)
            assert "Hello" == await rendered(pool, "{{ messages[0].content }}")
        assert workers == pool._workers

    aside(story, seconds=4.0)


@pytest.mark.alone  # at this priority another test takes all the time there is
def test_it_runs_at_the_lowest_priority_and_ends_with_the_pool(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("router.aside.pool.NICENESS", NICENESS)  # which other tests do without

    async def story(pool: Aside) -> None:
        await pool.warm_up()
        [worker] = pool._workers
        pid = worker._process.pid
        assert 19 == os.getpriority(os.PRIO_PROCESS, pid) == os.getpriority(os.PRIO_PROCESS, worker._child)
        await pool.close()
        while is_alive(pid) or is_alive(worker._child):
            await asyncio.sleep(0.01)

    aside(story)


def test_who_stops_waiting_leaves_room() -> None:
    async def story(pool: Aside) -> None:
        await pool.warm_up()
        [worker] = pool._workers
        child = worker._child
        tasks = [asyncio.ensure_future(rendered(pool, ENDLESS)) for _ in range(3)]
        await asyncio.sleep(0.05)
        for task in tasks:
            task.cancel()
        await asyncio.wait(tasks)
        assert "Hello" == await rendered(pool, "{{ messages[0].content }}")
        assert {worker} == pool._workers and child != worker._child and not is_alive(child)

    aside(story, seconds=100.0)


def test_another_process_is_ready_once_one_has_been_ended() -> None:
    async def story(pool: Aside) -> None:
        await pool.warm_up()
        [worker] = pool._workers
        for _ in range(3):
            with pytest.raises(TaskError, match=r"longer than 1 s"):
                await rendered(pool, ENDLESS)
            assert "Hello" == await rendered(pool, "{{ messages[0].content }}")
        assert {worker} == pool._workers

    aside(story, seconds=1.0)  # of which a busy machine grants what a greeting takes


def test_a_child_that_dies_is_its_task_s_failure_and_the_next_task_has_another() -> None:
    async def story(pool: Aside) -> None:
        await pool.warm_up()
        [worker] = pool._workers
        task = asyncio.ensure_future(rendered(pool, ENDLESS))
        await asyncio.sleep(0.05)
        os.kill(worker._child, signal.SIGKILL)
        with pytest.raises(TaskError, match="too much memory"):
            await task
        assert "Hello" == await rendered(pool, "{{ messages[0].content }}")
        assert {worker} == pool._workers

    aside(story, seconds=100.0)


def test_a_process_that_has_died_meanwhile_is_not_asked() -> None:
    async def story(pool: Aside) -> None:
        await pool.warm_up()
        [worker] = pool._workers
        worker._process.kill()
        await worker._process.wait()
        assert "Hello" == await rendered(pool, "{{ messages[0].content }}")
        assert worker not in pool._workers and 1 == len(pool._workers)

    aside(story)


def test_keys_are_served_by_turns() -> None:
    served: list[str] = []

    async def one(pool: Aside, owner: str) -> None:
        await rendered(pool, "{{ messages[0].content }}", owner)
        served.append(owner)

    async def story(pool: Aside) -> None:
        await pool.warm_up()
        await asyncio.gather(*(one(pool, owner) for owner in ("many", "many", "many", "few")))
        assert ["many", "many", "few", "many"] == served

    aside(story)


@pytest.mark.parametrize(("had", "waits"), [(0.0, 40), (0.004, 40), (None, 4)])
def test_who_gets_no_time_on_the_cores_is_given_more(
    monkeypatch: pytest.MonkeyPatch, had: float | None, waits: int
) -> None:
    asked: list[float] = []

    async def wait(futures: Any, timeout: float) -> None:
        asked.append(timeout)
        await asyncio.sleep(timeout)

    async def story(pool: Aside) -> None:
        await pool.warm_up()
        [worker] = pool._workers
        used = iter([0.0] + [1.0 if had is None else had] * 50)
        monkeypatch.setattr(worker, "cpu_seconds", lambda: next(used))
        monkeypatch.setattr("router.aside.pool.asyncio.wait", wait)
        with pytest.raises(TaskError, match=r"longer than 0\.05 s"):
            await rendered(pool, ENDLESS)
        assert [0.05 / 4] * waits == asked

    aside(story, seconds=0.05)


def test_a_process_that_ends_before_it_is_ready_is_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    commands: list[str] = []
    start = asyncio.create_subprocess_exec

    async def stillborn(program: str, *arguments: str, **options: Any) -> asyncio.subprocess.Process:
        commands.append(program if commands else "/bin/false")
        return await start(commands[-1], *arguments, **options)

    async def story(pool: Aside) -> None:
        monkeypatch.setattr("router.aside.pool.asyncio.create_subprocess_exec", stillborn)
        assert "Hello a" == await rendered(pool, "{{ messages[0].content }} {{ name }}", name="a")
        assert 2 == len(commands)

    aside(story)


def test_a_process_whose_end_is_already_known_has_no_next_answer() -> None:
    async def story() -> None:
        process = await asyncio.create_subprocess_exec("/bin/false", stdin=PIPE, stdout=PIPE)
        await process.wait()
        assert await _Worker(process)._line() is None

    asyncio.run(story())
