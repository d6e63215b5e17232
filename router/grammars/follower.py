"""Tells matchers the tokens of texts, and is told what may come next.

Matchers live in a process of their own, at the lowest priority, which all texts share. A text is its grammar and its
tokens: a process that dies, or is ended because it takes too long, is started again, and is told of every text. Who was
waited for too long fails alone, and so does whose process died twice while it was waited for.

Left out: whether a grammar is good, which is found out before, in another process (`compiler.py`).
"""

from __future__ import annotations

import asyncio
import itertools
import json
import logging
import sys
from asyncio.subprocess import PIPE, Process
from contextlib import suppress
from typing import Any

from router.aside.pool import MOST_ANSWER_BYTES, PATIENCE, ROOT, cpu_seconds
from router.errors import GenerationError
from router.grammars.grammar import CompiledGrammar, Continuation, Match, OnAnswer
from server.process import end_with_parent

MEMORY_MB = 4096
SECONDS = 2.0  # for what comes behind one token
START_S = 60.0  # for a process to read the tokenizer, at the lowest priority
PAUSE_S = 1.0  # before another is started, where one has ended before it was ready
MOST_DEATHS = 2  # of processes that a text was waited for in

logger = logging.getLogger(__name__)


class _Text:
    """A text that is followed."""

    def __init__(self, follower: Follower, key: int, grammar: CompiledGrammar, on_answer: OnAnswer) -> None:
        self.key = key
        self.grammar = grammar.grammar
        self.tokens = list(grammar.first.forced)
        self.on_answer = on_answer
        self.asked_at: float | None = None  # None: nothing is waited for
        self.num_deaths = 0
        self._follower = follower

    def advance(self, token_id: int) -> None:
        """It goes on with this token: what may come behind it is told once it is known."""
        self.tokens.append(token_id)
        self._follower.ask(self, token_id)

    def end(self) -> None:
        """Nothing more is asked of it."""
        self._follower.end(self)

    def begin_order(self) -> dict[str, Any]:
        """What has a process follow it from here on."""
        asks = self.asked_at is not None
        grammar = {"kind": self.grammar.kind, "text": self.grammar.text}
        return {"key": self.key, **grammar, "tokens": self.tokens, "asks": asks}


class Follower:
    """Follows texts in a process, which is there from the first one, or from `start`, on.

    matchers: the arguments of `Matchers`, as JSON; seconds: for what comes behind one token.
    """

    def __init__(self, matchers: str, *, seconds: float = SECONDS, memory_mb: int = MEMORY_MB) -> None:
        self._matchers = matchers
        self._seconds = seconds
        self._memory_mb = memory_mb
        self._keys = itertools.count(1)
        self._texts: dict[int, _Text] = {}
        self._process: Process | None = None  # once it is ready
        self._running: asyncio.Task[None] | None = None
        self._is_ready = False
        self._late: _Text | None = None  # whose process was ended for it

    def start(self) -> None:
        """Have the process started, so that the first text need not wait for it."""
        if self._running is None:
            self._running = asyncio.ensure_future(self._run())

    def begin(self, grammar: CompiledGrammar, on_answer: OnAnswer) -> Match:
        """Follow a text from its beginning. What its grammar forces there is taken for said."""
        text = _Text(self, next(self._keys), grammar, on_answer)
        self._texts[text.key] = text
        self.start()
        self._order(text.begin_order())
        return text

    def ask(self, text: _Text, token_id: int) -> None:
        """Have it told what comes behind the token."""
        text.asked_at = asyncio.get_running_loop().time()
        self._order({"key": text.key, "token": token_id})

    def end(self, text: _Text) -> None:
        """Forget it."""
        if self._texts.pop(text.key, None) is not None:
            self._order({"key": text.key, "end": True})

    async def close(self) -> None:
        """End the process."""
        if self._running is not None:
            self._running.cancel()
            with suppress(asyncio.CancelledError):
                await self._running

    def _order(self, order: dict[str, Any]) -> None:
        """Tell the process; one that is not ready yet will be told of every text when it is."""
        if self._process is not None and self._process.stdin is not None:
            self._process.stdin.write(json.dumps(order).encode() + b"\n")

    async def _run(self) -> None:
        """Have a process, and another one when it has ended."""
        while True:
            process = await asyncio.create_subprocess_exec(
                *(sys.executable, "-m", "router.grammars", str(self._memory_mb), self._matchers),
                cwd=ROOT,
                stdin=PIPE,
                stdout=PIPE,
                limit=MOST_ANSWER_BYTES,
                preexec_fn=end_with_parent(),
            )
            try:
                await self._serve(process)
            finally:
                self._process = None
                with suppress(ProcessLookupError):
                    process.kill()
                assert process.stdin is not None
                process.stdin.close()
                await process.wait()
            self._blame()
            logger.warning("the process that follows grammars ended; texts that go on in another: %d", len(self._texts))
            if not self._is_ready:
                await asyncio.sleep(PAUSE_S)

    async def _serve(self, process: Process) -> None:
        """Tell it of all texts, and hand out its answers, until it ends or takes too long."""
        assert process.stdout is not None
        self._is_ready = await self._starts(process.stdout)
        if not self._is_ready:
            return
        self._process, now = process, asyncio.get_running_loop().time()
        for text in self._texts.values():
            text.asked_at = None if text.asked_at is None else now
            self._order(text.begin_order())
        watching = asyncio.ensure_future(self._watch(process))
        try:
            while line := await process.stdout.readline():
                self._answer(json.loads(line))
        except (ConnectionError, ValueError):
            logger.exception("the process that follows grammars answered nonsense")
        finally:
            watching.cancel()

    @staticmethod
    async def _starts(answers: asyncio.StreamReader) -> bool:
        """Whether a process has said in time that it is ready."""
        try:
            async with asyncio.timeout(START_S):
                return bool(await answers.readline())
        except TimeoutError:
            return False

    def _answer(self, answer: dict[str, Any]) -> None:
        text = self._texts.get(answer["key"])
        if text is None:
            return
        text.asked_at, text.num_deaths = None, 0
        if "error" in answer:
            text.on_answer(failure(answer["error"]))
            return
        found = Continuation.read(answer)
        text.tokens += found.forced
        text.on_answer(found)

    async def _watch(self, process: Process) -> None:
        """End the process when an answer takes too long, but for what it waits for the cores."""
        loop = asyncio.get_running_loop()
        while True:
            begun = cpu_seconds(process.pid)
            await asyncio.sleep(self._seconds / 2)
            oldest = min((t for t in self._texts.values() if t.asked_at), key=_age, default=None)
            waited = loop.time() - oldest.asked_at if oldest is not None and oldest.asked_at else 0.0
            worked = cpu_seconds(process.pid) - begun
            if waited > self._seconds * PATIENCE or (waited > self._seconds and worked > self._seconds / 4):
                self._late = oldest
                process.kill()
                return

    def _blame(self) -> None:
        """Fail the text that took too long, or those that were waited for in two processes that ended."""
        late, self._late = self._late, None
        for text in [t for t in self._texts.values() if t.asked_at is not None]:
            text.num_deaths += 1
            if text is late or (late is None and text.num_deaths >= MOST_DEATHS):
                self.end(text)
                text.on_answer(failure("it takes too much time or memory"))


def _age(text: _Text) -> float:
    return text.asked_at or 0.0


def failure(sentence: str) -> GenerationError:
    """What a client reads whose text cannot go on."""
    return GenerationError(f"the grammar cannot be followed: {sentence}")
