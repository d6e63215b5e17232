"""The process that follows texts, where those with the grammar NEVER never begin, which takes no CPU time.

Started in place of `router.grammars`, with the same arguments.
"""

from __future__ import annotations

import sys
import threading

from router.grammars import __main__ as process
from router.grammars.matcher import Matchers, TextMatcher
from router.scheduling.grammar import Grammar, GrammarKind

NEVER = Grammar(GrammarKind.REGEX, "never")
begin_at_once = Matchers.begin


def begin(self: Matchers, grammar: Grammar) -> TextMatcher:
    """As `Matchers.begin`."""
    if grammar == NEVER:
        threading.Event().wait()
    return begin_at_once(self, grammar)


if __name__ == "__main__":
    Matchers.begin = begin  # type: ignore[method-assign]
    sys.exit(process.main())
