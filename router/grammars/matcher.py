"""Grammars by llguidance: what a text may go on with. Runs in processes of its own, never in the router.

llguidance follows a text with an Earley parser over a lexer of derivatives, and walks the tokenizer's trie for tokens
that are possible (https://github.com/guidance-ai/llguidance). Its limits bound what a grammar may cost: in each step,
and in lexer states, which are memory.

JSON is written as Python's `json.dumps` writes it, with one space behind commas and colons: models have read that
most, and it leaves no choice between one value and the next, so that whole keys are forced.

What may come behind guesses is found out with a copy of the text's matcher. All copies share a lexer, which is of no
use any more once one of them, a wrong guess for instance, has exceeded a limit: so a text that cannot go on is tried
once more, with a lexer that works, before it fails.

Imported by the processes of `router/sandbox` and `router/grammars` alone: llguidance keeps a table of the whole
vocabulary. `tasks` is what the sandbox does when a new grammar comes.
"""

from __future__ import annotations

import json
import time
from base64 import b64encode
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
from llguidance import LLMatcher, LLParserLimits, LLTokenizer, TokenizerWrapper
from tokenizers import Tokenizer

from router.sandbox import Task, TaskError
from router.scheduling.grammar import Grammar, GrammarKind

MOST_FORCED = 4096  # tokens at once
MOST_DRAFTED = 32  # masks of one draft: 3 MB of an answer at most, with 250,000 tokens
DRAFT_S = 0.02  # of CPU time, after which the rest of a draft is cut: eight masks take 1 ms with 250,000 tokens
MOST_KEPT = 128  # compiled grammars, as many as `compiler.py` knows to be valid
MOST_CHARACTERS_OF_A_CAUSE = 200
NO_TOKEN = "no token of the model can come next"
JSON_STYLE = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
LIMITS = LLParserLimits(
    initial_lexer_fuel=1_000_000,  # 20 ms
    step_lexer_fuel=200_000,  # 15 ms
    step_max_items=50_000,  # 2.5 ms
    max_lexer_states=50_000,  # 1 to 2 kB each
    max_grammar_size=200_000,
    verbose_errors=False,
)


T = TypeVar("T")


class GrammarError(ValueError):
    """A grammar is invalid or costs too much; the sentence is for the client."""


class Matchers:
    """Makes matchers for one model's tokens.

    tokenizer_path: of tokenizer.json; vocab_size: of the model; eos_ids: tokens that end a text; special: tokens that
    are no text, though tokenizer.json does not say so.
    """

    def __init__(
        self, tokenizer_path: str, vocab_size: int, eos_ids: Sequence[int], special: Sequence[str] = ()
    ) -> None:
        self._tokenizer = load_tokenizer(tokenizer_path, vocab_size, eos_ids, special)
        self._vocab_size = vocab_size
        self._kept: OrderedDict[Grammar, LLMatcher] = OrderedDict()

    def begin(self, grammar: Grammar) -> TextMatcher:
        """A matcher at the beginning of a text. Raises GrammarError."""
        return TextMatcher(partial(self._copy, grammar), self._vocab_size)

    def _copy(self, grammar: Grammar) -> LLMatcher:
        kept = self._kept.pop(grammar, None)
        if kept is None or not _works(kept):
            kept = self._compile(grammar)
        self._kept[grammar] = kept
        if len(self._kept) > MOST_KEPT:
            self._kept.popitem(last=False)
        return kept.deep_copy()

    def _compile(self, grammar: Grammar) -> LLMatcher:
        try:
            matcher = LLMatcher(self._tokenizer, _source(grammar), log_level=0, limits=LIMITS)
        except ValueError as error:
            raise GrammarError(cause(str(error))) from None
        _check(matcher)
        return matcher


