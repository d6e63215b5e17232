"""Finds out whether a grammar is good, and what it allows first, beside the router: see `router/sandbox/pool.py`.

A grammar can be written so that its automaton explodes. It is compiled where that ends nothing but a process that has
no text to follow; only what has passed there comes to those that have (`follower.py`).
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable

from router.errors import ValidationError
from router.grammars.grammar import CompiledGrammar, Continuation, Grammar
from router.sandbox import TaskError
from router.sandbox.pool import Aside

MOST_KEPT = 128  # grammars that are known to be good


class Compiler:
    """aside: with the tasks of `tasks.py`; without it all grammars are refused, and `refusal` says what to do.

    on_grammar: called when one comes.
    """

    def __init__(
        self,
        aside: Aside | None = None,
        refusal: str = "leave `grammar` out",
        on_grammar: Callable[[], None] = lambda: None,
    ) -> None:
        self._aside = aside
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
        if self._aside is None:
            raise ValidationError(f"grammar is not supported: {self._refusal}")
        self._on_grammar()
        try:
            answer = await self._aside.do("compile_grammar", owner, kind=str(grammar.kind), text=grammar.text)
        except TaskError as error:
            raise ValidationError(f"grammar is not valid: {error}") from None
        return CompiledGrammar(grammar, Continuation.read(answer))

    async def close(self) -> None:
        """End the processes."""
        if self._aside is not None:
            await self._aside.close()
