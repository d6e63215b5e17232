"""How much text tokens can stand for: never less than they do, and not said where it is not known."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers

from router.text.tokenizer import MOST_COMPOSED, most_characters_per_token
from tests.router.doubles import byte_tokenizer, bytes_to_characters, word_tokenizer

BYTE_LEVEL = pre_tokenizers.ByteLevel(add_prefix_space=False)
FALLBACK_BYTES = [f"<0x{byte:02X}>" for byte in range(256)]


def byte_level(normalizer: Any = None, pre_tokenizer: Any = BYTE_LEVEL, *added: AddedToken) -> Tokenizer:
    """All bytes, and `ab`, `abab`, `e` with its accent."""
    words = [*bytes_to_characters().values(), "ab", "abab", "Ã©"]
    merges = [("a", "b"), ("ab", "ab"), ("Ã", "©")]
    tokenizer = Tokenizer(models.BPE(vocab={word: id for id, word in enumerate(words)}, merges=merges))
    tokenizer.pre_tokenizer, tokenizer.normalizer, tokenizer.decoder = pre_tokenizer, normalizer, decoders.ByteLevel()
    tokenizer.add_special_tokens(list(added))
    return tokenizer


def falling_back(*missing: str) -> Tokenizer:
    words = [word for word in (*FALLBACK_BYTES, "<unk>", "▁", "a", "▁a", "aa") if word not in missing]
    vocab = {word: id for id, word in enumerate(words)}
    merges = [("▁", "a"), ("a", "a")]
    tokenizer = Tokenizer(models.BPE(vocab, merges, unk_token="<unk>", fuse_unk=True, byte_fallback=True))
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    return tokenizer


SPLIT = pre_tokenizers.Split(Regex(r"\s+"), "isolated")
KNOWN = {
    "byte level": byte_level(),
    "added": byte_level(None, BYTE_LEVEL, AddedToken("<a long end>", special=True)),
    "composed": byte_level(normalizers.NFC()),
    "decomposed": byte_level(normalizers.NFKD()),
    "bytes made by the normalizer": byte_level(normalizers.ByteLevel(), None),
    "split": byte_level(None, pre_tokenizers.Sequence([SPLIT, pre_tokenizers.Digits(), BYTE_LEVEL])),
    "fallback": falling_back(),
}
TEXTS = st.text(st.characters(exclude_categories=["Cs"]) | st.sampled_from("ab \u0301\u0345\u0313\u0300\u03b1éa"))


@pytest.mark.parametrize("kind", KNOWN)
@given(TEXTS | st.just("<a long end>" * 9) | st.just("\u03b1\u0313\u0300\u0345" * 20))
def test_no_text_has_fewer_tokens_than_the_bound_says(kind: str, text: str) -> None:
    most = most_characters_per_token(KNOWN[kind])
    assert most is not None
    assert len(text) <= most * len(KNOWN[kind].encode(text).ids)


def test_bound_is_the_longest_entry() -> None:
    assert most_characters_per_token(byte_tokenizer().tokenizer) == len("</s>") + 1
    assert most_characters_per_token(KNOWN["composed"]) == (len("abab") + 1) * MOST_COMPOSED


LOSING = {
    "strip": byte_level(normalizers.Strip()),
    "compatibility": byte_level(normalizers.NFKC()),
    "replaced by less": byte_level(normalizers.Replace("  ", " ")),
    "pattern": byte_level(normalizers.Replace(Regex(" +"), " ")),
    "lower case, which may drop": byte_level(normalizers.Sequence([normalizers.NFD(), normalizers.StripAccents()])),
    "removed by the pre-tokenizer": byte_level(
        None, pre_tokenizers.Sequence([pre_tokenizers.Split(" ", "removed"), BYTE_LEVEL])
    ),
    "white space": byte_level(None, pre_tokenizers.Sequence([pre_tokenizers.WhitespaceSplit(), BYTE_LEVEL])),
    "token that takes spaces": byte_level(None, BYTE_LEVEL, AddedToken("<mask>", lstrip=True, special=True)),
    "no bytes": byte_level(None, None),
    "unknown words": word_tokenizer("?", "▁a").tokenizer,
    "byte missing": falling_back("<0xE2>"),
}


@pytest.mark.parametrize("kind", LOSING)
def test_nothing_is_said_of_tokenizers_that_may_lose_characters(kind: str) -> None:
    assert most_characters_per_token(LOSING[kind]) is None
