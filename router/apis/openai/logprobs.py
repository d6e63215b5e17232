"""Log-probabilities as OpenAI's API tells of them: the model's own, of the tokens that a shown text is made of.

A token whose text is not shown (an end token, what a stop sequence took away) has no entry; one that is cut has one for
what is left of it, so that the entries together are the text. Of a prompt that is echoed every token has an entry, for
clients count them; a special one of which the text has nothing has an empty one.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import product
from typing import NamedTuple

from typing_extensions import TypedDict

from router.errors import ValidationError
from router.requests.generation import Answer
from router.scheduling.request import Event, Finished, PromptScores, ScoredToken, Token
from router.text.generated import Detokeniser
from router.text.tokenizer import ModelTokenizer, TokenShare, TokenShares

Prompt = str | Sequence[int]
OF_RESPONSE = "message.output_text.logprobs"  # in `include`
MOST_ADDED = 2  # special tokens before a prompt, and behind it, that a tokenizer adds
LEAST = -9999.0  # stands for minus infinity, as in OpenAI's answers: JSON has no such number


def candidates_of_chat(logprobs: bool | None, top_logprobs: int | None, most: int) -> int | None:
    """How many candidates a chat wants with each token; None: no log-probabilities. Raises ValidationError."""
    if not logprobs:
        if top_logprobs:
            raise ValidationError(f"`top_logprobs` is {top_logprobs} without `logprobs`: set `logprobs` to true")
        return None
    return _checked("top_logprobs", top_logprobs or 0, most)


def candidates_of_completion(logprobs: int | None, most: int) -> int | None:
    """How many candidates a completion wants with each token; None: no log-probabilities. Raises ValidationError."""
    return None if logprobs is None else _checked("logprobs", logprobs, most)


def candidates_of_response(include: Sequence[str], top_logprobs: int | None, most: int) -> int | None:
    """How many candidates a response wants with each token; None: no log-probabilities. Raises ValidationError."""
    if OF_RESPONSE not in include:
        if top_logprobs:
            raise ValidationError(f"`top_logprobs` is {top_logprobs}, and `include` has no {OF_RESPONSE}: add it")
        return None
    return _checked("top_logprobs", top_logprobs or 0, most)


def _checked(name: str, count: int, most: int) -> int:
    if not 0 <= count <= most:
        raise ValidationError(f"`{name}` must be >= 0 and <= {most} (max_top_n_tokens). Given: {count}: ask for fewer")
    return count


class TokenLogprob(TypedDict):
    """A token and what the model itself thought of it; `token` names the bytes of a part of a character.

    Its log-probability is null where the model gives none.
    """

    token: str
    logprob: float | None
    bytes: list[int]


class ShownTokenLogprob(TokenLogprob):
    """A token of the text, and its candidates."""

    top_logprobs: list[TokenLogprob]


class ChatLogprobs(TypedDict):
    """What `logprobs` of a chat asks for."""

    content: list[ShownTokenLogprob]
    refusal: None


class TextLogprobs(TypedDict):
    """What `logprobs` of a completion asks for. The first token of a prompt has none: nothing predicted it."""

    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float | None] | None]
    text_offset: list[int]


class ShownToken(NamedTuple):
    """A token's part in a shown text, and what the model thought of it."""

    id: int
    text: str
    data: bytes
    logprob: float | None  # None for the first token of a prompt, which nothing predicted
    candidates: Sequence[tuple[int, float]]


class ShownTokens:
    """Which tokens the text of one answer is made of, as far as it is shown."""

    def __init__(self, tokenizer: ModelTokenizer) -> None:
        self._shares = TokenShares(tokenizer.token_bytes)
        self._num_pushed = 0
        self._tokens: dict[int, Token] = {}  # those whose text is not all shown yet, by their places
        self._ready: list[TokenShare] = []  # what is certain of their shares
        self._num_shown = 0  # characters that are shown of those

    def push(self, token: Token) -> list[ShownToken]:
        """The tokens all of whose text is shown by now."""
        piece = token.piece if isinstance(token, ScoredToken) else token.text
        self._num_shown += len(token.text)
        if not token.special:
            self._tokens[self._num_pushed] = token
            self._num_pushed += 1
            self._ready += self._shares.push(token.id, piece)
        return self._released()

    def end(self) -> list[ShownToken]:
        """The last tokens, of which the last may be cut. Nothing more is shown."""
        self._ready += self._shares.close()
        whole = self._released()
        if not self._num_shown:
            return whole
        place, text, _ = next(share for share in self._ready if share.text)
        text = text[: self._num_shown]
        return [*whole, self._shown(TokenShare(place, text, text.encode()))]

    def of(self, events: Sequence[Event]) -> list[ShownToken]:
        """Those of a stream's next events."""
        tokens = [one for event in events if isinstance(event, Token) for one in self.push(event)]
        return tokens + self.end() if isinstance(events[-1], Finished) else tokens

    def _released(self) -> list[ShownToken]:
        released, kept = [], 0
        for number, share in enumerate(self._ready, start=1):
            if len(share.text) > self._num_shown:
                break
            if share.text:  # with it come the parts of its first character
                self._num_shown -= len(share.text)
                shown = [self._shown(one) for one in self._ready[kept:number]]
                released += [one for one in shown if one.data]
                kept = number
        del self._ready[:kept]
        return released

    def _shown(self, share: TokenShare) -> ShownToken:
        token = self._tokens.pop(share.place)
        candidates = token.candidates if isinstance(token, ScoredToken) else ()
        return ShownToken(token.id, share.text, share.data, token.logprob, candidates)


