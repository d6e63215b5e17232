"""How much text a number of tokens can stand for, known before anything is tokenised.

A prompt of two megabytes takes seconds to tokenise, only to be refused for its length. Where every character of a text
ends up in some token, a text with more characters than all of its tokens could hold need not be looked at. Many
tokenizers lose characters, though: they strip, compose or drop them, or one unknown token stands for any number. So the
bound is given for the kinds that are known to lose none (byte-level BPE and BPE that falls back to bytes: GPT-2, BLOOM,
Llama, Qwen and their kin), and for no others.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from tokenizers import Tokenizer, models, pre_tokenizers

# Unicode's canonical forms: composing makes at most so many characters one (UAX #15, maximum expansion of NFD).
MOST_COMPOSED = 4
KEEPING_PRE_TOKENIZERS = ("ByteLevel", "Metaspace", "Digits", "UnicodeScripts")


def most_characters_per_token(tokenizer: Tokenizer) -> int | None:
    """No token stands for more characters of a text than this; None where that is not known."""
    shrinking = _shrinking(_state(tokenizer.normalizer))
    if shrinking is None or not _keeps_all(_state(tokenizer.pre_tokenizer)):
        return None
    if any(token.lstrip or token.rstrip for token in tokenizer.get_added_tokens_decoder().values()):
        return None  # one such token takes in all spaces beside it
    vocab = tokenizer.get_vocab(with_added_tokens=True)
    if not _knows_every_byte(tokenizer, vocab):
        return None
    return shrinking * (max(map(len, vocab)) + 1)  # 1: a space that a normalizer puts in front of an added token


def _state(part: Any) -> Mapping[str, Any]:
    """A normalizer or pre-tokenizer as tokenizer.json describes it; empty where there is none."""
    state: Mapping[str, Any] = {} if part is None else json.loads(part.__getstate__())
    return state


def _shrinking(normalizer: Mapping[str, Any]) -> int | None:
    """Characters that it makes one at most; None where it may drop any."""
    kind = normalizer.get("type")
    if kind == "Sequence":
        shrinking = 1
        for part in normalizer["normalizers"]:
            if (factor := _shrinking(part)) is None:
                return None
            shrinking *= factor
        return shrinking
    if kind == "Replace":
        pattern = normalizer["pattern"].get("String")
        return 1 if pattern is not None and len(normalizer["content"]) >= len(pattern) else None
    return {None: 1, "Prepend": 1, "NFD": 1, "NFKD": 1, "ByteLevel": 1, "NFC": MOST_COMPOSED}.get(kind)


def _keeps_all(pre_tokenizer: Mapping[str, Any]) -> bool:
    kind = pre_tokenizer.get("type")
    if kind == "Sequence":
        return all(map(_keeps_all, pre_tokenizer["pretokenizers"]))
    if kind in ("Split", "Punctuation"):
        return bool(pre_tokenizer["behavior"] != "Removed")
    return kind is None or kind in KEEPING_PRE_TOKENIZERS


def _knows_every_byte(tokenizer: Tokenizer, vocab: Mapping[str, int]) -> bool:
    """Whether no character is ever unknown, because its bytes are tokens."""
    model = tokenizer.model
    if not isinstance(model, models.BPE):
        return False
    if model.byte_fallback and all(f"<0x{byte:02X}>" in vocab for byte in range(256)):
        return True
    is_byte_level = any(
        _contains(_state(part), "ByteLevel") for part in (tokenizer.normalizer, tokenizer.pre_tokenizer)
    )
    return is_byte_level and all(character in vocab for character in pre_tokenizers.ByteLevel.alphabet())


def _contains(part: Mapping[str, Any], kind: str) -> bool:
    inner = part.get("normalizers") or part.get("pretokenizers") or ()
    return part.get("type") == kind or any(_contains(one, kind) for one in inner)
