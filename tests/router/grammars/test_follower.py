"""The process that follows texts: what it says, and that its end is the end of no text."""

from __future__ import annotations

import asyncio
import itertools
import json
import os
import resource
import signal
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager
from typing import Any

import pytest
import uvloop

from router.errors import GenerationError, RouterError, Unavailable, ValidationError
from router.grammars import follower as followers
from router.grammars.compiler import MOST_KEPT, Compiler
from router.grammars.follower import Follower
from router.grammars.matcher import Matchers
from router.sandbox.pool import Sandbox
from router.scheduling.grammar import CompiledGrammar, Continuation, Grammar, GrammarKind, Match
from tests.router.grammars.waiting import NEVER
from tests.running import ROOT

DEMO = ROOT / "server" / "demo" / "tokenizer.json"
ARGUMENTS = {"tokenizer_path": str(DEMO), "vocab_size": 2048, "eos_ids": [2]}
REGEX = Grammar(GrammarKind.REGEX, "(cat|dog){40}")
LETTERS = Grammar(GrammarKind.REGEX, "[ab]{40}")


def long_schema(num_fields: int, number: int = 0) -> Grammar:
    """One that takes about 60 ms of work for every thousand fields."""
    fields = {f"field_{number}_{index}": {"type": "string", "maxLength": index + 1} for index in range(num_fields)}
    schema = {"type": "object", "properties": fields, "required": list(fields)}
    return Grammar(GrammarKind.JSON_SCHEMA, json.dumps(schema))


class Reader:
    """A text that takes the first token that is allowed, and what it was told."""

    def __init__(self, follower: Follower, grammar: CompiledGrammar) -> None:
        self.tokens = list(grammar.first.forced)
        self.answers: asyncio.Queue[Continuation | RouterError] = asyncio.Queue()
        self.match: Match = follower.begin(grammar, self.answers.put_nowait)
        self.last = grammar.first

    def advance(self, draft: Sequence[int] = ()) -> None:
        came = [mask.allowed[0] for mask in (self.last.mask, *self.last.drafted) if mask.allowed]
        self.tokens += came
        self.match.advance(came, draft)

    async def read(self) -> Continuation:
        answer = await asyncio.wait_for(self.answers.get(), 60)
        assert isinstance(answer, Continuation)
        self.tokens += answer.forced
        self.last = answer
        return answer


def compiled(grammar: Grammar = REGEX) -> CompiledGrammar:
    answer = Matchers(str(DEMO), 2048, [2]).begin(grammar).go_on()
    return CompiledGrammar(grammar, Continuation.read(answer))


@asynccontextmanager
async def following(**bounds: Any) -> AsyncIterator[Follower]:
    follower = Follower(json.dumps(ARGUMENTS), **bounds)
    try:
        yield follower
    finally:
        await follower.close()
        assert follower._process is None


async def running(follower: Follower, but: int | None = None) -> int:
    """The id of its process, once that is ready and another than `but`."""
    while follower._process is None or follower._process.pid == but:
        await asyncio.sleep(0.01)
    return follower._process.pid


async def go_on(reader: Reader, steps: int) -> None:
    for _ in range(steps):
        reader.advance()
        await reader.read()


def alone(steps: int, grammar: Grammar = REGEX) -> list[int]:
    """The tokens of a reader that nothing disturbs."""
    text, tokens = Matchers(str(DEMO), 2048, [2]).begin(grammar), []
    for step in range(steps + 1):
        answer = text.go_on()
        tokens += answer["forced"]
        if step < steps:
            tokens.append(answer["allowed"][0])
            text.take(tokens[-1:])
    return tokens


async def test_texts_are_followed_each_for_itself() -> None:
    async with following() as follower:
        readers = [Reader(follower, compiled()) for _ in range(5)]
        await asyncio.gather(*(go_on(reader, 6 + number) for number, reader in enumerate(readers)))
        assert [alone(6 + number) for number in range(5)] == [reader.tokens for reader in readers]


