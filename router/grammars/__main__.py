"""The process that follows texts: `python -m router.grammars MEMORY_MB MATCHERS`, started by `follower.py`.

It says {} once it is ready. Then it reads orders, one line of JSON each, and follows every text by its number: `begin`
with a grammar and the tokens so far, `advance` with the next one, `end`. What may come next is answered in one line for
each `advance`, and for a `begin` that asks for it, by whichever is known first. One thread begins texts and others
advance them, so that neither a grammar that is long to compile nor a text that takes long holds up the rest (llguidance
lets go of the interpreter meanwhile).
"""

from __future__ import annotations

import json
import os
import resource
import sys
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from typing import Any

from router.grammars.grammar import Grammar, GrammarKind
from router.grammars.matcher import GrammarError, Matchers, TextMatcher

MEGABYTE = 2**20
THREADS = 2


class Follower:
    """All texts of one process."""

    def __init__(self, matchers: Matchers) -> None:
        self._matchers = matchers
        self._texts: dict[int, Future[TextMatcher]] = {}
        self._beginning = ThreadPoolExecutor(1)  # a grammar is compiled with it
        self._advancing = ThreadPoolExecutor(THREADS)

    def take(self, order: dict[str, Any]) -> None:
        """Do as told; what is answered is printed."""
        key = order["key"]
        if "end" in order:
            self._texts.pop(key, None)
        elif "token" in order:
            self._answer(key, order["token"])
        else:
            grammar = Grammar(GrammarKind(order["kind"]), order["text"])
            self._texts[key] = self._beginning.submit(self._begin, grammar, order["tokens"])
            if order["asks"]:
                self._answer(key, None)

    def _answer(self, key: int, token: int | None) -> None:
        self._texts[key].add_done_callback(partial(self._go_on, key, token))

    def _go_on(self, key: int, token: int | None, begun: Future[TextMatcher]) -> None:
        """Called once the text is begun, so that no thread waits for that."""
        self._advancing.submit(self._advance, key, begun, token).add_done_callback(_end_if_failed)

    def _begin(self, grammar: Grammar, tokens: Sequence[int]) -> TextMatcher:
        text = self._matchers.begin(grammar)
        text.take(tokens)
        return text

    def _advance(self, key: int, begun: Future[TextMatcher], token: int | None) -> None:
        """Answer what comes behind the token."""
        try:
            text = begun.result()
            text.take(() if token is None else (token,))
            answer = text.go_on()
        except GrammarError as error:
            answer = {"error": str(error)}
        sys.stdout.write(json.dumps({"key": key, **answer}) + "\n")  # one call, so that lines stay whole
        sys.stdout.flush()


def _end_if_failed(advanced: Future[None]) -> None:
    """What nobody expected, such as too little memory, ends the process: the texts go on in another."""
    if advanced.exception() is not None:
        os._exit(1)


def main() -> int:
    """Follow texts until standard input ends. Returns the exit code."""
    os.nice(19)  # at the same priority as the shards it would make their steps twice as long
    most = int(sys.argv[1]) * MEGABYTE
    resource.setrlimit(resource.RLIMIT_AS, (most, most))
    follower = Follower(Matchers(**json.loads(sys.argv[2])))
    print("{}", flush=True)
    for line in sys.stdin:
        follower.take(json.loads(line))
    os._exit(0)  # whatever its threads are at


if __name__ == "__main__":
    sys.exit(main())
