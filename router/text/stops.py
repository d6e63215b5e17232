"""Leaves stop sequences out of a text that is shown as it comes, as OpenAI's and Anthropic's APIs want it.

What may be the beginning of a stop sequence is held back until it is known not to be one. Each sequence is looked for
by the automaton of Knuth, Morris and Pratt (1977), so that a character costs the same however long a sequence is.

Left out: TGI's own routes, which show a stop sequence (`text.py`).
"""

from __future__ import annotations

from collections.abc import Sequence


class StopFilter:
    """Takes a text in pieces; gives out what is no stop sequence and not the beginning of one."""

    def __init__(self, stop: Sequence[str]) -> None:
        self.found: str | None = None  # the sequence that was complete first; of several the longest
        self._automata = [_Automaton(sequence) for sequence in stop]
        self._held: list[tuple[str, bool]] = []  # characters, and whether each is to be shown

    def push(self, piece: str, is_shown: bool = True) -> tuple[str, bool]:
        """(what can be shown by now, whether a stop sequence is complete). Nothing may be pushed after that.

        is_shown: whether the piece is part of the text, or of a special token, which is only searched.
        """
        if not self._automata:
            return (piece if is_shown else ""), False
        for character in piece:
            self._held.append((character, is_shown))
            found = [automaton.sequence for automaton in self._automata if automaton.push(character)]
            if found:
                self.found = max(found, key=len)
                return self._release(len(self.found)), True
        return self._release(max(automaton.matched for automaton in self._automata)), False

    def flush(self) -> str:
        """What is held back: nothing more will come."""
        return self._release(0)

    def _release(self, num_kept: int) -> str:
        """All but the last so many characters, as far as they are shown."""
        split = max(0, len(self._held) - num_kept)
        out, self._held = self._held[:split], self._held[split:]
        return "".join(character for character, is_shown in out if is_shown)


class _Automaton:
    """Finds one sequence: `matched` is the length of its longest beginning with which the text ends."""

    def __init__(self, sequence: str) -> None:
        self.sequence = sequence
        self.matched = 0
        self._shorter = _shorter_beginnings(sequence)

    def push(self, character: str) -> bool:
        """Whether the sequence is complete with this character."""
        while self.matched and self.sequence[self.matched] != character:
            self.matched = self._shorter[self.matched - 1]
        if self.sequence[self.matched] == character:
            self.matched += 1
        return self.matched == len(self.sequence)


def _shorter_beginnings(sequence: str) -> list[int]:
    """For each beginning of the sequence, the longest shorter beginning with which it ends."""
    shorter = [0] * len(sequence)
    matched = 0
    for at in range(1, len(sequence)):
        while matched and sequence[matched] != sequence[at]:
            matched = shorter[matched - 1]
        matched += sequence[matched] == sequence[at]
        shorter[at] = matched
    return shorter
