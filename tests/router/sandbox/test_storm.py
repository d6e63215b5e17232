"""Cancellations, deadlines and kills at random: whatever ends a process, nobody is answered with somebody else's."""

from __future__ import annotations

import asyncio
import json
import os
import random
import signal
from collections import Counter
from collections.abc import Awaitable, Callable
from contextlib import suppress
from pathlib import Path

import pytest
from tokenizers import Tokenizer

from router.errors import RouterError, Unavailable
from router.grammars.compiler import Compiler
from router.sandbox.pool import Sandbox
from router.scheduling.grammar import Grammar, GrammarKind
from tests.router.grammars.test_follower import ARGUMENTS, DEMO

NUM_TASKS = 2000
AT_ONCE = 24
MOST_BETWEEN = 100  # tasks that end from one kill to the next
OWNERS = ("one", "other")
LONGEST_S = 0.03  # before somebody leaves

TOKENIZER = Tokenizer.from_file(str(DEMO))
Ask = Callable[[Sandbox, int, str], Awaitable[bool]]  # whether the answer to this number is its own


async def render(pool: Sandbox, number: int, owner: str) -> bool:
    prompt = await pool.do(
        "render_chat",
        owner,
        template="{% for i in range(spins) %}{% endfor %}{{ messages[0].content }}",
        messages=[{"role": "user", "content": f"a secret of {owner}, {number}"}],
        tools=None,
        variables={"spins": 1000 * (number % 97)},
        add_generation_prompt=True,
        continue_final_message=False,
    )
    return bool(prompt == f"a secret of {owner}, {number}")


class Grammars:
    """Texts of which all but the end is forced, so that a grammar's answer tells whose it is."""

    def __init__(self) -> None:
        self._compiler: Compiler | None = None

    async def __call__(self, pool: Sandbox, number: int, owner: str) -> bool:
        self._compiler = self._compiler or Compiler(pool)
        text = f"{owner} {number} secret"
        compiled = await self._compiler.compile(Grammar(GrammarKind.REGEX, text), owner)
        forced = TOKENIZER.decode(list(compiled.first.forced))
        return len(forced) > len(owner) and text.startswith(forced)


def descendants(pid: int) -> list[int]:
    found = []
    with suppress(OSError):
        for child in map(int, Path(f"/proc/{pid}/task/{pid}/children").read_text().split()):
            found += [child, *descendants(child)]
    return found


async def disturb(pool: Sandbox, chance: random.Random, found: Counter[str]) -> None:
    """Kill and stop children of the present fork server, for ever, one whenever some tasks have ended."""
    while True:
        enough = found.total() + chance.randint(1, MOST_BETWEEN)
        while found.total() < enough:
            await asyncio.sleep(0.001)
        children = [] if pool._fork_server is None else descendants(pool._fork_server.process.pid)
        if children:
            with suppress(ProcessLookupError):
                os.kill(chance.choice(children), chance.choice((signal.SIGKILL, signal.SIGKILL, signal.SIGSTOP)))


async def one(pool: Sandbox, ask: Ask, number: int, chance: random.Random, found: Counter[str]) -> None:
    asked = asyncio.ensure_future(ask(pool, number, OWNERS[number % 2]))
    leaves = chance.random()
    if leaves < 0.5:
        await asyncio.sleep(chance.uniform(0, LONGEST_S))
        asked.cancel()
    try:
        async with asyncio.timeout(chance.uniform(0, LONGEST_S) if leaves > 0.8 else None):
            found["own" if await asked else "another's"] += 1
    except (asyncio.CancelledError, TimeoutError):
        found["gone"] += 1
    except Unavailable:
        found["unavailable"] += 1
    except RouterError as error:
        found[f"blamed: {error}"] += 1


@pytest.mark.parametrize(
    ("ask", "tasks"),
    [(render, ("router.sandbox.tasks", "")), (Grammars(), ("router.grammars.matcher", json.dumps(ARGUMENTS)))],
    ids=["chats", "grammars"],
)
async def test_nobody_is_answered_with_anothers_whatever_is_cancelled_or_killed(
    ask: Ask, tasks: tuple[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("router.sandbox.pool.FORK_S", 3.0)  # which pass where a child is stopped before it is ready
    chance, found = random.Random(7), Counter[str]()
    pool = Sandbox(2, 4.0, 4096, tasks)
    await pool.warm_up()
    disturbing = asyncio.ensure_future(disturb(pool, chance, found))
    try:
        places = asyncio.Semaphore(AT_ONCE)

        async def placed(number: int) -> None:
            async with places:
                await one(pool, ask, number, chance, found)

        await asyncio.gather(*map(placed, range(NUM_TASKS)))
        disturbing.cancel()
        last = [await ask(pool, NUM_TASKS + number, OWNERS[0]) for number in range(5)]
        assert all(last)
    finally:
        disturbing.cancel()
        await pool.close()
    print(dict(found))
    assert {"own", "gone", "unavailable"} >= set(found), found
    assert found["own"] > NUM_TASKS / 5
