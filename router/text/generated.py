"""The text of a request as it grows: whole characters, stop sequences, and why it ended.

Detokenising one token at a time is wrong twice over: a character may be spread over several tokens, and the text of a
token may depend on its neighbours (a leading space disappears at the start of a text). So each new token is decoded
together with the last few that are already out, and only what it adds is given out, once it is whole characters.

This does by hand what `tokenizers.decoders.DecodeStream` offers, on purpose. That class cannot give out held bytes at
the end of a generation, and it gives out the end of the *prompt* when that ends in U+FFFD. The text of a finished
request is here what decoding all its ids at once would have given, but for bytes that a special token cuts off at the
end: they are never shown.

TGI shows stop sequences; OpenAI's and Anthropic's APIs leave them out, so that what may turn out to begin one is held
back until it is known (`StopFilter`), by the automaton of Knuth, Morris and Pratt (1977): a character costs the same
however long a sequence is.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum

from router.text.tokenizer import MOST_TOKENS_OF_A_CHARACTER, REPLACEMENT, ModelTokenizer

CONTEXT_TOKENS = 5  # of the prompt, decoded along with the first tokens; enough for every decoder's joining rules


class FinishReason(StrEnum):
    """Why a generation ended, in TGI's words."""

    LENGTH = "length"
    EOS_TOKEN = "eos_token"
    STOP_SEQUENCE = "stop_sequence"


@dataclass(frozen=True, slots=True)
class Ends:
    """Which tokens end a generation, and from when on anything but its length does. By default the model's own do."""

    stop_ids: frozenset[int] = frozenset()  # beside the model's end tokens
    ignores_eos: bool = False
    min_tokens: int = 0
    shows_stop: bool = True  # whether a stop sequence is part of the text, as on TGI's routes
    shown_ids: frozenset[int] = frozenset()  # special tokens that are part of the text where stop sequences are not
    has_grammar: bool = False  # then an end token is the grammar's word, which counts more than `min_tokens`

    def reason(self, token_id: int, eos_ids: frozenset[int]) -> FinishReason | None:
        """What a token ends a generation for; None for most tokens."""
        if token_id in eos_ids and not self.ignores_eos:
            return FinishReason.EOS_TOKEN
        return FinishReason.STOP_SEQUENCE if token_id in self.stop_ids else None

    def ids(self, eos_ids: frozenset[int]) -> frozenset[int]:
        """All tokens that end a generation."""
        return self.stop_ids if self.ignores_eos else self.stop_ids | eos_ids


ENDS_OF_THE_MODEL = Ends()


class GeneratedText:
    """What one request has generated so far, as text, and whether it has ended."""

    def __init__(
        self,
        tokenizer: ModelTokenizer,
        prompt_ids: Sequence[int],
        stop: Sequence[str],
        max_new_tokens: int,
        ends: Ends = ENDS_OF_THE_MODEL,
    ) -> None:
        self.num_tokens = 0
        self.piece = ""  # what the last token added to the text, of which less may be shown by now
        self._ends = ends
        self._stop_filter = None if ends.shows_stop else StopFilter(stop)
        self._tokenizer = tokenizer
        self._max_new_tokens = max_new_tokens
        self._detokeniser = Detokeniser(tokenizer, prompt_ids)
        self._stop_search = StopSearch(stop)
        self._pieces: list[str] = []

    @property
    def text(self) -> str:
        """The generated text: without special tokens, up to and including a stop sequence."""
        return "".join(self._pieces)

    @property
    def stop_sequence(self) -> str | None:
        """Which stop sequence ended the text; None where none did, or where it is part of the text."""
        return self._stop_filter.found if self._stop_filter is not None else None

    def push(self, token_id: int) -> tuple[str, FinishReason | None]:
        """Take one token: the text to show for it, and the reason if it is the last.

        What is shown of all tokens but the special ones is `text`. Special tokens are searched for stop sequences. One
        that ends the request inside a character leaves its bytes out of both: no token is left to show them with.
        """
        self.num_tokens += 1
        if self._stop_filter is not None:
            return self._push_filtered(token_id, self._stop_filter)
        if token_id in self._tokenizer.special_ids:
            self.piece = shown = self._tokenizer.token_text(token_id)
            return shown, self._reason(token_id, self._stop_search.push(shown) is not None)
        piece = self._detokeniser.push(token_id)
        cut = self._stop_search.push(piece)
        if self.num_tokens < self._ends.min_tokens:
            cut = None
        reason = self._reason(token_id, cut is not None)
        piece = piece[:cut]
        if reason is not None and cut is None:
            piece += self._detokeniser.flush()
        self.piece = piece
        self._pieces.append(piece)
        return piece, reason

    def _push_filtered(self, token_id: int, stops: StopFilter) -> tuple[str, FinishReason | None]:
        """As `push`, but no stop sequence and no special token is shown, and a stop counts more than a length."""
        is_special = token_id in self._tokenizer.special_ids or self._is_end(token_id)
        piece = self._tokenizer.token_text(token_id) if is_special else self._detokeniser.push(token_id)
        if is_special and token_id in self._ends.shown_ids:
            piece, is_special = self._detokeniser.flush() + piece, False
        self.piece = "" if is_special else piece
        if self.num_tokens < self._ends.min_tokens:
            stops.pass_by(piece)
            shown, has_stopped = "" if is_special else piece, False
        else:
            shown, has_stopped = stops.push(piece, not is_special)
        reason = FinishReason.STOP_SEQUENCE if has_stopped else self._reason(token_id, has_stopped)
        if reason is not None and not has_stopped:
            rest = "" if is_special else self._detokeniser.flush()
            self.piece += rest
            more, has_stopped = stops.push(rest)
            shown += more if has_stopped else more + stops.flush()
        self._pieces.append(shown)
        return shown, reason

    def _is_end(self, token_id: int) -> bool:
        """Whether a token ends the text as one of the model's end tokens, which need not be special."""
        is_counted = self.num_tokens >= self._ends.min_tokens or self._ends.has_grammar
        return is_counted and not self._ends.ignores_eos and token_id in self._tokenizer.eos_ids

    def _reason(self, token_id: int, has_stopped: bool) -> FinishReason | None:
        """On TGI's routes a length counts most, elsewhere an end token: with it a text is complete."""
        is_last = self.num_tokens >= self._max_new_tokens
        if is_last and self._stop_filter is None:
            return FinishReason.LENGTH
        if self.num_tokens < self._ends.min_tokens:
            is_end = self._ends.has_grammar and token_id in self._tokenizer.eos_ids
            return FinishReason.EOS_TOKEN if is_end else None
        stopped = FinishReason.STOP_SEQUENCE if has_stopped else None
        ended = self._ends.reason(token_id, self._tokenizer.eos_ids) or stopped
        return ended or (FinishReason.LENGTH if is_last else None)