async def test_a_process_that_dies_is_replaced_and_every_text_goes_on() -> None:
    async with following() as follower:
        asked, idle = Reader(follower, compiled()), Reader(follower, compiled())
        await asyncio.gather(go_on(asked, 3), go_on(idle, 5))
        pid = await running(follower)
        os.kill(pid, signal.SIGSTOP)
        asked.advance()
        os.kill(pid, signal.SIGKILL)
        await asked.read()
        await asyncio.gather(go_on(asked, 2), go_on(idle, 2))
        assert (alone(6), alone(7)) == (asked.tokens, idle.tokens)


@pytest.mark.alone
async def test_a_process_of_which_nothing_is_heard_is_replaced_and_every_text_goes_on() -> None:
    async with following(seconds=0.1) as follower:
        asked, idle = Reader(follower, compiled()), Reader(follower, compiled())
        await asyncio.gather(go_on(asked, 2), go_on(idle, 2))
        pid = await running(follower)
        os.kill(pid, signal.SIGSTOP)
        asked.advance()
        await asked.read()
        assert pid != await running(follower)
        await asyncio.gather(go_on(asked, 1), go_on(idle, 2))
        assert (alone(4), alone(4)) == (asked.tokens, idle.tokens)


@pytest.mark.alone
async def test_a_text_that_takes_too_long_fails_alone() -> None:
    """Not who is asked of first, nor who waits behind it."""
    async with following(seconds=0.1) as follower:
        idle, asked = Reader(follower, compiled()), Reader(follower, compiled())
        await asyncio.gather(go_on(idle, 2), go_on(asked, 2))
        pid = await running(follower)
        asked.advance()
        late = Reader(follower, CompiledGrammar(long_schema(12_000), compiled().first))
        answer = await asyncio.wait_for(late.answers.get(), 60)
        assert isinstance(answer, GenerationError)
        assert "the grammar cannot be followed: it takes too much time or memory" in str(answer)
        await asked.read()
        assert pid != await running(follower, but=pid)
        await asyncio.gather(go_on(idle, 2), go_on(asked, 1))
        assert (alone(4), alone(4)) == (idle.tokens, asked.tokens)


async def test_texts_of_short_grammars_do_not_wait_for_long_ones() -> None:
    async with following(seconds=60) as follower:
        first = Reader(follower, compiled())
        await go_on(first, 1)
        for number in range(20):
            Reader(follower, CompiledGrammar(long_schema(2000, number), compiled().first)).match.advance((0,))
        short = Reader(follower, compiled())
        await go_on(short, 3)
        assert alone(3) == short.tokens
        assert 10 <= sum(text.is_asked for text in follower._texts.values())


@pytest.mark.parametrize(("number", "most"), [(signal.SIGABRT, 2), (signal.SIGKILL, 3)])
async def test_whose_process_keeps_dying_fails(monkeypatch: pytest.MonkeyPatch, number: int, most: int) -> None:
    """Later where somebody else kills it, which says nothing of the text."""
    monkeypatch.setattr(followers, "MOST_KILLS", 3)
    monkeypatch.setattr(followers, "PAUSE_S", 0.0)
    async with following() as follower:
        reader, deaths, pid = Reader(follower, compiled()), 0, 0
        await go_on(reader, 1)
        follower._order = lambda order: None  # type: ignore[method-assign]  # nobody is told, so nobody answers
        reader.advance()
        while reader.answers.empty():
            process = follower._process
            if process is not None and process.pid != pid:
                pid = process.pid
                os.kill(pid, number)
                deaths += 1
            await asyncio.sleep(0.01)
        assert isinstance(await reader.answers.get(), GenerationError)
        assert most == deaths


@pytest.fixture
def children_without_a_bound_of_the_stack() -> Iterator[None]:
    limits = resource.getrlimit(resource.RLIMIT_STACK)
    resource.setrlimit(resource.RLIMIT_STACK, (limits[1], limits[1]))
    yield
    resource.setrlimit(resource.RLIMIT_STACK, limits)


