"""The process that follows texts, started by `follower.py`: `python -m router.grammars NICENESS MEMORY_MB SECONDS …`.

It says {} once it is ready, and again and again, as long as it lives. Then it reads orders, one line of JSON each, and
follows every text by its number: `begin` with a grammar and the tokens so far, `advance` with the next one, `end`. What
may come next is answered in one line for each `advance`, and for a `begin` that asks for it, by whichever is known
first. One thread begins texts, those of the shortest grammar first, and others advance them, so that neither a grammar
that is long to compile nor a text that takes long holds up the rest (llguidance lets go of the interpreter meanwhile).

A text may end the process: which one is begun is said before, {"begins": KEY}, and {"begins": 0} after. A thread that
works for SECONDS at one text cannot be stopped: the process says which text that is, {"late": KEY}, and ends itself.
Threads are asked for the time that they had on the cores, so that busy cores make no text late.
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
from router.grammars.grammar import Grammar, GrammarKind
from router.grammars.matcher import GrammarError, Matchers, TextMatcher
from router.sandbox import STACK_BYTES

MEGABYTE = 2**20
THREADS = 2


class Watched:
    """What each thread works at, and since when by the clock of its own time on the cores."""

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self._working: dict[int, tuple[int, float]] = {}  # by thread: the key of its text, and what the clock said

    @contextmanager
    def at(self, key: int) -> Iterator[None]:
        """This thread works at the text."""
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
        """Say that the process lives, until a text is late: say which, and end."""
        while True:
            time.sleep(self._seconds / 4)
            key = self.late()
            _say({} if key is None else {"late": key})
            if key is not None:
                os._exit(1)


class Follower:
    """All texts of one process."""

    def __init__(self, matchers: Matchers, watched: Watched) -> None:
        self._matchers = matchers
        self._watched = watched
        self._texts: dict[int, Future[TextMatcher]] = {}
        self._waiting: PriorityQueue[tuple[int, int, Callable[[], None]]] = PriorityQueue()  # by the grammar's length
        self._advancing = ThreadPoolExecutor(THREADS)
        self._beginning = ThreadPoolExecutor(1)

    def take(self, order: dict[str, Any]) -> None:
        """Do as told; what is answered is printed."""
        key = order["key"]
        if "end" in order:
            self._texts.pop(key).cancel()
        elif "token" in order:
            self._answer(key, order["token"])
        else:
            grammar = Grammar(GrammarKind(order["kind"]), order["text"])
            begun = self._texts[key] = Future()
            self._waiting.put((len(grammar.text), key, partial(self._begin, key, grammar, order["tokens"], begun)))
            self._beginning.submit(self._begin_shortest).add_done_callback(_end_if_failed)
            if order["asks"]:
                self._answer(key, None)

    def _answer(self, key: int, token: int | None) -> None:
        self._texts[key].add_done_callback(partial(self._go_on, key, token))

    def _go_on(self, key: int, token: int | None, begun: Future[TextMatcher]) -> None:
        """Called once the text is begun, so that no thread waits for that."""
        if not begun.cancelled():
            self._advancing.submit(self._advance, key, begun, token).add_done_callback(_end_if_failed)

    def _begin_shortest(self) -> None:
        _, _, begin = self._waiting.get()
        begin()

    def _begin(self, key: int, grammar: Grammar, tokens: Sequence[int], begun: Future[TextMatcher]) -> None:
        if not begun.set_running_or_notify_cancel():
            return
        _say({"begins": key})
        try:
            with self._watched.at(key):
                text = self._matchers.begin(grammar)
                text.take(tokens)
        except GrammarError as error:
            begun.set_exception(error)
        else:
            begun.set_result(text)
        finally:
            _say({"begins": 0})

    def _advance(self, key: int, begun: Future[TextMatcher], token: int | None) -> None:
        """Answer what comes behind the token."""
        try:
            text = begun.result()
            with self._watched.at(key):
                text.take(() if token is None else (token,))
                answer = text.go_on()
        except GrammarError as error:
            answer = {"error": str(error)}
        _say({"key": key, **answer})


def _say(answer: dict[str, Any]) -> None:
    sys.stdout.write(json.dumps(answer) + "\n")  # one call, so that lines stay whole
    sys.stdout.flush()


def _end_if_failed(done: Future[None]) -> None:
    """What nobody expected, such as too little memory, ends the process: the texts go on in another."""
    if done.exception() is not None:
        os._exit(1)


def main() -> int:
    """Follow texts until standard input ends. Returns the exit code."""
    niceness, memory_mb, seconds, matchers = sys.argv[1:]
    lower_priority(int(niceness))
    most = int(memory_mb) * MEGABYTE
    resource.setrlimit(resource.RLIMIT_AS, (most, most))
    threading.stack_size(2 * STACK_BYTES)  # what has been compiled aside may recurse as deep here
    watched = Watched(float(seconds))
    follower = Follower(Matchers(**json.loads(matchers)), watched)
    _say({})
    Thread(target=watched.watch, daemon=True).start()
    for line in sys.stdin:
        follower.take(json.loads(line))
    os._exit(0)  # whatever its threads are at


if __name__ == "__main__":
    sys.exit(main())
