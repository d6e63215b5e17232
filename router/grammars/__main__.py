"""The process that follows texts, started by `follower.py`: `python -m router.grammars NICENESS MEMORY_MB SECONDS …`.

It sends {} once it is ready, and regularly for as long as it lives. It reads orders, one line of JSON each, and follows
every text by its number: a new one with its grammar and the tokens so far, the tokens that came next and guesses behind
them, its end. What may come next is answered in one line for each order of tokens, and for a new text that asks for it,
in the order in which it is known. One thread begins texts, those with the shortest grammar first, and others advance
them, so that neither a grammar that takes long to compile nor a slow text delays the rest (llguidance releases the
interpreter lock meanwhile).

A text may end the process: so the one that is begun is reported before, {"begins": KEY}, and {"begins": 0} after. A
thread that works for SECONDS at one text cannot be stopped: the process reports the text, {"late": KEY}, and exits.
Only CPU time of the thread counts, so that busy cores make no text late.
"""

from __future__ import annotations

import json
import os
import resource
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from queue import PriorityQueue
from threading import Thread, get_ident
from typing import Any

from host.process import lower_priority
from router.grammars.matcher import GrammarError, Matchers, TextMatcher
from router.sandbox import STACK_BYTES
from router.scheduling.grammar import Grammar, GrammarKind

MEGABYTE = 2**20
THREADS = 2


class Deadlines:
    """The text that each thread works at, and the thread's CPU time when it began."""

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self._working: dict[int, tuple[int, float]] = {}  # by thread: the key of its text, and CPU time

    @contextmanager
    def at(self, key: int) -> Iterator[None]:
        """Within the block this thread works at the text."""
        self._working[get_ident()] = key, time.thread_time()
        try:
            yield
        finally:
            del self._working[get_ident()]

    def late(self) -> int | None:
        """The key of a text that a thread has worked at for too long."""
        for thread, (key, begun) in list(self._working.items()):
            if time.clock_gettime(time.pthread_getcpuclockid(thread)) - begun > self._seconds:
                return key
        return None

    def watch(self) -> None:
        """Send signs of life until a text is late; then report it and exit."""
        while True:
            time.sleep(self._seconds / 4)
            key = self.late()
            _say({} if key is None else {"late": key})
            if key is not None:
                os._exit(1)


class Follower:
    """All texts of one process."""

    def __init__(self, matchers: Matchers, deadlines: Deadlines) -> None:
        self._matchers = matchers
        self._deadlines = deadlines
        self._texts: dict[int, Future[TextMatcher]] = {}
        self._waiting: PriorityQueue[tuple[int, int, Callable[[], None]]] = PriorityQueue()  # by the grammar's length
        self._advancing = ThreadPoolExecutor(THREADS)
        self._beginning = ThreadPoolExecutor(1)

    def take(self, order: dict[str, Any]) -> None:
        """Carry out an order; answers are printed."""
        key = order["key"]
        if "end" in order:
            self._texts.pop(key).cancel()
        elif "draft" in order:
            self._answer(key, order["came"], order["draft"])
        else:
            grammar = Grammar(GrammarKind(order["kind"]), order["text"])
            begun = self._texts[key] = Future()
            self._waiting.put((len(grammar.text), key, partial(self._begin, key, grammar, order["tokens"], begun)))
            self._beginning.submit(self._begin_shortest).add_done_callback(_end_if_failed)
            if order["asks"]:
                self._answer(key, order["came"], ())

    def _answer(self, key: int, came: Sequence[int], draft: Sequence[int]) -> None:
        self._texts[key].add_done_callback(partial(self._go_on, key, came, draft))

    def _go_on(self, key: int, came: Sequence[int], draft: Sequence[int], begun: Future[TextMatcher]) -> None:
        """Called once the text has begun, so that no thread waits for that."""
        if not begun.cancelled():
            self._advancing.submit(self._advance, key, begun, came, draft).add_done_callback(_end_if_failed)

    def _begin_shortest(self) -> None:
        _, _, begin = self._waiting.get()
        begin()

    def _begin(self, key: int, grammar: Grammar, tokens: Sequence[int], begun: Future[TextMatcher]) -> None:
        if not begun.set_running_or_notify_cancel():
            return
        _say({"begins": key})
        try:
            with self._deadlines.at(key):
                text = self._matchers.begin(grammar)
                text.take(tokens)
        except GrammarError as error:
            begun.set_exception(error)
        else:
            begun.set_result(text)
        finally:
            _say({"begins": 0})

    def _advance(self, key: int, begun: Future[TextMatcher], came: Sequence[int], draft: Sequence[int]) -> None:
        """Answer what may come behind the tokens that came, and behind the guesses."""
        try:
            text = begun.result()
            with self._deadlines.at(key):
                answer = text.go_on(came, draft)
        except GrammarError as error:
            answer = {"error": str(error)}
        _say({"key": key, **answer})


def _say(answer: dict[str, Any]) -> None:
    sys.stdout.write(json.dumps(answer) + "\n")  # one call, so that lines stay whole
    sys.stdout.flush()


def _end_if_failed(done: Future[None]) -> None:
    """An unexpected error, such as too little memory, ends the process: the texts go on in another."""
    if done.exception() is not None:
        os._exit(1)


def main() -> int:
    """Follow texts until standard input ends. Returns the exit code."""
    niceness, memory_mb, seconds, matchers = sys.argv[1:]
    most = int(memory_mb) * MEGABYTE
    resource.setrlimit(resource.RLIMIT_AS, (most, most))
    threading.stack_size(2 * STACK_BYTES)  # what was compiled in the sandbox may recurse as deep here
    deadlines = Deadlines(float(seconds))
    follower = Follower(Matchers(**json.loads(matchers)), deadlines)
    lower_priority(int(niceness))  # before there are threads; the tokenizer is no client's
    _say({})
    Thread(target=deadlines.watch, daemon=True).start()
    for line in sys.stdin:
        follower.take(json.loads(line))
    os._exit(0)  # without waiting for threads


if __name__ == "__main__":
    sys.exit(main())