@pytest.mark.parametrize("depth", [500, 1500, 6000])
async def test_what_is_compiled_aside_is_followed_whatever_the_stack(
    children_without_a_bound_of_the_stack: None, depth: int
) -> None:
    """Its rules recurse; threads have less of a stack than a process may have, and theirs would overflow."""
    rules = [f"r{number}: r{number + 1}" for number in range(depth)]
    grammar = Grammar(GrammarKind.LARK, "\n".join(["start: r0", *rules, f'r{depth}: "a" | "b"']))
    async with following() as follower:
        compiler = Compiler(Sandbox(1, tasks=("router.grammars.matcher", json.dumps(ARGUMENTS))))
        other = Reader(follower, compiled())
        await go_on(other, 1)
        pid = await running(follower)
        try:
            deep = await compiler.compile(grammar)
        except ValidationError:
            assert depth > 500
        else:
            assert depth < 6000
            answers: asyncio.Queue[Continuation | RouterError] = asyncio.Queue()
            assert deep.first.mask.allowed is not None
            follower.begin(deep, answers.put_nowait, known=deep.first.mask.allowed[:1])
            assert isinstance(await asyncio.wait_for(answers.get(), 60), Continuation)
        finally:
            await compiler.close()
        await go_on(other, 1)
        assert pid == await running(follower)


def test_orders_to_a_process_that_has_just_died_are_no_errors() -> None:
    """On the router's own event loop, which knows of the closed pipe before anybody is told of the end."""

    async def story() -> None:
        follower, known = Follower(json.dumps(ARGUMENTS)), compiled()
        try:
            reader = Reader(follower, known)
            await go_on(reader, 1)
            for _ in range(4):
                pid = await running(follower)
                os.kill(pid, signal.SIGKILL)
                while follower._process is not None and follower._process.pid == pid:
                    follower.begin(known, lambda answer: None).end()
                    await asyncio.sleep(0)
            await go_on(reader, 1)
            assert alone(2) == reader.tokens
        finally:
            await follower.close()

    uvloop.run(story())


async def test_whose_beginning_ends_processes_fails_though_nobody_asks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its request may wait in the queue meanwhile."""
    start = asyncio.create_subprocess_exec

    async def starting(*arguments: str, **options: Any) -> Any:
        ours = ["tests.router.grammars.waiting" if one == "router.grammars" else one for one in arguments]
        return await start(*ours, **options)

    monkeypatch.setattr(followers, "PAUSE_S", 0.0)
    monkeypatch.setattr(asyncio, "create_subprocess_exec", starting)
    async with following(seconds=60) as follower, asyncio.timeout(300):
        idle = Reader(follower, compiled())
        await go_on(idle, 1)
        deadly = Reader(follower, CompiledGrammar(NEVER, compiled().first))
        killed: set[int] = set()
        while deadly.answers.empty():
            process = follower._process
            if process is not None and process.pid not in killed and follower._beginning == deadly.match.key:
                killed.add(process.pid)
                os.kill(process.pid, signal.SIGABRT)
            await asyncio.sleep(0.01)
        assert isinstance(await deadly.answers.get(), GenerationError)
        assert 2 == len(killed)
        await go_on(idle, 1)
        assert alone(2) == idle.tokens


async def test_what_nobody_expected_of_a_process_ends_no_text(monkeypatch: pytest.MonkeyPatch) -> None:
    """An answer without what it must have, and no process to be had."""
    monkeypatch.setattr(followers, "PAUSE_S", 0.0)
    faults: list[Exception] = [KeyError("allowed"), RuntimeError("odd")]
    read, start, failures = Continuation.read, asyncio.create_subprocess_exec, 0

    def reading(answer: dict[str, Any]) -> Continuation:
        if faults:
            raise faults.pop()
        return read(answer)

    async def starting(*arguments: Any, **options: Any) -> Any:
        nonlocal failures
        failures += 1
        if failures in (2, 3):
            raise OSError(24, "too many open files")
        return await start(*arguments, **options)

    monkeypatch.setattr(followers.Continuation, "read", reading)
    monkeypatch.setattr(asyncio, "create_subprocess_exec", starting)
    monkeypatch.setattr(followers, "MOST_DEATHS", 3)
    async with following() as follower:
        reader = Reader(follower, CompiledGrammar(REGEX, read(Matchers(str(DEMO), 2048, [2]).begin(REGEX).go_on())))
        await go_on(reader, 3)
        assert alone(3) == reader.tokens
        assert not faults and failures >= 5


async def test_a_process_that_was_ended_for_its_silence_is_the_only_one_that_texts_are_blamed_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The next is killed from outside before it is ready."""
    monkeypatch.setattr(followers, "PAUSE_S", 0.0)
    starts, starting = itertools.count(), Follower._starts
    async with following() as follower:
        asked = Reader(follower, compiled())
        await go_on(asked, 1)

        async def once_killed(pid: int, answers: asyncio.StreamReader) -> bool:
            if next(starts) == 0:
                os.kill(pid, signal.SIGKILL)
            return await starting(pid, answers)

        monkeypatch.setattr(follower, "_starts", once_killed)
        monkeypatch.setattr(followers, "MOST_DEATHS", 2)
        asked.advance()
        follower._is_hung = True
        followers._kill(follower._process)
        assert isinstance(await asyncio.wait_for(asked.answers.get(), 60), Continuation)
        assert next(starts) > 1


