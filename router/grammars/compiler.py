"""Checks a grammar in the sandbox (`router/sandbox/pool.py`), and finds out what it allows first.

A grammar can be written so that its automaton explodes. It is compiled where that ends no process but one that follows
no text; only grammars that have passed there are given to the process that does (`follower.py`).
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable

from router.errors import ValidationError
from router.sandbox import TaskError
from router.sandbox.pool import Sandbox
from router.scheduling.grammar import CompiledGrammar, Continuation, Grammar

MOST_KEPT = 128  # grammars that are known to be valid


class Compiler:
    """sandbox: with the tasks of `matcher.py`; without it all grammars are refused, and `refusal` says what to do.

    on_grammar: called for each new grammar.
    """

    def __init__(
        self,
        sandbox: Sandbox | None = None,
        refusal: str = "leave `grammar` out",
        on_grammar: Callable[[], None] = lambda: None,
    ) -> None:
        self._sandbox = sandbox
        self._on_grammar = on_grammar
        self._refusal = refusal
        self._kept: OrderedDict[Grammar, CompiledGrammar] = OrderedDict()

    async def compile(self, grammar: Grammar, owner: str = "") -> CompiledGrammar:
        """The grammar with what it allows first. Raises ValidationError. owner: whose request it is."""
        compiled = self._kept.pop(grammar, None) or await self._compile(grammar, owner)
        self._kept[grammar] = compiled
        if len(self._kept) > MOST_KEPT:
            self._kept.popitem(last=False)
        return compiled

    async def _compile(self, grammar: Grammar, owner: str) -> CompiledGrammar:
        if self._sandbox is None:
            raise ValidationError(f"grammar is not supported: {self._refusal}")
        self._on_grammar()
        try:
            answer = await self._sandbox.do("compile_grammar", owner, kind=str(grammar.kind), text=grammar.text)
        except TaskError as error:
            raise ValidationError(f"grammar is not valid: {error}") from None
        return CompiledGrammar(grammar, Continuation.read(answer))

    async def close(self) -> None:
        """End the processes."""
        if self._sandbox is not None:
            await self._sandbox.close()
