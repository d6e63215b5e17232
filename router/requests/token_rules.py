"""What a request says of single tokens: biases of their scores, words that are never generated, and what ends it.

Rules that need no tokenizer are checked with all others (`validation.py`), the rest where the prompt is tokenised.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

from router.entry import Sampling
from router.errors import ValidationError
from router.requests.schemas import GenerateParameters
from router.text import Ends, ModelTokenizer, TokenizerError

MOST_BIASES = 300
LARGEST_BIAS = 100.0
MOST_BAD_WORDS = 64
MOST_STOP_TOKENS = 64
MOST_WORD_CHARACTERS = 1000  # more can never be few enough tokens of any language's words
MOST_WORD_TOKENS = 32  # what the shards look back for


def logit_bias(given: GenerateParameters, vocab_size: int) -> dict[int, float]:
    """The biases by token. Raises ValidationError."""
    asked = given.logit_bias or {}
    if len(asked) > MOST_BIASES:
        raise ValidationError(
            f"`logit_bias` must have at most {MOST_BIASES} tokens. Given: {len(asked)}: keep those that matter most"
        )
    biases = {}
    for key, bias in asked.items():
        id = _token_id(key, vocab_size)
        if not -LARGEST_BIAS <= bias <= LARGEST_BIAS:
            raise ValidationError(f"`logit_bias` of token {id} must be >= -100 and <= 100. Given: {bias:g}")
        biases[id] = bias
    return {id: bias for id, bias in biases.items() if bias}


def _token_id(key: str, vocab_size: int) -> int:
    is_number = key.isascii() and key.isdecimal() and len(key) < 20 and (key == "0" or key[0] != "0")
    if not is_number:
        raise ValidationError(
            f'`logit_bias` has the key {key[:32]!r}, which is no token id: write ids as decimal numbers, such as "42"'
        )
    if int(key) >= vocab_size:
        raise ValidationError(
            f"`logit_bias` has token {key}, but the model knows {vocab_size} tokens: use ids up to {vocab_size - 1}"
        )
    return int(key)


def check_bad_words(given: GenerateParameters) -> None:
    """What can be told of `bad_words` without their tokens. Raises ValidationError."""
    words = given.bad_words or []
    if len(words) > MOST_BAD_WORDS:
        raise ValidationError(
            f"`bad_words` must have at most {MOST_BAD_WORDS} texts. Given: {len(words)}: leave some out"
        )
    if "" in words:
        raise ValidationError("`bad_words` has an empty text, which would ban everything: remove it")
    if (longest := max(map(len, words), default=0)) > MOST_WORD_CHARACTERS:
        raise ValidationError(
            f"`bad_words` must have at most {MOST_WORD_CHARACTERS} characters each. Given: {longest}: shorten them"
        )


def banned(sampling: Sampling, words: Sequence[str], tokenizer: ModelTokenizer, vocab_size: int) -> Sampling:
    """The same without these words: one token is never generated, of several the last not after the others.

    Raises ValidationError.
    """
    try:
        tokens = {tuple(tokenizer.encode_plain(word)): None for word in words}  # in order, each once
    except TokenizerError as error:
        raise ValidationError(f"`bad_words` cannot be tokenised: {error}; change the texts") from None
    for ids in tokens:
        if not 0 < len(ids) <= MOST_WORD_TOKENS:
            raise ValidationError(
                f"`bad_words` must have 1 to {MOST_WORD_TOKENS} tokens each. Given: {len(ids)}: "
                f"{'send a shorter text' if ids else 'remove the text that the tokenizer drops'}"
            )
        if max(ids) >= vocab_size:
            raise ValidationError(
                f"`bad_words` has token {max(ids)}, but the model knows {vocab_size} tokens: leave that text out"
            )
    if len({*sampling.end_ids, *(ids[-1] for ids in tokens)}) >= vocab_size:
        raise ValidationError(f"`bad_words` may leave none of the model's {vocab_size} tokens: send fewer texts")
    never = {ids[0]: -math.inf for ids in tokens if len(ids) == 1}
    several = tuple(ids for ids in tokens if len(ids) > 1)
    return replace(sampling, biases={**sampling.biases, **never}, banned_words=several)


def check_ends(given: GenerateParameters, vocab_size: int) -> None:
    """What can be told of `stop_token_ids` and `min_tokens` before the prompt is tokenised. Raises ValidationError."""
    stop_ids = given.stop_token_ids or []
    if len(stop_ids) > MOST_STOP_TOKENS:
        raise ValidationError(
            f"`stop_token_ids` must have at most {MOST_STOP_TOKENS} tokens. Given: {len(stop_ids)}: leave some out"
        )
    for id in stop_ids:
        if not 0 <= id < vocab_size:
            raise ValidationError(
                f"`stop_token_ids` has token {id}, but the model knows {vocab_size} tokens: "
                f"use ids of 0 to {vocab_size - 1}"
            )
    if given.min_tokens is not None and given.min_tokens < 0:
        raise ValidationError(f"`min_tokens` must be >= 0, which is off. Given: {given.min_tokens}")


def ending(
    sampling: Sampling, given: GenerateParameters, eos_ids: frozenset[int], max_new_tokens: int, vocab_size: int
) -> tuple[Sampling, Ends]:
    """What ends the request, and the sampling that keeps from it until `min_tokens` are out. Raises ValidationError."""
    min_tokens = given.min_tokens or 0
    if min_tokens > max_new_tokens:
        raise ValidationError(
            f"`min_tokens` must be <= `max_new_tokens`, here {max_new_tokens}. Given: {min_tokens}: ask for fewer"
        )
    ends = Ends(frozenset(given.stop_token_ids or ()), bool(given.ignore_eos), min_tokens)
    end_ids = tuple(sorted(id for id in ends.ids(eos_ids) if id < vocab_size)) if min_tokens else ()
    if end_ids and len(end_ids) >= vocab_size:
        raise ValidationError(f"`stop_token_ids` are all of the model's {vocab_size} tokens: send fewer")
    return replace(sampling, min_tokens=min_tokens if end_ids else 0, end_ids=end_ids), ends
