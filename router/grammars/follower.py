"""Sends the tokens of texts to matchers, and receives what may come next.

Matchers run in one process for all texts, at the lowest priority (`__main__.py`). A text is its grammar and its tokens:
a process that dies or hangs is replaced, and the new one is told every text. A process exits where one text takes too
long, and reports it: that text fails alone. Where it could not report, a text that an answer was expected for fails
the second time; a process that was killed or stopped from outside counts against a text only after many times. No
answer is waited for longer than `WAIT_S`.

A draft fails no text: the end of a process is put down to drafts that it had not answered, if there are any, and their
texts go on without drafts.

Left out: whether a grammar is valid, which is checked before, in another process (`compiler.py`).
"""

from __future__ import annotations

import asyncio
import itertools
import json
import logging
import os
import signal
import sys
from asyncio.subprocess import PIPE, Process
from collections.abc import Collection, Sequence
from contextlib import suppress
from typing import Any

from host.process import end_with_parent
from router.errors import GenerationError, Unavailable
from router.sandbox import MOST_ANSWER_BYTES, pool
from router.sandbox.pool import PATIENCE, ROOT
from router.scheduling.grammar import CompiledGrammar, Continuation, Match, OnAnswer

MEMORY_MB = 4096
SECONDS = 2.0  # of CPU time, to compile a grammar or to answer one token
START_S = 60.0  # for a process to read the tokenizer, at the lowest priority
PAUSE_S = 1.0  # before another is started, where one has ended before it was ready
MOST_DEATHS = 2  # of processes while a text was waited for, after which the text fails
MOST_KILLS = 8  # likewise, from outside: the system may kill them for their memory
WAIT_S = 300.0  # for an answer, whatever happens meanwhile
LOOK_S = 1.0  # between checks whether the process is stopped or silent

logger = logging.getLogger(__name__)


class _Text:
    """A text that is followed."""

    def __init__(self, follower: Follower, key: int, grammar: CompiledGrammar, on_answer: OnAnswer) -> None:
        self.key = key
        self.grammar = grammar.grammar
        self.tokens = list(grammar.first.forced)  # that an answer has been about
        self.came: tuple[int, ...] = ()  # the next ones, which the next answer is about
        self.draft: tuple[int, ...] = ()  # and its guesses
        self.may_draft = True
        self.on_answer = on_answer
        self.given_up: asyncio.TimerHandle | None = None  # where an answer is waited for
        self.num_deaths = self.num_kills = 0
        self._follower = follower

    @property
    def is_asked(self) -> bool:
        """Whether an answer is waited for."""
        return self.given_up is not None

    def advance(self, token_ids: Sequence[int], draft: Sequence[int] = ()) -> None:
        """See `Match`."""
        assert not self.is_asked, "the next tokens cannot be known before what they may be"
        self.came, self.draft = tuple(token_ids), tuple(draft) if self.may_draft else ()
        self._follower.ask(self)

    def end(self) -> None:
        """See `Match`."""
        self._follower.end(self)

    def begin_order(self) -> dict[str, Any]:
        """The order that has a process follow it from its present state, without a draft."""
        grammar = {"kind": self.grammar.kind, "text": self.grammar.text}
        return {"key": self.key, **grammar, "tokens": self.tokens, "came": self.came, "asks": self.is_asked}


