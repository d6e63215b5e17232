"""Requests that wait for their grammars: from a token that has come to what may come behind it."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from router.entry import Entry
from router.errors import RouterError
from router.grammars.grammar import Continuation, Matching


class Held:
    """Asks the matchers of one batching loop.

    allow: called when it is known what an entry may get; fail: when that cannot be found out; go_on: after either.
    """

    def __init__(
        self,
        matching: Matching | None,
        allow: Callable[[Entry, Continuation], None],
        fail: Callable[[Entry, RouterError], None],
        go_on: Callable[[], None],
    ) -> None:
        self.asked: set[Entry] = set()  # entries whose matchers have not answered
        self._matching = matching
        self._allow = allow
        self._fail = fail
        self._go_on = go_on

    def begin(self, entry: Entry) -> None:
        """Have a matcher for it, if it has a grammar."""
        if entry.request.grammar is not None:
            assert self._matching is not None, "without matchers, grammars are refused"
            known = entry.generated_ids
            entry.match = self._matching.begin(entry.request.grammar, partial(self._note, entry), known)
            if known:
                self.asked.add(entry)

    def ask(self, entry: Entry, token_id: int) -> None:
        """Find out what its grammar, if it has one, allows behind this token. It is held until then."""
        if entry.match is not None and not entry.is_over:
            self.asked.add(entry)
            entry.match.advance(token_id)

    def end(self, entry: Entry) -> None:
        """Nothing more is wanted of it."""
        if entry.match is not None:
            self.asked.discard(entry)
            entry.match.end()

    def _note(self, entry: Entry, found: Continuation | RouterError) -> None:
        self.asked.discard(entry)
        if isinstance(found, RouterError):
            self._fail(entry, found)
        elif not entry.is_over:
            self._allow(entry, found)
        self._go_on()