async def test_nobody_waits_for_ever_for_an_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    async with following() as follower:
        lost, other = Reader(follower, compiled()), Reader(follower, compiled())
        await asyncio.gather(go_on(lost, 1), go_on(other, 1))
        monkeypatch.setattr(followers, "WAIT_S", 0.2)
        with monkeypatch.context() as patch:
            patch.setattr(follower, "_order", lambda order: None)  # nobody is told, so nobody answers
            lost.advance()
        answer = await asyncio.wait_for(lost.answers.get(), 60)
        assert isinstance(answer, Unavailable) and "within 0.2 s: send it again" in str(answer)
        monkeypatch.setattr(followers, "WAIT_S", 60.0)
        await go_on(other, 3)
        assert alone(4) == other.tokens


async def test_a_process_that_only_lacks_time_on_the_cores_becomes_ready(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(followers, "START_S", 0.01)
    monkeypatch.setattr(followers.pool, "is_busy", lambda pid: True)
    started: list[Any] = []
    start = asyncio.create_subprocess_exec

    async def starting(*arguments: Any, **options: Any) -> Any:
        started.append(arguments)
        return await start(*arguments, **options)

    monkeypatch.setattr(asyncio, "create_subprocess_exec", starting)
    async with following() as follower:
        reader = Reader(follower, compiled())
        await go_on(reader, 1)
        assert 1 == len(started)


async def test_a_draft_brings_the_masks_of_its_guesses_and_several_tokens_at_once() -> None:
    async with following() as follower:
        drafting, plain = Reader(follower, compiled(LETTERS)), Reader(follower, compiled(LETTERS))
        await asyncio.gather(go_on(drafting, 1), go_on(plain, 1))
        drafting.advance([68] * 4)
        assert 4 == len((await drafting.read()).drafted)
        drafting.advance([68] * 3)
        assert 3 == len((await drafting.read()).drafted)
        plain.advance([999, 68])
        assert () == (await plain.read()).drafted
        await asyncio.gather(go_on(drafting, 2), go_on(plain, 2))
        assert (alone(12, LETTERS), alone(4, LETTERS)) == (drafting.tokens, plain.tokens)


@pytest.mark.parametrize(("number", "drafts_later"), [(signal.SIGKILL, 2), (signal.SIGABRT, 0)])
async def test_a_draft_is_told_once_and_no_other_where_it_may_have_ended_a_process(
    monkeypatch: pytest.MonkeyPatch, number: int, drafts_later: int
) -> None:
    async with following() as follower:
        reader = Reader(follower, compiled(LETTERS))
        await go_on(reader, 1)
        reader.advance([68, 68])
        assert 2 == len((await reader.read()).drafted)
        pid = await running(follower)
        with monkeypatch.context() as patch:
            patch.setattr(follower, "_order", lambda order: None)  # nobody is told, so nobody answers
            reader.advance([68, 68])
            os.kill(pid, number)
            os.kill(await running(follower, but=pid), signal.SIGABRT)  # which counts, but is the first for all that
        assert () == (await reader.read()).drafted
        reader.advance([68, 68])
        assert drafts_later == len((await reader.read()).drafted)
        await go_on(reader, 1)
        assert alone(7 + drafts_later, LETTERS) == reader.tokens


async def test_a_text_that_takes_too_long_with_a_draft_fails_only_without(monkeypatch: pytest.MonkeyPatch) -> None:
    async with following() as follower:
        reader = Reader(follower, compiled(LETTERS))
        await go_on(reader, 1)
        for fails in (False, True):
            with monkeypatch.context() as patch:
                pid = await running(follower)
                patch.setattr(follower, "_order", lambda order: None)
                reader.advance([68, 68])
                follower._answer({"late": reader.match.key})
                os.kill(pid, signal.SIGABRT)
                while follower._process is not None:
                    await asyncio.sleep(0.01)
            answer = await asyncio.wait_for(reader.answers.get(), 60)
            assert isinstance(answer, GenerationError if fails else Continuation)


async def test_a_text_that_leaves_its_grammar_fails_alone() -> None:
    async with following() as follower:
        wrong, right = Reader(follower, compiled()), Reader(follower, compiled())
        wrong.match.advance((94,))
        answer = await asyncio.wait_for(wrong.answers.get(), 60)
        assert isinstance(answer, GenerationError) and "cannot be followed" in str(answer)
        await go_on(right, 3)
        assert alone(3) == right.tokens


async def test_who_has_ended_is_told_nothing() -> None:
    async with following() as follower:
        gone, there = Reader(follower, compiled()), Reader(follower, compiled())
        gone.advance()
        gone.match.end()
        await go_on(there, 3)
        assert gone.answers.empty()


@asynccontextmanager
async def compiling() -> AsyncIterator[Compiler]:
    compiler = Compiler(Sandbox(1, tasks=("router.grammars.matcher", json.dumps(ARGUMENTS))))
    try:
        yield compiler
    finally:
        await compiler.close()


async def test_a_good_grammar_comes_with_what_it_allows_first() -> None:
    async with compiling() as compiler:
        assert compiled() == await compiler.compile(REGEX)


async def test_a_bad_grammar_is_the_request_s_fault() -> None:
    async with compiling() as compiler:
        with pytest.raises(ValidationError, match="grammar is not valid: unclosed group"):
            await compiler.compile(Grammar(GrammarKind.REGEX, "("))
        assert compiled() == await compiler.compile(REGEX)


async def test_a_known_grammar_is_not_compiled_again_and_not_all_are_kept() -> None:
    async with compiling() as compiler:
        first = await compiler.compile(REGEX)
        assert first is await compiler.compile(REGEX)
        for number in range(MOST_KEPT):
            await compiler.compile(Grammar(GrammarKind.REGEX, f"a{number}"))
        assert MOST_KEPT == len(compiler._kept)
        again = await compiler.compile(REGEX)
        assert first == again and first is not again


def test_without_processes_every_grammar_is_refused() -> None:
    with pytest.raises(ValidationError, match="grammar is not supported: leave `grammar` out, or start"):
        asyncio.run(Compiler(refusal="leave `grammar` out, or start the server otherwise").compile(REGEX))