class Follower:
    """Follows texts in a process, which is started with the first one or by `start`.

    matchers: the arguments of `Matchers`, as JSON; seconds: of CPU time, for the answer to one token.
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
        """Start the process, so that the first text need not wait for it."""
        if self._running is None:
            self._running = asyncio.ensure_future(self._run())

    def begin(self, grammar: CompiledGrammar, on_answer: OnAnswer, known: Sequence[int] = ()) -> Match:
        """See `Matching`."""
        text = _Text(self, next(self._keys), grammar, on_answer)
        if known:
            text.tokens = list(known)
            self._expect(text)
        self._texts[text.key] = text
        self.start()
        self._order(text.begin_order())
        return text

    def ask(self, text: _Text) -> None:
        """Order an answer to the tokens that came, and to its draft."""
        self._expect(text)
        self._order({"key": text.key, "came": text.came, "draft": text.draft})

    def end(self, text: _Text) -> None:
        """Follow the text no longer."""
        self._expect_nothing(text)
        if self._texts.pop(text.key, None) is not None:
            self._order({"key": text.key, "end": True})

    def _expect(self, text: _Text) -> None:
        """Wait for an answer, but not for ever."""
        self._expect_nothing(text)
        text.given_up = asyncio.get_running_loop().call_later(WAIT_S, self._give_up, text)

    @staticmethod
    def _expect_nothing(text: _Text) -> None:
        if text.given_up is not None:
            text.given_up.cancel()
            text.given_up = None

    def _give_up(self, text: _Text) -> None:
        self.end(text)
        text.on_answer(Unavailable(f"What its grammar allows next was not known within {WAIT_S:g} s: send it again"))

    async def close(self) -> None:
        """End the process."""
        if self._running is not None:
            self._running.cancel()
            with suppress(asyncio.CancelledError):
                await self._running

    def _order(self, order: dict[str, Any]) -> None:
        """Send an order; a process that is not ready yet, or another one, is told every text when it is.

        uvloop raises where the pipe of a process that has just died is written to, hence the check.
        """
        stdin = self._process.stdin if self._process is not None else None
        if stdin is not None and not stdin.is_closing():
            stdin.write(json.dumps(order).encode() + b"\n")

    async def _run(self) -> None:
        """Run a process, and another one whenever it has ended."""
        while True:
            try:
                await self._live()
            except Exception as error:  # all texts depend on this loop: another process is tried
                logger.exception("the grammar process could not be started, or its reply could not be used")
                self._is_ready = False
                self._fail_texts(is_from_outside=isinstance(error, OSError))
            if not self._is_ready:
                await asyncio.sleep(PAUSE_S)

    async def _live(self) -> None:
        """Run one process from its start to its end."""
        self._is_hung = False
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
            _kill(process)
            assert process.stdin is not None
            process.stdin.close()
            await process.wait()
        self._fail_texts(is_from_outside=pool.is_from_outside(process.returncode or 0) and not self._is_hung)
        logger.warning("the grammar process ended; texts that continue in another: %d", len(self._texts))

    async def _serve(self, process: Process) -> None:
        """Order all texts and dispatch the answers until the process ends."""
        assert process.stdout is not None
        self._is_ready = await self._starts(process.pid, process.stdout)
        if not self._is_ready:
            return
        self._process = process
        for text in self._texts.values():
            self._order(text.begin_order())
        watching = asyncio.ensure_future(self._watch(process))
        try:
            while (answer := await _next_answer(process.stdout)) is not None:
                self._heard_at = asyncio.get_running_loop().time()
                self._answer(answer)
        finally:
            watching.cancel()

    async def _watch(self, process: Process) -> None:
        """Kill the process once it is stopped by a signal or silent for too long."""
        patience, loop = self._seconds * PATIENCE, asyncio.get_running_loop()
        self._heard_at = loop.time()
        while True:
            await asyncio.sleep(min(LOOK_S, patience / 4))
            self._is_hung = loop.time() - self._heard_at > patience
            if self._is_hung or pool.is_stopped(process.pid):
                cause = "it gave no sign of life for too long" if self._is_hung else "it was stopped by a signal"
                logger.warning("ending the grammar process: %s", cause)
                _kill(process)
                return

    @staticmethod
    async def _starts(pid: int, answers: asyncio.StreamReader) -> bool:
        """Whether a process becomes ready; where only the cores are busy, however late."""
        while True:
            with suppress(TimeoutError):
                async with asyncio.timeout(START_S):
                    return bool(await answers.readline())
            if not pool.is_busy(pid):
                return False

    def _answer(self, answer: dict[str, Any]) -> None:
        self._late = answer.get("late", self._late)
        self._beginning = answer.get("begins", self._beginning)
        text = self._texts.get(answer.get("key", 0))
        if text is None:  # it has ended, or the line is a sign of life
            return
        found = failure(answer["error"]) if "error" in answer else Continuation.read(answer)
        self._expect_nothing(text)
        text.num_deaths = text.num_kills = 0
        text.draft = ()
        if isinstance(found, Continuation):
            text.tokens += [*text.came, *found.forced]
            text.came = ()
        text.on_answer(found)

    def _fail_texts(self, *, is_from_outside: bool) -> None:
        """Fail the text that took too long, or those that were waited for or begun when too many processes ended."""
        late, self._late = self._late, None
        beginning, self._beginning = self._beginning, 0
        suspects = self._end_drafts(() if is_from_outside else self._texts if late is None else (late,))
        if late is not None:
            failed = [text for text in self._texts.values() if text.key == late and not suspects]
        else:
            asked = [text for text in self._texts.values() if text.is_asked or text.key == beginning]
            for text in asked:
                text.num_kills += 1
                text.num_deaths += not (is_from_outside or suspects)
            failed = [text for text in asked if text.num_deaths >= MOST_DEATHS or text.num_kills >= MOST_KILLS]
        for text in failed:
            self.end(text)
            text.on_answer(failure("it takes too much time or memory"))

    def _end_drafts(self, suspects: Collection[int]) -> list[_Text]:
        """No draft is told to another process, nor any more of a suspect's; returns the suspects that had one."""
        drafting = [text for text in self._texts.values() if text.draft]
        found = [text for text in drafting if text.key in suspects]
        for text in drafting:
            text.draft, text.may_draft = (), text not in found
        return found


async def _next_answer(answers: asyncio.StreamReader) -> dict[str, Any] | None:
    """A process's next line; None where there is none, or none that can be read."""
    try:
        line = await answers.readline()
        return json.loads(line) if line else None
    except (ConnectionError, ValueError):
        logger.exception("the grammar process sent an invalid reply")
        return None


def _kill(process: Process) -> None:
    """Not by asyncio's `kill`: that looks first whether the process has ended, and its code is then lost to `wait`."""
    if process.returncode is None:
        with suppress(ProcessLookupError):
            os.kill(process.pid, signal.SIGKILL)


def failure(sentence: str) -> GenerationError:
    """What a client reads whose text cannot go on."""
    return GenerationError(f"the grammar cannot be followed: {sentence}")