def shown_tokens(answer: Answer, tokenizer: ModelTokenizer) -> list[ShownToken]:
    """The tokens of a whole answer's text."""
    shown = ShownTokens(tokenizer)
    return [one for token in answer.tokens for one in shown.push(token)] + shown.end()


def prompt_tokens(
    prompt: str | Sequence[int], token_ids: Sequence[int], scores: PromptScores, tokenizer: ModelTokenizer
) -> list[ShownToken]:
    """Every token of a prompt, whose texts together are what is echoed of it.

    That is a text's own, but where the tokenizer cannot give it back: then it is the text of its tokens.
    """
    pieces = _pieces(token_ids, tokenizer)
    if isinstance(prompt, str) and prompt != "".join(pieces):
        pieces = next((named for named in _named(pieces, token_ids, tokenizer) if prompt == "".join(named)), pieces)
    shares = TokenShares(tokenizer.token_bytes)
    found = [share for id, piece in zip(token_ids, pieces, strict=True) for share in shares.push(id, piece)]
    return [
        ShownToken(
            token_ids[place],
            text,
            data,
            scores.logprobs[place - 1] if place else None,
            list(scores.candidates(place - 1)) if place else (),
        )
        for place, text, data in found + shares.close()
    ]


def _named(pieces: Sequence[str], token_ids: Sequence[int], tokenizer: ModelTokenizer) -> Iterator[list[str]]:
    """The same with special tokens by their names, all of them or all but those that the tokenizer may have added."""
    is_special = [id in tokenizer.special_ids for id in token_ids]
    named = [
        tokenizer.token_text(id) if special else piece
        for id, special, piece in zip(token_ids, is_special, pieces, strict=True)
    ]
    for first, last in product(range(MOST_ADDED + 1), repeat=2):
        if all(is_special[:first]) and all(is_special[len(named) - last :]) and first + last <= len(named):
            yield [*pieces[:first], *named[first : len(named) - last], *pieces[len(named) - last :]]


def _pieces(token_ids: Sequence[int], tokenizer: ModelTokenizer) -> list[str]:
    """What each token of a text adds to it, special ones nothing."""
    detokeniser, special = Detokeniser(tokenizer, ()), tokenizer.special_ids
    pieces = ["" if id in special else detokeniser.push(id) for id in token_ids]
    pieces[-1] += detokeniser.flush()
    return pieces


@dataclass(frozen=True)
class Scoring:
    """What an answer tells of its tokens."""

    count: int  # candidates of each token
    tokenizer: ModelTokenizer
    prompts: Sequence[Prompt] = ()  # what is echoed before each answer, with log-probabilities; none of a chat

    def of_chat(self, tokens: Iterable[ShownToken]) -> ChatLogprobs:
        """`logprobs` of a chat's choice, or of a chunk of one."""
        return {"content": self.entries(tokens), "refusal": None}

    def entries(self, tokens: Iterable[ShownToken]) -> list[ShownTokenLogprob]:
        """An entry for each token, as chats and responses have them."""
        return [self._entry(token) for token in tokens]

    def _entry(self, token: ShownToken) -> ShownTokenLogprob:
        top = [_told("", data, logprob) for _, data, logprob in self.candidates(token)]
        return {**_told(token.text, token.data, token.logprob), "top_logprobs": top}

    def candidates(self, token: ShownToken) -> Iterator[tuple[int, bytes, float]]:
        """Id, bytes and log-probability of each."""
        for id, logprob in token.candidates[: self.count]:
            yield id, token.data if id == token.id else self.tokenizer.token_bytes[id], logprob

    def prompt(self, number: int, token_ids: Sequence[int], scores: PromptScores) -> list[ShownToken]:
        """The tokens of what is echoed before the answer of this number."""
        return prompt_tokens(self.prompts[number], token_ids, scores, self.tokenizer)


def _told(text: str, data: bytes, logprob: float | None) -> TokenLogprob:
    return {"token": _name(text, data, ""), "logprob": _number(logprob), "bytes": list(data)}


class CompletionLogprobs:
    """`logprobs` of a completion's choice, or of its chunks one after another; offsets count characters of its text."""

    def __init__(self, scoring: Scoring) -> None:
        self._scoring = scoring
        self._offset = 0

    def of(self, tokens: Iterable[ShownToken]) -> TextLogprobs:
        """Those of the next tokens of its text."""
        told: TextLogprobs = {"tokens": [], "token_logprobs": [], "top_logprobs": [], "text_offset": []}
        for token in tokens:
            name = _name(token.text, token.data, "bytes:")
            logprob = _number(token.logprob)
            told["tokens"].append(name)
            told["token_logprobs"].append(logprob)
            told["text_offset"].append(self._offset)
            self._offset += len(token.text)
            told["top_logprobs"].append(None if logprob is None else self._top(token, name, logprob))
        return told

    def _top(self, token: ShownToken, name: str, logprob: float) -> dict[str, float | None]:
        """The candidates by their names, the likelier one where two have the same, and the token itself."""
        top: dict[str, float | None] = {}
        for id, data, value in self._scoring.candidates(token):
            top.setdefault(name if id == token.id else _name("", data, "bytes:"), _number(value))
        top.setdefault(name, logprob)
        return top


def _name(text: str, data: bytes, prefix: str) -> str:
    """The text of a token; of one that is only a part of a character its bytes, as OpenAI writes them."""
    if text and text.encode() == data:
        return text
    try:
        return data.decode()
    except UnicodeDecodeError:
        return prefix + data.decode(errors="backslashreplace")


def _number(logprob: float | None) -> float | None:
    return max(logprob, LEAST) if logprob is not None and not math.isnan(logprob) else None


def text_of(tokens: Iterable[ShownToken]) -> str:
    """The tokens' text."""
    return "".join(token.text for token in tokens)
