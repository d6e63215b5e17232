"""Bodies of `/tokenize` and `/detokenize` as other servers have them: one key tells which.

vLLM and SGLang send `prompt`, or a chat's `messages`; llama.cpp sends `content`; TGI's own `inputs` is in `schemas.py`.
Tokens are called `tokens` everywhere but here, and the answer has the text by all three names.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any

from orjson import dumps
from pydantic import Field

from router.schemas import Lenient, Strict

Tokens = Sequence[tuple[int, tuple[int, int]]]
Json = dict[str, Any]


class Keys(Strict):
    """Which of the keys a body has."""

    inputs: Any = None
    prompt: Any = None
    messages: Any = None
    content: Any = None


class Ids(Strict):
    """Whether a body has ids by their other name."""

    tokens: Any = None


class PromptToTokenize(Lenient):
    """vLLM's and SGLang's body."""

    prompt: str
    model: str | None = Field(default=None, description="Any name.")
    add_special_tokens: bool | None = Field(default=None, description="Absent: true.")
    return_token_strs: bool | None = Field(default=None, description="Return the text of each token too.")


class ContentToTokenize(Lenient):
    """llama.cpp's body."""

    content: str
    add_special: bool | None = Field(default=None, description="Absent: false.")
    with_pieces: bool | None = Field(default=None, description="Return the text of each token too.")


class TokensToText(Lenient):
    """The body of `/detokenize` by another name of the ids."""

    tokens: Annotated[list[Annotated[int, Field(ge=0, le=2**32 - 1)]], Field(fail_fast=True)]
    model: str | None = Field(default=None, description="Any name.")
    skip_special_tokens: bool | None = Field(default=None, description="Leave special tokens out. Absent: true.")


def counted_tokens(text: str, tokens: Tokens, *, most: int, has_texts: bool) -> bytes:
    """What vLLM and SGLang answer. most: tokens of a whole sequence."""
    texts = [text[start:stop] for _, (start, stop) in tokens] if has_texts else None
    ids = [id for id, _ in tokens]
    return dumps({"count": len(ids), "max_model_len": most, "tokens": ids, "token_strs": texts})


def pieces(text: str, tokens: Tokens, *, has_texts: bool) -> bytes:
    """What llama.cpp answers."""
    told: list[Any] = [{"id": id, "piece": text[start:stop]} if has_texts else id for id, (start, stop) in tokens]
    return dumps({"tokens": told})


def named_text(text: str) -> Json:
    """The text of tokens as SGLang, vLLM and llama.cpp call it."""
    return {"text": text, "prompt": text, "content": text}
