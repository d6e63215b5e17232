"""What is done aside when a grammar comes: it is compiled, and what it allows first of all is found out.

Imported by the processes of `router/aside` alone: llguidance keeps a table of the whole vocabulary.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from router.aside import Task, TaskError
from router.grammars.grammar import Grammar, GrammarKind
from router.grammars.matcher import GrammarError, Matchers


def tasks(argument: str) -> Mapping[str, Task]:
    """All of them. argument: the arguments of `Matchers`, as JSON."""
    matchers = Matchers(**json.loads(argument))

    def compile_grammar(kind: str, text: str) -> dict[str, Any]:
        """What `TextMatcher.go_on` says of the beginning of a text. Raises TaskError with what is wrong."""
        try:
            return matchers.begin(Grammar(GrammarKind(kind), text)).go_on()
        except GrammarError as error:
            raise TaskError(str(error)) from None

    return {"compile_grammar": compile_grammar}