class TextMatcher:
    """One text and its grammar. begin: makes a matcher at the beginning of a text."""

    def __init__(self, begin: Callable[[], LLMatcher], vocab_size: int) -> None:
        self._begin = begin
        self._vocab_size = vocab_size
        self._matcher = begin()
        self._tokens: list[int] = []
        self._may_draft = True

    def take(self, token_ids: Sequence[int]) -> None:
        """Append tokens to the text. Raises GrammarError where the grammar does not allow them."""
        self._surely(lambda: _take(self._matcher, token_ids))
        self._tokens += token_ids

    def go_on(self, token_ids: Sequence[int] = (), draft: Sequence[int] = ()) -> dict[str, Any]:
        """What is next behind these further tokens, as JSON. Raises GrammarError.

        `forced` are tokens that come in any case, which are taken; those that `token_ids` have already are not among
        them. Then a form of `Mask`, and where nothing is forced `drafted`, the masks behind guesses: each of them is a
        form, or the number of an equal one before it, from 0, the mask behind no guess.
        """
        forced, bits = self._surely(lambda: self._behind(token_ids))
        answer = {"forced": forced, **mask_of(bits, self._vocab_size)}
        self._tokens += [*token_ids, *forced]
        if draft and not forced and self._may_draft:
            answer["drafted"] = self._drafted(bits, draft)
        return answer

    def _surely(self, work: Callable[[], T]) -> T:
        """Its result, at the second try with another lexer and from then on without drafts. Raises GrammarError."""
        try:
            return work()
        except GrammarError:
            self._may_draft = False
            self._matcher = self._begin()
            _take(self._matcher, self._tokens)
            return work()

    def _behind(self, token_ids: Sequence[int]) -> tuple[list[int], bytes]:
        """What is forced behind the tokens, and a bit for each token that may come next."""
        forced = [] if token_ids else self._forced(self._matcher)
        for token in token_ids:
            _take(self._matcher, [token])
            forced = forced[1:] if forced[:1] == [token] else self._forced(self._matcher)
        _take(self._matcher, forced)
        return forced, _bits(self._matcher)

    def _forced(self, matcher: LLMatcher) -> list[int]:
        forced = matcher.compute_ff_tokens()[:MOST_FORCED]
        if any(token >= self._vocab_size for token in forced):
            raise GrammarError("it needs a token that the model does not have")
        return forced

    def _drafted(self, bits: bytes, draft: Sequence[int]) -> list[dict[str, Any] | int]:
        """See `go_on`. bits: of the mask behind no guess."""
        until = time.thread_time() + DRAFT_S
        masks, places = list[dict[str, Any] | int](), {bits: 0}
        with suppress(GrammarError):
            for place, behind in enumerate(islice(self._behind_guesses(bits, draft), MOST_DRAFTED), start=1):
                masks.append(places[behind] if behind in places else mask_of(behind, self._vocab_size))
                places.setdefault(behind, place)
                if time.thread_time() > until:
                    break
        return masks

    def _behind_guesses(self, bits: bytes, draft: Sequence[int]) -> Iterator[bytes]:
        """A bit for each token that may come behind each leading guess, until one is not allowed or is the last.

        Guesses before forced tokens that are not all guessed are left out: those need no guesses to come at once.
        """
        matcher = self._matcher.deep_copy()
        while draft and 0 <= draft[0] < self._vocab_size and bits[draft[0] // 8] >> draft[0] % 8 & 1:
            _take(matcher, draft[:1])
            forced = self._forced(matcher)
            if forced != list(draft[1 : 1 + len(forced)]):
                return
            _take(matcher, forced)
            if matcher.is_stopped():
                return
            bits = _bits(matcher)
            yield from (_only(token, len(bits)) for token in forced)
            yield bits
            draft = draft[1 + len(forced) :]


def _works(matcher: LLMatcher) -> bool:
    copy = matcher.deep_copy()
    copy.compute_bitmask()
    return not copy.is_error()


def _take(matcher: LLMatcher, token_ids: Sequence[int]) -> None:
    if token_ids and not matcher.consume_tokens(list(token_ids)):
        _check(matcher)
        raise GrammarError("the text left it")


def _bits(matcher: LLMatcher) -> bytes:
    bits = matcher.compute_bitmask()
    _check(matcher)
    return bits


def _only(token: int, num_bytes: int) -> bytes:
    """The bits of a mask that allows one token."""
    return (1 << token).to_bytes(num_bytes, "little")


def mask_of(bits: bytes, vocab_size: int) -> dict[str, Any]:
    """The shortest form, as JSON: ids take three bytes on the wire. Raises GrammarError where nothing is allowed."""
    every = (1 << vocab_size) - 1
    tokens = int.from_bytes(bits, "little") & every
    num_allowed, most, num_bytes = tokens.bit_count(), vocab_size // 24, -(-vocab_size // 8)
    if not num_allowed:
        raise GrammarError(NO_TOKEN)
    if num_allowed <= most:
        return {"allowed": _ids(tokens.to_bytes(num_bytes, "little"))}
    if vocab_size - num_allowed <= most:
        return {"forbidden": _ids((tokens ^ every).to_bytes(num_bytes, "little"))}
    return {"bits": b64encode(tokens.to_bytes(num_bytes, "little")).decode()}


def _ids(bits: bytes) -> list[int]:
    """The tokens whose bits are set. Most bytes have none, and are skipped."""
    packed = np.frombuffer(bits, dtype=np.uint8)
    (places,) = packed.nonzero()
    rows, columns = np.unpackbits(packed[places, None], axis=1, bitorder="little").nonzero()
    ids: list[int] = (8 * places[rows] + columns).tolist()
    return ids


def _source(grammar: Grammar) -> str:
    match grammar.kind:
        case GrammarKind.JSON_SCHEMA:
            return LLMatcher.grammar_from_json_schema(grammar.text, defaults=JSON_STYLE)  # type: ignore[arg-type]
        case GrammarKind.REGEX:
            return LLMatcher.grammar_from_regex(grammar.text)
        case GrammarKind.LARK:
            return LLMatcher.grammar_from_lark(grammar.text)


def _check(matcher: LLMatcher) -> None:
    if matcher.is_error():
        raise GrammarError(cause(matcher.get_error()))


def cause(message: str) -> str:
    """llguidance's own sentence, without what it repeats of the grammar, and without its settings."""
    lines = message.strip().splitlines() or [""]
    if "limits." in message or "fuel" in message or "too complex" in message.lower():
        return "it is too complex"
    if lines[0] in ("NoExtension", "NoExtensionBias"):
        return NO_TOKEN
    found = next((line for line in lines if line.startswith("error: ")), lines[0]).removeprefix("error: ")
    sentence = " ".join(found.split())
    return sentence if len(sentence) <= MOST_CHARACTERS_OF_A_CAUSE else sentence[:MOST_CHARACTERS_OF_A_CAUSE] + " …"


def _marked(document: dict[str, Any], special: Mapping[str, int | None]) -> str:
    """A tokenizer that says of these tokens, by their ids, that they are special."""
    others = [token for token in document.get("added_tokens") or [] if token["content"] not in special]
    flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    added = [{"id": id, "content": token, **flags, "special": True} for token, id in special.items() if id is not None]
    return json.dumps(document | {"added_tokens": sorted([*others, *added], key=lambda token: int(token["id"]))})


def load_tokenizer(path: str, vocab_size: int, eos_ids: Sequence[int], special: Sequence[str] = ()) -> LLTokenizer:
    """The model's tokenizer as llguidance needs it: the bytes of every token. Raises ValueError."""
    text = Path(path).read_text(encoding="utf-8")
    tokenizer = Tokenizer.from_str(text)
    if special:
        text = _marked(json.loads(text), {token: tokenizer.token_to_id(token) for token in special})
        tokenizer = Tokenizer.from_str(text)
    size = max(vocab_size, tokenizer.get_vocab_size())
    try:
        return LLTokenizer(text, n_vocab=size, eos_token=list(eos_ids))
    except ValueError:  # neither bytes nor bytes for what has no token: such as T5's
        return LLTokenizer(
            TokenizerWrapper(PieceTokenizer(tokenizer, eos_ids[0])), n_vocab=size, eos_token=list(eos_ids)
        )


class PieceTokenizer:
    """A tokenizer of pieces of text, such as words, as llguidance asks for one."""

    def __init__(self, tokenizer: Tokenizer, eos_token_id: int) -> None:
        added = tokenizer.get_added_tokens_decoder()
        self.eos_token_id = eos_token_id
        self.bos_token_id = None
        self.special_token_ids = [id for id, token in added.items() if token.special]
        self.tokens = [_piece(tokenizer, id) for id in range(tokenizer.get_vocab_size())]
        self._ids = {piece: id for id, piece in reversed(list(enumerate(self.tokens))) if piece}
        self._longest = max(map(len, self._ids), default=1)

    def __call__(self, text: bytes) -> list[int]:
        """The longest token at each place. What no token stands for is left out."""
        found, start = [], 0
        while start < len(text):
            ends = range(min(len(text), start + self._longest), start, -1)
            end = next((end for end in ends if text[start:end] in self._ids), None)
            if end is not None:
                found.append(self._ids[text[start:end]])
            start = end or start + 1
        return found


def _piece(tokenizer: Tokenizer, id: int) -> bytes:
    """What a token adds to a text: at the start of one it may lose its leading space."""
    once, twice = (
        tokenizer.decode([id], skip_special_tokens=False),
        tokenizer.decode([id, id], skip_special_tokens=False),
    )
    return twice[len(once) :].encode()


def tasks(argument: str) -> Mapping[str, Task]:
    """All tasks by name. argument: the arguments of `Matchers`, as JSON."""
    matchers = Matchers(**json.loads(argument))

    def compile_grammar(kind: str, text: str) -> dict[str, Any]:
        """What `TextMatcher.go_on` says of the beginning of a text. Raises TaskError with what is wrong."""
        try:
            return matchers.begin(Grammar(GrammarKind(kind), text)).go_on()
        except GrammarError as error:
            raise TaskError(str(error)) from None

    return {"compile_grammar": compile_grammar}