class Detokeniser:
    """Turns the growing ids of one sequence into pieces of whole characters."""

    def __init__(self, tokenizer: ModelTokenizer, prompt_ids: Sequence[int]) -> None:
        self._tokenizer = tokenizer
        self._context = list(prompt_ids[-CONTEXT_TOKENS:])
        self._context_text: str | None = tokenizer.decode(self._context)  # None: not asked for yet, and not empty
        self._held: list[int] = []
        self._num_shown = 0  # characters of the held tokens that are out already

    def push(self, token_id: int) -> str:
        """The whole characters that this token completes; empty while it ends inside the only one."""
        piece = self._tokenizer.lone_pieces[token_id]
        if piece and not self._held and self._context_text != "":
            self._context, self._context_text = [token_id], None
            return piece
        self._held.append(token_id)
        piece = self._held_text()
        if (piece and not piece.endswith(REPLACEMENT)) or len(self._held) >= MOST_TOKENS_OF_A_CHARACTER:
            return self._give_out(piece)
        piece = piece.rstrip(REPLACEMENT)
        self._num_shown += len(piece)
        return piece

    def flush(self) -> str:
        """The text of held tokens, whole characters or not: nothing more will come."""
        return self._give_out(self._held_text()) if self._held else ""

    def _held_text(self) -> str:
        """What the held tokens add to their context, but for what is out."""
        if self._context_text is None:
            self._context_text = self._tokenizer.decode(self._context)
        text = self._tokenizer.decode([*self._context, *self._held])
        return text[len(self._context_text) + self._num_shown :]

    def _give_out(self, piece: str) -> str:
        self._context, self._held, self._num_shown = self._held, [], 0
        self._context_text = self._tokenizer.decode(self._context)
        return piece


class StopSearch:
    """Finds the first of several stop sequences in text that arrives in pieces."""

    def __init__(self, stop: Sequence[str]) -> None:
        self._stop = stop
        self._num_kept = max(map(len, stop), default=1) - 1  # a match may begin this far back
        self._tail = ""

    def push(self, piece: str) -> int | None:
        """How much of the piece is left when it is cut after the first match that ends in it; None if none does."""
        if not self._stop or not piece:
            return None
        text = self._tail + piece
        start = len(self._tail)
        ends = [at + len(s) for s in self._stop if (at := text.find(s, max(0, start - len(s) + 1))) >= 0]
        self._tail = text[max(0, len(text) - self._num_kept) :]
        return min(ends) - start if ends else None


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

    def pass_by(self, piece: str) -> None:
        """See text that is given out whatever it has: a stop sequence may begin in it, and none ends there."""
        for character in piece:
            for automaton in self._automata:
                if automaton.push(character):
                    automaton.forget()

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

    def forget(self) -> None:
        """Go on behind a whole sequence, whose end may be the beginning of another."""
        self.matched = self._shorter[-1]


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
