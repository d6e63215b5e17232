"""What tokens stand for in bytes, and which of them a text is made of, for every kind of vocabulary."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from router.text.generated import Detokeniser
from router.text.tokenizer import ModelTokenizer, TokenShare, TokenShares
from tests.router.doubles import EOS, byte_tokenizer, bytes_to_characters, word_tokenizer


def pieces_tokenizer(*pieces: str) -> ModelTokenizer:
    """A byte-level vocabulary of these pieces, given as latin-1 bytes, and all single bytes behind them."""
    names = bytes_to_characters()
    vocab = {"".join(names[byte] for byte in piece.encode("latin-1")): id for id, piece in enumerate(pieces)}
    vocab |= {name: len(pieces) + byte for byte, name in names.items() if name not in vocab}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return ModelTokenizer.of(tokenizer, frozenset())


def metaspace_tokenizer(*pieces: str) -> ModelTokenizer:
    """A vocabulary as sentencepiece has it: pieces with `▁` for spaces, then the bytes, then `</s>`."""
    vocab = {piece: id for id, piece in enumerate(pieces)}
    vocab |= {f"<0x{byte:02X}>": len(pieces) + byte for byte in range(256)}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[], byte_fallback=True))
    parts = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    tokenizer.decoder = decoders.Sequence(parts)
    tokenizer.add_special_tokens([AddedToken("</s>", special=True)])
    return ModelTokenizer.of(tokenizer, frozenset({len(vocab)}))


def shares_of(tokenizer: ModelTokenizer, ids: Sequence[int], prompt: Sequence[int] = ()) -> list[TokenShare]:
    detokeniser, shares = Detokeniser(tokenizer, prompt), TokenShares(tokenizer.token_bytes)
    pieces = [detokeniser.push(id) for id in ids]
    pieces[-1] += detokeniser.flush()
    return [s for id, piece in zip(ids, pieces, strict=True) for s in shares.push(id, piece)] + shares.close()


def test_bytes_of_a_byte_level_vocabulary() -> None:
    assert [bytes([byte]) for byte in range(256)] == [byte_tokenizer().token_bytes[byte] for byte in range(256)]
    assert b"</s>" == byte_tokenizer().token_bytes[EOS]
    tokenizer = pieces_tokenizer(" \xe2", "\x98\x83 and", " caf\xc3\xa9")
    assert [b" \xe2", b"\x98\x83 and", " café".encode()] == [tokenizer.token_bytes[id] for id in range(3)]


def test_bytes_of_a_metaspace_vocabulary() -> None:
    tokenizer = metaspace_tokenizer("▁the", "re", "▁", "é")
    assert [b" the", b"re", b" ", "é".encode()] == [tokenizer.token_bytes[id] for id in range(4)]
    assert [b"\x00", b"\xff"] == [tokenizer.token_bytes[id] for id in (4, 259)]
    words = word_tokenizer("▁one", "two")
    assert [b" one", b"two", b"</s>"] == [words.token_bytes[id] for id in range(3)]


def test_a_token_that_ends_inside_a_character_has_its_own_bytes() -> None:
    tokenizer = pieces_tokenizer(" \xe2", "\x98\x83 and", " caf\xc3\xa9")
    shares = shares_of(tokenizer, [2, 0, 1, 2])
    assert [" café".encode(), b" \xe2", b"\x98\x83 and", " café".encode()] == [share.data for share in shares]
    assert [" café", " ", "☃ and", " café"] == [share.text for share in shares]
    assert [0, 1, 2, 3] == [share.place for share in shares]


def test_the_space_at_the_start_of_a_text_belongs_to_no_token() -> None:
    tokenizer = metaspace_tokenizer("▁the", "re", "▁", "é")
    assert [("the", b"the"), ("re", b"re"), (" the", b" the")] == [s[1:] for s in shares_of(tokenizer, [0, 1, 0])]
    assert [(" the", b" the")] == [share[1:] for share in shares_of(tokenizer, [0], prompt=[1])]
    assert [("", b""), ("re", b"re")] == [share[1:] for share in shares_of(tokenizer, [2, 1])]
    snow = [4 + byte for byte in "☃".encode()]
    assert [("", b"\xe2"), ("", b"\x98"), ("☃", b"\x83")] == [s[1:] for s in shares_of(tokenizer, [0, *snow])[1:]]


def test_bytes_that_are_no_text_are_told_as_bytes() -> None:
    ids = [*b"ok", 0xE2, 0x98]  # cut inside a character
    assert [b"o", b"k", b"\xe2", b"\x98"] == [share.data for share in shares_of(byte_tokenizer(), ids)]
    assert "ok\ufffd" == "".join(share.text for share in shares_of(byte_tokenizer(), ids))


@pytest.mark.parametrize("kind", ["bytes", "pieces", "metaspace"])
@given(data=st.data())
def test_shares_are_all_tokens_once_and_together_the_text(kind: str, data: st.DataObject) -> None:
    tokenizer = {
        "bytes": byte_tokenizer(),
        "pieces": pieces_tokenizer(" \xe2", "\x98\x83 and", " caf\xc3\xa9", "\xa9\xc3", "\xff"),
        "metaspace": metaspace_tokenizer("▁the", "re", "▁", "é"),
    }[kind]
    most = tokenizer.tokenizer.get_vocab_size() - 1
    common = st.sampled_from([*range(5), *"é☃🙂".encode()])
    ids = data.draw(st.lists(st.one_of(common, st.integers(0, most - 1)), min_size=1, max_size=30))
    shares = shares_of(tokenizer, ids)
    assert list(range(len(ids))) == [share.place for share in shares]
    text = "".join(share.text for share in shares)
    if "\ufffd" not in text:
        assert tokenizer.decode(ids) == text
        assert text == b"".join(share.data for share in shares).decode()
