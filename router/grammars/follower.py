"""Tells matchers the tokens of texts, and is told what may come next.

Matchers live in a process of their own, at the lowest priority, which all texts share. A text is its grammar and its
tokens: a process that dies, or of which nothing is heard, is started again, and is told of every text. A process ends
itself where one text takes too long, and says which: that text fails alone. Where it could not say, a text that was
waited for fails when that has happened twice; ends and stops that come from outside are no text's fault, unless they
come again and again.

Left out: whether a grammar is good, which is found out before, in another process (`compiler.py`).
"""

from __future__ import annotations

import asyncio
import itertools
import json
import logging
import sys
from asyncio.subprocess import PIPE, Process
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

from host.process import end_with_parent
from router.errors import GenerationError
from router.grammars.grammar import CompiledGrammar, Continuation, Match, OnAnswer
from router.sandbox import MOST_ANSWER_BYTES, pool
from router.sandbox.pool import PATIENCE, ROOT

MEMORY_MB = 4096
SECONDS = 2.0  # of work, for a grammar to be compiled or for what comes behind one token
START_S = 60.0  # for a process to read the tokenizer, at the lowest priority
PAUSE_S = 1.0  # before another is started, where one has ended before it was ready
MOST_DEATHS = 2  # of processes that a text was waited for in
MOST_KILLS = 8  # likewise, that somebody else ended: it may be the system, for their memory
LOOK_S = 1.0  # between looks at whether somebody has stopped the process, while nothing is heard of it

logger = logging.getLogger(__name__)


class _Text:
    """A text that is followed."""

    def __init__(self, follower: Follower, key: int, grammar: CompiledGrammar, on_answer: OnAnswer) -> None:
        self.key = key
        self.grammar = grammar.grammar
        self.tokens = list(grammar.first.forced)
        self.on_answer = on_answer
        self.is_asked = False  # what it may go on with is waited for
        self.num_deaths = self.num_kills = 0
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
        grammar = {"kind": self.grammar.kind, "text": self.grammar.text}
        return {"key": self.key, **grammar, "tokens": self.tokens, "asks": self.is_asked}


class Follower:
    """Follows texts in a process, which is there from the first one, or from `start`, on.

    matchers: the arguments of `Matchers`, as JSON; seconds: of work, for what comes behind one token.
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
        self._heard_at = 0.0  # by the loop's clock
        self._is_hung = False  # and was ended for it
        self._late: int | None = None  # the key of the text that its process ended for
        self._beginning = 0  # the key of the text that its process begins

    def start(self) -> None:
        """Have the process started, so that the first text need not wait for it."""
        if self._running is None:
            self._running = asyncio.ensure_future(self._run())

    def begin(self, grammar: CompiledGrammar, on_answer: OnAnswer, known: Sequence[int] = ()) -> Match:
        """Follow a text from its beginning. What its grammar forces there is taken for said.

        known: its first tokens, where there are some already; then what may come behind them is told once it is known.
        """
        text = _Text(self, next(self._keys), grammar, on_answer)
        if known:
            text.tokens, text.is_asked = list(known), True
        self._texts[text.key] = text
        self.start()
        self._order(text.begin_order())
        return text

    def ask(self, text: _Text, token_id: int) -> None:
        """Have it told what comes behind the token."""
        text.is_asked = True
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
        """Tell the process; one that is not ready yet will be told of every text when it is, and so will the next one.

        uvloop raises where the pipe of a process that has just died is written to.
        """
        stdin = self._process.stdin if self._process is not None else None
        if stdin is not None and not stdin.is_closing():
            stdin.write(json.dumps(order).encode() + b"\n")

    async def _run(self) -> None:
        """Have a process, and another one when it has ended."""
        while True:
            try:
                await self._live()
            except Exception as error:  # all texts wait for this loop: whatever is raised, another process is tried
                logger.exception("the grammar process could not be started, or sent an unexpected reply")
                self._is_ready = False
                self._blame(is_from_outside=isinstance(error, OSError))
            if not self._is_ready:
                await asyncio.sleep(PAUSE_S)

    async def _live(self) -> None:
        """Have one process from its start to its end."""
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "router.grammars", str(pool.NICENESS), str(self._memory_mb)),
            *(str(self._seconds), self._matchers),
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
        self._blame(is_from_outside=pool.is_from_outside(process.returncode or 0) and not self._is_hung)
        logger.warning("the grammar process ended; texts that continue in another: %d", len(self._texts))

    async def _serve(self, process: Process) -> None:
        """Tell it of all texts, and hand out its answers, until it ends or nothing is heard of it."""
        assert process.stdout is not None
        self._is_ready = await self._starts(process.stdout)
        if not self._is_ready:
            return
        self._process = process
        for text in self._texts.values():
            self._order(text.begin_order())
        watching = asyncio.ensure_future(self._watch(process))
        try:
            while line := await process.stdout.readline():
                self._heard_at = asyncio.get_running_loop().time()
                self._answer(json.loads(line))
        except (ConnectionError, ValueError):
            logger.exception("the grammar process sent an invalid reply")
        finally:
            watching.cancel()

    async def _watch(self, process: Process) -> None:
        """Kill the process once somebody has stopped it, or nothing was heard of it for too long."""
        patience, loop = self._seconds * PATIENCE, asyncio.get_running_loop()
        self._heard_at, self._is_hung = loop.time(), False
        while True:
            await asyncio.sleep(min(LOOK_S, patience / 4))
            self._is_hung = loop.time() - self._heard_at > patience
            if self._is_hung or pool.is_stopped(process.pid):
                cause = "it gave no sign of life for too long" if self._is_hung else "it was stopped by a signal"
                logger.warning("ending the grammar process: %s", cause)
                with suppress(ProcessLookupError):
                    process.kill()
                return

    @staticmethod
    async def _starts(answers: asyncio.StreamReader) -> bool:
        """Whether a process has said in time that it is ready."""
        try:
            async with asyncio.timeout(START_S):
                return bool(await answers.readline())
        except TimeoutError:
            return False

    def _answer(self, answer: dict[str, Any]) -> None:
        self._late = answer.get("late", self._late)
        self._beginning = answer.get("begins", self._beginning)
        text = self._texts.get(answer.get("key", 0))
        if text is None:  # it has ended, or the line says only that the process lives
            return
        found = failure(answer["error"]) if "error" in answer else Continuation.read(answer)
        text.is_asked, text.num_deaths, text.num_kills = False, 0, 0
        if isinstance(found, Continuation):
            text.tokens += found.forced
        text.on_answer(found)

    def _blame(self, *, is_from_outside: bool) -> None:
        """Fail the text that took too long, or those that were waited for or begun in too many processes that ended."""
        late, self._late = self._late, None
        beginning, self._beginning = self._beginning, 0
        if late is None:
            asked = [text for text in self._texts.values() if text.is_asked or text.key == beginning]
            for text in asked:
                text.num_kills += 1
                text.num_deaths += not is_from_outside
            guilty = [text for text in asked if text.num_deaths >= MOST_DEATHS or text.num_kills >= MOST_KILLS]
        else:
            guilty = [text for text in self._texts.values() if text.key == late]
        for text in guilty:
            self.end(text)
            text.on_answer(failure("it takes too much time or memory"))


def failure(sentence: str) -> GenerationError:
    """What a client reads whose text cannot go on."""
    return GenerationError(f"the grammar cannot be followed: {sentence}")
